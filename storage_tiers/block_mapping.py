# SPDX-License-Identifier: Apache-2.0
"""The runner's encoder cache as a mapping over device blocks: what vLLM writes and reads by `mm_hash`.

Takes whatever a dict would take: what fits no block lives as a plain tensor, and is counted. No plan and no host tier
may enter.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field

import torch

from storage_tiers.device_blocks import BlocksExhaustedError, DeviceBlockCache
from storage_tiers.faults import FaultLog

__all__ = ["BlockMapping", "ItemBlocks", "ItemSource", "Occupancy"]


@dataclass(frozen=True, slots=True)
class ItemSource:
    """An item to be copied out, which stays as it is until `release`."""

    views: tuple[torch.Tensor, ...]
    """Its rows in order, each `[tokens, width]`."""
    release: Callable[[], None] = field(default=lambda: None)
    """Says that the copy is done. Any thread; once."""
    in_blocks: bool = False
    """Whether it lies in blocks that exist anyway: to wait for its copy then costs no memory."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Device blocks by what they are used for, and tokens in those that items own."""

    active: int
    held: int
    usable: int
    """Blocks that can hold items: all but the scratch block."""
    real_tokens: int


class ItemBlocks(ABC):
    """A device cache of items in blocks, as plans are carried out on it. Worker's step thread only."""

    @abstractmethod
    def __contains__(self, mm_hash: object) -> bool: ...

    @property
    @abstractmethod
    def has_orphans(self) -> bool:
        """Whether items are gone whose blocks are kept for a copy."""

    @abstractmethod
    def load(self, mm_hash: str, source: torch.Tensor, device: torch.device) -> None:
        """Bring an item from host memory, `[num_tokens, width]`, onto `device`."""

    @abstractmethod
    def discard(self, mm_hash: str) -> int:
        """Drop an item, if it is there; the blocks that it had."""

    @abstractmethod
    def occupancy(self) -> Occupancy | None:
        """How full the blocks are; None where none have been made yet."""

    @abstractmethod
    def source_of(self, mm_hash: str) -> ItemSource:
        """The item, to be copied out by another thread. Raises KeyError."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no source is read whose blocks could be reused meanwhile."""


class BlockMapping(MutableMapping[str, torch.Tensor], ItemBlocks):
    """`mm_hash` to `[num_tokens, width]`. Worker's step thread only.

    The block buffer is made for the first item that comes, whose width and dtype are the encoder's: in vLLM that is the
    profiling run on a GPU, so that the buffer is part of what vLLM measures. A tensor got from here is valid until its
    item goes.
    """

    def __init__(self, make_cache: Callable[[int, torch.dtype], DeviceBlockCache], faults: FaultLog) -> None:
        """`make_cache(width, dtype)` makes the block cache, once."""
        self._make_cache = make_cache
        self._faults = faults
        self._plain: dict[str, torch.Tensor] = {}
        self.blocks: DeviceBlockCache | None = None
        """None until the first item has come."""
        self.counts: Counter[str] = Counter()
        """Items that live outside of blocks, by reason: other_width, larger_than_cache, no_free_blocks."""

    # -- What vLLM calls --------------------------------------------------------------------------------------------

    def __setitem__(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Copy the tensor into blocks, or keep it as it is where it fits none."""
        if not self._put(mm_hash, tensor):
            self._plain[mm_hash] = tensor

    def __getitem__(self, mm_hash: str) -> torch.Tensor:
        plain = self._plain.get(mm_hash)
        if plain is not None:
            return plain
        if self.blocks is None:
            raise KeyError(mm_hash)
        return self.blocks.get(mm_hash)

    def __delitem__(self, mm_hash: str) -> None:
        if mm_hash not in self:
            raise KeyError(mm_hash)
        self.discard(mm_hash)

    def __contains__(self, mm_hash: object) -> bool:
        if mm_hash in self._plain:
            return True
        return self.blocks is not None and isinstance(mm_hash, str) and self.blocks.contains(mm_hash)

    def __iter__(self) -> Iterator[str]:
        yield from list(self._plain)
        if self.blocks is not None:
            yield from self.blocks.hashes()

    def __len__(self) -> int:
        return len(self._plain) + (len(self.blocks.hashes()) if self.blocks is not None else 0)

    def clear(self) -> None:
        """Drop everything; the buffer stays."""
        self._plain.clear()
        if self.blocks is not None:
            self.blocks.clear()

    # -- What the connector calls -----------------------------------------------------------------------------------

    @property
    def has_orphans(self) -> bool:
        """Whether items are gone whose blocks are held: a reset frees without a word to anybody."""
        return self.blocks is not None and self.blocks.num_held_blocks > 0

    def discard(self, mm_hash: str) -> int:
        """Drop an item, if it is there; the blocks that it had."""
        self._plain.pop(mm_hash, None)
        if self.blocks is None or not self.blocks.contains(mm_hash):
            return 0
        count = len(self.blocks.get_block_ids(mm_hash))
        self.blocks.free(mm_hash)
        return count

    def occupancy(self) -> Occupancy | None:
        """How full the blocks are; None before the first item."""
        cache = self.blocks
        if cache is None:
            return None
        return Occupancy(cache.num_active_blocks, cache.num_held_blocks, cache.num_blocks - 1, cache.num_real_tokens)

    def load(self, mm_hash: str, source: torch.Tensor, device: torch.device) -> None:
        """Bring an item from host memory, `[num_tokens, width]`, onto `device`: straight into blocks where it fits."""
        if not self._put(mm_hash, source):
            self._plain[mm_hash] = torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source)

    def source_of(self, mm_hash: str) -> ItemSource:
        """The item, to be copied out by another thread. Raises KeyError."""
        plain = self._plain.get(mm_hash)
        if plain is not None:
            return ItemSource((plain,))
        if self.blocks is None:
            raise KeyError(mm_hash)
        hold = self.blocks.hold(mm_hash)
        return ItemSource(hold.views, hold.release, in_blocks=True)

    def settle(self) -> None:
        """Nothing to wait for: blocks that are read are held."""

    def _put(self, mm_hash: str, tensor: torch.Tensor) -> bool:
        """Whether the item is in blocks now; if not, it is nowhere."""
        self._plain.pop(mm_hash, None)
        if self.blocks is None:
            self.blocks = self._make_cache(tensor.shape[-1], tensor.dtype)
        reason = self._unfit(self.blocks, tensor)
        if reason is None:
            try:
                self.blocks.put(mm_hash, tensor)
                return True
            except BlocksExhaustedError as error:
                reason = "no_free_blocks"
                self._faults.report("device", reason, error)
        self.blocks.free(mm_hash)
        self.counts[reason] += 1
        return False

    def _unfit(self, blocks: DeviceBlockCache, tensor: torch.Tensor) -> str | None:
        """Why no number of free blocks could take the tensor, or None."""
        if tensor.ndim != 2 or tensor.shape[1] != blocks.fat_dim or tensor.dtype != blocks.dtype or not len(tensor):
            return "other_width"
        capacity = (blocks.num_blocks - 1) * blocks.block_size
        return "larger_than_cache" if len(tensor) > capacity else None
