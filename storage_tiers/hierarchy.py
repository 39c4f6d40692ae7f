# SPDX-License-Identifier: Apache-2.0
"""The hierarchy: one index over the shared pool and the tiers below it, and every decision about an item's bytes.

Callers take leases, stage, save and release; bytes move on I/O threads. One lock, the pool's, guards the index, and
nothing that touches a disk or a network runs under it. Nothing of an engine may enter: no request, no step, no plan.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from storage_tiers.entry import Entry, EntryState, Lease
from storage_tiers.faults import FaultLog
from storage_tiers.io_threads import IoThreads
from storage_tiers.key import KeySpace, WantedItem, is_content_hash
from storage_tiers.shared_pool import SharedPool
from storage_tiers.tier import ItemHeader, LowerTier, Usage, digest_of
from storage_tiers.tier_io import LowerTiers

__all__ = ["HierarchyOptions", "TierHierarchy"]

FALLBACK_ENCODE_SECONDS_PER_TOKEN = 1e-4
"""Ranks items for eviction while no encoder run has been measured; only ratios matter then."""
FALLBACK_RESTORE_BYTES_PER_SECOND = 1e9
"""Ranks items for eviction while no restore has been measured: an NVMe drive's order of magnitude."""
USE_SECONDS = 60.0
"""How often lower tiers hear of the items that are used above them."""
MAX_NOTED_USES = 65536
"""Items that are remembered for the next such report; those beyond are not reported."""


@dataclass(frozen=True, slots=True)
class HierarchyOptions:
    """How the hierarchy behaves; see the settings of the same names."""

    max_lease_bytes: int
    """Most bytes that requests may hold in the pool at once, waiting ones included."""
    persist_client_ids: bool = False
    """Whether items whose identifier is no content hash may leave the pool for lower tiers."""
    skip_slow_restores: bool = True
    """Whether a restore that is estimated to take longer than encoding is left out."""
    io_threads: int = 4
    io_queue_items: int = 1024
    """Most restores that may wait for an I/O thread."""
    staging_overdue_seconds: float = 4.0
    """Age of a staging from which on nobody new waits for it."""


class TierHierarchy:
    """Items by their 64-bit name: resident in the pool, on their way there, or only below.

    All methods may be called from any thread; those marked "step thread" do no I/O and never wait for any.
    """

    def __init__(
        self,
        pool: SharedPool,
        lower: Sequence[LowerTier],
        key_space: KeySpace,
        options: HierarchyOptions,
        faults: FaultLog,
        encode_seconds_per_token: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over `pool` and `lower`: `close` closes them.

        `encode_seconds_per_token` gives what workers measured lately, 0.0 while unknown; `clock` monotonic seconds.
        """
        self.faults = faults
        self._pool = pool
        self._keys = key_space
        self._options = options
        self._encode_seconds_per_token = encode_seconds_per_token
        self._clock = clock
        self._lock: threading.RLock = pool.lock
        self._lower = LowerTiers(lower, faults, clock)
        self._io = IoThreads(options.io_threads, options.io_queue_items, faults)
        self._index: dict[int, Entry] = {}
        self._tick = 0
        self._claimed_bytes = 0
        self._dirty_bytes = 0
        self._used: set[int] = set()
        self._uses_told_at = clock()
        self._counts: Counter[str] = Counter()
        pool.set_policy(self._cost_of, self._on_evict)

    # -- Asking and holding (step thread) ---------------------------------------------------------------------------

    def state_of(self, wanted: WantedItem) -> EntryState | None:
        """The state of the entry that serves `wanted`, or None where there is none in or near the pool. Step thread."""
        entry = self._index.get(wanted.chunk_hash)
        return entry.state if entry is not None and entry.serves(wanted) else None

    def is_stored_below(self, wanted: WantedItem) -> bool:
        """Whether an entry is known to have reached a lower tier, or one there has its name. Step thread."""
        entry = self._index.get(wanted.chunk_hash)
        if entry is not None and entry.stored_below and entry.serves(wanted):
            return True
        return self._lower.lists(wanted.chunk_hash)

    def note_use(self, wanted: WantedItem) -> None:
        """Note that an item is in use, for lower tiers that are not asked for it. Step thread: a set operation.

        What the device or the pool serves would otherwise grow old below and be evicted there. Once a minute lower
        tiers hear of all that was noted.
        """
        if len(self._used) < MAX_NOTED_USES:
            self._used.add(wanted.chunk_hash)
        now = self._clock()
        if now - self._uses_told_at >= USE_SECONDS and self._io.pending_writes < self._options.io_queue_items:
            self._uses_told_at = now
            used, self._used = self._used, set()
            self._io.submit_write(partial(self._lower.touch, used))

    def acquire(self, wanted: WantedItem, can_be_encoded: Callable[[], bool] = lambda: True) -> Lease | None:
        """Claim an item for a request, starting a restore where it may be below. None is a miss. Step thread.

        Without `can_be_encoded` no restore is too slow: there is no other way to the bytes.

        Watch the lease's state: RESIDENT can be used, STAGING and SAVING may become so, GONE will not. `release` it.
        """
        with self._lock:
            entry = self._live_entry(wanted)
            if entry is None:
                return self._start_staging(wanted, can_be_encoded)
            if not entry.serves(wanted):
                return self._missed("other_item_in_pool")
            if self._is_overdue(entry):
                return self._missed("staging_overdue")
            if not entry.claims and self._claimed_bytes + entry.nbytes > self._options.max_lease_bytes:
                return self._missed("lease_limit")
            self._touch(entry)
            return self._lease(entry, is_claim=True)

    def pin_resident(self, wanted: WantedItem) -> Lease | None:
        """Hold an item that is resident at this moment, whatever requests hold; None where it is not. Step thread."""
        with self._lock:
            entry = self._live_entry(wanted)
            if entry is None or entry.state is not EntryState.RESIDENT or not entry.serves(wanted):
                return None
            self._touch(entry)
            return self._lease(entry, is_claim=False)

    def take_restored(self, lease: Lease) -> bool:
        """Whether this is the first load since a lower tier brought the item. Step thread; says so once."""
        with self._lock:
            restored, lease.entry.is_restored = lease.entry.is_restored, False
            return restored

    def release(self, lease: Lease) -> None:
        """End a lease; a second call does nothing. Step thread."""
        with self._lock:
            if lease.released:
                return
            lease.released = True
            entry = lease.entry
            if lease.is_claim:
                entry.claims -= 1
                self._claimed_bytes -= 0 if entry.claims else entry.nbytes
            entry.leases -= 1
            if entry.leases == 0 and entry.obj is not None:
                entry.obj.ref_count_down()
                if entry.state is EntryState.GONE:
                    entry.obj = None

    def segment_offset(self, lease: Lease) -> int:
        """Bytes from the start of the shared segment to a leased item's payload. Step thread.

        Raises ValueError for a lease without memory: one that is staging, or was released.
        """
        if lease.released or lease.entry.obj is None:
            raise ValueError(f"lease on {lease.entry.wanted.mm_hash} ({lease.state.value}) has no memory")
        return self._pool.offset_of(lease.entry.obj)

    # -- Saving (step thread; the write below runs on I/O threads) --------------------------------------------------

    def begin_save(self, header: ItemHeader) -> Lease | None:
        """Reserve pool space for an item that is about to be encoded; None: do not save it. Step thread.

        None where it is resident, on its way, or the pool is exhausted (a counted fault). `finish_save` ends it.
        """
        wanted = header.as_wanted()
        with self._lock:
            entry = self._index.get(wanted.chunk_hash)
            if entry is not None:
                if entry.state is not EntryState.RESIDENT or entry.serves(wanted):
                    return None
                self._drop(entry)
            obj = self._allocate(header)
            if obj is None:
                self.faults.report("pool", "exhausted", f"{header.payload_bytes} bytes for {header.mm_hash}")
                return None
            entry = self._insert(wanted, EntryState.SAVING)
            entry.header, entry.obj = header, obj
            lease = self._lease(entry, is_claim=False)
            obj.ref_count_down()  # the lease's reference is the one that stays
            return lease

    def finish_save(self, lease: Lease, succeeded: bool) -> None:
        """End a save: the bytes are in the pool, or never will be. Hands a success to the tiers below. Step thread."""
        with self._lock:
            entry = lease.entry
            attached = self._index.get(entry.wanted.chunk_hash) is entry
            if not attached:
                self._counts["save_outdated"] += 1
            elif not succeeded:
                self._counts["save_failed"] += 1
                self._drop(entry)
            else:
                self._counts["save"] += 1
                self._publish(entry)
                self._queue_write(entry)
            self.release(lease)

    # -- Forgetting -------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Drop every entry from the pool, after the fingerprint has changed for all of them. Step thread."""
        with self._lock:
            for entry in list(self._index.values()):
                self._drop(entry)

    def evict(self, wanted: WantedItem) -> bool:
        """Drop one unleased resident item from the pool; False where there was none. Step thread."""
        with self._lock:
            entry = self._index.get(wanted.chunk_hash)
            if entry is None or entry.leases or entry.state is not EntryState.RESIDENT:
                return False
            self._drop(entry)
            return True

    # -- Figures and the end ----------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Events since start by name. Any thread."""
        with self._lock:
            return dict(self._counts)

    def usage(self) -> dict[str, Usage]:
        """How full each tier is, by its name; the pool's is "pool". Any thread."""
        pool = Usage(self.num_entries, self._pool.used_bytes, self._pool.capacity_bytes)
        return {"pool": pool, **self._lower.usage()}

    @property
    def claimed_bytes(self) -> int:
        """Bytes that requests hold in the pool. Any thread."""
        return self._claimed_bytes

    @property
    def num_entries(self) -> int:
        """Items in the pool or on their way there. Any thread."""
        return len(self._index)

    @property
    def pending_writes(self) -> int:
        """Items that lower tiers have yet to take. Any thread."""
        return self._io.pending_writes

    def flush(self, timeout_seconds: float) -> int:
        """Wait until lower tiers have taken what was saved; the number of items left when the time is up.

        Never from the step thread, except at shutdown.
        """
        self._io.drain_writes(timeout_seconds)
        return self._io.pending_writes

    def close(self) -> None:
        """Stop the I/O threads, close lower tiers and pool. What is stored below stays; what is queued is lost."""
        if not self._io.close():
            self.faults.report("hierarchy", "io_thread_hangs", "left behind at close")
        self._lower.close()
        with self._lock:
            self.forget_all()
        self._pool.close()

    # -- Under the lock ---------------------------------------------------------------------------------------------

    def _is_overdue(self, entry: Entry) -> bool:
        """Whether the entry's tier seems to hang: who comes now need not wait for it as well."""
        age = self._clock() - entry.since
        return entry.state is EntryState.STAGING and age > self._options.staging_overdue_seconds

    def _live_entry(self, wanted: WantedItem) -> Entry | None:
        """The entry of that name, unless its bytes were taken from the pool through LMCache's face."""
        entry = self._index.get(wanted.chunk_hash)
        if entry is None or entry.state is not EntryState.RESIDENT or entry.leases:
            return entry
        if entry.obj is not None and self._pool.is_live(entry.obj):
            return entry
        self._drop(entry)
        return None

    def _missed(self, reason: str) -> Lease | None:
        self._counts[f"miss_{reason}"] += 1
        return None

    def _touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.last_used = self._tick

    def _insert(self, wanted: WantedItem, state: EntryState) -> Entry:
        entry = self._index[wanted.chunk_hash] = Entry(wanted, state)
        entry.since = self._clock()
        self._touch(entry)
        return entry

    def _lease(self, entry: Entry, is_claim: bool) -> Lease:
        if entry.leases == 0 and entry.obj is not None:
            entry.obj.ref_count_up()
        entry.leases += 1
        if is_claim:
            self._claimed_bytes += 0 if entry.claims else entry.nbytes
            entry.claims += 1
        return Lease(entry, is_claim)

    def _start_staging(self, wanted: WantedItem, can_be_encoded: Callable[[], bool]) -> Lease | None:
        if not self._lower or not self._may_be_below(wanted):
            return self._missed("absent")
        if self._is_slower_than_encoding(wanted) and can_be_encoded():
            return self._missed("slower_than_encoding")
        entry = self._insert(wanted, EntryState.STAGING)
        lease = self._lease(entry, is_claim=True)
        if self._io.submit_read(partial(self._stage, entry)):
            return lease
        self._drop(entry)
        self.release(lease)
        return self._missed("io_queue_full")

    def _may_be_below(self, wanted: WantedItem) -> bool:
        return self._options.persist_client_ids or is_content_hash(wanted.mm_hash)

    def _is_slower_than_encoding(self, wanted: WantedItem) -> bool:
        encode_seconds = wanted.num_tokens * self._encode_seconds_per_token()
        if not self._options.skip_slow_restores or wanted.width is None or encode_seconds <= 0.0:
            return False
        nbytes = wanted.num_tokens * wanted.width * self._keys.dtype.itemsize
        return self._lower.seconds_to_restore(wanted.chunk_hash, nbytes) > encode_seconds

    def _allocate(self, header: ItemHeader) -> MemoryObj | None:
        shape = torch.Size((header.num_tokens, header.width))
        return self._pool.allocate(shape, header.dtype, MemoryFormat.EC_TD, eviction=True, busy_loop=False)

    def _publish(self, entry: Entry) -> None:
        assert entry.obj is not None  # callers publish what they have just filled
        entry.state = EntryState.RESIDENT
        entry.reload_seconds = self._reload_seconds(entry)
        self._pool.replace(self._key(entry), entry.obj)

    def _drop(self, entry: Entry) -> None:
        """Take an entry out of the index. Memory that leases still hold returns with the last of them."""
        if self._index.get(entry.wanted.chunk_hash) is entry:
            del self._index[entry.wanted.chunk_hash]
        was_resident = entry.state is EntryState.RESIDENT
        entry.state = EntryState.GONE
        if was_resident:
            self._pool.remove(self._key(entry))
        if not entry.leases:
            entry.obj = None

    def _key(self, entry: Entry) -> CacheEngineKey:
        return self._keys.key_of(entry.wanted.chunk_hash)

    def _cost_of(self, key: CacheEngineKey) -> float | None:
        """What evicting an item would cost: seconds to have it again, by its age. None: not evictable."""
        entry = self._index.get(key.chunk_hash)
        if entry is None:
            return 0.0
        if entry.leases:
            return None
        return entry.reload_seconds / (self._tick - entry.last_used + 1)

    def _reload_seconds(self, entry: Entry) -> float:
        if entry.stored_below:
            seconds = self._lower.seconds_to_restore(entry.wanted.chunk_hash, entry.nbytes)
            return seconds or entry.nbytes / FALLBACK_RESTORE_BYTES_PER_SECOND
        return entry.wanted.num_tokens * (self._encode_seconds_per_token() or FALLBACK_ENCODE_SECONDS_PER_TOKEN)

    def _on_evict(self, key: CacheEngineKey) -> None:
        """The pool has taken an item out to make room (under the lock)."""
        entry = self._index.get(key.chunk_hash)
        if entry is None or entry.state is not EntryState.RESIDENT:
            return
        del self._index[key.chunk_hash]
        entry.state = EntryState.GONE
        if not entry.leases:
            entry.obj = None
        self._counts["pool_eviction"] += 1
        if not entry.stored_below:
            self._counts["pool_eviction_lost"] += 1

    def _queue_write(self, entry: Entry) -> None:
        if not self._lower or not self._may_be_below(entry.wanted):
            return
        # What waits to be written is held, but not the whole pool: where a store hangs, the rest can still be evicted.
        lease = None
        if self._dirty_bytes + entry.nbytes <= self._pool.capacity_bytes // 2:
            lease = self._lease(entry, is_claim=False)
            self._dirty_bytes += entry.nbytes
        if not self._io.submit_write(partial(self._write_queued, entry, lease)) and lease is not None:
            self._end_write(lease)

    def _end_write(self, lease: Lease) -> None:
        self._dirty_bytes -= lease.entry.nbytes
        self.release(lease)

    # -- On I/O threads ---------------------------------------------------------------------------------------------

    def _stage(self, entry: Entry) -> None:
        """Find an item below and bring it into the pool; whatever fails, the waiting leases see GONE."""
        outcome = "failed"
        try:
            outcome = self._try_stage(entry)
        finally:
            with self._lock:
                self._counts[f"stage_{outcome}"] += 1
                if entry.state is EntryState.STAGING:
                    self._drop(entry)

    def _try_stage(self, entry: Entry) -> str:
        with self._lock:
            if not entry.leases or entry.state is not EntryState.STAGING:
                self._drop(entry)  # under the lock of the look at its leases: who comes now stages it anew
                return "abandoned"
        found = self._lower.find(entry.wanted)
        if found is None:
            return "absent"
        obj = self._reserve_for_staging(entry, found.header)
        if obj is None:
            return "no_space"
        intact = False
        try:
            intact = self._lower.read(found, self._pool.payload_view(obj))
        finally:
            with self._lock:
                if entry.state is EntryState.STAGING:
                    entry.stored_below = intact
                    if intact:
                        entry.is_restored = True
                        self._publish(entry)
                    else:
                        self._drop(entry)
                obj.ref_count_down()  # this thread's own
        return "hit" if intact else "damaged"

    def _reserve_for_staging(self, entry: Entry, header: ItemHeader) -> MemoryObj | None:
        """Give the entry memory, with one reference for this thread and one for its leases if it has any."""
        with self._lock:
            if entry.state is not EntryState.STAGING:
                return None
            if self._claimed_bytes + header.payload_bytes > self._options.max_lease_bytes:
                return None
            obj = self._allocate(header)
            if obj is None:
                return None
            # An item that a tier accepted without a fingerprint counts as what was wanted, or nothing would be served.
            entry.header = header if header.fingerprint else replace(header, fingerprint=entry.wanted.fingerprint)
            entry.obj = obj
            if entry.leases:
                obj.ref_count_up()
            if entry.claims:
                self._claimed_bytes += entry.nbytes
            return obj

    def _write_queued(self, entry: Entry, lease: Lease | None) -> None:
        """Write an item whose turn has come, held since it was queued or, if it is still there, from now on."""
        with self._lock:
            if lease is None:
                if entry.state is not EntryState.RESIDENT:
                    self._counts["write_too_late"] += 1
                    return
                lease = self._lease(entry, is_claim=False)
                self._dirty_bytes += entry.nbytes
        try:
            self._write(entry)
        finally:
            with self._lock:
                self._end_write(lease)

    def _write(self, entry: Entry) -> None:
        """Hand a held item to every lower tier. A failure leaves it in the pool alone, and is counted."""
        assert entry.header is not None and entry.obj is not None  # somebody holds it
        if entry.state is EntryState.GONE:  # replaced or forgotten: below, it would take the place of what is right
            with self._lock:
                self._counts["write_outdated"] += 1
            return
        self._pool.zero_padding(entry.obj)
        payload = self._pool.payload_view(entry.obj)
        header = replace(entry.header, digest=digest_of(payload), created=time.time())
        stored = self._lower.write(header, payload)
        with self._lock:
            entry.stored_below = stored
            entry.reload_seconds = self._reload_seconds(entry)
            self._counts["write" if stored else "write_failed"] += 1
