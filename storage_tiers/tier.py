# SPDX-License-Identifier: Apache-2.0
"""What a tier below the pool is: the words and the calls that the hierarchy and every tier share.

This room holds types and the digest only. No tier's own code, no thread and no policy may enter.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import xxhash

from storage_tiers.key import WantedItem, chunk_hash_of

__all__ = ["ItemHeader", "LowerTier", "Usage", "digest_of"]

DIGEST_CHUNK_BYTES = 1 << 20
"""A digest over one chunk takes about 50 µs at the 20 GB/s measured here: short enough to leave the cache warm."""


def digest_of(payload: memoryview) -> bytes:
    """XXH3-128 of `payload`, 16 bytes, in pieces so that no other thread waits long. Any thread."""
    hasher = xxhash.xxh3_128()
    flat = payload.cast("B")
    for start in range(0, len(flat), DIGEST_CHUNK_BYTES):
        hasher.update(flat[start : start + DIGEST_CHUNK_BYTES])
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """Everything that is known of one stored embedding besides its bytes."""

    mm_hash: str
    """The whole identifier; empty where a foreign program wrote the file and nothing says which item it is."""
    model: str
    """Model name as in the key, namespace included."""
    fingerprint: str
    """See `fingerprint.py`; empty where a foreign program wrote the file."""
    modality: str
    num_tokens: int
    """Rows of the embedding."""
    width: int
    """Columns of the embedding."""
    dtype: torch.dtype
    digest: bytes = b""
    """XXH3-128 of the payload, 16 bytes; empty where a foreign program wrote the file, which nothing can verify."""
    created: float = 0.0
    """Seconds since the epoch."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensor, row-major, without padding."""
        return self.num_tokens * self.width * self.dtype.itemsize

    @property
    def chunk_hash(self) -> int:
        """The 64-bit projection of `mm_hash` that names the item in every tier."""
        return chunk_hash_of(self.mm_hash)

    def as_wanted(self) -> WantedItem:
        """The request that exactly these bytes would serve. Any thread."""
        return WantedItem(self.mm_hash, self.num_tokens, self.modality, self.fingerprint, self.width)

    def mismatch(self, wanted: WantedItem) -> str | None:
        """The first thing in which these bytes are not what is wanted, as a name for counting, or None. Any thread."""
        if self.mm_hash != wanted.mm_hash:
            return "other_item"
        if self.fingerprint != wanted.fingerprint:
            return "other_fingerprint"
        if self.num_tokens != wanted.num_tokens:
            return "other_num_tokens"
        if self.modality != wanted.modality:
            return "other_modality"
        if wanted.width is not None and self.width != wanted.width:
            return "other_width"
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is."""

    entries: int
    used_bytes: int
    capacity_bytes: int


@runtime_checkable
class LowerTier(Protocol):
    """A tier below the pool. Calls block on I/O: the hierarchy makes them on its I/O threads only, except `lists`.

    A tier turns damaged or foreign data into a miss by itself: it removes what is damaged and reports a fault. It
    raises OSError only where the store itself fails, and the hierarchy counts that.
    """

    name: str
    """Label of the tier in metrics and logs: "disk", "remote"."""

    def lists(self, chunk_hash: int) -> bool:
        """Whether the tier's in-memory index has an entry of that name. A dict look-up: step thread allowed.

        False means unknown, not absent: another process may have stored it.
        """

    def probe(self, wanted: WantedItem) -> ItemHeader | None:
        """The header of the stored item if it is what is `wanted`, else None. Reads no payload. Raises OSError."""

    def read_into(self, header: ItemHeader, payload: memoryview) -> bool:
        """Read the item that `probe` found into `payload` (exactly `payload_bytes` long) and verify its digest.

        False: it has vanished, was replaced or is damaged; `payload` then holds rubbish. Raises OSError.
        """

    def write(self, header: ItemHeader, payload: memoryview) -> bool:
        """Store `payload` (exactly `payload_bytes` long, with its digest in `header`), replacing an older entry.

        True once another process could read it. False when the item can never fit. Raises OSError (ENOSPC included).
        """

    def touch(self, chunk_hash: int) -> None:
        """Note that an item was used from a tier above: what is hot there must not grow old here. Raises nothing."""

    def remove(self, mm_hash: str) -> bool:
        """Remove an entry; False when there was none. Raises OSError."""

    def usage(self) -> Usage:
        """How full the tier is, as far as this process knows. No I/O: step thread allowed."""

    def close(self) -> None:
        """Stop and join the tier's own threads. What is stored stays."""
