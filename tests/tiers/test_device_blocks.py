# SPDX-License-Identifier: Apache-2.0
"""The block cache: who owns which block, under every order of allocate, write, free, hold, load and clear."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage_tiers.device_blocks import BlockHold, BlocksExhaustedError, DeviceBlockCache

BLOCKS, SIZE, WIDTH = 9, 4, 3
HASHES = [f"item-{number}" for number in range(6)]
HOLD_MS = 100.0


def cache_of(num_blocks: int = BLOCKS, **options: object) -> DeviceBlockCache:
    return DeviceBlockCache(num_blocks, SIZE, WIDTH, dtype=torch.float32, **options)  # type: ignore[arg-type]


def content(num_tokens: int, seed: float) -> torch.Tensor:
    """Rows that are told apart from each other and from those of every other seed."""
    return torch.arange(num_tokens * WIDTH, dtype=torch.float32).view(num_tokens, WIDTH) + seed * 1000


class Books(RuleBasedStateMachine):
    """The cache beside a plain dict of what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.seed = 0.0
        self.expected: dict[str, torch.Tensor] = {}
        self.owned: dict[str, list[int]] = {}
        self.written: dict[str, float] = {}
        self.holds: list[tuple[BlockHold, torch.Tensor, list[int]]] = []

    @initialize(min_hold=st.sampled_from([0.0, HOLD_MS]))
    def start(self, min_hold: float) -> None:
        self.min_hold = min_hold
        self.cache = cache_of(min_hold_time_ms=min_hold, clock=lambda: self.now)

    def forget(self, mm_hash: str) -> None:
        self.expected.pop(mm_hash, None)
        self.owned.pop(mm_hash, None)

    def blocks_of_holds(self) -> set[int]:
        return {block for _, _, blocks in self.holds for block in blocks}

    @rule(mm_hash=st.sampled_from(HASHES), tokens=st.lists(st.integers(0, SIZE), min_size=1, max_size=BLOCKS + 1))
    def allocate_and_write_in_place(self, mm_hash: str, tokens: list[int]) -> None:
        """As a vision graph does: blocks with pads inside, written behind the cache's back."""
        before = self.cache.num_free_blocks + self.cache.num_held_blocks + self.cache.num_active_blocks
        if len(tokens) > BLOCKS - 1:
            with pytest.raises(ValueError, match="num_blocks is too small"):
                self.cache.allocate(mm_hash, tokens)
            return
        try:
            ids = self.cache.allocate(mm_hash, tokens)
        except BlocksExhaustedError:
            assert len(tokens) > self.cache.num_free_blocks
            assert before == BLOCKS - 1
            return
        assert len(ids) == len(tokens)
        self.seed += 1
        parts = []
        for index, (block, count) in enumerate(zip(ids, tokens, strict=True)):
            rows = content(count, self.seed * 100 + index)
            self.cache.buffer[block, :count] = rows
            self.cache.buffer[block, count:] = -1
            parts.append(rows)
        self.cache.mark_written(mm_hash)
        self.expected[mm_hash], self.owned[mm_hash] = torch.cat(parts), ids
        assert self.cache.get_tokens_per_block(mm_hash) == tokens

    @rule(mm_hash=st.sampled_from(HASHES), num_tokens=st.integers(1, SIZE * (BLOCKS - 1)))
    def put(self, mm_hash: str, num_tokens: int) -> None:
        self.seed += 1
        rows = content(num_tokens, self.seed)
        try:
            self.cache.put(mm_hash, rows)
        except BlocksExhaustedError:
            assert -(-num_tokens // SIZE) > self.cache.num_free_blocks
            return
        self.expected[mm_hash], self.owned[mm_hash] = rows, self.cache.get_block_ids(mm_hash)

    @rule(mm_hash=st.sampled_from(HASHES))
    def free(self, mm_hash: str) -> None:
        self.cache.free(mm_hash)
        self.forget(mm_hash)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        mm_hash = data.draw(st.sampled_from(sorted(self.expected)))
        self.holds.append((self.cache.hold(mm_hash), self.expected[mm_hash], self.owned[mm_hash]))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold, _, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.release()

    @rule(seconds=st.sampled_from([0.01, 0.2]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reclaim(self) -> None:
        free = self.cache.num_free_blocks
        assert self.cache.reclaim_held() == self.cache.num_free_blocks - free

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.expected.clear()
        self.owned.clear()

    @rule()
    def nothing_is_lost(self) -> None:
        """With nothing held and time gone by, every block that no item owns can be had again."""
        if self.holds:
            return
        self.now += 1
        self.cache.reclaim_held()
        assert self.cache.num_held_blocks == 0
        assert self.cache.can_allocate(BLOCKS - 1 - self.cache.num_active_blocks)

    @invariant()
    def books_balance(self) -> None:
        cache = self.cache
        assert cache.num_active_blocks + cache.num_free_blocks + cache.num_held_blocks == BLOCKS - 1
        assert cache.num_active_blocks == sum(map(len, self.owned.values()))
        assert cache.num_real_tokens == sum(map(len, self.expected.values()))

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for mm_hash in self.expected for block in self.cache.get_block_ids(mm_hash)]
        assert len(owned) == len(set(owned))
        assert self.cache.scratch_block_id not in owned
        assert all(0 <= block < BLOCKS for block in owned)

    @invariant()
    def what_was_written_is_read(self) -> None:
        assert set(self.cache.hashes()) == set(self.expected)
        for mm_hash, rows in self.expected.items():
            assert torch.equal(self.cache.get(mm_hash), rows)
            assert torch.equal(torch.cat([*self.cache.views(mm_hash), rows[:0]]), rows)

    @invariant()
    def what_is_held_stays(self) -> None:
        for hold, rows, _ in self.holds:
            assert torch.equal(torch.cat([*hold.views, rows[:0]]), rows)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_item_in_adjacent_blocks_is_read_without_a_copy() -> None:
    cache = cache_of()
    cache.put("a", content(10, 1))
    assert cache.get("a").data_ptr() == cache.buffer[cache.get_block_ids("a")[0]].data_ptr()
    assert cache.get_tokens_per_block("a") == [4, 4, 2]


def test_adjacent_blocks_are_found_behind_scattered_ones() -> None:
    cache = cache_of()
    for number in range(8):
        cache.put(f"{number}", content(4, number))
    for number in (0, 2, 5, 6, 7):
        cache.free(f"{number}")
    assert cache.allocate("three", [4, 4, 4]) == [5, 6, 7]


def test_free_blocks_are_reused_in_the_order_in_which_they_were_freed() -> None:
    cache = cache_of()
    for number in range(8):
        cache.put(f"{number}", content(4, number))
    for number in (6, 1, 4):
        cache.free(f"{number}")
    assert [cache.allocate(f"new-{number}", [1])[0] for number in range(3)] == [6, 1, 4]


def test_the_minimum_hold_time_counts_from_the_last_write_or_load() -> None:
    now = [0.0]
    cache = cache_of(2, min_hold_time_ms=HOLD_MS, clock=lambda: now[0])
    cache.put("loaded", content(3, 1))
    now[0] = 0.05
    cache.free("loaded")
    assert (cache.num_held_blocks, cache.can_allocate(1)) == (1, False)
    now[0] = 0.11
    assert cache.can_allocate(1)


def test_a_full_cache_refuses_at_once_and_changes_nothing() -> None:
    cache = cache_of(3)
    cache.put("a", content(8, 1))
    hold = cache.hold("a")
    cache.free("a")
    with pytest.raises(BlocksExhaustedError, match="0 are active, 2 held and 0 free"):
        cache.put("b", content(4, 2))
    assert cache.hashes() == []
    hold.release()
    cache.put("b", content(4, 2))


def test_a_hold_is_released_from_another_thread() -> None:
    cache = cache_of(3)
    cache.put("a", content(8, 1))
    hold = cache.hold("a")
    cache.free("a")
    thread = threading.Thread(target=hold.release)
    thread.start()
    thread.join()
    assert cache.can_allocate(2)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"num_blocks": 1}, "num_blocks = 1"),
        ({"block_size": 0}, "block_size = 0"),
        ({"fat_dim": 0}, "fat_dim = 0"),
        ({"min_hold_time_ms": -1.0}, "min_hold_time_ms = -1.0"),
    ],
)
def test_sizes_that_hold_nothing_are_refused(options: dict[str, float], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        DeviceBlockCache(**{"num_blocks": 2, "block_size": 4, "fat_dim": 3, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, WIDTH + 1), torch.zeros(2, WIDTH, dtype=torch.bfloat16), torch.zeros(2)]
)
def test_another_width_or_dtype_is_refused_with_both(rows: torch.Tensor) -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match=r"the cache holds torch.float32\[tokens, 3\]"):
        cache.put("a", rows)
    assert cache.num_free_blocks == BLOCKS - 1


@pytest.mark.parametrize("tokens", [[], [SIZE + 1], [-1]])
def test_token_counts_that_fit_no_block_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="a block holds 4"):
        cache_of().allocate("a", tokens)
