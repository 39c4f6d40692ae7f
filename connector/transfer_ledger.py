# SPDX-License-Identifier: Apache-2.0
"""Copies that workers have been told to make, and the thread that watches the board for their end.

An engine that idles calls no hook, so completions must not depend on one. What a transfer's end means for the bytes is
the hierarchy's business; the plan's content is the scheduler side's.
"""

import threading
from collections import Counter
from dataclasses import dataclass

from vllm.logger import init_logger

from storage_tiers.entry import Lease
from storage_tiers.hierarchy import TierHierarchy
from storage_tiers.transfer_board import SlotPool, TransferBoard, TransferStatus

__all__ = ["TransferLedger"]

logger = init_logger(f"vllm.{__name__}")

POLL_SECONDS = 0.002
"""How often the board is read while transfers are outstanding: a few microseconds per transfer."""


@dataclass(frozen=True, slots=True)
class _Outstanding:
    slot: int
    plan_number: int
    lease: Lease
    is_save: bool


class TransferLedger:
    """Hands out slots of the board, and ends leases as the workers report. Any thread."""

    def __init__(self, board: TransferBoard, hierarchy: TierHierarchy) -> None:
        """Starts the watching thread; `close` ends it."""
        self._board = board
        self._hierarchy = hierarchy
        self._slots = SlotPool(board.num_slots)
        self._outstanding: dict[int, _Outstanding] = {}
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="ec-watch", daemon=True)
        self._watcher.start()

    @property
    def num_outstanding(self) -> int:
        """Transfers that were planned and have not ended."""
        return len(self._outstanding)

    def counts(self) -> dict[str, int]:
        """Ended transfers since start: load_copied, load_copy_failed, save_copied, save_copy_failed."""
        with self._changed:
            return dict(self._counts)

    def reserve(self) -> int | None:
        """A cleared slot of the board for a transfer to be planned, or None when all are in use."""
        with self._changed:
            slot = self._slots.acquire()
        if slot is not None:
            self._board.clear_slot(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Return a slot whose transfer never went into a plan."""
        with self._changed:
            self._slots.release(slot)

    def open(self, slot: int, plan_number: int, lease: Lease, is_save: bool) -> None:
        """Watch a transfer that goes out with plan `plan_number`; its lease ends when every rank has reported."""
        with self._changed:
            self._outstanding[slot] = _Outstanding(slot, plan_number, lease, is_save)
            self._changed.notify()

    def poll(self) -> int:
        """Take up what workers have reported; the number of transfers still outstanding."""
        # Plan numbers first: a transfer without status in a plan that was complete before its status was read got none.
        completed = [self._board.completed_plan(rank) for rank in range(self._board.num_ranks)]
        with self._changed:
            waiting = list(self._outstanding.values())
        for transfer in waiting:
            succeeded = self._outcome(transfer, completed)
            if succeeded is not None:
                self._end(transfer, succeeded)
        return len(self._outstanding)

    def close(self, timeout_seconds: float = 1.0) -> int:
        """Take up the last reports and stop watching; the number of transfers that never ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._watcher.join(timeout_seconds)
        return self.poll()

    def _outcome(self, transfer: _Outstanding, completed: list[int]) -> bool | None:
        """True: done by all who take part. False: failed, or lost with its plan. None: not yet known."""
        ranks = (0,) if transfer.is_save else range(self._board.num_ranks)
        succeeded = True
        for rank in ranks:
            status = self._board.status(transfer.slot, rank)
            if status is TransferStatus.DEFERRED:
                return None
            if status is TransferStatus.EMPTY and completed[rank] < transfer.plan_number:
                return None
            succeeded &= status is TransferStatus.DONE
        return succeeded

    def _end(self, transfer: _Outstanding, succeeded: bool) -> None:
        with self._changed:
            if self._outstanding.pop(transfer.slot, None) is None:
                return  # another thread polled at the same time
            self._slots.release(transfer.slot)
            kind = "save" if transfer.is_save else "load"
            self._counts[f"{kind}_{'copied' if succeeded else 'copy_failed'}"] += 1
        if transfer.is_save:
            entry = transfer.lease.entry
            self._hierarchy.finish_save(transfer.lease, succeeded)
            if succeeded:  # LMCache's line, which its users look for
                logger.info("EC put: stored %d bytes for mm_hash=%s", entry.nbytes, entry.wanted.mm_hash)
        else:
            self._hierarchy.release(transfer.lease)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._outstanding)
                if self._closed:
                    return
            if self.poll():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, POLL_SECONDS)
