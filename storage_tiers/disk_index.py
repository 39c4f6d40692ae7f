# SPDX-License-Identifier: Apache-2.0
"""What a cache directory holds, in memory: sizes by file name, least recently used first.

This room counts bytes and keeps the order. It never touches a file: whoever looked at the directory tells it.
"""

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

__all__ = ["DiskEntry", "DiskIndex", "Listing"]

_SECONDS_BITS = 40
_SECONDS_MASK = (1 << _SECONDS_BITS) - 1
_BATCH = 256
_PAUSE_SECONDS = 20e-6
"""Between batches a long loop really sleeps: to release the interpreter lock alone does not hand it over."""


class DiskEntry(NamedTuple):
    """One file of the directory, as the index knows it."""

    file_name: str
    size: int
    """Bytes of the whole file."""
    last_used: int
    """Seconds since the epoch, as the file's modification time says: up to a minute old."""


@dataclass
class Listing:
    """All entries found by one look at the directory, in columns: small objects would cost memory for nothing."""

    names: list[str] = field(default_factory=list)
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Bytes."""
    mtimes: "array[int]" = field(default_factory=lambda: array("q"))
    """Nanoseconds since the epoch."""

    def add(self, name: str, size: int, mtime_ns: int) -> None:
        """Append one entry; `size` in bytes."""
        self.names.append(name)
        self.sizes.append(size)
        self.mtimes.append(mtime_ns)

    def oldest_first(self) -> Iterator[DiskEntry]:
        """The entries by rising modification time. Sorts without the interpreter lock, which `list.sort` would hold."""
        order = np.argsort(np.array(self.mtimes, dtype=np.int64), kind="stable")
        for position in order.tolist():
            yield DiskEntry(self.names[position], self.sizes[position], self.mtimes[position] // 1_000_000_000)


def pause(done: int) -> None:
    """Let other threads run for 20 µs after every 256th step of a long loop, of which `done` steps are done."""
    if done % _BATCH == 0:
        time.sleep(_PAUSE_SECONDS)


class DiskIndex:
    """File name → size and last use, in order of use. Any thread; every call is a few dict operations.

    Size and seconds are packed into one integer, which keeps an entry under 500 bytes for any name a file can have.
    """

    def __init__(self) -> None:
        """An empty index."""
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, int] = OrderedDict()
        self._used_bytes = 0

    def __contains__(self, name: str) -> bool:
        """A dict look-up without a lock: step thread allowed."""
        return name in self._entries

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries together."""
        return self._used_bytes

    def size_of(self, name: str) -> int:
        """Bytes of one entry, 0 where there is none."""
        return self._entries.get(name, 0) >> _SECONDS_BITS

    def put(self, name: str, size: int, last_used: int) -> None:
        """Add or replace an entry of `size` bytes and make it the youngest; `last_used` in seconds since the epoch."""
        with self._lock:
            self._used_bytes += size - (self._entries.get(name, 0) >> _SECONDS_BITS)
            self._entries[name] = size << _SECONDS_BITS | last_used
            self._entries.move_to_end(name)

    def discard(self, name: str) -> bool:
        """Forget an entry; False when there was none."""
        with self._lock:
            packed = self._entries.pop(name, None)
            if packed is None:
                return False
            self._used_bytes -= packed >> _SECONDS_BITS
            return True

    def use(self, name: str, now: int, interval: int) -> bool:
        """Make an entry the youngest. True when what the file says of its last use is `interval` seconds old or more.

        The caller then writes `now` into the file. False as well when there is no such entry.
        """
        with self._lock:
            packed = self._entries.get(name)
            if packed is None:
                return False
            self._entries.move_to_end(name)
            if now - (packed & _SECONDS_MASK) < interval:
                return False
            self._entries[name] = packed & ~_SECONDS_MASK | now
            return True

    def oldest(self) -> DiskEntry | None:
        """The least recently used entry, or None when there is none."""
        with self._lock:
            for name, packed in self._entries.items():
                return _unpack(name, packed)
        return None

    def entries(self) -> list[DiskEntry]:
        """A copy of all entries, least recently used first."""
        with self._lock:
            entries = list(self._entries.items())
        return [_unpack(name, packed) for name, packed in entries]

    def reconcile(self, listing: Listing, *, first: bool = False) -> None:
        """Make the index equal to what was found in the directory, keeping the finer order of use that it knows.

        `first`: what is in the index already was added since the start, so it is younger than what is found now.
        Pauses often; while it runs nobody may add or remove files knowingly, but look-ups and uses go on.
        """
        with self._lock:
            known = list(self._entries)
        vanished = set(known)
        for done, entry in enumerate(listing.oldest_first()):
            vanished.discard(entry.file_name)
            self._take_up(entry)
            pause(done)
        for name in vanished:
            self.discard(name)
        if first:
            for name in known:
                self._make_youngest(name)

    def _take_up(self, entry: DiskEntry) -> None:
        with self._lock:
            packed = self._entries.get(entry.file_name)
            if packed is None or packed & _SECONDS_MASK < entry.last_used:
                self._entries[entry.file_name] = entry.size << _SECONDS_BITS | entry.last_used
                self._entries.move_to_end(entry.file_name)
            else:
                self._entries[entry.file_name] = entry.size << _SECONDS_BITS | packed & _SECONDS_MASK
            self._used_bytes += entry.size - ((packed or 0) >> _SECONDS_BITS)

    def _make_youngest(self, name: str) -> None:
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)


def _unpack(name: str, packed: int) -> DiskEntry:
    return DiskEntry(name, packed >> _SECONDS_BITS, packed & _SECONDS_MASK)
