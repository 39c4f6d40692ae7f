# SPDX-License-Identifier: Apache-2.0
"""The pool's ranges: what must hold after any history, checked against brute force on small pools."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage_tiers.pool_allocator import PoolAllocator

ALIGN = 16
POOL = 40 * ALIGN


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of allocations, frees and searches. Prices are small integers, so sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolAllocator(POOL + ALIGN - 1, ALIGN)
        self.taken: dict[int, int] = {}
        self.prices: dict[int, int | None] = {}

    @rule(nbytes=st.integers(1, POOL // 2), price=st.one_of(st.none(), st.integers(0, 9)))
    def allocate(self, nbytes: int, price: int | None) -> None:
        size = -(-nbytes // ALIGN) * ALIGN
        fitting = [s for _, s, used in self.pool if not used and s >= size]
        offset = self.pool.allocate(nbytes)
        assert (offset is not None) == bool(fitting)
        if offset is not None:
            self.taken[offset] = size
            self.prices[offset] = price

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.free(offset)
        del self.taken[offset], self.prices[offset]
        with pytest.raises(ValueError, match="freed twice"):
            self.pool.free(offset)

    @rule(nbytes=st.integers(1, POOL + ALIGN))
    def window_is_minimal(self, nbytes: int) -> None:
        before = list(self.pool)
        window = self.pool.cheapest_window(nbytes, self.prices.get)
        assert list(self.pool) == before, "a search changes nothing"
        best = brute_force_cost(self.pool, nbytes, self.prices.get)
        if window is None:
            assert best is None
            return
        prices = [self.prices[offset] for offset in window]
        assert None not in prices, "what must stay is in no window"
        assert sum(price or 0 for price in prices) == best

    @rule(nbytes=st.integers(1, POOL), max_scan=st.integers(1, 6))
    def evicting_any_window_makes_room(self, nbytes: int, max_scan: int) -> None:
        window = self.pool.cheapest_window(nbytes, self.prices.get, max_scan)
        if window is None:
            return
        for offset in window:
            assert self.prices[offset] is not None
            self.pool.free(offset)
            del self.taken[offset], self.prices[offset]
        offset = self.pool.allocate(nbytes)
        assert offset is not None
        self.taken[offset] = self.pool.size_of(offset)
        self.prices[offset] = 1

    @invariant()
    def ranges_tile_the_pool(self) -> None:
        end, used_bytes, previous_used = 0, 0, True
        for offset, size, used in self.pool:
            assert offset == end and offset % ALIGN == 0 and size % ALIGN == 0 and size > 0
            assert used or previous_used, "neighbouring free ranges are one"
            if used:
                assert self.taken[offset] == size == self.pool.size_of(offset)
                used_bytes += size
            end, previous_used = end + size, used
        assert end == self.pool.size_bytes == POOL
        assert used_bytes == self.pool.used_bytes == sum(self.taken.values())
        assert self.pool.free_bytes == POOL - used_bytes
        assert self.pool.largest_free_bytes == max((s for _, s, used in self.pool if not used), default=0)
        assert self.pool.num_ranges == len(list(self.pool))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def brute_force_cost(pool: PoolAllocator, nbytes: int, cost_of: Callable[[int], float | None]) -> float | None:
    """The least cost over all pairs of ends."""
    ranges = list(pool)
    best = math.inf
    for first in range(len(ranges)):
        size, cost = 0, 0.0
        for offset, range_size, used in ranges[first:]:
            price = cost_of(offset) if used else 0.0
            if price is None:
                break
            size, cost = size + range_size, cost + price
            if size >= nbytes:
                best = min(best, cost)
                break
    return None if best == math.inf else best


def filled(num_ranges: int) -> PoolAllocator:
    pool = PoolAllocator(num_ranges * ALIGN, ALIGN)
    for _ in range(num_ranges):
        assert pool.allocate(ALIGN) is not None
    return pool


def test_best_fit_leaves_the_large_range_whole() -> None:
    pool = PoolAllocator(10 * ALIGN, ALIGN)
    first = pool.allocate(2 * ALIGN)
    pool.allocate(ALIGN)
    assert first is not None
    pool.free(first)
    assert pool.allocate(2 * ALIGN - 1) == first
    assert pool.largest_free_bytes == 7 * ALIGN


def test_everything_freed_is_one_range_again() -> None:
    pool = filled(50)
    offsets = [offset for offset, _, _ in pool]
    random.Random(5).shuffle(offsets)
    for offset in offsets:
        pool.free(offset)
    assert list(pool) == [(0, 50 * ALIGN, False)]


def test_a_hopeless_request_is_none_and_changes_nothing() -> None:
    pool = filled(30)
    assert pool.cheapest_window(31 * ALIGN, lambda _: 0.0) is None
    assert pool.cheapest_window(2 * ALIGN, lambda offset: None if offset % (2 * ALIGN) else 1.0) is None
    assert pool.used_bytes == 30 * ALIGN


def test_room_that_is_free_already_costs_nothing() -> None:
    pool = PoolAllocator(4 * ALIGN, ALIGN)
    pool.allocate(ALIGN)
    assert pool.cheapest_window(3 * ALIGN, lambda _: 1.0) == []


@pytest.mark.parametrize("price", [math.inf, math.nan, -1.0])
def test_what_is_no_price_is_not_evictable(price: float) -> None:
    assert filled(4).cheapest_window(ALIGN, lambda _: price) is None


def test_a_large_cost_that_left_the_window_leaves_no_trace() -> None:
    pool = filled(4)
    costs = {0: 1.0, ALIGN: 1e18, 2 * ALIGN: 3.0, 3 * ALIGN: 3.0}
    assert pool.cheapest_window(ALIGN, costs.__getitem__) == [0]


def test_work_is_bounded_and_the_hand_goes_round() -> None:
    pool = filled(1000)
    seen: list[int] = []

    def cost_of(offset: int) -> float:
        seen.append(offset)
        return 1.0

    for _ in range(12):
        before = len(seen)
        assert pool.cheapest_window(2 * ALIGN, cost_of, max_scan=100) is not None
        assert len(seen) - before == 100
    assert set(seen) == {offset for offset, _, _ in pool}


def test_a_scan_that_finds_nothing_moves_on() -> None:
    """One evictable pair far from the start is found after a few calls, none of which prices the whole pool."""
    pool = filled(1000)
    good = {700 * ALIGN, 701 * ALIGN}
    priced: list[int] = []

    def cost_of(offset: int) -> float | None:
        priced.append(offset)
        return 1.0 if offset in good else None

    window = None
    while window is None and len(priced) < 1200:
        before = len(priced)
        window = pool.cheapest_window(2 * ALIGN, cost_of, max_scan=100)
        assert len(priced) - before <= 102
    assert window == sorted(good)


def test_a_window_wider_than_the_bound_is_still_found() -> None:
    assert len(filled(1000).cheapest_window(500 * ALIGN, lambda _: 1.0, max_scan=10) or ()) == 500


def test_the_hand_survives_the_merge_of_its_range() -> None:
    pool = filled(20)
    pool.cheapest_window(ALIGN, lambda _: 1.0, max_scan=5)  # leaves the hand on the fifth range
    pool.free(3 * ALIGN)
    pool.free(4 * ALIGN)
    assert pool.cheapest_window(3 * ALIGN, lambda _: 1.0, max_scan=5) == [5 * ALIGN]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_that_is_not_positive_is_refused(nbytes: int) -> None:
    pool = PoolAllocator(POOL, ALIGN)
    with pytest.raises(ValueError, match="cannot allocate"):
        pool.allocate(nbytes)
    with pytest.raises(ValueError, match="cannot allocate"):
        pool.cheapest_window(nbytes, lambda _: 0.0)


def test_a_pool_below_one_range_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        PoolAllocator(ALIGN - 1, ALIGN)


@pytest.mark.parametrize("offset", [ALIGN, 3, -ALIGN])
def test_an_unknown_offset_is_refused(offset: int) -> None:
    pool = PoolAllocator(POOL, ALIGN)
    with pytest.raises(ValueError, match="no range in use"):
        pool.free(offset)
    with pytest.raises(ValueError, match="no range in use"):
        pool.size_of(offset)


def test_mixed_sizes_reach_a_high_fill() -> None:
    """0.2 to 131 MB in 4 GB, evicting by bytes over age; LMCache's first fit fails at 0.58 to 0.89 of the pool."""
    rng = random.Random(11)
    pool = PoolAllocator(4 << 30)
    used_at: dict[int, int] = {}
    fills = []
    for tick in range(1500):
        nbytes = int(math.exp(rng.uniform(math.log(0.2), math.log(131))) * (1 << 20))
        offset = pool.allocate(nbytes)
        if offset is None:
            window = pool.cheapest_window(nbytes, lambda at, now=tick: pool.size_of(at) / (now - used_at[at] + 1), 512)
            assert window is not None
            for evicted in window:
                pool.free(evicted)
                del used_at[evicted]
            offset = pool.allocate(nbytes)
            assert offset is not None
            fills.append(pool.used_bytes / pool.size_bytes)
        used_at[offset] = tick
    assert min(fills) > 0.95
