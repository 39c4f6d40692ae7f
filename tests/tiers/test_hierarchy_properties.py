# SPDX-License-Identifier: Apache-2.0
"""The hierarchy under any history: what is served is what was saved for exactly that, and no byte is lost track of.

The steps of the machine may find a store that hangs, fails, loses and damages things; a restart keeps only what is
below. After each step all that can end has ended, so a history that fails repeats.
"""

import errno
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import storage_tiers.key
import storage_tiers.tier
from storage_tiers.entry import EntryState, Lease
from storage_tiers.tier import ItemHeader
from tests.tiers.memory_tier import PAGE_BYTES, Gate, Rig, content_of, hash_of, item, wait_until

PAGES = 7
MAX_LEASE_PAGES = 5
IO_THREADS = 3
CLIENT_ID = "a client's own id"
DOUBLES = {hash_of("b"): 7, hash_of("b's double"): 7}
"""Two items with one 64-bit name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request may ask for; its fingerprint changes with every reset."""

    mm_hash: str
    num_tokens: int = 1
    width: int = 2048
    modality: str = "image"
    adapter: str = ""


KINDS = [
    Kind(hash_of("a")),
    Kind(hash_of("a"), num_tokens=2),
    Kind(hash_of("a"), modality="video"),
    Kind(hash_of("a"), adapter="lora"),
    Kind(hash_of("b"), 3, width=1111),
    Kind(hash_of("b's double"), 3, width=1111),
    Kind(hash_of("c"), 3),
    Kind(hash_of("d"), 4),
    Kind(CLIENT_ID, 2, width=1000),
]
"""One page, two, one, one, two, two, three, four and one; some of them padded."""
HASHES = sorted({kind.mm_hash for kind in KINDS})
ITEMS = st.sampled_from(KINDS)
STAGING, SAVING, RESIDENT, GONE = EntryState.STAGING, EntryState.SAVING, EntryState.RESIDENT, EntryState.GONE


@dataclass(slots=True, eq=False)
class Held:
    """A lease that the machine holds."""

    lease: Lease
    header: ItemHeader
    """What was asked for."""
    seen: bytes | None = None
    """Its bytes when it was first usable: they may not change while it is held, whatever becomes of the item."""


class HierarchyMachine(RuleBasedStateMachine):
    """Requests and workers above, a store that cannot be trusted below; the model is what was ever saved."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        project = storage_tiers.key.chunk_hash_of
        for module in (storage_tiers.key, storage_tiers.tier):
            self.patch.setattr(module, "chunk_hash_of", lambda mm_hash: DOUBLES.get(mm_hash) or project(mm_hash))
        self.rig = Rig(PAGES, max_lease_pages=MAX_LEASE_PAGES, io_threads=IO_THREADS)
        self.rig.watch_finalizers(self.patch)
        self.epoch = 0
        self.held: list[Held] = []
        self.saving: list[Held] = []
        self.gates: dict[str, Gate] = {}
        self.saved: set[ItemHeader] = set()

    # -- Requests and workers -----------------------------------------------------------------------------------------

    @rule(kind=ITEMS)
    def begin_save(self, kind: Kind) -> None:
        self.try_begin_save(kind)

    @precondition(lambda self: self.saving)
    @rule(data=st.data(), succeeded=st.booleans())
    def finish_save(self, data: st.DataObject, succeeded: bool) -> None:
        self.finish(self.saving.pop(data.draw(st.integers(0, len(self.saving) - 1))), succeeded)

    @rule(kind=ITEMS)
    def save(self, kind: Kind) -> None:
        if self.try_begin_save(kind):
            self.finish(self.saving.pop(), succeeded=True)

    @rule(kind=ITEMS)
    def acquire(self, kind: Kind) -> None:
        header = self.header(kind)
        state = self.rig.hierarchy.state_of(header.as_wanted())
        lease = self.rig.hierarchy.acquire(header.as_wanted())
        if lease is None:
            return
        assert state is not None or header.mm_hash != CLIENT_ID, "nobody asks below for that"
        assert state in (None, lease.state)
        self.held.append(Held(lease, header))

    @rule(kind=ITEMS)
    def pin(self, kind: Kind) -> None:
        header = self.header(kind)
        lease = self.rig.hierarchy.pin_resident(header.as_wanted())
        assert (lease is not None) == self.rig.is_resident(header)
        if lease is not None:
            self.held.append(Held(lease, header))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for _ in range(times):
            self.rig.hierarchy.release(held.lease)

    @rule(kind=ITEMS)
    def evict(self, kind: Kind) -> None:
        wanted = self.header(kind).as_wanted()
        before = [each.lease.state for each in self.held]
        if self.rig.hierarchy.evict(wanted):
            assert self.rig.hierarchy.state_of(wanted) is None
        assert [each.lease.state for each in self.held] == before

    @precondition(lambda self: not self.gates)
    @rule(kind=ITEMS)
    def serve(self, kind: Kind) -> None:
        header = self.header(kind)
        if self.rig.hierarchy.state_of(header.as_wanted()) is SAVING:
            return
        certain = self.is_certain(header)
        served = self.rig.serve(header)
        if served is None:
            assert not certain
        else:
            assert served == content_of(header)
            assert header in self.saved

    # -- The store ----------------------------------------------------------------------------------------------------

    @rule(kind=ITEMS)
    def another_process_stores(self, kind: Kind) -> None:
        header = self.header(kind)
        if header.mm_hash != CLIENT_ID:
            self.rig.tier.plant(header)
            self.saved.add(header)

    @rule(mm_hash=st.sampled_from(HASHES), vanishes=st.booleans())
    def spoil(self, mm_hash: str, vanishes: bool) -> None:
        if vanishes:
            self.rig.tier.items.pop(storage_tiers.key.chunk_hash_of(mm_hash), None)
        else:
            self.rig.tier.damage(mm_hash)

    @rule(operation=st.sampled_from(["probe", "read", "write", "vanish"]), times=st.integers(1, 2))
    def fail_next(self, operation: str, times: int) -> None:
        if operation == "vanish":
            self.rig.tier.vanishing = True
        else:
            self.rig.tier.fail(operation, OSError(errno.ENOSPC, "No space left on device"), times)

    @rule(operation=st.sampled_from(["probe", "read", "write"]))
    def hang(self, operation: str) -> None:
        if operation not in self.gates:
            self.gates[operation] = self.rig.tier.hold(operation)

    @rule()
    def recover(self) -> None:
        self.gates.clear()
        self.rig.tier.recover()

    # -- Resets and restarts ------------------------------------------------------------------------------------------

    @rule()
    def reset(self) -> None:
        self.epoch += 1
        self.rig.hierarchy.forget_all()
        assert self.rig.hierarchy.num_entries == 0
        assert {each.lease.state for each in (*self.held, *self.saving)} <= {GONE}

    @rule()
    def restart(self) -> None:
        self.end_leases()
        self.gates.clear()
        self.rig.restart()

    # -- What always holds --------------------------------------------------------------------------------------------

    @invariant()
    def leased_bytes_never_change(self) -> None:
        self.settle()
        for held in self.held:
            if held.seen is None and held.lease.state is RESIDENT:
                held.seen = content_of(held.header)
                assert held.header in self.saved
            if held.seen is not None:
                assert self.rig.bytes_of(held.lease) == held.seen

    @invariant()
    def no_byte_is_lost_track_of(self) -> None:
        assert self.rig.pool.used_bytes <= self.rig.pool.capacity_bytes
        assert 0 <= self.rig.hierarchy.claimed_bytes <= MAX_LEASE_PAGES * PAGE_BYTES
        if not self.gates:
            self.rig.check_consistent([held.lease for held in (*self.held, *self.saving)])

    @invariant()
    def nothing_of_a_client_s_own_is_below(self) -> None:
        assert all(header.mm_hash != CLIENT_ID for header, _ in self.rig.tier.items.values())

    def teardown(self) -> None:
        try:
            self.end_leases()
            self.rig.finish()
        finally:
            self.patch.undo()

    # -- Parts --------------------------------------------------------------------------------------------------------

    def header(self, kind: Kind) -> ItemHeader:
        return item(
            "",
            kind.num_tokens,
            width=kind.width,
            modality=kind.modality,
            fingerprint=f"f{self.epoch}{kind.adapter}",
            mm_hash=kind.mm_hash,
        )

    def try_begin_save(self, kind: Kind) -> bool:
        """Reserve space for an item, and leave in it what a worker that has only begun does."""
        header = self.header(kind)
        state = self.rig.hierarchy.state_of(header.as_wanted())
        lease = self.rig.hierarchy.begin_save(header)
        if lease is None:
            return False
        assert state is None
        assert lease.state is SAVING
        self.rig.view(lease)[:] = b"\xdd" * header.payload_bytes
        self.saving.append(Held(lease, header))
        return True

    def finish(self, held: Held, succeeded: bool) -> None:
        """End a save as the worker reports it; a reset may have come in between."""
        succeeds = succeeded and held.lease.state is SAVING
        if succeeded:
            self.rig.view(held.lease)[:] = content_of(held.header)
        if succeeds:
            self.saved.add(held.header)
        below = self.rig.tier.items.get(held.header.chunk_hash)
        is_sound = self.store_is_sound() and (below is None or self.rig.tier.has(below[0]))
        self.rig.hierarchy.finish_save(held.lease, succeeded)
        self.settle()
        assert held.lease.state is (RESIDENT if succeeds else GONE)
        if succeeds and is_sound and held.header.mm_hash != CLIENT_ID:
            assert self.rig.tier.has(held.header)

    def settle(self) -> None:
        """Wait until every I/O thread is idle, or hangs at a gate."""
        wait_until(self.is_settled, "every thread is idle or at a gate")

    def is_settled(self) -> bool:
        io = self.rig.hierarchy._io
        with io._changed:
            running = io._running_reads + io._running_writes
            if running != sum(gate.arrived for gate in self.gates.values()):
                return False
            could_read = bool(io._reads)
            could_write = bool(io._writes) and io._running_writes < io._max_running_writes
            return running == IO_THREADS or not (could_read or could_write)

    def store_is_sound(self) -> bool:
        tier = self.rig.tier
        return not (self.gates or tier.vanishing or any(times > 0 for _, times in tier._errors.values()))

    def is_certain(self, header: ItemHeader) -> bool:
        """Whether nothing excuses a miss: nobody holds anything, the store is sound, it or the pool has the item."""
        if self.held or self.saving or not self.store_is_sound():
            return False
        if self.rig.is_resident(header):
            return True
        in_the_way = self.rig.hierarchy._index.get(header.chunk_hash) is not None
        return header.mm_hash != CLIENT_ID and not in_the_way and self.rig.tier.has(header)

    def end_leases(self) -> None:
        for held in self.saving:
            self.rig.hierarchy.finish_save(held.lease, succeeded=False)
        for held in self.held:
            self.rig.hierarchy.release(held.lease)
        self.saving.clear()
        self.held.clear()


TestHierarchyMachine = HierarchyMachine.TestCase
TestHierarchyMachine.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
