# SPDX-License-Identifier: Apache-2.0
"""Ranges of the pool: which bytes are taken, which are free, and what would have to go to make room.

This room holds integers only. No memory, no torch, no lock and no thread may enter: the caller holds one lock around
every call, and what lies in a range is the caller's business. Ranges tile the pool without gaps, as a list linked by
address; a free range never borders on another, since `free` merges them.
"""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate

from sortedcontainers import SortedList

__all__ = ["PoolAllocator"]


class _Range:
    """A stretch of the pool, taken or free, between its neighbours by address."""

    __slots__ = ("next", "offset", "prev", "size", "used")

    def __init__(self, offset: int, size: int, prev: "_Range | None", next_: "_Range | None") -> None:
        self.offset = offset
        self.size = size
        self.used = False
        self.prev = prev
        self.next = next_


class PoolAllocator:
    """Hands out ranges of `[0, size_bytes)`, best fit, and finds the cheapest contiguous window to evict."""

    def __init__(self, size_bytes: int, align: int = 4096) -> None:
        """`size_bytes` is rounded down and every request up to a multiple of `align`, in bytes.

        Raises ValueError where not even one aligned range fits.
        """
        if align <= 0 or size_bytes < align:
            raise ValueError(f"a pool of {size_bytes} bytes cannot hold one range of {align} bytes")
        self.align = align
        self.size_bytes = size_bytes // align * align
        self._used_bytes = 0
        self._ranges = {0: _Range(0, self.size_bytes, None, None)}
        self._free: SortedList[tuple[int, int]] = SortedList([(self.size_bytes, 0)])
        self._hand = self._ranges[0]

    def allocate(self, nbytes: int) -> int | None:
        """Take the smallest free range that holds `nbytes`; its offset in bytes, or None when there is none.

        O(log n). Raises ValueError when `nbytes` is not positive.
        """
        size = self.rounded(nbytes)
        index = self._free.bisect_left((size, 0))
        if index == len(self._free):
            return None
        _, offset = self._free.pop(index)
        taken = self._ranges[offset]
        if taken.size > size:
            self._split(taken, size)
        taken.used = True
        self._used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give back the range at `offset` (bytes) and merge it with free neighbours. O(log n).

        Raises ValueError when no range in use starts there: unknown offset or double free.
        """
        freed = self._ranges.get(offset)
        if freed is None or not freed.used:
            raise ValueError(f"no range in use starts at offset {offset}: freed twice, or never allocated")
        self._used_bytes -= freed.size
        freed.used = False
        if freed.next is not None and not freed.next.used:
            self._free.remove((freed.next.size, freed.next.offset))
            self._absorb_next(freed)
        if freed.prev is not None and not freed.prev.used:
            freed = freed.prev
            self._free.remove((freed.size, freed.offset))
            self._absorb_next(freed)
        self._free.add((freed.size, freed.offset))

    def cheapest_window(
        self, nbytes: int, cost_of: Callable[[int], float | None], max_scan: int = 2048
    ) -> list[int] | None:
        """The offsets to free so that `allocate(nbytes)` succeeds, at the least summed cost; None when hopeless.

        `cost_of(offset)` prices one range in use: a finite number >= 0, in any unit, or None where it must stay.
        Nothing is changed here, so a hopeless request evicts nothing. Up to `max_scan` ranges are priced, and beyond
        that only to finish the first window of a run that no such range has broken yet. A pool with more ranges is
        searched in turns: each call goes on where the last one stopped, and wraps at the end; the answer is then the
        cheapest of what was seen, and None may turn into an answer at the next call.
        Raises ValueError when `nbytes` is not positive.
        """
        size = self.rounded(nbytes)
        if size > self.size_bytes:
            return None
        head = self._ranges[0]
        start = head if len(self._ranges) <= max_scan else self._hand
        search = _WindowSearch(size, start)
        node = start
        scanned = 0
        while True:
            search.extend(node, cost_of(node.offset) if node.used else 0.0)
            scanned += 1
            if node.next is None:
                search.restart(head)
            node = node.next or head
            if node is start or (scanned >= max_scan and (search.found or search.is_empty)):
                break
        self._hand = node if search.left is start or search.left is None else search.left
        return search.offsets_in_use()

    def rounded(self, nbytes: int) -> int:
        """The bytes that a request for `nbytes` takes. Raises ValueError when `nbytes` is not positive."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        return -(-nbytes // self.align) * self.align

    def size_of(self, offset: int) -> int:
        """Bytes of the range in use at `offset`. Raises ValueError when none starts there."""
        found = self._ranges.get(offset)
        if found is None or not found.used:
            raise ValueError(f"no range in use starts at offset {offset}")
        return found.size

    @property
    def used_bytes(self) -> int:
        """Bytes taken, padding included."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, in however many pieces."""
        return self.size_bytes - self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest request that succeeds without an eviction."""
        return self._free[-1][0] if self._free else 0

    @property
    def num_ranges(self) -> int:
        """How many ranges, taken and free, the pool is cut into."""
        return len(self._ranges)

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        """Every range by address as `(offset, size in bytes, in use)`: for checks, O(n)."""
        node: _Range | None = self._ranges[0]
        while node is not None:
            yield node.offset, node.size, node.used
            node = node.next

    def _split(self, node: _Range, size: int) -> None:
        """Cut `node` to `size` bytes; what is left over becomes a free range behind it."""
        rest = _Range(node.offset + size, node.size - size, node, node.next)
        if node.next is not None:
            node.next.prev = rest
        node.next = rest
        node.size = size
        self._ranges[rest.offset] = rest
        self._free.add((rest.size, rest.offset))

    def _absorb_next(self, node: _Range) -> None:
        """Make `node` and the range behind it one."""
        gone = node.next
        if gone is None:
            return
        node.size += gone.size
        node.next = gone.next
        if gone.next is not None:
            gone.next.prev = node
        del self._ranges[gone.offset]
        if self._hand is gone:
            self._hand = node


class _WindowSearch:
    """Two pointers over neighbouring ranges: for every right end the shortest window that is large enough.

    Costs are not negative, so the shortest window that ends at a range is also the cheapest that ends there. Their sum
    is kept without ever subtracting, which would leave a trace of large costs: as a queue of two stacks.
    """

    __slots__ = ("_back", "_back_cost", "_best", "_best_cost", "_front", "_size", "_wanted", "left")

    def __init__(self, wanted: int, start: _Range) -> None:
        """`wanted` in bytes; `start` is the first range that `extend` will be given."""
        self._wanted = wanted
        self._best: tuple[_Range, _Range] | None = None
        self._best_cost = math.inf
        self.restart(start)

    def restart(self, left: _Range | None) -> None:
        """Begin a new run of neighbours at `left`."""
        self.left = left
        self._size = 0
        self._back: list[float] = []
        self._back_cost = 0.0
        self._front: list[float] = []
        """Costs of the window's left part, each with all of that part behind it; the leftmost is last."""

    def extend(self, node: _Range, cost: float | None) -> None:
        """Take in the neighbour behind the last one; a `cost` of None, or one that is no price, breaks the run."""
        if cost is None or not 0.0 <= cost < math.inf:
            self.restart(node.next)
            return
        self._size += node.size
        self._back.append(cost)
        self._back_cost += cost
        if self._size < self._wanted:
            return
        left = self.left
        while left is not None and self._size - left.size >= self._wanted:
            self._size -= left.size
            self._drop_leftmost_cost()
            left = left.next
        self.left = left
        total = (self._front[-1] if self._front else 0.0) + self._back_cost
        if total < self._best_cost and left is not None:
            self._best = (left, node)
            self._best_cost = total

    @property
    def found(self) -> bool:
        """Whether any window was large enough so far."""
        return self._best is not None

    @property
    def is_empty(self) -> bool:
        """Whether the run under way holds no range yet."""
        return not self._front and not self._back

    def offsets_in_use(self) -> list[int] | None:
        """What must go for the best window, or None when there was none."""
        if self._best is None:
            return None
        node: _Range | None
        node, last = self._best
        offsets = []
        while node is not None:
            if node.used:
                offsets.append(node.offset)
            if node is last:
                break
            node = node.next
        return offsets

    def _drop_leftmost_cost(self) -> None:
        if not self._front:
            self._front.extend(accumulate(reversed(self._back)))
            self._back.clear()
            self._back_cost = 0.0
        self._front.pop()
