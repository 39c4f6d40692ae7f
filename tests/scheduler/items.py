# SPDX-License-Identifier: Apache-2.0
"""Images, the requests that hold them, and what the encoder makes of them.

The bytes of an embedding follow from everything that decides them in a real engine: the picture, the number of rows,
the modality, the adapter and the weights. So whatever reaches the language model can be compared with what should have.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from storage_tiers.key import WantedItem

WIDTH = 32
DTYPE = torch.bfloat16
ROW_BYTES = WIDTH * DTYPE.itemsize
TEXT_TOKEN = 1
IMAGE_TOKEN = 2


@dataclass(frozen=True)
class Image:
    """One multimodal input: a picture, and the name under which the client or vLLM knows it."""

    picture: str
    rows: int = 8
    client_id: str | None = None
    """A uuid of the client's choice; without one the identifier is a digest of the picture, as vLLM makes it."""
    modality: str = "image"
    has_pixels: bool = True
    """False: the client sent only a size, since it trusts the cache to have the embedding."""
    row_tokens: int = 0
    """After so many embeddings comes a token that is text, as some models separate the rows of a picture; 0: never."""

    @property
    def identifier(self) -> str:
        """The `mm_hash` that vLLM gives the item, without an adapter's name in front."""
        return self.client_id or hashlib.sha256(f"{self.picture}/{self.rows}".encode()).hexdigest()

    def position(self, offset: int) -> PlaceholderRange:
        """Where its tokens are in a prompt, and which of them are embeddings."""
        if not self.row_tokens:
            return PlaceholderRange(offset=offset, length=self.rows)
        mask: list[bool] = []
        for row in range(self.rows):
            mask += [True] if (row + 1) % self.row_tokens else [True, False]
        return PlaceholderRange(offset=offset, length=len(mask), is_embed=torch.tensor(mask))


def seed_of(picture: str) -> int:
    """The number that stands for a picture's pixels."""
    return int.from_bytes(hashlib.sha256(picture.encode()).digest()[:6], "big")


@lru_cache(maxsize=4096)
def encode(seed: int, rows: int, modality: str, adapter: str, weights: int) -> torch.Tensor:
    """What the encoder makes of the pixels `seed`. Not to be written to."""
    text = f"{seed}/{rows}/{modality}/{adapter}/{weights}"
    generator = torch.Generator().manual_seed(seed_of(text))
    return torch.randn(rows, WIDTH, generator=generator).to(DTYPE)


def pixels_of(item: MultiModalKwargsItem) -> int | None:
    """The pixels in a processed item, or behind the address in it; None where it holds none."""
    if "address" in item:
        return int(item["address"].data)
    return int(item["pixel_values"].data[0]) if "pixel_values" in item else None


def kwargs_item(image: Image) -> MultiModalKwargsItem:
    """The processed item as vLLM's front end sends it: pixels where there are any, and always indices."""
    fields = {"image_grid_thw": torch.tensor([1, image.rows, 1])}
    if image.has_pixels:
        fields["pixel_values"] = torch.tensor([seed_of(image.picture)], dtype=torch.float64)
    shared = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=data, field=shared) for name, data in fields.items()})


def address_item(image: Image) -> MultiModalKwargsItem:
    """The same under `--mm-processor-cache-type shm`: where the worker finds the pixels, and nothing else."""
    field = MultiModalBatchedField()
    fields = {"address": seed_of(image.picture), "monotonic_id": 0, "signature": [0]}
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=data, field=field) for name, data in fields.items()})


def wanted(image: Image, fingerprint: str) -> WantedItem:
    """What a request with that image asks the tiers for."""
    return WantedItem(image.identifier, image.rows, image.modality, fingerprint, WIDTH)


def make_request(
    request_id: str,
    parts: Sequence[int | Image],
    *,
    max_tokens: int = 1,
    priority: int = 0,
    adapter: LoRARequest | None = None,
    arrival_time: float = 0.0,
    resumable: bool = False,
    block_hasher: Callable[[Request], list] | None = None,
    kwargs_of: Callable[[Image], MultiModalKwargsItem | None] = kwargs_item,
) -> Request:
    """A real request whose prompt is `parts` in order: so many text tokens, or an image."""
    tokens: list[int] = []
    features: list[MultiModalFeatureSpec] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [TEXT_TOKEN] * part
            continue
        prefix = f"{adapter.lora_name}:" if adapter is not None else ""
        features.append(
            MultiModalFeatureSpec(
                data=kwargs_of(part),
                modality=part.modality,
                identifier=prefix + part.identifier,
                mm_position=part.position(len(tokens)),
                mm_hash=part.identifier,
            )
        )
        tokens += [IMAGE_TOKEN] * features[-1].mm_position.length
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival_time,
        mm_features=features,
        lora_request=adapter,
        priority=priority,
        block_hasher=block_hasher,
        resumable=resumable,
    )
