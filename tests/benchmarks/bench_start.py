# SPDX-License-Identifier: Apache-2.0
"""Starting on a directory of 100,000 files: what the first request and other threads notice, and the index's size."""

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from storage_tiers.disk_tier import DiskTier
from storage_tiers.entry import EntryState
from storage_tiers.key import WantedItem
from tests.benchmarks.many import MANY, ROWS, WIDTH, plant, tiny_image, tiny_payload
from tests.benchmarks.measuring import Samples, StallMeter, Stopwatch, by_turns, stopwatch
from tests.benchmarks.rig import FINGERPRINT, PAGE_BYTES, TierRig, header_of, model_fingerprint, new_disk, wait_until
from tests.benchmarks.table import Goal, Table
from tests.scheduler.items import Image

T = TypeVar("T")

pytestmark = pytest.mark.timeout(900)

ROUNDS = 8
POOL_BYTES = 64 << 20
ASKED = 7
"""Item that the first request asks for; it is in both directories."""
POOL_ENTRIES = 20_000


@pytest.fixture
def small_directory(tmp_path: Path) -> Path:
    """With the one item that is asked for."""
    plant(tmp_path, model_fingerprint(), ASKED + 1)
    return tmp_path


class Start:
    """Opens the tiers on a directory as an engine's start does, as often as it is asked to."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self.constructor = Samples()
        self.stall = Samples()
        self.scanning: dict[Path, int] = {}
        """How often the scan of a directory still ran when the first item was there."""
        self.later = Samples()
        """Requests that follow the first, until the directory has been looked through."""

    def first_request(self, directory: Path) -> Stopwatch:
        """From opening the directory until the first item is in the pool."""
        rig, disk, started = self._open(directory)
        self._stage(rig, tiny_image(ASKED))
        took = Stopwatch(time.perf_counter() - started)
        self.scanning[directory] = self.scanning.get(directory, 0) + (not disk.wait_scanned(0))
        rig.close()
        return took

    def later_requests(self, directory: Path) -> Stopwatch:
        """One request after the other during the scan; returns how long the scan took."""
        rig, disk, started = self._open(directory)
        number = 0
        while not disk.wait_scanned(0):
            number += 1
            asked = time.perf_counter()
            self._stage(rig, tiny_image(number))
            self.later.add(Stopwatch(time.perf_counter() - asked))
            time.sleep(0.005)
        took = Stopwatch(time.perf_counter() - started)
        rig.close()
        return took

    def undisturbed(self, directory: Path) -> Stopwatch:
        """The scan alone, beside a thread that notes when it was held up; returns the scan's duration."""
        with StallMeter() as meter:
            rig, disk, started = self._open(directory)
            assert disk.wait_scanned(300)
            took = Stopwatch(time.perf_counter() - started)
        self.stall.add(meter.longest)
        assert sum(1 for _ in disk.store.entries()) == MANY
        rig.close()
        return took

    def _open(self, directory: Path) -> tuple[TierRig, DiskTier, float]:
        opened: list[tuple[DiskTier, float]] = []

        def open_disk() -> DiskTier:
            with stopwatch() as watch:
                disk = new_disk(directory)
            opened.append((disk, time.perf_counter() - watch.wall))
            self.constructor.add(watch)
            return disk

        rig = TierRig(POOL_BYTES, open_disk)
        return rig, *opened[0]

    def _stage(self, rig: TierRig, image: Image) -> None:
        lease = rig.hierarchy.acquire(self._wanted(image))
        assert lease is not None
        wait_until(lambda: lease.state is not EntryState.STAGING, 0.00005)
        assert lease.state is EntryState.RESIDENT and lease.entry.obj is not None
        assert bytes(rig.pool.payload_view(lease.entry.obj)) == tiny_payload(image.identifier)
        rig.hierarchy.release(lease)

    def _wanted(self, image: Image) -> WantedItem:
        return WantedItem(image.identifier, image.rows, image.modality, self._fingerprint, WIDTH)


def test_start_on_a_full_directory(full_directory: Path, small_directory: Path) -> None:
    start = Start(model_fingerprint())
    samples = by_turns(
        ROUNDS,
        {
            "full": lambda: start.first_request(full_directory),
            "small": lambda: start.first_request(small_directory),
            "scan": lambda: start.undisturbed(full_directory),
            "scan with requests": lambda: start.later_requests(full_directory),
            "nothing": _nothing,
        },
        warm_up=1,
    )
    table = Table(
        "start",
        f"Starting on a directory of {MANY:,} items",
        "ms",
        (
            "files of 8 KB, their names and attributes known to the kernel; each staged item compared byte for byte",
            f"the scan still ran when the first item was there: {start.scanning[full_directory]} of {ROUNDS + 1} times",
            f"delays: of a thread that wants to run every {StallMeter.INTERVAL_SECONDS * 1e3:g} ms",
        ),
    )
    table.add("DiskTier(...)", start.constructor)
    table.add("first item in the pool since then, full directory", samples["full"])
    table.add(f"  the same, directory of {ASKED + 1}", samples["small"])
    table.add("  delay of the first request", samples["full"].minus(samples["small"]), goal=Goal(100))
    table.add("requests that follow, while the scan runs", start.later)
    table.add("whole scan", samples["scan"])
    table.add("whole scan, beside such requests", samples["scan with requests"])
    table.add("longest delay of another thread during the scan", start.stall)
    table.add("  the same while nothing of ours runs, for 1 s", samples["nothing"])
    table.publish(full_directory)


def test_memory_of_an_entry(full_directory: Path) -> None:
    table = Table("index_memory", "Memory that an index takes per entry", "bytes", (f"by tracemalloc; {MANY:,} files",))
    kept, peak, disk = _traced(lambda: _scanned(full_directory))
    assert sum(1 for _ in disk.store.entries()) == MANY
    table.add("file on the disk, in the tier's index", Samples([kept / MANY]), goal=Goal(500))
    table.add("  the most that the first scan takes beside it", Samples([peak / MANY]))
    disk.close()
    rig = TierRig(POOL_ENTRIES * PAGE_BYTES)
    kept, _, _ = _traced(lambda: _fill(rig))
    assert rig.hierarchy.num_entries == POOL_ENTRIES
    table.add(f"item in the pool, all told ({POOL_ENTRIES:,} items)", Samples([kept / POOL_ENTRIES]))
    rig.close()
    table.publish(full_directory)


def _nothing() -> Stopwatch:
    with StallMeter() as meter:
        time.sleep(1)
    return meter.longest


def _scanned(directory: Path) -> DiskTier:
    disk = new_disk(directory)
    assert disk.wait_scanned(300)
    return disk


def _fill(rig: TierRig) -> None:
    for number in range(POOL_ENTRIES):
        lease = rig.hierarchy.begin_save(header_of(tiny_image(number).identifier, ROWS, WIDTH, FINGERPRINT))
        assert lease is not None
        rig.hierarchy.finish_save(lease, succeeded=True)


def _traced(make: Callable[[], T]) -> tuple[int, int, T]:
    """Bytes that what `make` does keeps allocated, the most beyond those on the way, and what it returns."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept, peak - kept, made
