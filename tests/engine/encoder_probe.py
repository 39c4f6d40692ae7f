# SPDX-License-Identifier: Apache-2.0
"""Watch the real encoder inside a worker of `vllm serve`, knowing nothing of any connector.

The server is started with `--worker-extension-cls tests.engine.encoder_probe.EncoderProbe`. vLLM imports that name in
every worker; the import wraps the model's encoder and the runner's gather, and each event is one JSON line appended to
the file that the environment variable ENCODER_PROBE_LOG names.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

LOG_VARIABLE = "ENCODER_PROBE_LOG"


@dataclass(frozen=True)
class ProbeEvent:
    """One thing that happened to one item in one worker."""

    kind: str
    """`encoded`: the vision tower ran for the item. `gathered`: a prefill took the item from the device cache."""
    modality: str
    """`image` or `video`."""
    tokens: int
    """Rows of the embedding."""
    shape: tuple[int, ...]
    dtype: str
    digest: str
    """XXH3-128 of the embedding's bytes, in hex: equal if and only if the tensors are equal bit for bit."""
    identifier: str
    """vLLM's `mm_hash` of a gathered item; empty for an encoded one, since the tower is not told."""
    rank: int
    """Tensor-parallel rank of the worker."""
    pid: int


def read_events(path: Path) -> list[ProbeEvent]:
    """Return the events in the log at `path`, oldest first; none if it does not exist."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [ProbeEvent(**{**fields, "shape": tuple(fields["shape"])}) for fields in lines]


def _record(kind: str, modality: str, tensor: Any, identifier: str = "") -> None:
    """Append one event about `tensor`, in one write so that lines of several workers do not mix."""
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank

    flat = tensor.detach().contiguous().cpu().view(torch.uint8)
    fields = {
        "kind": kind,
        "modality": modality,
        "tokens": tensor.shape[0],
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "digest": xxhash.xxh3_128_hexdigest(flat.numpy()),
        "identifier": identifier,
        "rank": get_tensor_model_parallel_rank(),
        "pid": os.getpid(),
    }
    with Path(os.environ[LOG_VARIABLE]).open("ab", buffering=0) as log:
        log.write(json.dumps(fields).encode() + b"\n")


def _watch_encoder(model: type, method: str, modality: str, pixels: str) -> None:
    """Wrap the method of `model` that encodes items of one modality; precomputed embeddings are not counted."""
    original: Callable[..., Any] = getattr(model, method)

    @functools.wraps(original)
    def watched(self: Any, given: Any) -> Any:
        outputs = original(self, given)
        if given["type"] == pixels:
            for output in outputs:
                _record("encoded", modality, output)
        return outputs

    setattr(model, method, watched)


def _watch_gather(runner: type) -> None:
    """Wrap the runner's gather: an item that a prefill takes is recorded when its tensor is another than last time."""
    original: Callable[..., Any] = runner._gather_mm_embeddings  # type: ignore[attr-defined]
    last: dict[str, weakref.ref[Any]] = {}

    @functools.wraps(original)
    def watched(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            for feature in request.mm_features:
                place, name = feature.mm_position, feature.identifier
                tensor = self._get_encoder_output_from_cache(name)
                if tensor is None or request.num_computed_tokens >= place.offset + place.length:
                    continue
                if name not in last or last[name]() is not tensor:
                    last[name] = weakref.ref(tensor)
                    _record("gathered", feature.modality, tensor, name)
        return original(self, scheduler_output, *args, **kwargs)

    runner._gather_mm_embeddings = watched  # type: ignore[attr-defined]


def _install() -> None:
    """Wrap the classes of the running worker."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _watch_encoder(Qwen3VLForConditionalGeneration, "_process_image_input", "image", "pixel_values")
    _watch_encoder(Qwen3VLForConditionalGeneration, "_process_video_input", "video", "pixel_values_videos")
    _watch_gather(GPUModelRunner)


class EncoderProbe:
    """What vLLM mixes into its worker; it adds nothing, the import has done the work."""


if LOG_VARIABLE in os.environ:
    _install()
