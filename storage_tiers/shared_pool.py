# SPDX-License-Identifier: Apache-2.0
"""The CPU tier: LMCache's `LocalCPUBackend` over our shared segment, with our allocator and our eviction.

Whatever speaks LMCache can put, look up and get here. What LMCache does badly is replaced: nothing waits, nothing is
evicted in vain, look-ups count as use, a finalizer takes no lock, and pins are reference counts. Files, networks and
threads of its own must not enter. LMCache's policies and metrics are not used: what an entry is worth, the owner says.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.utils import CacheEngineKey, get_size_bytes
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from storage_tiers.segment_memory import Dtypes, SegmentMemoryAllocator, Shapes
from storage_tiers.shared_segment import SharedSegment

__all__ = ["SharedPool", "view"]

SCAN_RANGES = (64, 512)
"""Ranges priced per allocation that must evict, and again where those held no window: 2 µs each, on the step thread.

More of them choose no better (simulated, hit rates within 1 %), but leave fewer allocations without an answer.
"""


@dataclass(slots=True)
class _Entry:
    """What eviction needs to know of an entry, found by its offset so that no key is hashed while ranges are priced."""

    key: CacheEngineKey
    obj: MemoryObj
    used_at: int
    """Tick of the pool's use counter."""
    pins: int = 0
    """References taken by LMCache callers' `pin`."""


class SharedPool(LocalCPUBackend):
    """Published entries by key, over a shared segment. Any thread may call any method; none waits for I/O.

    An entry holds one reference to its object. Only entries with no other reference are evicted, so whoever holds one
    (`get_blocking`, `obj.ref_count_up()`) holds the bytes. What `allocate` returned is no entry until it is put.
    """

    def __init__(self, config: LMCacheEngineConfig, segment: SharedSegment) -> None:
        """Takes over `segment`, which this process created: `close` removes it.

        Of `config`, only names and flags are read: the size is the segment's, and `local_cpu: false` or `cache_policy`
        mean nothing for a pool that every transfer passes through. Registers no metrics, changes no environment.
        """
        self.segment = segment
        self._allocator = SegmentMemoryAllocator(segment)
        with _quiet("lmcache.v1.storage_backend.local_cpu_backend", "lmcache.v1.storage_backend.cache_policy.lru"):
            super().__init__(config, metadata=None, dst_device="cpu", memory_allocator=self._allocator)
        self.lock = self.cpu_lock = self._allocator.lock
        """Guards the pool. Re-entrant: its owner may hold it around several calls to see and change one state."""
        self.use_hot = True
        self.hot_cache: OrderedDict[CacheEngineKey, MemoryObj] = OrderedDict()
        self._by_offset: dict[int, _Entry] = {}
        self._tick = 0
        self._cost_of: Callable[[CacheEngineKey], float | None] | None = None
        self._on_evict: Callable[[CacheEngineKey], None] | None = None

    def set_policy(
        self,
        cost_of: Callable[[CacheEngineKey], float | None] | None,
        on_evict: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        """Say what evicting an entry costs (finite, >= 0, any unit; None: it stays) and hear of each that went.

        Both are called under the lock, `cost_of` up to some thousand times per allocation, and must neither raise nor
        change the pool. Without a policy the cost is bytes by age, counted in uses of the pool.
        """
        with self.lock:
            self._cost_of = cost_of
            self._on_evict = on_evict

    # -- Memory -----------------------------------------------------------------------------------------------------

    def allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = False,
    ) -> MemoryObj | None:
        """An object with one reference, the caller's; None when no room can be made. `busy_loop` or not, never waits.

        Takes a free range, else evicts the cheapest contiguous window of free ranges and entries that nobody holds.
        Whether there is one is known before anything is evicted. Payload and padding hold rubbish.
        """
        taken = self.batched_allocate(shapes, dtypes, 1, fmt, eviction, busy_loop)
        return taken[0] if taken else None

    def batched_allocate(
        self,
        shapes: Shapes,
        dtypes: Dtypes,
        batch_size: int,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = False,
    ) -> list[MemoryObj] | None:
        """`batch_size` objects or None: from free ranges wherever they lie, else from one window for all of them."""
        fmt = MemoryFormat.EC_TD if fmt is None else fmt
        with self.lock:
            taken = self._allocator.batched_allocate(shapes, dtypes, batch_size, fmt)
            if taken is not None or not eviction:
                return taken
            shape_list, dtype_list = self._allocator._adapt_shapes_and_dtypes(shapes, dtypes)
            nbytes = get_size_bytes(shape_list, dtype_list)
            if nbytes <= 0 or batch_size <= 0:
                return None
            ranges = self._allocator.ranges
            wanted = ranges.rounded(nbytes) * batch_size
            windows = (ranges.cheapest_window(wanted, self._cost_at, limit) for limit in SCAN_RANGES)
            window = next((found for found in windows if found is not None), None)
            if window is None:
                return None
            evicted = [self._drop(self._by_offset[offset].key) for offset in window]
            taken = self._allocator.batched_allocate(shapes, dtypes, batch_size, fmt)
            self._tell_evicted(evicted)
            return taken

    def payload_view(self, obj: MemoryObj, padded: bool = False) -> memoryview:
        """The object's logical bytes, or with `padded` its whole range: both begin at a multiple of 4096.

        For I/O; valid for as long as the caller holds a reference to `obj`. Raises ValueError when that is not ours,
        or freed.
        """
        start = self.offset_of(obj)
        return self.segment.buffer[start : start + (obj.get_physical_size() if padded else obj.get_size())]

    def zero_padding(self, obj: MemoryObj) -> None:
        """Zero the bytes behind the payload, fewer than 4096 as a rule, before the whole range is written somewhere.

        Raises ValueError when the object is not ours, or freed.
        """
        padding = self.payload_view(obj, padded=True)[obj.get_size() :]
        padding[:] = bytes(len(padding))

    def is_live(self, obj: MemoryObj) -> bool:
        """Whether the object is this pool's and not freed: its bytes are its own. A dict look-up."""
        return self._allocator.owns(obj)

    def offset_of(self, obj: MemoryObj) -> int:
        """Where the payload begins, in bytes from the segment's start: what another process passes to `view`.

        Raises ValueError when the object is not ours, or freed.
        """
        if not self._allocator.owns(obj):
            raise ValueError("the object is freed, or is none of this pool")
        return self.segment.data_offset + obj.metadata.address

    # -- Entries ----------------------------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether `key` is published; counts as use."""
        with self.lock:
            return self._use(key) is not None and (not pin or self.pin(key))

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The object of `key` with one more reference, the caller's to end by `ref_count_down`; counts as use."""
        with self.lock:
            obj = self._use(key)
            if obj is not None:
                obj.ref_count_up()
            return obj

    def submit_put_task(
        self,
        key: CacheEngineKey,
        memory_obj: MemoryObj,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Publish `memory_obj` under `key`, with a reference of the pool's own; ignored when the key is published.

        Raises ValueError when the object is not ours, freed, or published under another key.
        """
        with self.lock:
            if key in self.hot_cache:
                return
            self._publish(key, memory_obj)
        if on_complete_callback is not None:
            on_complete_callback(key)

    def replace(self, key: CacheEngineKey, memory_obj: MemoryObj) -> bool:
        """Publish `memory_obj` under `key` in place of what was there; whether anything was.

        Who holds the old object keeps its bytes. Raises ValueError as `submit_put_task` does, and changes nothing then.
        """
        with self.lock:
            if self.hot_cache.get(key) is memory_obj:
                return True
            self._check_publishable(memory_obj)
            replaced = self.remove(key)
            self._publish(key, memory_obj)
            return replaced

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Unpublish `key`, pins included; whether it was published. Its bytes are free once nobody holds them.

        Does not call `on_evict`: the caller knows.
        """
        with self.lock:
            if key not in self.hot_cache:
                return False
            self._drop(key)
            return True

    def clear(self) -> int:
        """Evict every entry that nobody holds; how many tokens that were. Calls `on_evict` for each."""
        with self.lock:
            unheld = [entry for entry in self._by_offset.values() if entry.obj.get_ref_count() == 1]
            num_tokens = sum(entry.obj.get_num_tokens() for entry in unheld)
            self._tell_evicted([self._drop(entry.key) for entry in unheld])
            return num_tokens

    def pin(self, key: CacheEngineKey) -> bool:
        """Hold the entry's bytes until as many `unpin`, or `remove`; a reference, since pins raise and expire."""
        with self.lock:
            obj = self._use(key)
            if obj is None:
                return False
            self._by_offset[obj.metadata.address].pins += 1
            obj.ref_count_up()
            return True

    def unpin(self, key: CacheEngineKey) -> bool:
        """Undo one `pin`; False when there is none."""
        with self.lock:
            obj = self.hot_cache.get(key)
            if obj is None or self._by_offset[obj.metadata.address].pins == 0:
                return False
            self._by_offset[obj.metadata.address].pins -= 1
            obj.ref_count_down()
            return True

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many of `keys`, from the first on, are published without a gap."""
        return int(self.batched_contains(keys, pin))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The objects of `keys` up to the first that is not published, each with one more reference."""
        found: list[MemoryObj] = []
        for key in keys:
            obj = self.get_blocking(key)
            if obj is None:
                break
            found.append(obj)
        return found

    def touch_cache(self) -> None:
        """Nothing to do: look-ups count as use when they are made."""

    def close(self) -> None:
        """Unpublish everything and remove the segment. Objects and views that somebody holds stay valid."""
        with self.lock:
            for key in list(self.hot_cache):
                self._drop(key)
            self._allocator.close()

    # -- Figures ----------------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes that entries and reservations can take together."""
        return self._allocator.ranges.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken, by entries or by objects that are not published; padding included."""
        with self.lock:
            self._allocator.drain()
            return self._allocator.ranges.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken, in however many pieces."""
        return self.capacity_bytes - self.used_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of entries that nobody holds. O(entries) under the lock: for metrics."""
        with self.lock:
            unheld = (entry.obj for entry in self._by_offset.values() if entry.obj.get_ref_count() == 1)
            return sum(obj.get_physical_size() for obj in unheld)

    @property
    def num_entries(self) -> int:
        """Published entries."""
        return len(self.hot_cache)

    # -- Under the lock ---------------------------------------------------------------------------------------------

    def _use(self, key: CacheEngineKey) -> MemoryObj | None:
        obj = self.hot_cache.get(key)
        if obj is not None:
            self.hot_cache.move_to_end(key)
            self._tick += 1
            self._by_offset[obj.metadata.address].used_at = self._tick
        return obj

    def _check_publishable(self, memory_obj: MemoryObj) -> None:
        offset = self.offset_of(memory_obj) - self.segment.data_offset
        if offset in self._by_offset:
            raise ValueError(f"the object is published already, as {self._by_offset[offset].key}")

    def _publish(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        self._check_publishable(memory_obj)
        memory_obj.ref_count_up()
        self._tick += 1
        self.hot_cache[key] = memory_obj
        self._by_offset[memory_obj.metadata.address] = _Entry(key, memory_obj, self._tick)

    def _drop(self, key: CacheEngineKey) -> CacheEngineKey:
        obj = self.hot_cache.pop(key)
        entry = self._by_offset.pop(obj.metadata.address)
        for _ in range(1 + entry.pins):
            obj.ref_count_down()
        return key

    def _tell_evicted(self, keys: Sequence[CacheEngineKey]) -> None:
        if self._on_evict is not None:
            for key in keys:
                self._on_evict(key)

    def _cost_at(self, offset: int) -> float | None:
        """The price of the range at `offset`. No lock of the object is taken: a count of 1 can only grow under ours."""
        entry = self._by_offset.get(offset)
        if entry is None:
            return None
        meta = entry.obj.meta
        if meta.ref_count != 1 or meta.pin_count > 0:
            return None
        if self._cost_of is not None:
            return self._cost_of(entry.key)
        return float(meta.phy_size / (self._tick - entry.used_at + 1))


def view(segment: SharedSegment, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at `offset` bytes from the segment's start, shared with every process that maps it. Any thread.

    Raises ValueError when it does not lie within the data area or is not aligned for `dtype`, or the segment is closed.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if offset < segment.data_offset or offset + nbytes > segment.nbytes or offset % dtype.itemsize:
        raise ValueError(f"{nbytes} bytes at {offset} do not lie in the data area of {segment.name}")
    return segment.tensor()[offset : offset + nbytes].view(dtype).view(*shape)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep loggers below ERROR quiet: LMCache's constructor warns of a controller that nobody asked for."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)
