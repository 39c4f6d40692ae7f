# SPDX-License-Identifier: Apache-2.0
"""Keeps a directory within its byte budget; the only room that publishes into it or removes from it.

A budget belongs to the directory, not to a process: it counts the entries of all processes and deployments, including
those from before the start, and whoever publishes makes the room under a lock that all processes share. What others
did meanwhile shows in the directory's modification time and is looked up before a decision. No payload and no format
may enter.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage_tiers.disk_directory import CacheDirectory, TempFile
from storage_tiers.disk_index import DiskEntry, DiskIndex

__all__ = ["DiskBudget"]

_LOCK_SECONDS = 30.0
_TURN_SECONDS = 0.2
"""Longest that one process removes files before others get the lock: a budget that was lowered may free terabytes."""
_CHEAP_REFRESH_SECONDS = 0.005
_REFRESH_DUTY = 20
"""Looking through a directory that others keep changing takes at most 1/20 of a processor, once it takes over 5 ms."""


class DiskBudget:
    """Publishes, removes and evicts entries of `directory` and keeps `index` equal to it. I/O threads only."""

    def __init__(self, directory: CacheDirectory, index: DiskIndex, capacity_bytes: int) -> None:
        """`capacity_bytes`: what all entries together may take. Raises ValueError unless that is positive."""
        if capacity_bytes <= 0:
            raise ValueError(f"disk tier: a capacity of {capacity_bytes} bytes holds nothing")
        self.capacity_bytes = capacity_bytes
        self.evicted_entries = 0
        """Entries that this process has evicted."""
        self.evicted_bytes = 0
        """Bytes of those entries."""
        self._directory = directory
        self._index = index
        self._mutex = threading.Lock()
        self._seen_ns = -1
        self._next_refresh = 0.0

    def first_look(self) -> bool:
        """Tidy up and fill the index from the directory; publishing waits for the end of it. Returns what `tidy` does.

        Raises OSError; the next publication then looks again.
        """
        with self._mutex:
            remain = self._directory.tidy()
            self._refresh(first=True)
            return remain

    def tidy(self) -> bool:
        """Remove what dead writers left; True when temporary files remain. Raises OSError."""
        with self._mutex:
            return self._directory.tidy()

    def new_temp(self) -> TempFile:
        """A file to write an entry to. Waits up to 30 s for the first look. Raises OSError (TimeoutError is one)."""
        with self._exclusive(_LOCK_SECONDS), self._own_change():
            return self._directory.new_temp()

    def publish(self, temp: TempFile, name: str, size: int) -> None:
        """Evict what must go for `size` more bytes, then make `temp` the entry `name`, in one step for other processes.

        Raises OSError, and TimeoutError (an OSError) when another process holds the directory for 30 s; `temp` is then
        the caller's to discard.
        """

        def excess() -> int:
            return self._index.used_bytes - self._index.size_of(name) + size - self.capacity_bytes

        while True:
            with self._exclusive(_LOCK_SECONDS):
                self._look_again()
                if self._shrink(excess):
                    with self._own_change():
                        temp.publish(self._directory.path_of(name))
                    self._index.put(name, size, int(time.time()))
                    return

    def remove(self, name: str, only_fd: int | None = None, timeout_seconds: float = _LOCK_SECONDS) -> bool:
        """Remove an entry, with `only_fd` only while it is the very file open there; False when there was none.

        Raises OSError, and TimeoutError (an OSError) after `timeout_seconds`.
        """
        with self._exclusive(timeout_seconds):
            if only_fd is not None and not self._directory.is_still(name, only_fd):
                return False
            return self._unlink(name)

    def evict(self, nbytes: int) -> int:
        """Remove least recently used entries until `nbytes` are freed or none is left; bytes freed. Raises OSError."""
        target = self.evicted_bytes + nbytes
        while True:
            with self._exclusive(_LOCK_SECONDS):
                self._look_again(patient=True)
                if self._shrink(lambda: target - self.evicted_bytes):
                    return self.evicted_bytes - target + nbytes

    def make_room(self, nbytes: int) -> bool:
        """After the file system said that it is full: evict so much that `nbytes` fit. Raises OSError.

        False, with nothing evicted, where evicting everything would not be enough.
        """
        free = self._directory.free_bytes()
        if free + self._index.used_bytes < nbytes:
            return False
        # A quota's limit need not show in what the file system calls free: then evict all that is needed.
        return self.evict(nbytes - free if free < nbytes else nbytes) > 0

    @contextmanager
    def _held(self, timeout_seconds: float) -> Iterator[None]:
        if not self._mutex.acquire(timeout=timeout_seconds):
            raise TimeoutError(f"disk tier: {self._directory.path} was busy for {timeout_seconds} s")
        try:
            yield
        finally:
            self._mutex.release()

    @contextmanager
    def _exclusive(self, timeout_seconds: float) -> Iterator[None]:
        """Alone among threads and processes."""
        with self._held(timeout_seconds), self._directory.locked(timeout_seconds):
            yield

    @contextmanager
    def _own_change(self) -> Iterator[None]:
        """Around one change of ours: it is none of another process, but what others changed before it stays unseen.

        Only within `_exclusive`, or what another process does at the same moment would be taken for ours.
        """
        unseen = self._directory.modified_ns() != self._seen_ns
        yield
        if not unseen:
            self._seen_ns = self._directory.modified_ns()

    def _look_again(self, *, patient: bool = False) -> None:
        """Take up what other processes did; unless `patient`, not if that was done lately and takes long."""
        if self._directory.modified_ns() != self._seen_ns and (patient or time.monotonic() >= self._next_refresh):
            self._refresh()

    def _refresh(self, *, first: bool = False) -> None:
        started = time.thread_time()
        seen_ns = self._directory.modified_ns()  # before the look: what changes during it stays unseen
        self._index.reconcile(self._directory.list_entries(), first=first)
        self._seen_ns = seen_ns
        took = time.thread_time() - started
        self._next_refresh = time.monotonic() + took * _REFRESH_DUTY if took > _CHEAP_REFRESH_SECONDS else 0.0

    def _shrink(self, excess: Callable[[], int]) -> bool:
        """Evict until `excess` bytes are zero or less, or nothing is left; False when the turn is over before that."""
        turn_ends = time.monotonic() + _TURN_SECONDS
        while excess() > 0:
            oldest = self._index.oldest()
            if oldest is None:
                break
            if time.monotonic() > turn_ends:
                return False
            self._evict_one(oldest)
        return True

    def _evict_one(self, entry: DiskEntry) -> None:
        found = self._directory.entry_status(entry.file_name)
        if found is not None and found.last_used > entry.last_used:
            # Another process has used or replaced it: it is not the oldest.
            self._index.put(*found)
        elif self._unlink(entry.file_name) and found is not None:
            self.evicted_entries += 1
            self.evicted_bytes += found.size

    def _unlink(self, name: str) -> bool:
        try:
            with self._own_change():
                self._directory.unlink(name)
        except FileNotFoundError:
            return False
        finally:
            self._index.discard(name)
        return True
