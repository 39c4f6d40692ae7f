# SPDX-License-Identifier: Apache-2.0
"""The thread that copies freshly encoded items from the device into the shared pool, so that no step waits for it.

Knows tensors and where they go. What a copy is for, and who is told of its end, comes in from outside.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from connector.step_plan import Transfer
from storage_tiers.faults import FaultLog

__all__ = ["CopyThread"]


@dataclass(slots=True)
class _Copy:
    save: Transfer
    source: torch.Tensor
    ready: torch.Event | None


class CopyThread:
    """One daemon thread over a queue that is bounded in bytes, since every queued copy keeps device memory alive."""

    def __init__(
        self,
        max_queued_bytes: int,
        target_of: Callable[[Transfer], torch.Tensor],
        finished: Callable[[Transfer, bool], None],
        faults: FaultLog,
    ) -> None:
        """Both are called on the copy thread, once per accepted copy: where it goes, and `finished(save, done)`."""
        self._max_queued_bytes = max_queued_bytes
        self._target_of = target_of
        self._finished = finished
        self._faults = faults
        self._copies: deque[_Copy] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ec-copy", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the copies that wait or run. Any thread."""
        return self._queued_bytes

    def submit(self, save: Transfer, source: torch.Tensor) -> bool:
        """Queue a copy; False when the queue is full or closed. Step thread: O(1), copies nothing.

        `source` must not be written any more: the runner never writes an encoder output twice. A copy larger than the
        whole queue is taken when nothing else waits.
        """
        ready = _event_after(source)
        with self._changed:
            full = self._queued_bytes and self._queued_bytes + save.nbytes > self._max_queued_bytes
            if self._closed or full:
                return False
            self._copies.append(_Copy(save, source, ready))
            self._queued_bytes += save.nbytes
            self._changed.notify()
            return True

    def close(self, timeout_seconds: float) -> int:
        """Finish what is queued, end the thread; bytes that were not copied when the time was up. Any other thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        return self._queued_bytes

    def _work(self) -> None:
        while (copy := self._next()) is not None:
            succeeded = False
            try:
                if copy.ready is not None:
                    copy.ready.synchronize()
                with torch.inference_mode():  # `source` was made under it
                    self._target_of(copy.save).copy_(copy.source)
                succeeded = True
            except RuntimeError as error:  # what torch raises for every failure of a device
                self._faults.report("device", "copy_failed", f"{copy.save.mm_hash}: {error}")
            self._finished(copy.save, succeeded)
            with self._changed:
                self._queued_bytes -= copy.save.nbytes
            del copy  # the device memory goes back now, not when the next copy comes

    def _next(self) -> _Copy | None:
        with self._changed:
            while not self._copies and not self._closed:
                self._changed.wait()
            return self._copies.popleft() if self._copies else None


def _event_after(source: torch.Tensor) -> torch.Event | None:
    """An event behind the work that makes `source`, where the device runs apart from the host."""
    if source.device.type == "cpu":
        return None
    event = torch.Event(device=source.device)
    event.record()
    return event
