# SPDX-License-Identifier: Apache-2.0
"""LMCache memory objects over the shared segment: what `allocate` returns and what a finalizer gives back.

This room turns ranges into objects and objects into ranges. Keys, entries, eviction and I/O must not enter.
"""

import logging
import threading
from collections import deque

import torch
from lmcache.utils import get_size_bytes
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from storage_tiers.pool_allocator import PoolAllocator
from storage_tiers.shared_segment import PAGE_BYTES, SharedSegment

__all__ = ["Dtypes", "SegmentMemoryAllocator", "Shapes"]

Shapes = torch.Size | list[torch.Size]
Dtypes = torch.dtype | list[torch.dtype]

# It prints to stderr, in colours and past every handler of ours.
logging.getLogger("lmcache.v1.memory_management").setLevel(logging.ERROR)


class _SegmentMemoryObj(TensorMemoryObj):
    """LMCache's object with a finalizer that neither logs nor takes a lock, and works while the interpreter exits."""

    @property
    def raw_data(self) -> torch.Tensor:
        """Sliced when asked for: hardly anybody does, and it would be a good part of what allocating costs."""
        return self._pool[self.meta.address : self.meta.address + self.meta.phy_size]

    @raw_data.setter
    def raw_data(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def __del__(self) -> None:
        self.parent_allocator.free(self)


class SegmentMemoryAllocator(MemoryAllocatorInterface):
    """LMCache memory objects over the data area of a segment. `meta.address` is the offset there, in bytes.

    All methods but `free` take `lock`. `free` is called by finalizers, on any thread, in the middle of anything: it
    takes none, and queues the range for whoever comes next with the lock.
    """

    def __init__(self, segment: SharedSegment) -> None:
        """Takes all of the segment's data area; `close` closes the segment."""
        self.lock = threading.RLock()
        self.align_bytes = PAGE_BYTES
        self.ranges = PoolAllocator(segment.data_bytes, PAGE_BYTES)
        self._segment = segment
        self._bytes = segment.tensor()[segment.data_offset :]
        self._outstanding: dict[int, int] = {}
        """`id` of every object not yet freed to its offset: `dict.pop` decides atomically who frees it."""
        self._freed: deque[int] = deque()
        self._closed = False

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat = MemoryFormat.EC_TD,
        allocator_type: str | None = None,
    ) -> MemoryObj | None:
        """One object with one reference, from free ranges only; None when there is no room or no byte asked for."""
        taken = self.batched_allocate(shapes, dtypes, 1, fmt)
        return taken[0] if taken else None

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.EC_TD,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """`batch_size` such objects, or None and nothing taken."""
        shape_list, dtype_list = self._adapt_shapes_and_dtypes(shapes, dtypes)
        nbytes = get_size_bytes(shape_list, dtype_list)
        with self.lock:
            self.drain()
            if nbytes <= 0 or self._closed:
                return None
            offsets: list[int] = []
            for _ in range(batch_size):
                offset = self.ranges.allocate(nbytes)
                if offset is None:
                    for taken in offsets:
                        self.ranges.free(taken)
                    return None
                offsets.append(offset)
            return [self._object_at(offset, shape_list, dtype_list, fmt) for offset in offsets]

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """Queue the object's range and mark the object invalid; a second call does nothing. No lock, any thread."""
        memory_obj.invalidate()
        offset = self._outstanding.pop(id(memory_obj), None)
        if offset is not None:
            self._freed.append(offset)

    def batched_free(
        self, memory_objs: list[MemoryObj], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """`free` for each. Takes no lock. Any thread."""
        for memory_obj in memory_objs:
            self.free(memory_obj)

    def drain(self) -> None:
        """Return queued ranges to the pool. The caller holds `lock`."""
        while self._freed:
            self.ranges.free(self._freed.popleft())

    def owns(self, memory_obj: MemoryObj) -> bool:
        """Whether the object is one of ours and not freed. Any thread."""
        return id(memory_obj) in self._outstanding

    def memcheck(self) -> bool:
        """Whether ranges tile the pool and add up. O(n) under the lock."""
        with self.lock:
            self.drain()
            used = end = 0
            for offset, size, in_use in self.ranges:
                if offset != end:
                    return False
                end += size
                used += size if in_use else 0
            return end == self.ranges.size_bytes and used == self.ranges.used_bytes

    def close(self) -> None:
        """Close the segment; objects and views that live keep the memory, nothing more is allocated."""
        with self.lock:
            self._closed = True
            self._bytes = self._bytes[:0].clone()  # or this tensor would keep the mapping for ever
        self._segment.close()

    def _object_at(
        self, offset: int, shapes: list[torch.Size], dtypes: list[torch.dtype], fmt: MemoryFormat
    ) -> MemoryObj:
        size = self.ranges.size_of(offset)
        meta = MemoryObjMetadata(
            shape=shapes[0],
            dtype=dtypes[0],
            address=offset,
            phy_size=size,
            ref_count=1,
            fmt=fmt,
            shapes=shapes,
            dtypes=dtypes,
        )
        memory_obj = _SegmentMemoryObj(self._bytes, meta, self)
        self._outstanding[id(memory_obj)] = offset
        return memory_obj
