# SPDX-License-Identifier: Apache-2.0
"""The thread that copies freshly encoded items from the device into the shared pool, so that no step waits for it.

Knows tensors, where they go and when. What a copy is for, and who is told of its end, comes in from outside.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

import torch

from connector.step_plan import Transfer
from storage_tiers.block_mapping import ItemSource
from storage_tiers.faults import FaultLog

__all__ = ["CopyThread"]


@dataclass(slots=True)
class _Copy:
    save: Transfer
    source: ItemSource
    ready: torch.Event | None
    due: float
    """When the thread may begin, in seconds of the clock."""

    @property
    def kept_bytes(self) -> int:
        """Device memory that only this copy keeps alive."""
        return 0 if self.source.in_blocks else self.save.nbytes


class CopyThread:
    """One daemon thread over a queue, in the order in which copies are due; a new copy is due last of all.

    Bounded in the bytes of device memory that it alone keeps alive. An item in blocks counts nothing: there the cache
    is the bound. Copies that are not due yet are the device's dirty items.
    """

    def __init__(
        self,
        max_queued_bytes: int,
        target_of: Callable[[Transfer], torch.Tensor],
        finished: Callable[[Transfer, bool], None],
        faults: FaultLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both are called once per accepted copy, where it is made: where it goes, and `finished(save, done)`."""
        self._max_queued_bytes = max_queued_bytes
        self._target_of = target_of
        self._finished = finished
        self._faults = faults
        self._clock = clock
        self._due_now: OrderedDict[int, _Copy] = OrderedDict()
        self._due_later: OrderedDict[int, _Copy] = OrderedDict()
        self._queued_bytes = 0
        self._kept_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ec-copy", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the copies that wait or run. Any thread."""
        return self._queued_bytes

    def submit(self, save: Transfer, source: ItemSource, after_seconds: float = 0.0) -> bool:
        """Queue a copy; False when the queue is full or closed, and then `source` is not released.

        Step thread: O(1), copies nothing. `source` must not be written before it is released. With `after_seconds`,
        the same for all, the copy waits that long, unless it is expedited. A copy larger than the whole queue is taken
        when nothing else waits.
        """
        copy = _Copy(save, source, None, self._clock() + after_seconds)
        try:
            copy.ready = _event_after(source.views)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            # A device without events: only this thread's own order of work says when the rows are there.
            self._faults.report("device", "no_events", error)
            self._count_in(copy)
            self._carry_out(copy)
            return True
        with self._changed:
            full = copy.kept_bytes and self._kept_bytes and self._kept_bytes + copy.kept_bytes > self._max_queued_bytes
            if self._closed or full:
                return False
            queue = self._due_later if after_seconds else self._due_now
            queue[save.slot] = copy
            self._count_in(copy)
            self._changed.notify()
            return True

    def expedite(self, max_bytes: int) -> None:
        """Make the copies that have waited longest due, up to `max_bytes`, one at least. Step thread."""
        with self._changed:
            left = max_bytes
            while self._due_later and left > 0:
                slot, copy = self._due_later.popitem(last=False)
                self._due_now[slot] = copy
                left -= copy.save.nbytes
            self._changed.notify()

    def expedite_all_but(self, kept: Container[str]) -> None:
        """Make the copies of items that are not in `kept` due: nothing but the copy holds their blocks. Step thread."""
        with self._changed:
            for slot, copy in list(self._due_later.items()):
                if copy.save.mm_hash not in kept:
                    self._due_now[slot] = self._due_later.pop(slot)
            self._changed.notify()

    def spill(self, mm_hashes: Collection[str] | None) -> int:
        """Make the copies of these items, or of all, that still wait, here and now on the step thread; their bytes."""
        with self._changed:
            waiting = [
                queue.pop(slot)
                for queue in (self._due_now, self._due_later)
                for slot, copy in list(queue.items())
                if mm_hashes is None or copy.save.mm_hash in mm_hashes
            ]
        for copy in waiting:
            self._carry_out(copy)
        return sum(copy.save.nbytes for copy in waiting)

    def close(self, timeout_seconds: float) -> int:
        """Finish what is queued, due or not, and end the thread; bytes that were not copied when the time was up.

        Any other thread.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        return self._queued_bytes

    def _count_in(self, copy: _Copy) -> None:
        with self._changed:
            self._queued_bytes += copy.save.nbytes
            self._kept_bytes += copy.kept_bytes

    def _work(self) -> None:
        while (copy := self._next()) is not None:
            self._carry_out(copy)
            del copy  # the device memory goes back now, not when the next copy comes

    def _carry_out(self, copy: _Copy) -> None:
        succeeded = False
        try:
            if copy.ready is not None:
                copy.ready.synchronize()
            with torch.inference_mode():  # the source was made under it
                _copy_rows(copy.source.views, self._target_of(copy.save))
            succeeded = True
        except Exception as error:  # noqa: BLE001 - the thread must outlive it, and the source be let go of
            self._faults.report("device", "copy_failed", f"{copy.save.mm_hash}: {type(error).__name__}: {error}")
        finally:
            copy.source.release()
            self._finished(copy.save, succeeded)
            with self._changed:
                self._queued_bytes -= copy.save.nbytes
                self._kept_bytes -= copy.kept_bytes

    def _next(self) -> _Copy | None:
        """The next copy that is due; None at the end. Waits."""
        with self._changed:
            while True:
                if self._due_now:
                    return self._due_now.popitem(last=False)[1]
                first = next(iter(self._due_later.values()), None)
                if first is None and self._closed:
                    return None
                wait = None if first is None else first.due - self._clock()
                if first is not None and (self._closed or (wait is not None and wait <= 0)):
                    return self._due_later.popitem(last=False)[1]
                self._changed.wait(wait)


def _copy_rows(views: tuple[torch.Tensor, ...], target: torch.Tensor) -> None:
    row = 0
    for view in views:
        target[row : row + len(view)].copy_(view)
        row += len(view)


def _event_after(views: tuple[torch.Tensor, ...]) -> torch.Event | None:
    """An event behind the work that makes `views`, where the device runs apart from the host."""
    if not views or views[0].device.type == "cpu":
        return None
    event = torch.Event(device=views[0].device)
    event.record()
    return event
