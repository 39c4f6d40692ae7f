# SPDX-License-Identifier: Apache-2.0
"""The harness itself, on a real server without a connector: what later tests conclude from it must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from tests.engine.checkpoint import TowerShape, checkpoint
from tests.engine.media import clip, photograph, photographs
from tests.engine.server import ROOT, EngineStartError, ServerOptions, VllmServer

MODELS = ROOT / "build" / "models"


def _prefill(model: Qwen3VLForConditionalGeneration, rows: torch.Tensor, levels: list[torch.Tensor]) -> torch.Tensor:
    """Return the log-probabilities of the first token after an image with these embedding rows."""
    config = model.config
    image = torch.full((1, len(rows)), config.image_token_id)
    ids = torch.cat([torch.tensor([[config.vision_start_token_id]]), image, torch.tensor([[7, 8, 9]])], dim=1)
    mask = ids == config.image_token_id
    text = model.model.language_model
    embeds = text.embed_tokens(ids).masked_scatter(mask.unsqueeze(-1), rows)
    states = text(inputs_embeds=embeds, visual_pos_masks=mask, deepstack_visual_embeds=levels).last_hidden_state
    return torch.log_softmax(model.lm_head(states[:, -1]).float(), dim=-1)


def test_one_wrong_row_of_an_embedding_changes_the_log_probabilities() -> None:
    """One row of 256, in the main embedding or in a deepstack level."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint(MODELS)).eval()
    generator = torch.Generator().manual_seed(1)
    rows, *levels = (torch.randn(256, 128, generator=generator).to(model.dtype) for _ in range(3))
    with torch.no_grad():
        right = _prefill(model, rows, levels)
        assert torch.equal(right, _prefill(model, rows, levels))
        for tensor in (rows, *levels):
            kept = tensor[100].clone()
            tensor[100] = tensor[101]
            assert not torch.equal(right, _prefill(model, rows, levels))
            tensor[100] = kept


def test_the_same_shape_is_the_same_checkpoint_byte_for_byte(tmp_path: Path) -> None:
    """Stored embeddings stay valid over runs only if the weights do."""
    shape = TowerShape(depth=2, width=64)
    first, second = checkpoint(tmp_path / "a", shape), checkpoint(tmp_path / "b", shape)
    assert first.name == second.name
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert first.name != checkpoint(tmp_path / "a", TowerShape(depth=2, width=64, seed=1)).name


def test_pictures_and_the_clip_are_the_same_bytes_every_time() -> None:
    """Content hashes of the media must not move."""
    assert len(set(photographs(14))) == 14
    again = photograph.__wrapped__("coffee"), clip.__wrapped__()
    assert again == (photograph("coffee"), clip())


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_server_is_asked_and_watched(plain_server: VllmServer) -> None:
    """Answers depend on the picture and repeat exactly; the probe counts what the tower encodes."""
    server = plain_server
    first, second = (photograph(name) for name in ("clock", "brick"))
    runs, seen = server.encoder_runs(), len(server.events())
    cold = server.chat(images=[first])
    assert server.encoder_runs() == runs + 1
    warm = server.chat(images=[first])
    assert server.encoder_runs() == runs + 1
    assert warm.same_as(cold)
    other = server.chat(images=[second])
    assert not other.same_as(cold)
    assert other.logprobs[0] != pytest.approx(cold.logprobs[0], abs=0.05)
    both = server.chat(images=[first, second])
    assert server.encoder_runs() == runs + 2
    assert both.tokens
    clip_answer = server.chat(video=clip(skip=30))
    assert server.events("encoded")[-1].modality == "video"
    assert 0 < clip_answer.ttft_s <= clip_answer.total_s

    events = server.events()[seen:]
    encoded = [(event.tokens, event.digest) for event in events if event.kind == "encoded"]
    assert encoded == [(event.tokens, event.digest) for event in events if event.kind == "gathered"]
    assert "vllm:" in server.metrics()
    assert "POST /v1/chat/completions" in server.log()


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error holds the end of the log, and nothing is left running."""
    broken = VllmServer(checkpoint(MODELS), tmp_path, ServerOptions(arguments=["--no-such-option"]))
    with pytest.raises(EngineStartError, match="no-such-option"):
        broken.start()
    assert broken.pids == []
