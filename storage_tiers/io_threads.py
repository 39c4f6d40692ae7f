# SPDX-License-Identifier: Apache-2.0
"""The threads on which everything below the pool happens: reads that requests wait for before writes nobody waits for.

This room knows jobs, not tiers: what a job does, and what its failure means, is the hierarchy's business.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from storage_tiers.faults import FaultLog

__all__ = ["IoThreads"]

Job = Callable[[], None]


class IoThreads:
    """A fixed number of daemon threads over two queues. Reads come first, and writes never hold the last thread."""

    def __init__(self, num_threads: int, max_queued_reads: int, faults: FaultLog, name: str = "ec-io") -> None:
        """At least two threads, whatever `num_threads`: one for reads alone, so that no write holds the last.

        `max_queued_reads` bounds reads that wait; writes are bounded by who submits them.
        """
        num_threads = max(2, num_threads)
        self._max_queued_reads = max_queued_reads
        self._max_running_writes = num_threads - 1
        self._faults = faults
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._running_reads = 0
        self._running_writes = 0
        self._closed = False
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        """Where idle threads wait. Nobody else may: one job wakes one waiter."""
        self._drained = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_reads(self) -> int:
        """Reads that wait for a thread. Any thread."""
        return len(self._reads)

    @property
    def pending_writes(self) -> int:
        """Writes that wait or run. Any thread."""
        return len(self._writes) + self._running_writes

    def submit_read(self, job: Job) -> bool:
        """Queue a job that a request waits for. False when the queue is full or closed: a miss. Any thread."""
        with self._changed:
            if self._closed or len(self._reads) >= self._max_queued_reads:
                return False
            self._reads.append(job)
            self._changed.notify()
            return True

    def submit_write(self, job: Job) -> bool:
        """Queue a job that nobody waits for. False once closed. The caller bounds how many there are. Any thread."""
        with self._changed:
            if self._closed:
                return False
            self._writes.append(job)
            self._changed.notify()
            return True

    def drain_writes(self, timeout_seconds: float) -> bool:
        """Wait until no write waits or runs; False when the time is up first. Never call it from the step thread."""
        with self._drained:
            return self._drained.wait_for(lambda: not self._writes and not self._running_writes, timeout_seconds)

    def close(self, timeout_seconds: float = 1.0) -> bool:
        """Drop queued jobs, let running ones end, join. False when a thread hangs in I/O: it is a daemon, and is left.

        Call from any thread but these.
        """
        with self._changed:
            self._closed = True
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
            self._drained.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, is_write = taken
            del taken  # or an idle thread would keep its last job alive
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the edge of a thread, which must live
                self._faults.report("hierarchy", "io_job_failed", repr(error))
            finally:
                del job
                self._done(is_write)

    def _take(self) -> tuple[Job, bool] | None:
        with self._changed:
            while not self._closed:
                if self._reads:
                    self._running_reads += 1
                    return self._reads.popleft(), False
                if self._writes and self._running_writes < self._max_running_writes:
                    self._running_writes += 1
                    return self._writes.popleft(), True
                self._changed.wait()
            return None

    def _done(self, is_write: bool) -> None:
        with self._changed:
            if is_write:
                self._running_writes -= 1
            else:
                self._running_reads -= 1
            self._changed.notify()  # a thread that passed over a write because too many ran may take it now
            self._drained.notify_all()
