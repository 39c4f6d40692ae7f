# SPDX-License-Identifier: Apache-2.0
"""The hierarchy: what is served, what stays, and that no fault of a store is more than a miss."""

import errno
import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import storage_tiers.key
import storage_tiers.tier
from storage_tiers.disk_tier import DiskTier
from storage_tiers.entry import EntryState, Lease
from storage_tiers.faults import FaultLog
from storage_tiers.tier import ItemHeader, LowerTier
from tests.tiers.memory_tier import (
    KEYS,
    PAGE_BYTES,
    PAGE_WIDTH,
    Gate,
    MemoryTier,
    Rig,
    content_of,
    hash_of,
    item,
    wait_until,
)

STAGING, SAVING, RESIDENT, GONE = EntryState.STAGING, EntryState.SAVING, EntryState.RESIDENT, EntryState.GONE
DISK_FULL = OSError(errno.ENOSPC, "No space left on device")
IO_ERROR = OSError(errno.EIO, "Input/output error")

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Makes hierarchies. At the end of every test each is checked: no bytes leaked, none rescued by a finalizer."""
    rigs: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        rig = Rig(*args, **options)
        if not rigs:
            rig.watch_finalizers(monkeypatch)
        rigs.append(rig)
        return rig

    yield make
    with ExitStack() as ends:
        for rig in rigs:
            ends.callback(rig.finish)


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


def test_the_stand_in_is_a_lower_tier() -> None:
    assert isinstance(MemoryTier(), LowerTier)


# -- Three answers ----------------------------------------------------------------------------------------------------


def test_absent_being_saved_and_stored_below_are_three_answers(rig: Rig) -> None:
    wanted = item("a").as_wanted()
    assert rig.hierarchy.state_of(wanted) is None
    assert not rig.hierarchy.is_stored_below(wanted)
    lease = rig.begin_save(item("a"))
    assert rig.hierarchy.state_of(wanted) is SAVING
    assert not rig.hierarchy.is_stored_below(wanted)
    rig.hierarchy.finish_save(lease, succeeded=True)
    rig.flush()
    assert rig.hierarchy.state_of(wanted) is RESIDENT
    assert rig.hierarchy.is_stored_below(wanted)
    assert rig.hierarchy.evict(wanted)
    assert rig.hierarchy.state_of(wanted) is None
    assert rig.hierarchy.is_stored_below(wanted)


def test_what_is_nowhere_ends_as_a_miss(rig: Rig) -> None:
    lease = rig.acquire(item("a"))
    assert rig.settled(lease) is GONE
    rig.hierarchy.release(lease)
    rig.wait_reads()
    assert rig.count("stage_absent") == 1
    assert rig.hierarchy.num_entries == 0


def test_without_a_tier_below_what_is_unknown_is_an_immediate_miss(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=[])
    assert rig.hierarchy.acquire(item("a").as_wanted()) is None
    rig.save(item("a"))
    assert rig.serve(item("a")) == content_of(item("a"))
    assert not rig.hierarchy.is_stored_below(item("a").as_wanted())


# -- Saving -----------------------------------------------------------------------------------------------------------


def test_an_unfinished_save_is_never_served(rig: Rig) -> None:
    save = rig.hierarchy.begin_save(item("a"))
    assert save is not None
    lease = rig.acquire(item("a"))
    assert lease.state is SAVING
    assert rig.hierarchy.pin_resident(item("a").as_wanted()) is None
    rig.view(save)[:] = content_of(item("a"))
    assert rig.hierarchy.pin_resident(item("a").as_wanted()) is None
    rig.hierarchy.finish_save(save, succeeded=True)
    assert lease.state is RESIDENT
    assert rig.bytes_of(lease) == content_of(item("a"))
    rig.hierarchy.release(lease)


def test_a_failed_save_is_gone_for_whoever_waits_and_gives_its_bytes_back(rig: Rig) -> None:
    save = rig.begin_save(item("a", 3))
    waiting = rig.acquire(item("a", 3))
    rig.hierarchy.finish_save(save, succeeded=False)
    assert waiting.state is GONE
    assert rig.hierarchy.state_of(item("a", 3).as_wanted()) is None
    rig.hierarchy.release(waiting)
    assert rig.pool.used_bytes == 0
    assert rig.count("save_failed") == 1
    assert not rig.tier.calls["write"]


def test_after_a_failed_save_the_item_can_be_saved(rig: Rig) -> None:
    rig.hierarchy.finish_save(rig.begin_save(item("a")), succeeded=False)
    rig.save(item("a"))
    assert rig.serve(item("a")) == content_of(item("a"))


def test_no_item_is_saved_twice_at_once_or_again(rig: Rig) -> None:
    lease = rig.begin_save(item("a"))
    assert rig.hierarchy.begin_save(item("a")) is None
    rig.hierarchy.finish_save(lease, succeeded=True)
    assert rig.hierarchy.begin_save(item("a")) is None


def test_an_item_that_is_being_staged_reserves_no_save(rig: Rig) -> None:
    rig.tier.plant(item("a"))
    gate = rig.tier.hold("read")
    lease = rig.acquire(item("a"))
    gate.wait_arrived()
    used = rig.pool.used_bytes
    assert rig.hierarchy.begin_save(item("a")) is None
    assert rig.pool.used_bytes == used
    gate.open()
    assert rig.settled(lease) is RESIDENT
    rig.hierarchy.release(lease)


def test_a_save_that_does_not_fit_is_none_and_counted(rig: Rig) -> None:
    assert rig.hierarchy.begin_save(item("a", 17)) is None
    assert rig.faults.count("pool", "exhausted") == 1


def test_what_is_saved_is_written_below_with_its_digest_and_time(rig: Rig) -> None:
    rig.save(item("a", 3, width=PAGE_WIDTH - 7))
    header, payload = rig.tier.items[item("a").chunk_hash]
    assert payload == content_of(item("a", 3, width=PAGE_WIDTH - 7))
    assert header.digest == storage_tiers.tier.digest_of(memoryview(payload))
    assert header.created > 1.6e9
    assert replace(header, digest=b"", created=0.0) == item("a", 3, width=PAGE_WIDTH - 7)


def test_nothing_of_another_item_is_left_in_the_padding(rig: Rig) -> None:
    rig.pool.segment.data[:] = b"\xff" * rig.pool.capacity_bytes
    rig.save(item("a", width=100))
    lease = rig.acquire(item("a", width=100))
    assert lease.entry.obj is not None
    padding = rig.pool.payload_view(lease.entry.obj, padded=True)[lease.entry.nbytes :]
    assert len(padding) == PAGE_BYTES - 200
    assert not any(padding)
    rig.hierarchy.release(lease)


# -- Staging and leases -----------------------------------------------------------------------------------------------


def test_what_is_stored_below_is_staged_verified_and_not_written_again(rig: Rig) -> None:
    rig.tier.plant(item("a", 2))
    lease = rig.acquire(item("a", 2))
    assert rig.settled(lease) is RESIDENT
    assert rig.bytes_of(lease) == content_of(item("a", 2))
    rig.hierarchy.release(lease)
    rig.flush()
    assert rig.count("stage_hit") == 1
    assert rig.tier.calls == {"probe": 1, "read": 1}


def test_staging_starts_without_a_wait(rig: Rig) -> None:
    rig.tier.plant(item("a"))
    gate = rig.tier.hold("probe")
    lease = rig.acquire(item("a"))
    assert lease.state is STAGING
    assert rig.hierarchy.pin_resident(item("a").as_wanted()) is None
    gate.open()
    assert rig.settled(lease) is RESIDENT
    rig.hierarchy.release(lease)


def test_two_requests_share_one_restore(rig: Rig) -> None:
    rig.tier.plant(item("a"))
    gate = rig.tier.hold("read")
    first = rig.acquire(item("a"))
    gate.wait_arrived()
    second = rig.acquire(item("a"))
    gate.open()
    assert rig.settled(first) is RESIDENT and rig.settled(second) is RESIDENT
    assert rig.hierarchy.segment_offset(first) == rig.hierarchy.segment_offset(second)
    assert rig.tier.calls == {"probe": 1, "read": 1}
    rig.hierarchy.release(first)
    assert rig.bytes_of(second) == content_of(item("a"))
    rig.hierarchy.release(second)


def test_releasing_twice_ends_one_lease(rig: Rig) -> None:
    rig.save(item("a"))
    first, second = rig.acquire(item("a")), rig.acquire(item("a"))
    rig.hierarchy.release(first)
    rig.hierarchy.release(first)
    rig.check_consistent([second])
    assert not rig.hierarchy.evict(item("a").as_wanted()), "the other lease holds it"
    rig.hierarchy.release(second)
    assert rig.hierarchy.evict(item("a").as_wanted())


def test_a_lease_without_memory_has_no_offset(rig: Rig) -> None:
    gate = rig.tier.hold("probe")
    staging = rig.acquire(item("a"))
    with pytest.raises(ValueError, match=r"\(staging\) has no memory"):
        rig.hierarchy.segment_offset(staging)
    gate.open()
    rig.settled(staging)
    rig.hierarchy.release(staging)
    rig.save(item("b"))
    released = rig.acquire(item("b"))
    rig.hierarchy.release(released)
    with pytest.raises(ValueError, match="has no memory"):
        rig.hierarchy.segment_offset(released)


def test_a_new_process_on_the_same_tier_serves_what_the_last_one_stored(rig: Rig) -> None:
    headers = [item(name, tokens) for name, tokens in (("a", 1), ("b", 2), ("c", 3))]
    for header in headers:
        rig.save(header)
    rig.restart()
    for header in headers:
        assert rig.serve(header) == content_of(header)
    assert rig.count("stage_hit") == 3


def test_a_real_directory_serves_a_new_process_too(make_rig: MakeRig, tmp_path: Path) -> None:
    header = item("a", 3, width=PAGE_WIDTH - 5)
    for serving in (False, True):
        rig = make_rig(tiers=[DiskTier(tmp_path, 1 << 20, KEYS, FaultLog())])
        if serving:
            assert rig.serve(header) == content_of(header)
            assert rig.serve(replace(header, fingerprint="f1")) is None
        else:
            rig.save(header)
        rig.finish()


def test_the_second_tier_is_asked_where_the_first_has_nothing(make_rig: MakeRig) -> None:
    near, far = MemoryTier("near"), MemoryTier("far")
    rig = make_rig(tiers=[near, far])
    far.plant(item("a"))
    assert rig.serve(item("a")) == content_of(item("a"))
    assert near.calls == {"probe": 1}


def test_the_second_tier_is_asked_where_the_first_fails(make_rig: MakeRig) -> None:
    near, far = MemoryTier("near"), MemoryTier("far")
    rig = make_rig(tiers=[near, far])
    far.plant(item("a"))
    near.fail("probe", IO_ERROR)
    assert rig.serve(item("a")) == content_of(item("a"))
    assert rig.faults.count("near", "probe_failed") == 1


# -- Leases against eviction and against each other -------------------------------------------------------------------


def test_leased_bytes_stay_while_everything_around_them_goes(rig: Rig) -> None:
    held = {name: rig.begin_save(item(name, 2)) for name in ("a", "b")}
    for lease in held.values():
        rig.hierarchy.finish_save(lease, succeeded=True)
    claim = rig.acquire(item("a", 2))
    pin = rig.hierarchy.pin_resident(item("b", 2).as_wanted())
    assert pin is not None
    for number in range(40):
        rig.save(item(f"filler {number}", 1 + number % 5))
    assert rig.count("pool_eviction") > 20
    for lease, name in ((claim, "a"), (pin, "b")):
        assert lease.state is RESIDENT
        assert rig.bytes_of(lease) == content_of(item(name, 2))
        rig.hierarchy.release(lease)
    for number in range(40):
        rig.save(item(f"more {number}", 1 + number % 5))
    assert claim.state is GONE and pin.state is GONE


def test_a_hopeless_allocation_evicts_nothing(rig: Rig) -> None:
    """8 of 16 pages are free or evictable, but a leased item in the middle leaves no 5 of them side by side."""
    for name in "abcdefgh":
        rig.save(item(name, 2))
    leases = [rig.acquire(item(name, 2)) for name in "cf"]
    assert rig.hierarchy.begin_save(item("large", 5)) is None
    assert rig.faults.count("pool", "exhausted") == 1
    assert all(rig.is_resident(item(name, 2)) for name in "abcdefgh")
    assert rig.count("pool_eviction") == 0
    for lease in leases:
        rig.hierarchy.release(lease)
    assert rig.hierarchy.begin_save(item("huge", 17)) is None
    assert rig.hierarchy.num_entries == 8


def test_no_space_to_stage_is_gone_and_evicts_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(pages=4)
    rig.tier.plant(item("a", 2))
    rig.save(item("b", 3))
    pin = rig.hierarchy.pin_resident(item("b", 3).as_wanted())
    assert pin is not None
    lease = rig.acquire(item("a", 2))
    assert rig.settled(lease) is GONE
    rig.hierarchy.release(lease)
    rig.wait_reads()
    assert rig.count("stage_no_space") == 1
    assert rig.tier.calls["read"] == 0
    assert rig.is_resident(item("b", 3))
    rig.hierarchy.release(pin)
    assert rig.serve(item("a", 2)) == content_of(item("a", 2))


def test_two_requests_with_half_the_pool_each_cannot_wait_on_each_other(make_rig: MakeRig) -> None:
    rig = make_rig(pages=16, max_lease_pages=8)
    for name in ("a1", "a2", "b1", "b2"):
        rig.save(item(name, 4))
    first, second = rig.acquire(item("a1", 4)), rig.acquire(item("b1", 4))
    assert rig.hierarchy.claimed_bytes == 8 * PAGE_BYTES
    for name in ("a2", "b2"):
        assert rig.hierarchy.acquire(item(name, 4).as_wanted()) is None, "an immediate miss: nobody waits"
    assert rig.count("miss_lease_limit") == 2
    rig.hierarchy.release(first)
    third = rig.acquire(item("b2", 4))
    for lease in (second, third):
        rig.hierarchy.release(lease)


def test_the_cap_holds_for_what_is_staged(make_rig: MakeRig) -> None:
    """Sizes of unknown items are learned below: the cap is asked again once one is known."""
    rig = make_rig(pages=16, max_lease_pages=5)
    for name in "abc":
        rig.tier.plant(item(name, 2))
    gate = rig.tier.hold("probe")
    leases = [rig.acquire(item(name, 2)) for name in "abc"]
    gate.open()
    assert sorted(rig.settled(lease).name for lease in leases) == ["GONE", "RESIDENT", "RESIDENT"]
    assert rig.hierarchy.claimed_bytes == 4 * PAGE_BYTES
    for lease in leases:
        rig.hierarchy.release(lease)
    rig.wait_reads()
    assert rig.count("stage_no_space") == 1


def test_a_second_claim_on_an_item_costs_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(pages=16, max_lease_pages=4)
    rig.save(item("a", 4))
    leases = [rig.acquire(item("a", 4)) for _ in range(3)]
    assert rig.hierarchy.claimed_bytes == 4 * PAGE_BYTES
    for lease in leases:
        assert rig.hierarchy.claimed_bytes == 4 * PAGE_BYTES
        rig.hierarchy.release(lease)
    assert rig.hierarchy.claimed_bytes == 0


def test_a_pin_does_not_count_against_the_cap(make_rig: MakeRig) -> None:
    rig = make_rig(pages=16, max_lease_pages=2)
    for name in "ab":
        rig.save(item(name, 2))
    claim = rig.acquire(item("a", 2))
    pin = rig.hierarchy.pin_resident(item("b", 2).as_wanted())
    assert pin is not None
    assert rig.hierarchy.claimed_bytes == 2 * PAGE_BYTES
    for lease in (claim, pin):
        rig.hierarchy.release(lease)


def test_an_item_beyond_the_cap_can_never_be_claimed(make_rig: MakeRig) -> None:
    rig = make_rig(pages=16, max_lease_pages=3)
    rig.save(item("a", 4))
    assert rig.serve(item("a", 4)) is None
    rig.hierarchy.evict(item("a", 4).as_wanted())
    assert rig.serve(item("a", 4)) is None
    assert rig.count("stage_no_space") == 1


# -- Faults below -----------------------------------------------------------------------------------------------------


def order_probe_error(tier: MemoryTier) -> None:
    tier.fail("probe", IO_ERROR)


def order_read_error(tier: MemoryTier) -> None:
    tier.fail("read", IO_ERROR)


def order_damage(tier: MemoryTier) -> None:
    assert tier.damage(hash_of("a"))


def order_vanishing(tier: MemoryTier) -> None:
    tier.vanishing = True


STAGING_FAULTS = [
    pytest.param(order_probe_error, "stage_absent", id="probe raises"),
    pytest.param(order_read_error, "stage_damaged", id="read raises"),
    pytest.param(order_damage, "stage_damaged", id="damaged"),
    pytest.param(order_vanishing, "stage_damaged", id="vanished"),
]


@pytest.mark.parametrize(("order", "counted"), STAGING_FAULTS)
def test_a_fault_while_staging_is_a_counted_miss_and_the_next_request_works(
    rig: Rig, order: Callable[[MemoryTier], None], counted: str
) -> None:
    rig.tier.plant(item("a", 3))
    order(rig.tier)
    lease = rig.acquire(item("a", 3))
    assert rig.settled(lease) is GONE
    rig.wait_reads()
    assert rig.hierarchy.state_of(item("a", 3).as_wanted()) is None, "the next request asks anew"
    rig.hierarchy.release(lease)
    assert rig.pool.used_bytes == 0
    assert rig.count(counted) == 1
    assert sum(rig.faults.counts().values()) + sum(rig.tier.faults.values()) == 1
    rig.tier.recover()
    rig.save(item("a", 3))
    rig.hierarchy.evict(item("a", 3).as_wanted())
    assert rig.serve(item("a", 3)) == content_of(item("a", 3))


@pytest.mark.parametrize(("order", "counted"), STAGING_FAULTS)
def test_a_fault_while_staging_for_nobody_gives_the_bytes_back(
    rig: Rig, order: Callable[[MemoryTier], None], counted: str
) -> None:
    rig.tier.plant(item("a", 3))
    order(rig.tier)
    gate = rig.tier.hold("probe")
    lease = rig.acquire(item("a", 3))
    gate.wait_arrived()
    rig.hierarchy.release(lease)
    gate.open()
    rig.wait_reads()
    assert rig.count(counted) == 1
    assert rig.pool.used_bytes == 0
    assert rig.hierarchy.num_entries == 0


@pytest.mark.parametrize("operation", ["probe", "read"])
def test_a_tier_that_breaks_its_contract_costs_a_miss_and_no_thread(rig: Rig, operation: str) -> None:
    rig.expected_job_failures = 8
    for number in range(8):
        rig.tier.plant(item(f"a{number}"))
    rig.tier.fail(operation, RuntimeError("no OSError"))
    for number in range(8):
        lease = rig.acquire(item(f"a{number}"))
        assert rig.settled(lease) is GONE
        rig.hierarchy.release(lease)
    rig.wait_reads()
    assert rig.faults.count("hierarchy", "io_job_failed") == 8
    assert rig.count("stage_failed") == 8
    assert rig.pool.used_bytes == 0
    rig.tier.recover()
    assert rig.serve(item("a0")) == content_of(item("a0"))


def test_a_file_that_names_no_item_is_served_where_the_tier_accepts_it(rig: Rig) -> None:
    """LMCache's own files, with `accept_unverified_files`: the tier answers with an empty fingerprint."""
    payload = content_of(item("a", 2))
    foreign = replace(item("a", 2), mm_hash="", fingerprint="", modality="")
    rig.tier.items[item("a").chunk_hash] = (foreign, payload)
    rig.tier.accept_unverified = True
    assert rig.serve(item("a", 2)) == payload
    assert rig.serve(item("a", 2)) == payload
    assert rig.tier.calls["read"] == 1
    assert rig.serve(item("a", 2, fingerprint="f1")) is None


# -- Staging for nobody -----------------------------------------------------------------------------------------------


def test_an_item_that_is_read_while_nobody_waits_any_more_stays_evictable(make_rig: MakeRig) -> None:
    rig = make_rig(pages=4)
    rig.tier.plant(item("a", 3))
    gate = rig.tier.hold("read")
    lease = rig.acquire(item("a", 3))
    gate.wait_arrived()
    rig.hierarchy.release(lease)
    assert rig.hierarchy.claimed_bytes == 0
    assert rig.hierarchy.begin_save(item("b", 4)) is None, "bytes are on their way into that memory"
    gate.open()
    rig.wait_reads()
    assert rig.is_resident(item("a", 3))
    rig.check_consistent()
    pin = rig.hierarchy.pin_resident(item("a", 3).as_wanted())
    assert pin is not None
    assert rig.bytes_of(pin) == content_of(item("a", 3))
    rig.hierarchy.release(pin)
    rig.save(item("b", 4))
    assert not rig.is_resident(item("a", 3))


def test_who_comes_back_during_the_read_is_served_by_it(rig: Rig) -> None:
    rig.tier.plant(item("a", 3))
    gate = rig.tier.hold("read")
    first = rig.acquire(item("a", 3))
    gate.wait_arrived()
    rig.hierarchy.release(first)
    second = rig.acquire(item("a", 3))
    assert second.state is STAGING
    assert rig.hierarchy.claimed_bytes == 3 * PAGE_BYTES
    gate.open()
    assert rig.settled(second) is RESIDENT
    assert rig.bytes_of(second) == content_of(item("a", 3))
    rig.hierarchy.release(second)
    assert rig.tier.calls["read"] == 1


def test_what_nobody_waits_for_any_more_when_its_turn_comes_is_not_read(make_rig: MakeRig) -> None:
    rig = make_rig(io_threads=2)
    gate = rig.tier.hold("probe")
    leases = [rig.acquire(item(name)) for name in "ab"]
    gate.wait_arrived(2)
    queued = rig.acquire(item("c"))
    rig.hierarchy.release(queued)
    gate.open()
    rig.wait_reads()
    assert rig.tier.calls["probe"] == 2
    assert rig.count("stage_abandoned") == 1
    for lease in leases:
        rig.hierarchy.release(lease)


def test_who_comes_back_just_as_the_read_is_given_up_is_not_turned_away(make_rig: MakeRig) -> None:
    """Whether anybody waits is asked, and the answer acted on, under one lock."""
    rig = make_rig(io_threads=2)
    for number in range(10):
        header = item(f"a{number}")
        rig.tier.plant(header)
        gate = Gate()
        for arrived in (1, 2):
            assert rig.hierarchy._io.submit_read(gate.pass_through)
            gate.wait_arrived(arrived)
        rig.hierarchy.release(rig.acquire(header))
        with rig.pool.lock:
            gate.open()
            wait_until(lambda: rig.hierarchy._io._running_reads == 1, "the read is looked at")
            lease = rig.acquire(header)
        assert rig.settled(lease) is RESIDENT
        rig.hierarchy.release(lease)
        rig.wait_reads()


# -- Reset ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["probe", "read"])
def test_a_reset_while_staging_serves_nobody_and_gives_the_bytes_back(rig: Rig, operation: str) -> None:
    rig.tier.plant(item("a", 3))
    gate = rig.tier.hold(operation)
    lease = rig.acquire(item("a", 3))
    gate.wait_arrived()
    rig.hierarchy.forget_all()
    assert lease.state is GONE
    gate.open()
    rig.wait_reads()
    assert lease.state is GONE
    assert rig.hierarchy.num_entries == 0
    rig.hierarchy.release(lease)
    assert rig.pool.used_bytes == 0
    assert rig.tier.calls["read"] == (operation == "read"), "nothing is read that nobody can use"
    assert rig.serve(item("a", 3, fingerprint="f1")) is None
    assert rig.tier.faults == {"other_fingerprint": 1}


def test_a_lease_that_ends_before_a_reset_read_does_not_free_its_memory_early(rig: Rig) -> None:
    """The read still fills that memory: nobody else may get it."""
    rig.tier.plant(item("a", 3))
    gate = rig.tier.hold("read")
    lease = rig.acquire(item("a", 3))
    gate.wait_arrived()
    rig.hierarchy.forget_all()
    rig.hierarchy.release(lease)
    assert rig.pool.used_bytes == 3 * PAGE_BYTES
    gate.open()
    rig.wait_reads()
    assert rig.pool.used_bytes == 0


def test_a_reset_while_saving_never_shows_the_item(rig: Rig) -> None:
    save = rig.begin_save(item("a", 2))
    waiting = rig.acquire(item("a", 2))
    rig.hierarchy.forget_all()
    assert waiting.state is GONE
    new = rig.begin_save(item("a", 2, fingerprint="f1"))
    assert rig.hierarchy.segment_offset(new) != rig.hierarchy.segment_offset(save), "a worker still writes there"
    rig.hierarchy.finish_save(save, succeeded=True)
    assert rig.count("save_outdated") == 1
    assert rig.hierarchy.state_of(item("a", 2, fingerprint="f1").as_wanted()) is SAVING
    rig.hierarchy.finish_save(new, succeeded=True)
    rig.hierarchy.release(waiting)
    rig.flush()
    assert rig.pool.used_bytes == 2 * PAGE_BYTES
    assert rig.tier.has(item("a", 2, fingerprint="f1"))
    assert rig.tier.calls["write"] == 1


def test_after_a_reset_leased_bytes_stay_valid_and_are_freed_with_the_last_lease(rig: Rig) -> None:
    rig.save(item("a", 2))
    leases = [rig.acquire(item("a", 2)), rig.hierarchy.pin_resident(item("a", 2).as_wanted())]
    rig.hierarchy.forget_all()
    for number in range(20):
        rig.save(item(f"filler {number}", 3, fingerprint="f1"))
    for lease in leases:
        assert lease is not None
        assert lease.state is GONE
        assert rig.bytes_of(lease) == content_of(item("a", 2))
    rig.hierarchy.forget_all()
    assert rig.pool.used_bytes == 2 * PAGE_BYTES
    for lease in leases:
        assert rig.pool.used_bytes == 2 * PAGE_BYTES
        assert lease is not None
        rig.hierarchy.release(lease)
    assert rig.pool.used_bytes == 0


def test_after_a_reset_every_tier_misses(rig: Rig) -> None:
    rig.save(item("a"))
    rig.hierarchy.forget_all()
    assert rig.serve(item("a", fingerprint="f1")) is None
    rig.save(item("a", fingerprint="f1"))
    rig.hierarchy.evict(item("a", fingerprint="f1").as_wanted())
    assert rig.serve(item("a", fingerprint="f1")) == content_of(item("a", fingerprint="f1"))


def test_what_was_reset_or_replaced_before_its_write_began_is_not_written(make_rig: MakeRig) -> None:
    rig = make_rig(io_threads=2)
    gate = rig.tier.hold("write")
    rig.save(item("first"), wait=False)
    gate.wait_arrived()
    rig.save(item("a"), wait=False)
    rig.hierarchy.forget_all()
    rig.save(item("b", 2), wait=False)
    rig.save(item("b", 3), wait=False)
    gate.open()
    rig.flush()
    assert not rig.tier.has(item("a"))
    assert rig.tier.calls["write"] == 2
    assert rig.tier.has(item("b", 3))
    assert rig.count("write_outdated") == 2


# -- Other items under the same name ----------------------------------------------------------------------------------

OTHERS = [
    pytest.param({"num_tokens": 2}, id="num_tokens"),
    pytest.param({"fingerprint": "f1"}, id="fingerprint"),
    pytest.param({"modality": "video"}, id="modality"),
    pytest.param({"width": PAGE_WIDTH // 2}, id="width"),
]


@pytest.mark.parametrize("changes", OTHERS)
def test_another_item_under_the_same_hash_is_a_miss_in_the_pool_and_below(rig: Rig, changes: dict[str, Any]) -> None:
    other = replace(item("a"), **changes)
    rig.save(item("a"))
    assert rig.hierarchy.state_of(other.as_wanted()) is None
    assert rig.hierarchy.pin_resident(other.as_wanted()) is None
    assert rig.serve(other) is None
    assert rig.count("miss_other_item_in_pool") == 1
    rig.hierarchy.evict(item("a").as_wanted())
    assert rig.serve(other) is None
    assert rig.serve(item("a")) == content_of(item("a"))


@pytest.mark.parametrize("changes", OTHERS)
def test_the_next_save_replaces_another_item_whose_lease_keeps_its_bytes(rig: Rig, changes: dict[str, Any]) -> None:
    other = replace(item("a"), **changes)
    rig.save(item("a"))
    old = rig.acquire(item("a"))
    rig.save(other)
    assert old.state is GONE
    assert rig.bytes_of(old) == content_of(item("a"))
    assert rig.serve(other) == content_of(other)
    assert rig.serve(item("a")) is None
    rig.hierarchy.release(old)
    assert rig.pool.used_bytes == PAGE_BYTES * other.num_tokens
    assert rig.tier.has(other)


def test_an_item_of_another_shape_is_not_served_by_a_save_under_way(rig: Rig) -> None:
    save = rig.begin_save(item("a", 2))
    assert rig.hierarchy.acquire(item("a", 3).as_wanted()) is None
    assert rig.hierarchy.begin_save(item("a", 3)) is None
    rig.hierarchy.finish_save(save, succeeded=True)


def test_an_unknown_width_takes_any(rig: Rig) -> None:
    wanted = replace(item("a").as_wanted(), width=None)
    rig.tier.plant(item("a"))
    lease = rig.hierarchy.acquire(wanted)
    assert lease is not None
    assert rig.settled(lease) is RESIDENT
    pin = rig.hierarchy.pin_resident(wanted)
    assert pin is not None
    for each in (lease, pin):
        rig.hierarchy.release(each)


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> tuple[ItemHeader, ItemHeader]:
    """Two items whose 64-bit names are equal, as about one pair in 2**64 has."""
    first, second = item("first", 2), item("second", 2)
    project = storage_tiers.key.chunk_hash_of
    same = {first.mm_hash: 7, second.mm_hash: 7}

    def chunk_hash_of(mm_hash: str) -> int:
        return same.get(mm_hash) or project(mm_hash)

    for module in (storage_tiers.key, storage_tiers.tier):
        monkeypatch.setattr(module, "chunk_hash_of", chunk_hash_of)
    assert first.chunk_hash == second.chunk_hash == first.as_wanted().chunk_hash
    return first, second


def test_a_collision_of_the_64_bit_name_is_a_miss_everywhere(
    rig: Rig, colliding: tuple[ItemHeader, ItemHeader]
) -> None:
    first, second = colliding
    rig.save(first)
    assert rig.hierarchy.state_of(second.as_wanted()) is None
    assert rig.serve(second) is None
    rig.hierarchy.evict(first.as_wanted())
    assert rig.serve(second) is None
    assert rig.tier.faults == {"other_item": 1}
    rig.restart()
    assert rig.serve(second) is None
    assert rig.serve(first) == content_of(first)


def test_of_two_items_that_collide_the_last_one_saved_is_served(
    rig: Rig, colliding: tuple[ItemHeader, ItemHeader]
) -> None:
    first, second = colliding
    rig.save(first)
    held = rig.acquire(first)
    rig.save(second)
    assert rig.serve(second) == content_of(second)
    assert rig.bytes_of(held) == content_of(first)
    rig.hierarchy.release(held)
    rig.hierarchy.evict(second.as_wanted())
    assert rig.serve(first) is None
    assert rig.serve(second) == content_of(second)


def test_a_collision_with_what_is_being_staged_is_a_miss(rig: Rig, colliding: tuple[ItemHeader, ItemHeader]) -> None:
    first, second = colliding
    rig.tier.plant(first)
    gate = rig.tier.hold("probe")
    lease = rig.acquire(first)
    assert rig.hierarchy.acquire(second.as_wanted()) is None
    assert rig.hierarchy.begin_save(second) is None
    gate.open()
    assert rig.settled(lease) is RESIDENT
    assert rig.bytes_of(lease) == content_of(first)
    rig.hierarchy.release(lease)


# -- Client ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mm_hash", ["my-uuid", "abc123", hash_of("a")[:40], hash_of("a").upper(), ""])
def test_a_client_s_id_reaches_no_lower_tier(rig: Rig, mm_hash: str) -> None:
    header = replace(item("a"), mm_hash=mm_hash)
    rig.tier.plant(header)
    assert rig.hierarchy.acquire(header.as_wanted()) is None
    rig.tier.items.clear()
    rig.save(header)
    assert rig.serve(header) == content_of(header), "the pool is this engine's own"
    rig.hierarchy.evict(header.as_wanted())
    assert rig.serve(header) is None
    assert not rig.tier.calls and not rig.tier.items


def test_a_client_s_id_is_kept_below_where_that_is_asked_for(make_rig: MakeRig) -> None:
    rig = make_rig(persist_client_ids=True)
    header = item("", mm_hash="my-uuid")
    rig.save(header)
    rig.restart()
    assert rig.serve(header) == content_of(header)


@pytest.mark.parametrize("mm_hash", [hash_of("a"), hash_of("a") * 2, f"adapter:{hash_of('a')}"])
def test_a_content_hash_is_kept_below(rig: Rig, mm_hash: str) -> None:
    rig.save(item("", mm_hash=mm_hash))
    rig.restart()
    assert rig.serve(item("", mm_hash=mm_hash)) is not None


# -- Write-behind -----------------------------------------------------------------------------------------------------


def test_what_has_yet_to_be_written_is_not_evicted(make_rig: MakeRig) -> None:
    rig = make_rig(pages=8)
    gate = rig.tier.hold("write")
    for name in "abcd":
        rig.save(item(name), wait=False)
    assert rig.hierarchy.pending_writes == 4
    large = rig.begin_save(item("large", 4))
    assert rig.hierarchy.begin_save(item("e")) is None
    assert not rig.hierarchy.evict(item("a").as_wanted())
    assert all(rig.is_resident(item(name)) for name in "abcd")
    gate.open()
    rig.flush()
    rig.hierarchy.finish_save(large, succeeded=False)
    rig.save(item("e", 5))
    assert rig.count("pool_eviction") == 1
    assert rig.count("pool_eviction_lost") == 0
    assert all(rig.tier.has(item(name)) for name in "abcd")


def test_a_store_that_hangs_holds_half_of_the_pool_at_most(make_rig: MakeRig) -> None:
    rig = make_rig(pages=4, io_threads=2)  # one of them may write
    gate = rig.tier.hold("write")
    for name in "abcdef":
        rig.save(item(name), wait=False)
    assert [name for name in "abcdef" if rig.is_resident(item(name))] == ["a", "b", "e", "f"]
    assert rig.count("pool_eviction_lost") == 2
    gate.open()
    rig.flush()
    assert rig.count("write_too_late") == 2
    assert [name for name in "abcdef" if rig.tier.has(item(name))] == ["a", "b", "e", "f"]


def test_nobody_new_waits_for_a_staging_that_hangs(rig: Rig) -> None:
    rig.tier.plant(item("a"))
    gate = rig.tier.hold("probe")
    first = rig.acquire(item("a"))
    rig.clock.advance(3.0)
    second = rig.acquire(item("a"))
    rig.clock.advance(2.0)
    assert rig.hierarchy.acquire(item("a").as_wanted()) is None
    assert rig.count("miss_staging_overdue") == 1
    gate.open()
    for lease in (first, second):
        assert rig.settled(lease) is RESIDENT
        rig.hierarchy.release(lease)


def test_an_item_that_lmcaches_caller_removed_is_staged_again(rig: Rig) -> None:
    rig.save(item("a"))
    rig.flush()
    rig.pool.remove(KEYS.key_of(item("a").chunk_hash))
    assert rig.hierarchy.pin_resident(item("a").as_wanted()) is None
    assert rig.serve(item("a")) == content_of(item("a"))


def test_lower_tiers_hear_of_use_once_a_minute(rig: Rig) -> None:
    used, elsewhere = item("a").as_wanted(), item("b").as_wanted()
    rig.save(item("a"))
    rig.flush()
    for seconds in (0.0, 30.0, 31.0, 30.0):
        rig.clock.advance(seconds)
        rig.hierarchy.note_use(used)
        rig.hierarchy.note_use(elsewhere)
        rig.flush()
    assert rig.tier.touched == [used.chunk_hash]
    rig.clock.advance(60.0)
    rig.hierarchy.note_use(elsewhere)
    rig.flush()
    assert rig.tier.touched == [used.chunk_hash] * 2


def test_a_save_is_over_before_its_write_is(rig: Rig) -> None:
    gate = rig.tier.hold("write")
    rig.save(item("a"), wait=False)
    assert rig.is_resident(item("a"))
    assert rig.serve(item("a")) == content_of(item("a"))
    assert not rig.hierarchy.is_stored_below(item("a").as_wanted())
    gate.open()
    rig.flush()
    assert rig.hierarchy.is_stored_below(item("a").as_wanted())
    assert rig.count("write") == 1


def test_a_full_disk_costs_a_counted_write_and_the_item_stays_evictable(make_rig: MakeRig) -> None:
    rig = make_rig(pages=2)
    rig.tier.fail("write", DISK_FULL, times=1)
    rig.save(item("a", 2))
    assert rig.faults.counts() == {("memory", "write_failed"): 1}
    assert rig.count("write_failed") == 1
    assert rig.serve(item("a", 2)) == content_of(item("a", 2)), "it is as good as ever in the pool"
    assert not rig.hierarchy.is_stored_below(item("a", 2).as_wanted())
    rig.save(item("b", 2))
    assert rig.count("pool_eviction_lost") == 1
    assert rig.serve(item("a", 2)) is None
    assert rig.tier.has(item("b", 2)), "writing resumes when there is space"


def test_an_item_that_fits_no_tier_stays_in_the_pool(rig: Rig) -> None:
    rig.tier.max_payload_bytes = PAGE_BYTES
    rig.save(item("a", 2))
    assert rig.count("write_failed") == 1
    assert rig.serve(item("a", 2)) == content_of(item("a", 2))
    assert rig.hierarchy.evict(item("a", 2).as_wanted())


def test_what_a_tier_has_already_is_not_written_again(rig: Rig) -> None:
    rig.save(item("a"))
    rig.hierarchy.forget_all()
    rig.save(item("a"))
    assert rig.tier.calls["write"] == 1
    assert rig.count("write") == 2
    assert rig.hierarchy.is_stored_below(item("a").as_wanted())


def test_what_a_tier_has_of_another_fingerprint_is_replaced(rig: Rig) -> None:
    rig.tier.plant(item("a", fingerprint="old"))
    rig.save(item("a"))
    assert rig.tier.has(item("a"))


def test_other_bytes_of_the_same_item_are_replaced(rig: Rig) -> None:
    payload = bytes(PAGE_BYTES)
    header = replace(item("a"), digest=storage_tiers.tier.digest_of(memoryview(payload)))
    rig.tier.items[header.chunk_hash] = (header, payload)
    rig.save(item("a"))
    assert rig.tier.has(item("a"))


def test_what_cannot_be_read_below_is_written_anew(rig: Rig) -> None:
    """One unreadable file must not keep its item from ever being stored again."""
    rig.tier.plant(item("a"))
    rig.tier.fail("probe", IO_ERROR, times=1)
    rig.save(item("a"))
    assert rig.tier.calls["write"] == 1
    assert rig.faults.counts() == {("memory", "probe_failed"): 1}
    assert rig.hierarchy.is_stored_below(item("a").as_wanted())


@pytest.mark.parametrize("failing", [0, 1])
def test_one_tier_that_fails_does_not_keep_an_item_from_the_other(make_rig: MakeRig, failing: int) -> None:
    tiers = [MemoryTier("near"), MemoryTier("far")]
    rig = make_rig(tiers=tiers)
    tiers[failing].fail("write", DISK_FULL)
    rig.save(item("a"))
    assert tiers[1 - failing].has(item("a"))
    assert rig.hierarchy.is_stored_below(item("a").as_wanted())
    rig.hierarchy.evict(item("a").as_wanted())
    assert rig.serve(item("a")) == content_of(item("a"))


@pytest.mark.parametrize("io_threads", [1, 2, 4])
def test_hanging_writes_leave_reads_working(make_rig: MakeRig, io_threads: int) -> None:
    rig = make_rig(io_threads=io_threads)
    rig.tier.plant(item("below"))
    gate = rig.tier.hold("write")
    for number in range(6):
        rig.save(item(f"a{number}"), wait=False)
    gate.wait_arrived(max(1, io_threads - 1))
    assert rig.serve(item("below")) == content_of(item("below"))
    assert rig.hierarchy.pending_writes == 6
    gate.open()


def test_a_full_queue_is_an_immediate_miss(make_rig: MakeRig) -> None:
    rig = make_rig(io_threads=2, io_queue_items=1)
    gate = rig.tier.hold("probe")
    leases = []
    for number, name in enumerate("ab", 1):
        leases.append(rig.acquire(item(name)))
        gate.wait_arrived(number)
    leases.append(rig.acquire(item("c")))
    assert rig.hierarchy.acquire(item("d").as_wanted()) is None
    assert rig.count("miss_io_queue_full") == 1
    assert rig.hierarchy.state_of(item("d").as_wanted()) is None
    assert rig.hierarchy.num_entries == 3
    gate.open()
    for lease in leases:
        rig.settled(lease)
        rig.hierarchy.release(lease)


# -- Use above, as the tiers below hear of it -------------------------------------------------------------------------


def test_what_is_not_below_is_not_touched(rig: Rig) -> None:
    rig.hierarchy.note_use(item("a").as_wanted())
    rig.save(replace(item("b"), mm_hash="my-uuid"))
    rig.clock.advance(61.0)
    rig.hierarchy.note_use(replace(item("b"), mm_hash="my-uuid").as_wanted())
    rig.flush()
    assert rig.tier.touched == []


# -- Restores that are not worth it -----------------------------------------------------------------------------------


def slow_rig(make_rig: MakeRig, **options: Any) -> Rig:
    """A store whose reads take 10 s, found out by a first restore, where encoding takes 0.1 s per token."""
    rig = make_rig(**options)
    rig.encode_seconds_per_token = 0.1
    for name in "ab":
        rig.tier.plant(item(name))
    rig.tier.slow_down("read", 10.0)
    assert rig.serve(item("a")) is not None, "nobody knows yet"
    rig.hierarchy.evict(item("a").as_wanted())
    return rig


def test_a_restore_slower_than_encoding_is_left_out_and_tried_again_later(make_rig: MakeRig) -> None:
    rig = slow_rig(make_rig)
    assert rig.hierarchy.acquire(item("b").as_wanted()) is None
    assert rig.count("miss_slower_than_encoding") == 1
    rig.clock.advance(60.0)
    assert rig.hierarchy.acquire(item("b").as_wanted()) is None
    rig.tier.recover()
    rig.clock.advance(600.0)
    assert rig.serve(item("b")) == content_of(item("b"))
    assert rig.serve(item("a")) == content_of(item("a")), "it is fast now, and known to be"


def test_a_store_that_is_still_slow_is_left_out_again_after_one_try(make_rig: MakeRig) -> None:
    rig = slow_rig(make_rig)
    rig.clock.advance(600.0)
    assert rig.serve(item("b")) is not None
    assert rig.hierarchy.acquire(item("a").as_wanted()) is None


def test_slow_probes_count_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.encode_seconds_per_token = 0.1
    for name in "ab":
        rig.tier.plant(item(name))
    rig.tier.slow_down("probe", 10.0)
    assert rig.serve(item("a")) is not None
    assert rig.hierarchy.acquire(item("b").as_wanted()) is None


@pytest.mark.parametrize("why", ["switched off", "encoding is slower", "encoding was never measured", "width unknown"])
def test_a_slow_restore_is_made_where_it_is_not_known_to_be_slower(make_rig: MakeRig, why: str) -> None:
    rig = slow_rig(make_rig, skip_slow_restores=why != "switched off")
    wanted = item("b").as_wanted()
    if why == "encoding is slower":
        rig.encode_seconds_per_token = 11.0
    elif why == "encoding was never measured":
        rig.encode_seconds_per_token = 0.0
    elif why == "width unknown":
        wanted = replace(wanted, width=None)
    lease = rig.hierarchy.acquire(wanted)
    assert lease is not None
    assert rig.settled(lease) is RESIDENT
    rig.hierarchy.release(lease)


def test_a_slow_store_keeps_nobody_from_what_is_in_the_pool(make_rig: MakeRig) -> None:
    rig = slow_rig(make_rig)
    rig.save(item("c"))
    assert rig.serve(item("c")) == content_of(item("c"))


# -- What is evicted --------------------------------------------------------------------------------------------------


def test_a_small_item_that_is_dear_to_encode_outlives_a_large_cheap_one(make_rig: MakeRig) -> None:
    rig = make_rig(pages=9, tiers=[])
    rig.encode_seconds_per_token = 1.0
    rig.save(item("small"))
    rig.encode_seconds_per_token = 1e-6
    rig.save(item("large", 8))
    rig.save(item("new"))
    assert rig.is_resident(item("small"))
    assert not rig.is_resident(item("large", 8))


def test_what_can_be_restored_goes_before_what_would_be_encoded_again(make_rig: MakeRig) -> None:
    rig = make_rig(pages=2)
    rig.encode_seconds_per_token = 1.0
    rig.tier.fail("write", DISK_FULL, times=1)
    rig.save(item("lost if evicted"))
    rig.save(item("stored"))
    rig.save(item("new"))
    assert rig.is_resident(item("lost if evicted"))
    assert not rig.is_resident(item("stored"))


def test_of_equals_the_least_recently_used_goes(make_rig: MakeRig) -> None:
    rig = make_rig(pages=3)
    for name in "abc":
        rig.save(item(name))
    rig.hierarchy.release(rig.acquire(item("a")))
    rig.save(item("d"))
    assert [rig.is_resident(item(name)) for name in "abcd"] == [True, False, True, True]


# -- The end ----------------------------------------------------------------------------------------------------------


def test_flush_says_how_many_items_are_left(rig: Rig) -> None:
    gate = rig.tier.hold("write")
    for name in "abc":
        rig.save(item(name), wait=False)
    assert rig.hierarchy.flush(0.0) == 3
    gate.open()
    rig.flush()
    assert all(rig.tier.has(item(name)) for name in "abc")


@pytest.mark.parametrize("operation", ["probe", "read", "write"])
def test_close_returns_and_reports_where_a_tier_hangs(make_rig: MakeRig, operation: str) -> None:
    rig = make_rig(io_threads=2)
    rig.tier.plant(item("below", 2))
    gate = rig.tier.hold(operation)
    lease = rig.acquire(item("below", 2))
    rig.save(item("a"), wait=False)
    gate.wait_arrived()
    rig.close()
    assert rig.faults.count("hierarchy", "io_thread_hangs") == 1
    gate.open()
    wait_until(lambda: not any(thread.is_alive() for thread in rig.hierarchy._io._threads), "the thread ends")
    rig.hierarchy.release(lease)
    assert lease.state is GONE
    assert rig.pool.used_bytes == 0
    assert rig.faults.count("hierarchy", "io_job_failed") == 0


def test_leases_outlive_close_with_their_bytes(rig: Rig) -> None:
    rig.save(item("a", 2))
    lease = rig.acquire(item("a", 2))
    view = rig.view(lease)
    rig.close()
    assert lease.state is GONE
    assert bytes(view) == content_of(item("a", 2))
    rig.hierarchy.release(lease)
    assert rig.pool.used_bytes == 0
    assert rig.hierarchy.claimed_bytes == 0


def test_after_close_everything_is_a_miss_and_nothing_raises(rig: Rig) -> None:
    rig.save(item("a"))
    save = rig.begin_save(item("b"))
    rig.close()
    assert rig.hierarchy.acquire(item("a").as_wanted()) is None
    assert rig.hierarchy.pin_resident(item("a").as_wanted()) is None
    assert rig.hierarchy.begin_save(item("c")) is None
    rig.hierarchy.finish_save(save, succeeded=True)
    assert not rig.hierarchy.evict(item("a").as_wanted())
    assert rig.hierarchy.flush(0.0) == 0
    rig.hierarchy.forget_all()
    assert rig.pool.used_bytes == 0
    assert rig.hierarchy.claimed_bytes == 0


def test_close_twice_is_close_once(rig: Rig) -> None:
    rig.save(item("a"))
    rig.close()
    rig.hierarchy.close()


def test_close_drops_queued_reads_and_whoever_waits_sees_gone(make_rig: MakeRig) -> None:
    rig = make_rig(io_threads=2)
    gate = rig.tier.hold("probe")
    leases = [rig.acquire(item(name)) for name in "abcd"]
    gate.wait_arrived(2)
    rig.close()
    assert [lease.state for lease in leases] == [GONE] * 4
    gate.open()
    for lease in leases:
        rig.hierarchy.release(lease)
    wait_until(lambda: not any(thread.is_alive() for thread in rig.hierarchy._io._threads), "the threads end")
    assert rig.tier.calls["probe"] == 2


def test_a_tier_that_cannot_be_closed_keeps_neither_the_others_nor_the_segment(make_rig: MakeRig) -> None:
    tiers = [MemoryTier("near"), MemoryTier("far")]
    rig = make_rig(tiers=tiers)
    tiers[0].fail("close", IO_ERROR)
    rig.close()
    assert rig.faults.count("near", "close_failed") == 1


def test_a_lease_that_was_lost_gives_its_bytes_back_with_its_last_reference(rig: Rig) -> None:
    """The safety net below every count: nobody released, yet after a reset and a collection no byte is missing."""
    rig.save(item("a", 2))
    lost: list[Lease] = [rig.acquire(item("a", 2)), rig.begin_save(item("b", 3))]
    rig.hierarchy.forget_all()
    assert rig.pool.used_bytes == 5 * PAGE_BYTES
    lost.clear()
    gc.collect()
    assert rig.pool.used_bytes == 0
    assert len(rig._finalized) == 2
    rig._finalized.clear()
    rig.hierarchy._claimed_bytes = 0  # nothing can tell whose they were


# -- Everything at once -----------------------------------------------------------------------------------------------


class Hammer:
    """One thread of many that ask, save, evict and reset at random; notes the first thing that is wrong."""

    def __init__(self, rig: Rig, seed: int, steps: int, failures: list[BaseException]) -> None:
        self._rig = rig
        self._random = random.Random(seed)
        self._steps = steps
        self._failures = failures
        self.served = 0
        self.thread = threading.Thread(target=self._run, name=f"hammer-{seed}")

    def _run(self) -> None:
        try:
            for _ in range(self._steps):
                self._step()
        except BaseException as failure:  # noqa: BLE001  # the test raises it in its own thread
            self._failures.append(failure)

    def _step(self) -> None:
        header = item(
            f"item {self._random.randrange(12)}",
            self._random.randrange(1, 4),
            fingerprint=f"f{self._random.randrange(2)}",
        )
        choice = self._random.random()
        if choice < 0.55:
            self._ask(header)
        elif choice < 0.9:
            self._save(header, succeeded=self._random.random() < 0.8)
        elif choice < 0.98:
            self._rig.hierarchy.evict(header.as_wanted())
        elif choice < 0.985:
            self._rig.hierarchy.forget_all()
        elif choice < 0.99:
            self._rig.tier.damage(header.mm_hash)
        else:
            self._rig.tier.fail(self._random.choice(("probe", "read", "write")), IO_ERROR, times=1)

    def _ask(self, header: ItemHeader) -> None:
        hierarchy = self._rig.hierarchy
        lease = hierarchy.acquire(header.as_wanted())
        if lease is None:
            return
        if self._random.random() < 0.7:
            wait_until(lambda: lease.state not in (STAGING, SAVING), "a lease settles")
        pin = hierarchy.pin_resident(header.as_wanted())
        hierarchy.release(lease)
        if pin is not None:
            assert self._rig.bytes_of(pin) == content_of(header)
            assert self._rig.bytes_of(pin) == content_of(header), "leased bytes do not change"
            hierarchy.release(pin)
            self.served += 1

    def _save(self, header: ItemHeader, succeeded: bool) -> None:
        lease = self._rig.hierarchy.begin_save(header)
        if lease is not None:
            self._rig.view(lease)[:] = content_of(header) if succeeded else b"\xdd" * header.payload_bytes
            self._rig.hierarchy.finish_save(lease, succeeded)


def test_many_threads_lose_no_byte_and_serve_no_wrong_one(make_rig: MakeRig) -> None:
    rig = make_rig(pages=20, max_lease_pages=10, io_queue_items=8)
    failures: list[BaseException] = []
    hammers = [Hammer(rig, seed, 2000, failures) for seed in range(6)]
    for hammer in hammers:
        hammer.thread.start()
    for hammer in hammers:
        hammer.thread.join()
    if failures:
        raise failures[0]
    rig.tier.recover()
    rig.wait_reads()
    rig.flush()
    rig.check_consistent()
    assert rig.hierarchy.claimed_bytes == 0
    assert sum(hammer.served for hammer in hammers) > 100
    assert rig.count("pool_eviction") > 0 and rig.count("stage_hit") > 0
