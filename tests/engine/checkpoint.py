# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-VL checkpoint with random weights of ordinary scale, whose answers depend on the picture."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AddedToken,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_WRITER_VERSION = 2
"""Part of a cached checkpoint's name: to be raised when what is written here changes."""


@dataclass(frozen=True)
class TowerShape:
    """Size of the checkpoint: three text layers, and a vision tower as deep and wide as asked."""

    depth: int = 4
    """Blocks of the vision tower, at least 2: deepstack features leave it at two levels."""
    width: int = 128
    """Hidden size of the vision tower, a multiple of 64."""
    text_width: int = 128
    """Hidden size of the text model; an embedding row has three times as many values (two deepstack levels)."""
    image_pixels: int = 512 * 512
    """Most pixels of one image: 1024 of them are one token."""
    video_pixels: int = 8 * 320 * 192
    """Most pixels of one video, all its frames together: 2048 of them are one token."""
    dtype: str = "bfloat16"
    """The dtype of weights and embeddings, as torch names it."""
    seed: int = 0

    @property
    def deepstack_levels(self) -> tuple[int, int]:
        """The two blocks whose outputs are the deepstack features."""
        return (self.depth // 2 - 1, self.depth - 1)


def checkpoint(parent: Path, shape: TowerShape = TowerShape()) -> Path:
    """Return the directory below `parent` that holds a checkpoint of this shape, writing it where it is not there yet.

    The same shape gives the same bytes, on every machine with the same torch.
    """
    text = json.dumps([_WRITER_VERSION, asdict(shape), torch.__version__])
    directory = parent / f"qwen3-vl-{shape.depth}x{shape.width}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if (directory / "config.json").exists():
        return directory
    partial = directory.with_name(f"{directory.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    processor = _processor(shape)
    _model(shape, processor).save_pretrained(partial)
    processor.save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the vision tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _processor(shape: TowerShape) -> Qwen3VLProcessor:
    """Return the processor: tokenizer, image and video preprocessing limited to the shape's pixels."""
    small = 64 * 64
    image = Qwen2VLImageProcessor(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": small, "longest_edge": shape.image_pixels},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    video = Qwen3VLVideoProcessor(size={"shortest_edge": small, "longest_edge": shape.video_pixels})
    tokenizer = _tokenizer()
    return Qwen3VLProcessor(
        image_processor=image, tokenizer=tokenizer, video_processor=video, chat_template=CHAT_TEMPLATE
    )


def _config(shape: TowerShape, processor: Qwen3VLProcessor) -> Qwen3VLConfig:
    """Return the model's configuration."""
    ids = processor.tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": shape.text_width,
            "intermediate_size": 2 * shape.text_width,
            # The second deepstack level is added after the second layer, so without a third it would decide nothing.
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": False,
            "eos_token_id": ids("<|im_end|>"),
        },
        vision_config={
            "depth": shape.depth,
            "hidden_size": shape.width,
            "intermediate_size": 4 * shape.width,
            "num_heads": shape.width // 64,
            "out_hidden_size": shape.text_width,
            "num_position_embeddings": 32 * 32,
            "deepstack_visual_indexes": list(shape.deepstack_levels),
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype=shape.dtype,
    )


def _model(shape: TowerShape, processor: Qwen3VLProcessor) -> Qwen3VLForConditionalGeneration:
    """Return the model with weights as large as a trained one's, so that what goes in decides what comes out."""
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(_config(shape, processor))
    model = model.to(dtype=getattr(torch, shape.dtype)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_initial(name, weight, generator))
        head = model.get_output_embeddings().weight
        printable = torch.tensor(_printable_ids(processor))
        head.copy_(torch.zeros_like(head).index_copy(0, printable, head[printable]))
    return model


def _initial(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the initial value of the parameter `name`: norms are one, biases zero, the rest keeps a signal's scale."""
    if weight.ndim == 1:
        return torch.zeros_like(weight) if name.endswith("bias") else torch.ones_like(weight)
    fan_in = math.prod(weight.shape[1:])
    scale = 1.0 if "embed_tokens" in name else 0.1 if "pos_embed" in name else 1.0 / math.sqrt(fan_in)
    if "lm_head" in name or "q_proj" in name:
        scale *= 3.0
    return (torch.randn(weight.shape, generator=generator) * scale).to(weight.dtype)


def _printable_ids(processor: Qwen3VLProcessor) -> list[int]:
    """Return the tokens of printable ASCII; the others keep a zero logit, so that answers are readable and not cut."""
    return [processor.tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127)]
