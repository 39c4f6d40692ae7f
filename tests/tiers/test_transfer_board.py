# SPDX-License-Identifier: Apache-2.0
"""The board: what one process writes is what the other reads, and nobody reads or writes beside it."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

import storage_tiers.transfer_board as module
from storage_tiers.transfer_board import MAX_GAUGES, RankGauge, SlotPool, TransferBoard, TransferStatus

ROOT = Path(__file__).parents[2]


def new_board(num_ranks: int = 3, num_slots: int = 70) -> TransferBoard:
    return TransferBoard(memoryview(bytearray(TransferBoard.nbytes_for(num_ranks, num_slots))), num_ranks, num_slots)


def test_a_status_is_seen_in_its_slot_and_rank_only() -> None:
    board = new_board()
    board.rank(1).set_status(69, TransferStatus.DONE)
    seen = {(s, r): board.status(s, r) for s in range(70) for r in range(3)}
    assert [at for at, status in seen.items() if status] == [(69, 1)]
    assert board.statuses(69) == (TransferStatus.EMPTY, TransferStatus.DONE, TransferStatus.EMPTY)


def test_clearing_a_slot_leaves_its_neighbours() -> None:
    board = new_board()
    for rank in range(3):
        for slot in (4, 5, 6):
            board.rank(rank).set_status(slot, TransferStatus.FAILED)
    board.clear_slot(5)
    assert board.statuses(5) == (TransferStatus.EMPTY,) * 3
    assert board.statuses(4) == board.statuses(6) == (TransferStatus.FAILED,) * 3


def test_everything_written_is_read_back_and_nothing_overlaps() -> None:
    board = new_board()
    for rank in range(3):
        view = board.rank(rank)
        view.complete_plan((1 << 64) - 1 - rank)
        for which in RankGauge:
            view.set_gauge(which, rank + which / 100)
        for slot in range(70):
            view.set_status(slot, TransferStatus((rank + slot) % 4))
    for rank in range(3):
        assert board.completed_plan(rank) == (1 << 64) - 1 - rank
        assert [board.gauge(rank, which) for which in RankGauge] == [rank + which / 100 for which in RankGauge]
        assert [board.status(slot, rank) for slot in range(70)] == [(rank + slot) % 4 for slot in range(70)]
    assert not board.attached()


def test_attached_means_every_rank() -> None:
    board = new_board()
    for rank in (2, 0, 1):
        assert not board.attached()
        board.rank(rank).attach()
    assert board.attached()


def test_plan_numbers_only_grow() -> None:
    board = new_board()
    board.rank(0).complete_plan(7)
    board.rank(0).complete_plan(7)
    with pytest.raises(ValueError, match="plan 6 completes after plan 7"):
        board.rank(0).complete_plan(6)
    with pytest.raises(OverflowError):
        board.rank(0).complete_plan(1 << 64)
    assert (board.completed_plan(0), board.completed_plan(1)) == (7, 0)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5), (1025, 1), (1, (1 << 20) + 1)])
def test_senseless_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no board has"):
        TransferBoard.nbytes_for(*sizes)


@pytest.mark.parametrize("sizes", [(1, 1), (8, 4096), (64, 1 << 16)])
def test_a_board_takes_whole_pages(sizes: tuple[int, int]) -> None:
    assert TransferBoard.nbytes_for(*sizes) % 4096 == 0


def test_memory_that_does_not_fit_is_refused() -> None:
    too_small = memoryview(bytearray(4096))
    with pytest.raises(ValueError, match="needs"):
        TransferBoard(too_small, 1, 5000)
    with pytest.raises(ValueError, match="writable"):
        TransferBoard(memoryview(bytes(TransferBoard.nbytes_for(1, 1))), 1, 1)
    with pytest.raises(ValueError, match="no board yet"):
        TransferBoard.attach(too_small)


def test_a_board_is_found_with_its_sizes_and_never_laid_over_another() -> None:
    memory = memoryview(bytearray(TransferBoard.nbytes_for(2, 100)))
    TransferBoard(memory, 2, 100).rank(1).set_status(99, TransferStatus.DEFERRED)
    found = TransferBoard.attach(memory)
    assert (found.num_ranks, found.num_slots) == (2, 100)
    assert found.status(99, 1) is TransferStatus.DEFERRED
    with pytest.raises(ValueError, match="carries a board of 2 ranks and 100 slots"):
        TransferBoard(memory, 1, 100)


@pytest.mark.parametrize("rank", [-1, 3])
def test_there_is_no_other_rank(rank: int) -> None:
    board = new_board()
    with pytest.raises(IndexError, match="rank"):
        board.rank(rank)
    with pytest.raises(IndexError, match="rank"):
        board.status(0, rank)
    with pytest.raises(IndexError, match="rank"):
        board.completed_plan(rank)
    with pytest.raises(IndexError, match="rank"):
        board.gauge(rank, RankGauge.SAVED_BYTES)


@pytest.mark.parametrize("slot", [-1, 70])
def test_there_is_no_other_slot(slot: int) -> None:
    board = new_board()
    with pytest.raises(IndexError, match="slot"):
        board.rank(0).set_status(slot, TransferStatus.DONE)
    with pytest.raises(IndexError, match="slot"):
        board.status(slot, 0)
    with pytest.raises(IndexError, match="slot"):
        board.statuses(slot)
    with pytest.raises(IndexError, match="slot"):
        board.clear_slot(slot)


def test_gauges_fit() -> None:
    assert max(RankGauge) < MAX_GAUGES
    assert len({int(which) for which in RankGauge}) == len(RankGauge)


WRITER = """
import mmap, os, sys
from storage_tiers.transfer_board import *
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, os.fstat(fd).st_size)
rank = TransferBoard.attach(memoryview(memory)).rank(int(sys.argv[2]))
rank.attach()
for number in range(1, 20001):
    rank.set_status(number % 64, TransferStatus(1 + number % 3))
    rank.set_gauge(RankGauge.SAVED_BYTES, float(number))
    rank.complete_plan(number)
"""


def test_another_process_is_seen_without_a_message(tmp_path: Path) -> None:
    """While two ranks write, plan numbers only grow and the gauge written before a number is never older than it."""
    path = tmp_path / "board"
    path.write_bytes(bytes(TransferBoard.nbytes_for(2, 64)))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    board = TransferBoard(memoryview(memory), 2, 64)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(rank)], cwd=ROOT) for rank in range(2)]
    last = [0, 0]
    while any(writer.poll() is None for writer in writers):
        for rank in range(2):
            number = board.completed_plan(rank)
            assert number >= last[rank]
            assert board.gauge(rank, RankGauge.SAVED_BYTES) >= number
            last[rank] = number
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [board.completed_plan(rank) for rank in range(2)] == [20000, 20000]
    assert board.attached()
    assert board.statuses(20000 % 64) == (TransferStatus(1 + 20000 % 3),) * 2


def test_the_fence_of_weakly_ordered_processors_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRONGLY_ORDERED", False)
    board = new_board()
    board.rank(0).set_status(3, TransferStatus.DONE)
    assert board.status(3, 0) is TransferStatus.DONE


def test_slots_are_handed_out_once_and_reused_last() -> None:
    slots = SlotPool(3)
    assert [slots.acquire() for _ in range(4)] == [0, 1, 2, None]
    slots.release(1)
    slots.release(0)
    assert slots.num_free == 2
    assert [slots.acquire(), slots.acquire()] == [1, 0]


@pytest.mark.parametrize("slot", [-1, 0, 3])
def test_a_slot_that_is_not_in_use_cannot_be_released(slot: int) -> None:
    with pytest.raises(ValueError, match="not in use"):
        SlotPool(3).release(slot)
