# SPDX-License-Identifier: Apache-2.0
"""Bringing items from the disk into the pool, verified, beside a plain read of the same file."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from storage_tiers.disk_tier import DiskTier
from storage_tiers.entry import EntryState
from storage_tiers.key import WantedItem, chunk_hash_of
from storage_tiers.tier import ItemHeader, digest_of
from tests.benchmarks.measuring import Stopwatch, Timed, by_turns, timed
from tests.benchmarks.rig import KEYS, SIZES, WIDTH, TierRig, encoder_output, header_of, new_disk, wait_until
from tests.benchmarks.table import Goal, Table
from tests.scheduler.items import Image

pytestmark = pytest.mark.timeout(900)

ROUNDS = 50
POOL_BYTES = 300 << 20
PIECE_BYTES = 1 << 20
DIRECT_PIECE_BYTES = 8 << 20
GOAL = Goal(0.8, of_ratio=True)


@dataclass
class Stored:
    """One item in a file, and the same touched pool memory for whoever reads it."""

    rig: TierRig
    disk: DiskTier
    header: ItemHeader
    content: np.ndarray
    path: Path
    target: memoryview

    @property
    def wanted(self) -> WantedItem:
        return self.header.as_wanted()

    def plain_pieces(self) -> Stopwatch:
        """preadv, 1 MiB at a time."""
        return self._plain(os.O_RDONLY, PIECE_BYTES)

    def plain_whole(self) -> Stopwatch:
        """One preadv for all."""
        return self._plain(os.O_RDONLY, len(self.target))

    def plain_direct(self) -> Stopwatch:
        """Past the page cache, 8 MiB at a time."""
        return self._plain(os.O_RDONLY | os.O_DIRECT, DIRECT_PIECE_BYTES)

    def tier(self) -> Stopwatch:
        """`probe` and `read_into`, digest and all."""

        def restore() -> None:
            found = self.disk.probe(self.wanted)
            assert found is not None and self.disk.read_into(found, self.target)

        return self._checked(timed(restore))

    def hierarchy(self) -> Stopwatch:
        """From a request's claim until its bytes are resident: I/O thread, probe, allocation, read, digest."""
        hierarchy = self.rig.hierarchy

        started = time.perf_counter()
        lease = hierarchy.acquire(self.wanted)
        assert lease is not None
        wait_until(lambda: lease.state is not EntryState.STAGING, 0.00005)
        took = Stopwatch(time.perf_counter() - started)
        assert lease.state is EntryState.RESIDENT and lease.entry.obj is not None
        assert np.array_equal(np.asarray(self.rig.pool.payload_view(lease.entry.obj)), self.content)
        hierarchy.release(lease)
        assert hierarchy.evict(self.wanted)
        return took

    def drop_from_page_cache(self) -> bool:
        """Have the kernel forget the file's pages; whether it did."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.preadv(fd, [bytearray(1)], len(self.target) // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _plain(self, flags: int, piece: int) -> Stopwatch:
        def read() -> None:
            fd = os.open(self.path, flags)
            whole = len(self.target) // 4096 * 4096 if flags & os.O_DIRECT else len(self.target)
            done = 0
            while done < whole:
                done += os.preadv(fd, [self.target[done : min(whole, done + piece)]], done)
            os.close(fd)
            if whole < len(self.target):
                self.target[whole:] = bytes(self.content[whole:])  # the tail that O_DIRECT cannot read

        return self._checked(timed(read))

    def _checked(self, took: Stopwatch) -> Stopwatch:
        target = np.asarray(self.target)
        assert np.array_equal(target, self.content), "other bytes"
        target[:] = 0
        return took


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restore")


@pytest.fixture(scope="module")
def buffered(directory: Path) -> Iterator[dict[str, Stored]]:
    disk = new_disk(directory)
    rig = TierRig(POOL_BYTES, lambda: disk)
    yield {size: _stored(rig, disk, directory, rows) for size, rows in SIZES.items()}
    assert not rig.faults.counts()
    rig.close()


def test_restore_from_the_page_cache(buffered: dict[str, Stored], directory: Path) -> None:
    table = _table("restore_disk_cached", "file in the page cache", "one plain preadv")
    for size, item in buffered.items():
        samples = by_turns(
            ROUNDS,
            {
                "one plain preadv": item.plain_whole,
                "plain preadv, pieces of 1 MiB": item.plain_pieces,
                "DiskTier.probe + read_into": item.tier,
                "acquire until RESIDENT": item.hierarchy,
            },
        )
        for case, values in samples.items():
            goal = GOAL if case.startswith("DiskTier") else None
            table.add(f"{size}: {case}", values, reference=samples["one plain preadv"], goal=goal)
        table.add(
            f"{size}: DiskTier again, ratio to pieces of 1 MiB",
            samples["DiskTier.probe + read_into"],
            reference=samples["plain preadv, pieces of 1 MiB"],
            goal=GOAL,
        )
    table.publish(directory)


def test_restore_from_the_drive(buffered: dict[str, Stored], directory: Path) -> None:
    table = _table("restore_disk_dropped", "page cache dropped before each read", "one plain preadv")
    for size, item in buffered.items():
        if not item.drop_from_page_cache():
            pytest.skip("the kernel keeps the pages")

        def dropped(work: Timed, item: Stored = item) -> Timed:
            def run() -> Stopwatch:
                assert item.drop_from_page_cache()
                return work()

            return run

        samples = by_turns(
            ROUNDS,
            {
                "one plain preadv": dropped(item.plain_whole),
                "plain preadv, pieces of 1 MiB": dropped(item.plain_pieces),
                "DiskTier.probe + read_into": dropped(item.tier),
                "acquire until RESIDENT": dropped(item.hierarchy),
            },
        )
        for case, values in samples.items():
            goal = GOAL if case.startswith("DiskTier") else None
            table.add(f"{size}: {case}", values, reference=samples["one plain preadv"], goal=goal)
    table.publish(directory)


def test_restore_by_direct_io(directory: Path) -> None:
    disk = new_disk(directory, direct_io=True)
    rig = TierRig(POOL_BYTES, lambda: disk)
    table = _table("restore_disk_direct", "O_DIRECT on both sides", "plain O_DIRECT read")
    for size, rows in SIZES.items():
        item = _stored(rig, disk, directory, rows)
        try:
            item.plain_direct()
        except OSError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
        samples = by_turns(
            ROUNDS,
            {
                "plain O_DIRECT read, pieces of 8 MiB": item.plain_direct,
                "DiskTier.probe + read_into": item.tier,
                "acquire until RESIDENT": item.hierarchy,
            },
        )
        for case, values in samples.items():
            reference = samples["plain O_DIRECT read, pieces of 8 MiB"]
            goal = GOAL if case.startswith("DiskTier") else None
            table.add(f"{size}: {case}", values, reference=reference, goal=goal)
    assert not rig.faults.counts()
    rig.close()
    table.publish(directory)


def _table(key: str, how: str, compared_with: str) -> Table:
    return Table(
        key,
        f"Bringing an item from the disk into the pool: {how}",
        "ms",
        (
            f"[rows, {WIDTH}] bfloat16; all but `acquire` into the same faulted-in pool memory",
            "each read compared byte for byte, memory zeroed in between; our reads verify an XXH3-128 digest",
        ),
        compared_with,
    )


def _stored(rig: TierRig, disk: DiskTier, directory: Path, rows: int) -> Stored:
    """Write an item through the tier; the pool memory for plain reads stays taken until the rig ends."""
    payload = memoryview(encoder_output(rows, rows).view(torch.uint8).reshape(-1).numpy())
    mm_hash = Image("stored", rows=rows).identifier
    header = header_of(mm_hash, rows, WIDTH, digest=digest_of(payload))
    assert disk.wait_scanned(60) and disk.write(header, payload)
    lease = rig.hierarchy.begin_save(header_of(Image("memory", rows=rows).identifier, rows, WIDTH))
    assert lease is not None and lease.entry.obj is not None
    path = directory / KEYS.file_name_of(chunk_hash_of(mm_hash))
    return Stored(rig, disk, header, np.array(payload), path, rig.pool.payload_view(lease.entry.obj))
