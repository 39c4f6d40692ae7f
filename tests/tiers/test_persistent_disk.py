# SPDX-License-Identifier: Apache-2.0
"""The disk tier: the contract of all tiers, and what only a directory can suffer."""

import mmap
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from storage_tiers.disk_index import DiskIndex, Listing
from storage_tiers.disk_tier import DiskTier
from storage_tiers.faults import FaultLog
from storage_tiers.key import KeySpace
from storage_tiers.tier import LowerTier
from tests.tiers.contract import KEYS, Damage, TierContract, make_item, read
from tests.tiers.disk_rig import GIB, ITEM_BYTES, DiskRig, opened, put, served


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path / "cache")
    yield rig
    rig.close()


class TestDiskTier(TierContract):
    """The contract, on a directory."""

    @pytest.fixture
    def rig(self, rig: DiskRig) -> DiskRig:
        return rig


class TestDiskTierWithDirectIo(TierContract):
    """The contract again with O_DIRECT where buffers allow it, which those of the contract seldom do."""

    @pytest.fixture
    def rig(self, rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> DiskRig:
        plain = rig.new_tier
        monkeypatch.setattr(rig, "new_tier", lambda keys, **options: plain(keys, direct_io=True, **options))
        return rig


# Files and their names.


def test_it_is_a_lower_tier(rig: DiskRig) -> None:
    assert isinstance(rig.open(), LowerTier)


def test_directory_and_files_are_the_users_own(rig: DiskRig) -> None:
    put(rig.open(), "a")
    assert stat.S_IMODE(rig.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in rig.directory.iterdir()} == {0o600}
    assert sorted(path.name for path in rig.directory.iterdir()) == sorted([".evictor.lock", rig.path("a").name])


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(NotADirectoryError, match="cache is a file"):
        DiskRig(tmp_path / "cache").open()


def test_a_capacity_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity"):
        DiskRig(tmp_path, capacity=0).open()


@pytest.mark.parametrize("length", [*range(130), 4095, 4096, 4097, 7999, 8000, 8001, 8191, 8192, 8193, 12287])
def test_torn_at_any_length(rig: DiskRig, length: int) -> None:
    tier = rig.open()
    put(tier, "a")
    os.truncate(rig.path("a"), length)
    assert not served(tier, "a")
    assert not rig.holds("a")
    assert sum(rig.faults.counts().values()) == 1


def test_what_is_no_regular_file_is_a_miss(rig: DiskRig, tmp_path: Path) -> None:
    tier = rig.open()
    put(tier, "real")
    rig.path("directory").mkdir()
    rig.path("link").symlink_to(rig.path("real"))
    os.mkfifo(rig.path("pipe"))
    assert not any(served(tier, name) for name in ("directory", "link", "pipe"))
    assert opened(rig).store.used_bytes == ITEM_BYTES


def test_foreign_files_are_neither_counted_nor_touched(rig: DiskRig) -> None:
    rig.directory.mkdir()
    names = ["notes.txt", "m@2@0@ff@bfloat16.pt", "m@1@0@FF@half.pt", "a@1@0@0f@half.pt", "x@1@0@f@half"]
    for name in names:
        (rig.directory / name).write_bytes(bytes(100_000))
    rig.capacity = 3 * ITEM_BYTES
    tier = opened(rig)
    assert tier.store.used_bytes == 0
    for number in range(9):
        put(tier, f"{number}")
    assert all((rig.directory / name).exists() for name in names)


def test_the_directory_vanishes(rig: DiskRig) -> None:
    tier = opened(rig)
    put(tier, "a")
    for path in rig.directory.iterdir():
        path.unlink()
    rig.directory.rmdir()
    assert not served(tier, "a")
    put(tier, "b")
    assert served(tier, "b")
    assert tier.store.used_bytes == ITEM_BYTES
    assert stat.S_IMODE(rig.directory.stat().st_mode) == 0o700


def test_a_good_item_that_replaces_a_damaged_one_is_not_removed_in_its_place(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(rig)
    put(tier, "a")
    rig.damage("a", Damage.FLIPPED_PAYLOAD)
    monkeypatch.setattr(rig.faults, "report", lambda *about: rig.plant(make_item("a")))
    assert not served(tier, "a")
    assert served(tier, "a")


# The budget and the order of eviction.


def test_the_least_recently_used_goes_first(rig: DiskRig) -> None:
    rig.capacity = 4 * ITEM_BYTES
    tier = opened(rig)
    for name in "abcd":
        put(tier, name)
    assert served(tier, "a")
    put(tier, "e")
    put(tier, "f")
    assert [name for name in "abcdef" if served(tier, name)] == ["a", "d", "e", "f"]
    assert tier.store.evicted == (2, 2 * ITEM_BYTES)


def test_touching_counts_as_use(rig: DiskRig) -> None:
    rig.capacity = 2 * ITEM_BYTES
    tier = opened(rig)
    put(tier, "a")
    put(tier, "b")
    tier.touch(make_item("a")[0].chunk_hash)
    put(tier, "c")
    assert [name for name in "abc" if served(tier, name)] == ["a", "c"]


def age(rig: DiskRig, mm_hash: str, seconds: int) -> None:
    then = time.time() - seconds
    os.utime(rig.path(mm_hash), (then, then))


def test_recency_survives_a_restart(rig: DiskRig) -> None:
    before = opened(rig)
    for number, name in enumerate("abcd"):
        put(before, name)
        age(rig, name, 1000 - number)
    before.close()
    between = opened(rig)
    assert served(between, "a")
    assert time.time() - rig.path("a").stat().st_mtime < 10
    between.close()
    rig.capacity = 3 * ITEM_BYTES
    after = opened(rig)
    assert [entry.file_name for entry in after.store.entries()] == [rig.path(name).name for name in "bcda"]
    put(after, "e")
    assert [name for name in "abcde" if served(after, name)] == ["a", "d", "e"]


def test_a_use_is_noted_in_the_file_once_a_minute(rig: DiskRig) -> None:
    tier = opened(rig)
    put(tier, "a")
    stamp = rig.path("a").stat().st_mtime_ns
    assert served(tier, "a")
    assert rig.path("a").stat().st_mtime_ns == stamp


def test_prefilled_and_restarted_it_is_within_the_limit_after_the_first_put(rig: DiskRig) -> None:
    before = opened(rig)
    for number in range(40):
        put(before, f"{number}")
    before.close()
    rig.capacity = 10 * ITEM_BYTES
    after = rig.open()
    put(after, "new")
    assert rig.used() <= rig.capacity
    assert len(rig.entries()) == 10
    assert served(after, "new")


def test_other_deployments_entries_count_and_are_evicted(rig: DiskRig) -> None:
    other = KeySpace("other/model", torch.float16)
    tier = rig.open(other)
    for number in range(4):
        header, payload = make_item(f"{number}", keys=other)
        tier.write(header, memoryview(payload))
    rig.capacity = 4 * ITEM_BYTES
    ours = opened(rig)
    assert ours.store.used_bytes == 4 * ITEM_BYTES
    put(ours, "a")
    assert rig.used() == 4 * ITEM_BYTES
    assert served(ours, "a")


def test_an_item_larger_than_the_budget_evicts_nothing(rig: DiskRig) -> None:
    rig.capacity = 2 * ITEM_BYTES
    tier = opened(rig)
    put(tier, "a")
    header, payload = make_item("large", rows=20)
    assert tier.write(header, memoryview(payload)) is False
    assert rig.faults.count("disk", "too_big") == 1
    assert served(tier, "a")


def test_replacing_needs_no_room_beside_the_old(rig: DiskRig) -> None:
    rig.capacity = 2 * ITEM_BYTES
    tier = opened(rig)
    for _ in range(5):
        put(tier, "a")
        put(tier, "b")
    assert tier.store.evicted == (0, 0)
    put(tier, "a", rows=1)
    assert tier.store.used_bytes == rig.used() == ITEM_BYTES + 8192


def test_a_thousand_cycles_leave_the_account_right(rig: DiskRig) -> None:
    rig.capacity = 20 * ITEM_BYTES
    tier = opened(rig)
    for number in range(1000):
        put(tier, f"{number % 37}", rows=1 + number % 5)
        if number % 3 == 0:
            tier.remove(f"{number % 11}")
        if number % 97 == 96:
            rig.entries()[0].unlink()
    assert read(tier, make_item("absent")[0].as_wanted()) is None
    put(tier, "last")
    assert tier.store.used_bytes == rig.used() <= rig.capacity


def test_evict_frees_what_was_asked(rig: DiskRig) -> None:
    tier = opened(rig)
    for name in "abcd":
        put(tier, name)
    assert tier.store.evict(ITEM_BYTES + 1) == 2 * ITEM_BYTES
    assert [name for name in "abcd" if served(tier, name)] == ["c", "d"]
    assert tier.store.evict(1 << 40) == 2 * ITEM_BYTES
    assert tier.store.used_bytes == rig.used() == 0


def test_what_another_process_used_is_not_the_oldest(rig: DiskRig) -> None:
    rig.capacity = 3 * ITEM_BYTES
    tier = opened(rig)
    for number, name in enumerate("abc"):
        put(tier, name)
        age(rig, name, 1000 - number)
    ours = opened(rig)
    other = opened(rig)
    assert served(other, "a")
    put(ours, "d")
    assert [name for name in "abcd" if rig.holds(name)] == ["a", "c", "d"]


# The administration.


def test_check_finds_damage_everywhere_and_fixes_it(rig: DiskRig) -> None:
    tier = opened(rig)
    for name in "abcdef":
        put(tier, name)
    rig.damage("b", Damage.FLIPPED_PAYLOAD)
    rig.damage("c", Damage.FLIPPED_TRAILER)
    rig.plant_foreign("d", b"LMCache's own")
    os.truncate(rig.path("e"), 0)
    expected = {rig.path("b").name: "digest", rig.path("c").name: "trailer", rig.path("d").name: "no_trailer"}
    expected[rig.path("e").name] = "empty"
    found = list(tier.store.check())
    assert {problem.file_name: problem.kind for problem in found} == expected
    assert not any(problem.removed for problem in found)
    fixed = {problem.file_name for problem in tier.store.check(fix=True) if problem.removed}
    assert fixed == set(expected) - {rig.path("d").name}
    assert [problem.kind for problem in tier.store.check()] == ["no_trailer"]
    assert [name for name in "abcdef" if rig.holds(name)] == ["a", "d", "f"]


# The scan.


def test_it_serves_while_the_directory_is_still_being_read(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig.open(), "old")
    monkeypatch.setattr("storage_tiers.disk_directory.CacheDirectory.list_entries", slow_listing)
    tier = DiskTier(rig.directory, GIB, KEYS, rig.faults)
    assert served(tier, "old")
    assert not tier.wait_scanned(0)
    started = time.monotonic()
    put(tier, "new")
    assert time.monotonic() - started > 0.2, "the first put waits, so that the budget holds"
    tier.close()


def test_closing_does_not_wait_for_the_scan(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.directory.mkdir()
    for number in range(5):
        rig.plant(make_item(f"{number}"))
    monkeypatch.setattr("storage_tiers.disk_directory.pause", lambda done: time.sleep(2))
    started = time.monotonic()
    tier = rig.open()
    time.sleep(0.1)
    tier.close()
    assert time.monotonic() - started < 4
    assert not rig.faults.counts()


def slow_listing(self: object) -> Listing:
    time.sleep(0.5)
    return Listing()


def test_an_unreadable_directory_is_counted(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object) -> Listing:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("storage_tiers.disk_directory.CacheDirectory.list_entries", failing)
        tier = opened(rig)
    assert rig.faults.count("disk", "scan_failed") == 1
    put(tier, "a")
    assert served(tier, "a")


def test_the_index_keeps_order_and_account() -> None:
    index = DiskIndex()
    index.put("used meanwhile", 5, 100)
    listing = Listing()
    for name, size, seconds in (("young", 3, 90), ("old", 2, 10), ("used meanwhile", 5, 50)):
        listing.add(name, size, seconds * 1_000_000_000)
    index.reconcile(listing, first=True)
    assert [entry.file_name for entry in index.entries()] == ["old", "young", "used meanwhile"]
    assert index.used_bytes == 10
    assert index.use("old", 10 + 59, 60) is False
    assert index.use("old", 10 + 60, 60) is True
    assert index.use("old", 10 + 61, 60) is False
    index.reconcile(Listing())
    assert (len(index), index.used_bytes, index.oldest()) == (0, 0, None)


# Direct I/O.


@pytest.mark.parametrize("rows", [1, 4, 2048, 5000])
@pytest.mark.parametrize("offset", [0, 1])
def test_direct_io(rig: DiskRig, rows: int, offset: int) -> None:
    tier = opened(rig, direct_io=True)
    header, payload = make_item("a", rows)
    with (
        mmap.mmap(-1, len(payload) + 4096) as memory,
        memoryview(memory) as whole,
        whole[offset : offset + len(payload)] as buffer,
    ):
        buffer[:] = payload
        assert tier.write(header, buffer)
        buffer[:] = bytes(len(payload))
        found = tier.probe(header.as_wanted())
        assert found is not None
        assert tier.read_into(found, buffer)
        assert buffer == payload
    assert read(opened(rig), header.as_wanted()) == payload
    assert not rig.faults.counts()


def test_direct_io_finds_damage(rig: DiskRig) -> None:
    tier = opened(rig, direct_io=True)
    header, payload = make_item("a", 2048)
    tier.write(header, memoryview(payload))
    found = tier.probe(header.as_wanted())
    assert found is not None
    with mmap.mmap(-1, len(payload)) as memory, memoryview(memory) as buffer:
        os.truncate(rig.path("a"), 1_000_001)
        assert not tier.read_into(found, buffer)
    assert not rig.holds("a")
    assert rig.faults.count("disk", "no_trailer") == 1


def test_a_file_system_without_direct_io(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_tiers.disk_io.fcntl.fcntl", refusing)
    tier = opened(rig, direct_io=True)
    header, payload = make_item("a", 2048)
    with mmap.mmap(-1, len(payload)) as memory, memoryview(memory) as buffer:
        buffer[:] = payload
        assert tier.write(header, buffer)
        assert tier.read_into(header, buffer)
        assert buffer == payload
    assert rig.faults.counts() == {("disk", "direct_io_refused"): 1}


def refusing(fd: int, command: int, flags: int = 0) -> int:
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return 0


# Any history.


class DiskMachine(RuleBasedStateMachine):
    """Any sequence of puts, reads, removals, restarts, damage and other processes' deeds, against a dict."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.faults = FaultLog()
        self.rig = DiskRig(Path(os.path.realpath(self._fresh())))
        self.tier = opened(self.rig)
        self.stored: dict[str, int] = {}

    @staticmethod
    def _fresh() -> str:
        return tempfile.mkdtemp(prefix="disk-machine-")

    @rule(target=names, name=st.sampled_from("abcdefgh"))
    def name(self, name: str) -> str:
        return name

    @rule(name=names, rows=st.integers(1, 5))
    def put(self, name: str, rows: int) -> None:
        put(self.tier, name, rows)
        self.stored[name] = rows

    @rule(name=names, rows=st.integers(1, 5))
    def another_process_puts(self, name: str, rows: int) -> None:
        self.rig.plant(make_item(name, rows))
        self.stored[name] = rows

    @rule(name=names, rows=st.integers(1, 5))
    def get(self, name: str, rows: int) -> None:
        assert served(self.tier, name, rows) == (self.stored.get(name) == rows)

    @rule(name=names)
    def remove(self, name: str) -> None:
        assert self.tier.remove(name) == (self.stored.pop(name, None) is not None)

    @rule(name=names)
    def another_process_removes(self, name: str) -> None:
        if self.stored.pop(name, None) is not None:
            self.rig.delete(name)

    @rule(name=names, how=st.sampled_from(list(Damage)))
    def damage(self, name: str, how: Damage) -> None:
        rows = self.stored.pop(name, None)
        if rows is not None:
            self.rig.damage(name, how)
            assert not served(self.tier, name, rows)
            assert not self.rig.holds(name)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = opened(self.rig)

    @rule(nbytes=st.integers(1, 4 * ITEM_BYTES))
    def evict(self, nbytes: int) -> None:
        self.tier.store.evict(nbytes)
        self.stored = {name: rows for name, rows in self.stored.items() if self.rig.holds(name)}
        assert self.tier.store.used_bytes == self.rig.used()

    @invariant()
    def only_what_is_stored_is_there(self) -> None:
        assert {path.name for path in self.rig.entries()} == {self.rig.path(name).name for name in self.stored}

    def teardown(self) -> None:
        self.rig.close()
        for path in self.rig.directory.iterdir():
            path.unlink()
        self.rig.directory.rmdir()


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
