# SPDX-License-Identifier: Apache-2.0
"""vllm-neuron's device cache, made to look like our own: items in by `mm_hash`, items out to be copied, items freed.

The plugin's object knows no copies in flight, so this room waits for them before it frees. Nothing of vllm_neuron is
imported, and no plan may enter.
"""

import threading
from collections import Counter
from typing import Any

import torch

from storage_tiers.block_mapping import ItemBlocks, ItemSource, Occupancy
from storage_tiers.device_copy import BlockCopies
from storage_tiers.faults import FaultLog

__all__ = ["PluginBlocks", "missing_from"]

READ_DEADLINE_SECONDS = 10.0
"""Longest wait for a copy that reads an item which is to be freed: one of 131 MB takes 30 ms."""

NEEDED = (
    "allocate", "buffer", "block_size", "contains", "dense_tokens_per_block", "free", "get_block_ids",
    "get_tokens_per_block", "mark_written", "min_hold_time_ms", "num_blocks", "num_free_blocks",
)  # fmt: skip
"""What is used of the plugin's `EncoderCacheBlocks`."""


def missing_from(encoder_cache: Any) -> list[str]:
    """The names that are used here and that `encoder_cache` does not have."""
    return [name for name in NEEDED if not hasattr(encoder_cache, name)]


class PluginBlocks(ItemBlocks):
    """The plugin's `encoder_cache`. Worker's step thread only, but for the release of a source."""

    def __init__(self, encoder_cache: Any, copies: BlockCopies, faults: FaultLog) -> None:
        """`copies` write into `encoder_cache.buffer`, in the way that its device allows."""
        self._cache = encoder_cache
        self._copies = copies
        self._faults = faults
        self._readers: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __contains__(self, mm_hash: object) -> bool:
        return bool(self._cache.contains(mm_hash))

    @property
    def has_orphans(self) -> bool:
        """Never: what is freed here is read to its end first."""
        return False

    def load(self, mm_hash: str, source: torch.Tensor, device: torch.device) -> None:
        """Bring an item from host memory, `[num_tokens, fat_dim]`, into blocks, densely; `device` is the buffer's.

        Raises RuntimeError where the plugin has no blocks left, ValueError for another width or dtype.
        """
        dense = self._cache.dense_tokens_per_block(len(source), self._cache.block_size)
        if self._cache.contains(mm_hash) and sum(self._cache.get_tokens_per_block(mm_hash)) != len(source):
            self.discard(mm_hash)  # another item, under an id that a client chose
        block_ids = self._cache.allocate(mm_hash, dense)
        # A video that the encoder has put there lies frame by frame, and is the same item.
        if list(self._cache.get_tokens_per_block(mm_hash)) == list(dense):
            self._copies.write(block_ids, source)
        self._cache.mark_written(mm_hash)

    def source_of(self, mm_hash: str) -> ItemSource:
        """The item, to be copied out by another thread. Raises KeyError."""
        if not self._cache.contains(mm_hash):
            raise KeyError(mm_hash)
        blocks = zip(self._cache.get_block_ids(mm_hash), self._cache.get_tokens_per_block(mm_hash), strict=True)
        views = tuple(self._cache.buffer[block_id, :tokens] for block_id, tokens in blocks)
        with self._changed:
            self._readers[mm_hash] += 1
        return ItemSource(views, lambda: self._has_read(mm_hash), in_blocks=True)

    def discard(self, mm_hash: str) -> int:
        """Free an item, if it is there, once nobody reads it; the blocks that it had."""
        if not self._cache.contains(mm_hash):
            return 0
        self._wait_for_readers(mm_hash)
        count = len(self._cache.get_block_ids(mm_hash))
        self._cache.free(mm_hash)
        return count

    def occupancy(self) -> Occupancy:
        """How full the blocks are. Revisions of the plugin without these figures show what is not free as active."""
        usable = self._cache.num_blocks - 1
        held = int(getattr(self._cache, "num_held_blocks", 0))
        active = usable - held - int(self._cache.num_free_blocks)
        return Occupancy(active, held, usable, int(getattr(self._cache, "num_active_real_tokens", 0)))

    def settle(self) -> None:
        """Wait until nothing is read: the plugin is about to forget everything."""
        for mm_hash in list(self._readers):
            self._wait_for_readers(mm_hash)

    def _wait_for_readers(self, mm_hash: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._readers[mm_hash], READ_DEADLINE_SECONDS):
                raise RuntimeError(f"the copy of {mm_hash} off the device has not ended in {READ_DEADLINE_SECONDS} s")
            del self._readers[mm_hash]

    def _has_read(self, mm_hash: str) -> None:
        with self._changed:
            self._readers[mm_hash] -= 1
            self._changed.notify_all()
