# SPDX-License-Identifier: Apache-2.0
"""Names of an item: `mm_hash` to LMCache key to file name.

This room holds pure functions of strings and numbers: no tier, no I/O and no state may enter. Every tier and LMCache
itself must derive the same name from the same item, so the rules live here once.
"""

import hashlib
import re
from dataclasses import dataclass, field

import torch
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, TORCH_DTYPE_TO_STR_DTYPE, CacheEngineKey

__all__ = ["KeySpace", "WantedItem", "chunk_hash_of", "is_content_hash"]

SENTINEL_WORLD_SIZE = 1
SENTINEL_WORKER_ID = 0
"""Encoder outputs are replicated over tensor-parallel ranks: one entry serves them all (LMCache `ec_engine.py`)."""

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")


def chunk_hash_of(mm_hash: str) -> int:
    """Project `mm_hash` onto the 64-bit integer that LMCache keys carry.

    First 8 bytes, big endian, of sha256; the same in every process, whatever PYTHONHASHSEED. Any thread.
    """
    return int.from_bytes(hashlib.sha256(mm_hash.encode()).digest()[:8], "big")


def is_content_hash(mm_hash: str) -> bool:
    """Tell whether `mm_hash` has the form of vLLM's own digest of an item's content.

    vLLM hashes with blake3 or sha256 (64 lower-case hex digits) or sha512 (128), and puts `<LoRA name>:` in front where
    the tower has adapters. Anything else was chosen by a client and says nothing about content. Any thread.
    """
    return _HEX_DIGEST.fullmatch(mm_hash.rpartition(":")[2]) is not None


@dataclass(frozen=True, slots=True)
class WantedItem:
    """What a request asks for: bytes are served only when all of this matches what is stored."""

    mm_hash: str
    """The whole identifier that vLLM gave the item, never its 64-bit projection."""
    num_tokens: int
    """Rows of the embedding: vLLM's `get_num_encoder_embeds` of the asking request."""
    modality: str
    """vLLM's name for the kind of input: "image", "video", "audio"."""
    fingerprint: str
    """Digest of everything besides `mm_hash` that the bytes depend on (see `fingerprint.py`)."""
    width: int | None = None
    """Columns of the embedding where the engine has measured them, else None: any width will do."""
    chunk_hash: int = field(init=False, compare=False)
    """64-bit projection of `mm_hash`, computed once: hooks look it up at every step."""

    def __post_init__(self) -> None:
        """Derives `chunk_hash`."""
        object.__setattr__(self, "chunk_hash", chunk_hash_of(self.mm_hash))

    def __hash__(self) -> int:
        """The name alone tells items apart but for collisions; hashing every field costs more than the look-up."""
        return self.chunk_hash


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The part of a key that all items of one deployment share."""

    model_name: str
    """Model id as vLLM was given it."""
    dtype: torch.dtype
    """The encoder's output dtype, never the KV cache's."""
    namespace: str = ""
    """Deployments that must not share set different ones. Empty: LMCache's own names."""
    _prefix: str = field(init=False, repr=False, default="")
    _suffix: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        """Raises ValueError for a dtype that LMCache has no name for, or a "@" in a name, which its keys split on."""
        if self.dtype not in TORCH_DTYPE_TO_STR_DTYPE:
            raise ValueError(f"encoder output dtype {self.dtype} has no name in LMCache's keys")
        for what, value in (("model name", self.model_name), ("namespace", self.namespace)):
            if "@" in value:
                raise ValueError(f"{what} {value!r} contains '@', which LMCache's keys use as separator")
        prefix = f"{self.key_model_name}@{SENTINEL_WORLD_SIZE}@{SENTINEL_WORKER_ID}@"
        object.__setattr__(self, "_prefix", prefix.replace("/", "-"))
        object.__setattr__(self, "_suffix", f"@{TORCH_DTYPE_TO_STR_DTYPE[self.dtype]}.pt")

    @property
    def key_model_name(self) -> str:
        """The model name as the key carries it: `<namespace>/<model>` or the model alone."""
        return f"{self.namespace}/{self.model_name}" if self.namespace else self.model_name

    def key_of(self, chunk_hash: int) -> CacheEngineKey:
        """LMCache's key for a 64-bit `chunk_hash`. Any thread."""
        return CacheEngineKey(self.key_model_name, SENTINEL_WORLD_SIZE, SENTINEL_WORKER_ID, chunk_hash, self.dtype)

    def file_name_of(self, chunk_hash: int) -> str:
        """LMCache's file name for `chunk_hash`: `<model, "/" → "-">@1@0@<lower hex, no padding>@<dtype>.pt`."""
        return f"{self._prefix}{chunk_hash:x}{self._suffix}"

    def chunk_hash_in(self, file_name: str) -> int | None:
        """The `chunk_hash` that `file_name` stands for, or None when it is no name of this key space. Any thread."""
        if not (file_name.startswith(self._prefix) and file_name.endswith(self._suffix)):
            return None
        digits = file_name[len(self._prefix) : -len(self._suffix)]
        if not re.fullmatch(r"0|[1-9a-f][0-9a-f]{0,15}", digits):
            return None
        return int(digits, 16)


def dtype_name(dtype: torch.dtype) -> str:
    """LMCache's name for `dtype`. Raises KeyError where it has none."""
    return TORCH_DTYPE_TO_STR_DTYPE[dtype]


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype that LMCache calls `name`, or None."""
    return STR_DTYPE_TO_TORCH_DTYPE.get(name)
