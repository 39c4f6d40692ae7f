# SPDX-License-Identifier: Apache-2.0
"""The disk tier among real processes and on real small file systems: killed writers, shared budgets, no space."""

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from storage_tiers.faults import FaultLog
from tests.tiers.contract import KEYS, Damage, make_item, read
from tests.tiers.disk_rig import ITEM_BYTES, DiskRig, in_another_process, join, opened, put, served

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

MIB = 1 << 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path / "cache")
    yield rig
    rig.close()


@contextmanager
def small_file_system(path: Path, nbytes: int) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


# Processes that share a directory.


def test_another_process_serves_what_this_one_stores(rig: DiskRig) -> None:
    writer = rig.open()

    def reader() -> None:
        tier = DiskRig(rig.directory).open()
        deadline = time.monotonic() + 20
        while not served(tier, "a"):
            assert time.monotonic() < deadline
        tier.close()

    pid = in_another_process(reader)
    time.sleep(0.05)
    put(writer, "a")
    join(pid)


def test_processes_share_one_budget(rig: DiskRig) -> None:
    """Items of up to a quarter of the budget, so that one that was not seen would show."""
    rig.capacity = 12 * ITEM_BYTES

    def work(seed: int) -> None:
        mine = DiskRig(rig.directory, rig.capacity)
        tier = mine.open()
        choose = random.Random(seed)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            name, rows = f"{choose.randrange(40)}", choose.choice([1, 4, 14])
            if choose.random() < 0.7:
                put(tier, name, rows)
            else:
                served(tier, name, rows)
        assert set(mine.faults.counts()) <= {("disk", "other_num_tokens"), ("disk", "replaced")}
        mine.close()

    pids = [in_another_process(lambda seed=seed: work(seed)) for seed in (1, 2)]  # type: ignore[misc]
    lock = FileLock(rig.directory / ".evictor.lock", poll_interval=0.002)
    deadline, most = time.monotonic() + 2, 0
    while time.monotonic() < deadline:
        if rig.directory.exists():
            with lock:  # a listing is no snapshot: let nobody publish during it
                most = max(most, rig.used())
        time.sleep(0.005)
    join(*pids)
    assert rig.capacity / 2 < most <= rig.capacity
    tier = opened(rig)
    assert tier.store.used_bytes == rig.used()
    assert not list(tier.store.check())
    assert not list(rig.directory.glob(".*.tmp"))


def test_eviction_by_another_process_is_a_quiet_miss(rig: DiskRig) -> None:
    tier = opened(rig)
    for name in "abc":
        put(tier, name)

    def evict() -> None:
        other = opened(DiskRig(rig.directory))
        assert other.store.evict(2 * ITEM_BYTES) == 2 * ITEM_BYTES
        other.close()

    join(in_another_process(evict))
    assert [name for name in "abc" if served(tier, name)] == ["c"]
    assert not rig.faults.counts()
    put(tier, "d")
    assert tier.store.used_bytes == rig.used()


# Killed writers.


def test_a_writer_killed_at_any_point_leaves_no_wrong_bytes(rig: DiskRig) -> None:
    items = [make_item(f"{number}", rows=2000) for number in range(3)]

    def write_for_ever() -> None:
        tier = DiskRig(rig.directory).open()
        while True:
            for header, payload in items:
                tier.write(header, memoryview(payload))

    choose = random.Random(7)
    for _ in range(12):
        pid = in_another_process(write_for_ever)
        time.sleep(choose.uniform(0.01, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        tier = rig.open()
        for header, payload in items:
            assert read(tier, header.as_wanted()) in (None, payload)
        tier.close()
    assert not rig.faults.counts(), "an item is whole or absent"
    for path in rig.directory.glob(".*.tmp"):
        os.utime(path, (0, 0))
    tier = opened(rig)
    assert not list(rig.directory.glob(".*.tmp"))
    assert tier.store.used_bytes == rig.used()
    put(tier, "a")


def test_leftovers_of_dead_writers_only_are_removed(rig: DiskRig) -> None:
    rig.directory.mkdir()
    reading, writing = os.pipe()

    def begin() -> None:
        tier = DiskRig(rig.directory).open()
        tier.store._budget.new_temp()  # type: ignore[attr-defined]
        os.write(writing, b"!")
        time.sleep(60)

    dead, alive = in_another_process(begin), in_another_process(begin)
    os.read(reading, 1)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    for path in rig.directory.glob(".*.tmp"):
        os.utime(path, (0, 0))
    os.kill(dead, signal.SIGKILL)
    os.waitpid(dead, 0)
    (rig.directory / ".00000000-1-abc.tmp").touch()
    (rig.directory / ".somebody-elses.tmp").touch()
    opened(rig)
    left = sorted(path.name for path in rig.directory.glob(".*.tmp"))
    os.kill(alive, signal.SIGKILL)
    os.waitpid(alive, 0)
    assert [name.split("-")[1] for name in left] == ["1", str(alive), "elses.tmp"], "young, locked, foreign"


def test_a_former_life_with_our_process_id(rig: DiskRig) -> None:
    put(opened(rig), "a")
    temp = opened(rig).store._directory.new_temp()
    os.close(temp.fd)
    assert len(list(rig.directory.glob(".*.tmp"))) == 1
    opened(rig)
    assert not list(rig.directory.glob(".*.tmp"))


# No space, and nothing but reading.


def test_a_full_file_system_makes_room_and_goes_on(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", MIB) as mount:
        rig = DiskRig(mount / "cache")
        tier = opened(rig)
        for number in range(200):
            put(tier, f"{number}")
        assert rig.faults.count("disk", "no_space") > 0
        kept = [number for number in range(200) if served(tier, f"{number}")]
        assert kept == list(range(kept[0], 200)), "the oldest made room"
        assert len(kept) > 60, "and no more of them than had to"
        assert tier.store.used_bytes == rig.used()
        assert not list(rig.directory.glob(".*.tmp"))
        rig.close()


def test_no_space_that_eviction_could_not_give(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", MIB) as mount:
        rig = DiskRig(mount / "cache")
        tier = opened(rig)
        for name in "abc":
            put(tier, name)
        others = mount / "others"
        others.write_bytes(bytes(900_000))
        header, payload = make_item("large", rows=100)
        with pytest.raises(OSError) as caught:
            tier.write(header, memoryview(payload))
        assert caught.value.errno == errno.ENOSPC
        assert all(served(tier, name) for name in "abc")
        others.unlink()
        assert tier.write(header, memoryview(payload))
        assert all(served(tier, name) for name in "abc")
        rig.close()


def test_a_read_only_directory_serves(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", MIB) as mount:
        rig = DiskRig(mount / "cache")
        tier = opened(rig)
        for name in "abc":
            put(tier, name)
        rig.damage("b", Damage.FLIPPED_PAYLOAD)
        for name in "abc":
            os.utime(rig.path(name), (1, 1))
        rig.close()
        subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        rig.faults = FaultLog()
        tier = opened(rig)
        assert [name for name in "abc" if served(tier, name)] == ["a", "c"]
        header, payload = make_item("d")
        with pytest.raises(OSError):
            tier.write(header, memoryview(payload))
        with pytest.raises(OSError):
            tier.remove("a")
        assert {kind for _, kind in rig.faults.counts()} == {"digest", "remove_failed", "touch_failed"}
        rig.close()


def test_the_file_name_is_lmcaches(rig: DiskRig) -> None:
    put(rig.open(), "a")
    key = KEYS.key_of(make_item("a")[0].chunk_hash)
    assert rig.path("a").name == key.to_string().replace("/", "-") + ".pt"
