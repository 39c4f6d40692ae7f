# SPDX-License-Identifier: Apache-2.0
"""A lower tier held in memory that fails to order, and a hierarchy over it that is checked for leaks when it ends.

Waiting is for events or for a state that the hierarchy shows, always with a deadline; "slow" moves a clock that tests
hold in their hands, and no real time passes.
"""

import hashlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat

import storage_tiers.key
from storage_tiers.entry import EntryState, Lease
from storage_tiers.faults import FaultLog
from storage_tiers.hierarchy import HierarchyOptions, TierHierarchy
from storage_tiers.key import KeySpace, WantedItem
from storage_tiers.shared_pool import SharedPool
from storage_tiers.shared_segment import SharedSegment
from storage_tiers.tier import ItemHeader, LowerTier, Usage, digest_of

DEADLINE_SECONDS = 20.0
"""Far beyond what anything here takes: it ends a test that would hang, and decides nothing else."""
PAGE_BYTES = 4096
MODEL = "acme/vision-1"
DTYPE = torch.bfloat16
KEYS = KeySpace(MODEL, DTYPE)
PAGE_WIDTH = PAGE_BYTES // DTYPE.itemsize
"""Columns with which a token takes exactly a page."""


def wait_until(holds: Callable[[], Any], what: str) -> None:
    """Poll until `holds()`; fail the test when it does not within the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.0005)


def hash_of(name: str) -> str:
    """What vLLM would call an item of that content."""
    return hashlib.sha256(name.encode()).hexdigest()


def item(
    name: str,
    num_tokens: int = 1,
    *,
    width: int = PAGE_WIDTH,
    modality: str = "image",
    fingerprint: str = "f0",
    mm_hash: str | None = None,
) -> ItemHeader:
    """The header of an item as a worker's save has it: no digest yet. As many pages as tokens unless told otherwise."""
    return ItemHeader(mm_hash or hash_of(name), MODEL, fingerprint, modality, num_tokens, width, DTYPE)


def content_of(header: ItemHeader | WantedItem) -> bytes:
    """The bytes that encoding gives: they depend on everything that must match, and on nothing else."""
    assert header.width is not None
    identity = repr((header.mm_hash, header.fingerprint, header.modality, header.num_tokens, header.width))
    return hashlib.shake_128(identity.encode()).digest(header.num_tokens * header.width * DTYPE.itemsize)


class Clock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Gate:
    """Holds whoever comes through until it is opened; tells how many have come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived = 0
        self._is_open = False

    def pass_through(self) -> None:
        """Arrive, and wait for `open`."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, 2 * DEADLINE_SECONDS), "nobody opened a gate"

    def wait_arrived(self, number: int = 1) -> None:
        """Wait until `number` callers in all have come to the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived >= number, DEADLINE_SECONDS), "nobody came to a gate"

    @property
    def arrived(self) -> int:
        return self._arrived

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class MemoryTier:
    """A `LowerTier` in a dictionary. Operations, for counting, holding and failing: probe, read, write, close."""

    def __init__(self, name: str = "memory", clock: Clock | None = None) -> None:
        self.name = name
        self.items: dict[int, tuple[ItemHeader, bytes]] = {}
        """What is stored, by 64-bit name: tests plant and damage here, behind the tier's back."""
        self.calls: Counter[str] = Counter()
        self.touched: list[int] = []
        """64-bit names of the items that were said to be in use, in order."""
        self.faults: Counter[str] = Counter()
        self.vanishing = False
        """Whether what a probe finds is gone by the time it is read."""
        self.max_payload_bytes = 1 << 40
        """What is larger is refused by `write`: it can never fit."""
        self.accept_unverified = False
        """Whether what names no item is accepted by its shape alone, as the disk tier does for LMCache's files."""
        self.closed = False
        self._clock = clock
        self._lock = threading.Lock()
        self._gates: dict[str, Gate] = {}
        self._slow: dict[str, float] = {}
        self._errors: dict[str, tuple[Exception, int]] = {}

    # -- To order ---------------------------------------------------------------------------------------------------

    def hold(self, operation: str) -> Gate:
        """Have all calls of `operation` wait at a gate from now on, until it is opened."""
        with self._lock:
            gate = self._gates[operation] = Gate()
        return gate

    def slow_down(self, operation: str, seconds: float) -> None:
        """Have each call of `operation` take `seconds` by the clock."""
        self._slow[operation] = seconds

    def fail(self, operation: str, error: Exception, times: int = 1 << 30) -> None:
        """Have the next `times` calls of `operation` raise `error`."""
        with self._lock:
            self._errors[operation] = (error, times)

    def recover(self) -> None:
        """Open every gate and forget every fault that was ordered."""
        with self._lock:
            gates = list(self._gates.values())
            self._gates.clear()
            self._errors.clear()
            self._slow.clear()
        self.vanishing = False
        for gate in gates:
            gate.open()

    def damage(self, mm_hash: str) -> bool:
        """Flip a bit in the middle of what is stored; False where there is nothing."""
        with self._lock:
            stored = self.items.get(storage_tiers.key.chunk_hash_of(mm_hash))
            if stored is None:
                return False
            header, payload = stored
            middle = len(payload) // 2
            flipped = payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
            self.items[header.chunk_hash] = (header, flipped)
            return True

    def plant(self, header: ItemHeader) -> None:
        """Store an item as another process would have: whole and with its digest."""
        payload = content_of(header)
        self.items[header.chunk_hash] = (replace(header, digest=digest_of(memoryview(payload))), payload)

    def has(self, header: ItemHeader) -> bool:
        """Whether exactly this item is stored, with the right bytes."""
        stored = self.items.get(header.chunk_hash)
        if stored is None or stored[0].mismatch(header.as_wanted()) is not None:
            return False
        return stored[1] == content_of(header)

    # -- LowerTier --------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage(len(self.items), sum(len(payload) for _, payload in self.items.values()), 1 << 40)

    def lists(self, chunk_hash: int) -> bool:
        return chunk_hash in self.items

    def probe(self, wanted: WantedItem) -> ItemHeader | None:
        self._enter("probe")
        with self._lock:
            stored = self.items.get(wanted.chunk_hash)
            if stored is None:
                return None
            header = stored[0]
            if self.accept_unverified and not header.mm_hash:
                return replace(header, mm_hash=wanted.mm_hash, modality=wanted.modality)
            why = header.mismatch(wanted)
            if why is not None:
                self.faults[why] += 1
                return None
            if self.vanishing:
                del self.items[wanted.chunk_hash]
            return header

    def read_into(self, header: ItemHeader, payload: memoryview) -> bool:
        if len(payload) != header.payload_bytes:
            raise ValueError(f"{len(payload)} bytes to read {header.payload_bytes} into")
        payload[:] = b"\xee" * len(payload)  # rubbish until it is the item
        self._enter("read")
        with self._lock:
            stored = self.items.get(header.chunk_hash)
        if stored is None or len(stored[1]) != len(payload):
            self.faults["vanished"] += 1
            return False
        payload[:] = stored[1]
        if header.digest and digest_of(payload) != header.digest:
            with self._lock:
                self.items.pop(header.chunk_hash, None)
                self.faults["digest"] += 1
            return False
        return True

    def write(self, header: ItemHeader, payload: memoryview) -> bool:
        if len(payload) != header.payload_bytes or header.digest != digest_of(payload):
            raise ValueError("the payload is not what the header says")
        self._enter("write")
        if len(payload) > self.max_payload_bytes:
            return False
        with self._lock:
            self.items[header.chunk_hash] = (header, bytes(payload))
        return True

    def touch(self, chunk_hash: int) -> None:
        self.touched.append(chunk_hash)

    def remove(self, mm_hash: str) -> bool:
        self._enter("remove")
        with self._lock:
            return self.items.pop(storage_tiers.key.chunk_hash_of(mm_hash), None) is not None

    def close(self) -> None:
        self.closed = True
        self._enter("close")

    def _enter(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1
            gate = self._gates.get(operation)
        if gate is not None:
            gate.pass_through()
        if self._clock is not None:
            self._clock.advance(self._slow.get(operation, 0.0))
        with self._lock:
            error, times = self._errors.get(operation, (None, 0))
            if error is not None and times > 0:
                self._errors[operation] = (error, times - 1)
                raise type(error)(*error.args)  # a new one: a traceback keeps alive what it passed through


class Rig:
    """A hierarchy over a small pool and tiers in memory; `finish` asserts that nothing was leaked or lost track of."""

    def __init__(
        self,
        pages: int = 16,
        tiers: Sequence[LowerTier] | None = None,
        *,
        max_lease_pages: int | None = None,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.tier = MemoryTier(clock=self.clock)
        """The tier below, where no others were given."""
        self.tiers: list[LowerTier] = [self.tier] if tiers is None else list(tiers)
        self.encode_seconds_per_token = 0.0
        self.expected_job_failures = 0
        self._pages = pages
        self._options = HierarchyOptions(
            max_lease_bytes=PAGE_BYTES * (pages if max_lease_pages is None else max_lease_pages), **options
        )
        self._finalized: list[int] = []
        self.start()

    def start(self) -> None:
        """A hierarchy like that of a new process: an empty pool over whatever the tiers hold."""
        segment = SharedSegment.create(f"test_hierarchy_{uuid.uuid4().hex}", self._pages * PAGE_BYTES)
        self.pool = SharedPool(LMCacheEngineConfig.from_defaults(), segment)
        self.faults = FaultLog()
        self.hierarchy = TierHierarchy(
            self.pool,
            self.tiers,
            KEYS,
            self._options,
            self.faults,
            encode_seconds_per_token=lambda: self.encode_seconds_per_token,
            clock=self.clock,
        )
        self.closed = False

    def restart(self) -> None:
        """End this hierarchy as a clean stop does, checks included, and start another."""
        self.finish()
        self.start()

    # -- Steps that many tests share --------------------------------------------------------------------------------

    def begin_save(self, header: ItemHeader) -> Lease:
        """Reserve and fill, as a worker does; the save is not finished."""
        lease = self.hierarchy.begin_save(header)
        assert lease is not None, f"no room for {header}"
        self.view(lease)[:] = content_of(header)
        return lease

    def save(self, header: ItemHeader, wait: bool = True) -> None:
        """Save an item; unless told otherwise, wait until the tiers below have taken it or failed."""
        self.hierarchy.finish_save(self.begin_save(header), succeeded=True)
        if wait:
            self.flush()

    def acquire(self, header: ItemHeader) -> Lease:
        """Claim what must not be a miss yet."""
        lease = self.hierarchy.acquire(header.as_wanted())
        assert lease is not None, f"{header} was a miss: {self.hierarchy.counts()}"
        return lease

    def settled(self, lease: Lease) -> EntryState:
        """Wait until a lease is usable or never will be, and no read runs any more; its state then."""
        wait_until(lambda: lease.state not in (EntryState.STAGING, EntryState.SAVING), "an item is staged or saved")
        return lease.state

    def serve(self, header: ItemHeader) -> bytes | None:
        """What a request is given: claim, wait, pin for the load, copy, release. None is a miss."""
        wanted = header.as_wanted()
        claim = self.hierarchy.acquire(wanted)
        if claim is None:
            return None
        self.settled(claim)
        pin = self.hierarchy.pin_resident(wanted)
        served = None if pin is None else self.bytes_of(pin)
        for lease in (claim, pin):
            if lease is not None:
                self.hierarchy.release(lease)
        self.wait_reads()
        return served

    def view(self, lease: Lease) -> memoryview:
        """The memory of a lease as a worker finds it: by its offset in the segment."""
        offset = self.hierarchy.segment_offset(lease)
        return self.pool.segment.buffer[offset : offset + lease.entry.nbytes]

    def bytes_of(self, lease: Lease) -> bytes:
        return bytes(self.view(lease))

    def is_resident(self, header: ItemHeader) -> bool:
        return self.hierarchy.state_of(header.as_wanted()) is EntryState.RESIDENT

    def count(self, event: str) -> int:
        return self.hierarchy.counts().get(event, 0)

    def flush(self) -> None:
        assert self.hierarchy.flush(DEADLINE_SECONDS) == 0, "writes hang"

    def wait_reads(self) -> None:
        """Wait until no read is queued or runs: counts are complete then."""
        io = self.hierarchy._io
        wait_until(lambda: not io.queued_reads and not io._running_reads, "reads have ended")

    # -- Checks -----------------------------------------------------------------------------------------------------

    def check_consistent(self, leases: Sequence[Lease] = ()) -> None:
        """The index, the pool, the reference counts and the sum of claims agree. `leases`: all that stand outside.

        For moments in which no I/O thread holds anything.
        """
        hierarchy, pool = self.hierarchy, self.pool
        with pool.lock:
            entries = {id(entry): entry for entry in (*hierarchy._index.values(), *(each.entry for each in leases))}
            resident = [entry for entry in hierarchy._index.values() if entry.state is EntryState.RESIDENT]
            assert {KEYS.key_of(entry.wanted.chunk_hash): entry.obj for entry in resident} == dict(pool.hot_cache)
            assert EntryState.GONE not in {entry.state for entry in hierarchy._index.values()}
            used = claimed = 0
            for entry in entries.values():
                standing = [each for each in leases if each.entry is entry and not each.released]
                assert (entry.leases, entry.claims) == (len(standing), sum(each.is_claim for each in standing))
                claimed += entry.nbytes if entry.claims else 0
                if entry.obj is not None:
                    expected = (entry.leases > 0) + (entry.state is EntryState.RESIDENT)
                    assert entry.obj.get_ref_count() == expected, entry.state
                    used += entry.obj.get_physical_size()
            assert pool.used_bytes == used <= pool.capacity_bytes
            assert hierarchy.claimed_bytes == claimed <= self._options.max_lease_bytes
            assert pool.memory_allocator.memcheck()

    def watch_finalizers(self, monkeypatch: Any) -> None:
        """From now on, note whatever is given back only by its finalizer: somebody has lost a reference."""
        sample = self.pool.allocate(torch.Size((1, 1)), DTYPE, MemoryFormat.EC_TD)
        assert sample is not None
        sample.ref_count_down()
        kind = type(sample)
        finalize = kind.__del__

        def noting(memory_obj: Any) -> None:
            if memory_obj.is_valid():
                self._finalized.append(memory_obj.meta.address)
            finalize(memory_obj)

        monkeypatch.setattr(kind, "__del__", noting)

    def finish(self) -> None:
        """Let everything run to its end, assert that all bytes are back, and close. The test has ended its leases."""
        if self.closed:
            return
        try:
            self._finish()
        finally:
            self.pool.segment.close()  # a failed test, too, leaves nothing behind

    def close(self) -> None:
        """Close, and assert that the segment is gone and that no job failed in a way nobody had thought of."""
        path: Path = self.pool.segment.path
        self.hierarchy.close()
        self.closed = True
        assert not path.exists()
        assert self.faults.count("hierarchy", "io_job_failed") == self.expected_job_failures
        for tier in self.tiers:
            if isinstance(tier, MemoryTier):
                assert tier.closed
                tier.closed = False

    def _finish(self) -> None:
        for tier in self.tiers:
            if isinstance(tier, MemoryTier):
                tier.recover()
        self.wait_reads()
        self.flush()
        self.check_consistent()
        self.hierarchy.forget_all()
        assert self.pool.used_bytes == 0 and self.hierarchy.claimed_bytes == 0 and self.hierarchy.num_entries == 0
        assert self._finalized == [], "only a finalizer gave these back"
        self.close()
