# SPDX-License-Identifier: Apache-2.0
"""What reserving pool space costs the scheduler's step thread once every reservation must evict."""

import random
from itertools import count

import numpy as np
import pytest

from storage_tiers.entry import Lease
from storage_tiers.tier import ItemHeader
from tests.benchmarks.measuring import Samples, settle_memory, stopwatch
from tests.benchmarks.rig import PAGE_BYTES, TierRig, header_of
from tests.benchmarks.table import Goal, Table

pytestmark = pytest.mark.timeout(900)

ENTRIES = (1_000, 10_000)
OPERATIONS = 2_000
MAX_PAGES = 128
MEAN_PAGES = 26.2
"""Of sizes whose logarithm is evenly spread from 1 to 128 pages."""
USES = 3
"""Items that are used between two reservations."""
HELD_SHARE = 0.3
"""Of the pool's items, held by requests in the last case."""
ROW_ELEMENTS = PAGE_BYTES // 2


class FullPool:
    """A pool of so many items in memory that has no room for one more."""

    def __init__(self, entries: int) -> None:
        self.rig = TierRig(int(entries * MEAN_PAGES) * PAGE_BYTES)
        self._random = random.Random(entries)
        self._numbers = count()
        self._headers: list[ItemHeader] = []
        """Of every item ever saved, in order."""
        while self.rig.pool.free_bytes > MAX_PAGES * PAGE_BYTES:
            self.save(Samples(), Samples())
        self._headers_at_start = len(self._headers)

    def save(self, reserving: Samples, publishing: Samples) -> None:
        """One item, as a step that encodes it does; its bytes tell which item it is."""
        hierarchy = self.rig.hierarchy
        header = header_of(f"{next(self._numbers):064x}", self._rows(), ROW_ELEMENTS)
        with stopwatch() as reserve:
            lease = hierarchy.begin_save(header)
        reserving.add(reserve)
        assert lease is not None and lease.entry.obj is not None
        self._payload(lease)[:] = _stamp(header)
        with stopwatch() as publish:
            hierarchy.finish_save(lease, succeeded=True)
        publishing.add(publish)
        self._headers.append(header)

    def run(self) -> tuple[Samples, Samples]:
        """Time to reserve and time to publish."""
        reserving, publishing = Samples(), Samples()
        settle_memory()
        for _ in range(OPERATIONS):
            for header in self._random.choices(self._headers[-2 * self._headers_at_start :], k=USES):
                lease = self.rig.hierarchy.pin_resident(header.as_wanted())
                if lease is not None:
                    self.rig.hierarchy.release(lease)
            self.save(reserving, publishing)
        return reserving, publishing

    def hold(self) -> list[Lease]:
        """Hold a share of the items, here and there."""
        chosen = self._random.sample(self._headers, int(len(self._headers) * HELD_SHARE))
        leases = [self.rig.hierarchy.pin_resident(header.as_wanted()) for header in chosen]
        return [lease for lease in leases if lease is not None]

    def check(self) -> int:
        """Compare every item that is left with what was written; how many those are."""
        left = 0
        for header in self._headers:
            lease = self.rig.hierarchy.pin_resident(header.as_wanted())
            if lease is not None:
                left += 1
                assert (self._payload(lease) == _stamp(header)).all(), "an item's bytes are not its own"
                self.rig.hierarchy.release(lease)
        assert left == self.rig.hierarchy.num_entries and self.rig.pool._allocator.memcheck()
        return left

    def _rows(self) -> int:
        return int(MAX_PAGES ** self._random.random())

    def _payload(self, lease: Lease) -> np.ndarray:
        return np.frombuffer(self.rig.pool.payload_view(lease.entry.obj), dtype=np.uint64)


def test_reserving_in_a_full_pool() -> None:
    table = Table(
        "evict",
        "Reserving pool space for an item that is about to be encoded (TierHierarchy.begin_save)",
        "ms",
        (
            f"sizes from 1 to {MAX_PAGES} pages, evenly spread by their logarithm; {USES} items used in between",
            f"held: {HELD_SHARE:.0%} of the items are leased by requests and must stay",
            "every item that is left is compared with what was written",
        ),
    )
    for entries in ENTRIES:
        pool = FullPool(entries)
        reserving, publishing = pool.run()
        num_entries = pool.check()
        table.add(f"{num_entries:,} items, evicting", reserving, goal=Goal(0.3))
        table.add("  finish_save of the same", publishing)
        held = pool.hold()
        reserving, _ = pool.run()
        for lease in held:
            pool.rig.hierarchy.release(lease)
        table.add(f"{pool.check():,} items, evicting, {len(held):,} held", reserving, goal=Goal(0.3))
        pool.rig.close()
    table.publish()


def _stamp(header: ItemHeader) -> np.uint64:
    return np.uint64(int(header.mm_hash, 16) + 1)
