# SPDX-License-Identifier: Apache-2.0
"""The top tier: encoder outputs in fixed-size blocks of one device buffer, one item per block.

Keeps the books of blocks: who owns which, which are free, which must not be reused yet. How bytes move is
`device_copy`'s; what is admitted and evicted is the scheduler's. No wait, no eviction policy, no host tier may enter.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from storage_tiers.device_copy import BlockCopies, Strategy, adjacent_runs, copies_for

__all__ = ["BlockHold", "BlocksExhaustedError", "DeviceBlockCache"]

_ADJACENT_SEARCH_BLOCKS = 512
"""Free blocks looked at for an adjacent run, some 50 µs at most; behind that, any blocks will do."""


class BlocksExhaustedError(RuntimeError):
    """There are not enough free blocks, and no held block may be reused yet."""


@dataclass(slots=True, eq=False)
class _Item:
    block_ids: tuple[int, ...]
    tokens_per_block: tuple[int, ...]
    written_at: float
    """When it was last written or loaded; when it was allocated, before that."""
    holds: int = 0
    """Copies in flight that read its blocks."""

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_per_block)


@dataclass(slots=True, eq=False)
class BlockHold:
    """Keeps an item's blocks from being reused while somebody reads them, even if the item is freed meanwhile."""

    views: tuple[torch.Tensor, ...]
    """The item's rows in order: each `[tokens, fat_dim]`, all of them together `[num_tokens, fat_dim]`. No copies."""
    _end: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """The reading is done. Any thread; once."""
        self._end()


class DeviceBlockCache:
    """Blocks of `buffer`, `[num_blocks, block_size, fat_dim]`; the last is scratch and never handed out.

    At every moment `num_active_blocks + num_free_blocks + num_held_blocks == num_blocks - 1`. Worker's step thread
    only, but for `BlockHold.release`. Nothing here waits: what cannot be allocated now is refused at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fat_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        min_hold_time_ms: float = 0.0,
        copy_strategy: Strategy = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates the buffer, zeroed. `block_size` in tokens.

        A freed block is not reused before it was written `min_hold_time_ms` ago, for readers outside of this process.

        Raises ValueError for sizes that leave no block to hand out, and for a copy strategy that the device cannot do.
        """
        if num_blocks < 2 or block_size < 1 or fat_dim < 1 or min_hold_time_ms < 0:
            raise ValueError(
                f"a block cache of num_blocks = {num_blocks}, block_size = {block_size}, fat_dim = {fat_dim}, "
                f"min_hold_time_ms = {min_hold_time_ms} holds nothing: it takes 2 blocks (one is scratch) of 1 token "
                f"and 1 column at least, and no negative time"
            )
        self.buffer = torch.zeros(num_blocks, block_size, fat_dim, dtype=dtype, device=device)
        self.num_blocks, self.block_size, self.fat_dim, self.dtype = num_blocks, block_size, fat_dim, dtype
        self.scratch_block_id = num_blocks - 1
        self.min_hold_time_ms = min_hold_time_ms
        self._copies: BlockCopies = copies_for(self.buffer, copy_strategy)
        self._clock = clock
        self._items: dict[str, _Item] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks - 1))
        self._held: list[_Item] = []
        self._num_active = 0
        self._num_real_tokens = 0
        self._num_held = 0
        self._holds_lock = threading.Lock()

    # -- Figures ----------------------------------------------------------------------------------------------------

    @property
    def num_active_blocks(self) -> int:
        """Blocks that items own."""
        return self._num_active

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of freed items that may not be reused yet."""
        return self._num_held

    @property
    def num_real_tokens(self) -> int:
        """Rows that items fill, pads not counted."""
        return self._num_real_tokens

    @staticmethod
    def dense_tokens_per_block(num_tokens: int, block_size: int) -> list[int]:
        """Real tokens of each block when `num_tokens` are packed without pads. Raises ValueError below 1 token."""
        if num_tokens < 1:
            raise ValueError(f"an item of {num_tokens} tokens needs no block")
        full, rest = divmod(num_tokens, block_size)
        return [block_size] * full + [rest] * bool(rest)

    # -- Items ------------------------------------------------------------------------------------------------------

    def contains(self, mm_hash: str) -> bool:
        """Whether the item owns blocks."""
        return mm_hash in self._items

    def hashes(self) -> list[str]:
        """The items that own blocks, oldest first."""
        return list(self._items)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every item with its dense tensor, as `get` gives it."""
        for mm_hash in list(self._items):
            yield mm_hash, self.get(mm_hash)

    def get_block_ids(self, mm_hash: str) -> list[int]:
        """The item's blocks in order. Raises KeyError."""
        return list(self._items[mm_hash].block_ids)

    def get_tokens_per_block(self, mm_hash: str) -> list[int]:
        """Real tokens of each of its blocks. Raises KeyError."""
        return list(self._items[mm_hash].tokens_per_block)

    def get_num_tokens(self, mm_hash: str) -> int:
        """Its real tokens. Raises KeyError."""
        return self._items[mm_hash].num_tokens

    def views(self, mm_hash: str) -> tuple[torch.Tensor, ...]:
        """Its rows in order without a copy: one view `[tokens, fat_dim]` per run of adjacent, densely filled blocks.

        Valid until the item is freed. Raises KeyError.
        """
        return tuple(self._views_of(self._items[mm_hash]))

    def get(self, mm_hash: str) -> torch.Tensor:
        """The item, dense, `[num_tokens, fat_dim]`: a view where its blocks are adjacent, else a copy. KeyError."""
        views = self.views(mm_hash)
        if not views:  # nothing but pads
            return self.buffer[self.scratch_block_id, :0]
        return views[0] if len(views) == 1 else torch.cat(views)

    # -- Blocks in --------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `num_blocks` blocks could be handed out now."""
        if num_blocks > len(self._free):
            self.reclaim_held()
        return num_blocks <= len(self._free)

    def allocate(self, mm_hash: str, tokens_per_block: Sequence[int]) -> list[int]:
        """Hand out one block per entry of `tokens_per_block`: the real tokens in each, 0 to `block_size`.

        Adjacent ones where there are any. An item that is there already gives up its blocks for the new ones.

        Raises BlocksExhaustedError when not enough blocks are free, at once, with nothing changed; ValueError for token
        counts that fit no block, or more blocks than there are at all.
        """
        wanted = len(tokens_per_block)
        if not wanted or min(tokens_per_block) < 0 or max(tokens_per_block) > self.block_size:
            raise ValueError(
                f"{mm_hash}: tokens per block are {list(tokens_per_block)}, a block holds {self.block_size}"
            )
        if wanted > self.num_blocks - 1:
            raise ValueError(
                f"{mm_hash} takes {wanted} blocks, the cache has {self.num_blocks - 1}: num_blocks is too small"
            )
        self.reclaim_held()
        old = self._items.get(mm_hash)
        own = len(old.block_ids) if old is not None and self._is_reusable(old) else 0
        if wanted > len(self._free) + own:
            raise BlocksExhaustedError(
                f"{mm_hash} takes {wanted} blocks; of {self.num_blocks - 1}, {self._num_active} are active, "
                f"{self._num_held} held and {len(self._free)} free"
            )
        self.free(mm_hash)
        block_ids = self._take(wanted)
        self._items[mm_hash] = _Item(tuple(block_ids), tuple(tokens_per_block), self._clock())
        self._num_active += wanted
        self._num_real_tokens += sum(tokens_per_block)
        return block_ids

    def mark_written(self, mm_hash: str) -> None:
        """The item's blocks have been written by somebody else: its minimum hold time starts again. Raises KeyError."""
        self._items[mm_hash].written_at = self._clock()

    def put(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Store a dense item `[num_tokens, fat_dim]`, from the device or from host memory, straight into blocks.

        Raises what `allocate` raises; ValueError for another width or dtype, with nothing changed.
        """
        if tensor.ndim != 2 or tensor.shape[1] != self.fat_dim or tensor.dtype != self.dtype:
            raise ValueError(
                f"{mm_hash} is {tensor.dtype}{list(tensor.shape)}, the cache holds {self.dtype}[tokens, {self.fat_dim}]"
            )
        block_ids = self.allocate(mm_hash, self.dense_tokens_per_block(len(tensor), self.block_size))
        try:
            self._copies.write(block_ids, tensor)
        except BaseException:
            self.free(mm_hash)  # half written: nobody may read it
            raise
        self.mark_written(mm_hash)

    # -- Blocks out -------------------------------------------------------------------------------------------------

    def hold(self, mm_hash: str) -> BlockHold:
        """Keep the item's blocks until the hold is released, also when it is freed before. Raises KeyError."""
        item = self._items[mm_hash]
        with self._holds_lock:
            item.holds += 1

        def end() -> None:
            with self._holds_lock:
                item.holds -= 1

        return BlockHold(tuple(self._views_of(item)), end)

    def free(self, mm_hash: str) -> None:
        """Give the item's blocks back; moves no data. Blocks in use or just written are held first. Twice is once."""
        item = self._items.pop(mm_hash, None)
        if item is None:
            return
        self._num_active -= len(item.block_ids)
        self._num_real_tokens -= item.num_tokens
        if self._is_reusable(item):
            self._free.update(dict.fromkeys(item.block_ids))
        else:
            self._held.append(item)
            self._num_held += len(item.block_ids)

    def reclaim_held(self) -> int:
        """Free the held blocks that may be reused by now; how many. `allocate` does it by itself."""
        if not self._held:
            return 0
        held_before = self._num_held
        still_held = []
        for item in self._held:
            if self._is_reusable(item):
                self._free.update(dict.fromkeys(item.block_ids))
                self._num_held -= len(item.block_ids)
            else:
                still_held.append(item)
        self._held = still_held
        return held_before - self._num_held

    def clear(self) -> None:
        """Free every item."""
        for mm_hash in list(self._items):
            self.free(mm_hash)

    # -- Parts ------------------------------------------------------------------------------------------------------

    def _is_reusable(self, item: _Item) -> bool:
        waits = (self._clock() - item.written_at) * 1000 < self.min_hold_time_ms
        return not waits and not item.holds

    def _take(self, wanted: int) -> list[int]:
        """Blocks off the free queue: the adjacent run nearest to its front, or else the oldest."""
        run = self._find_run(wanted) if wanted > 1 else None
        block_ids = list(run) if run is not None else sorted(islice(self._free, wanted))
        for block in block_ids:
            del self._free[block]
        return block_ids

    def _find_run(self, wanted: int) -> range | None:
        """`wanted` adjacent free blocks, searched from the oldest free block on."""
        free, seen = self._free, set[int]()
        for block in free:
            if block in seen:
                continue
            first = last = block
            while last - first + 1 < wanted and last + 1 in free:
                last += 1
            while last - first + 1 < wanted and first - 1 in free:
                first -= 1
            if last - first + 1 == wanted:
                return range(first, last + 1)
            seen.update(range(first, last + 1))
            if len(seen) > _ADJACENT_SEARCH_BLOCKS:
                break
        return None

    def _views_of(self, item: _Item) -> Iterator[torch.Tensor]:
        """A view per run of blocks that are adjacent and full but for the last; blocks without tokens are left out."""
        at = 0
        for first, count in adjacent_runs(item.block_ids):
            tokens = item.tokens_per_block[at : at + count]
            at += count
            start = 0
            for index, filled in enumerate(tokens):
                if filled < self.block_size or index == count - 1:
                    rows = (index - start) * self.block_size + filled
                    if rows:
                        yield self.buffer[first + start : first + index + 1].view(-1, self.fat_dim)[:rows]
                    start = index + 1
