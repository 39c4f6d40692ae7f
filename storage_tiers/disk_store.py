# SPDX-License-Identifier: Apache-2.0
"""Items in a directory by file name: read and verified, written, removed, checked, within a byte budget.

This room puts together format, I/O, index and budget, and turns damage into a miss. Whether an item is the one that is
wanted may not enter: that is for `disk_tier.py`, which asks for our hierarchy, and `persistent_disk.py`, for LMCache.
The administration (`entries`, `check`, `evict`) needs no model at all.

Faults that it counts: empty, no_trailer, torn, trailer, size, digest (damaged: the file is removed), remove_failed,
replaced (between probe and read), too_big, unstorable, no_space, direct_io_refused, touch_failed, scan_failed.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path
from typing import NamedTuple

from storage_tiers.disk_budget import DiskBudget
from storage_tiers.disk_directory import CacheDirectory
from storage_tiers.disk_index import DiskEntry, DiskIndex
from storage_tiers.disk_io import PayloadIo, file_digest
from storage_tiers.faults import FaultLog
from storage_tiers.file_format import BLOCK_BYTES, DamagedFile, decode_header, encode_trailer, padded_bytes
from storage_tiers.tier import ItemHeader

__all__ = ["DiskProblem", "DiskStore"]

_TOUCH_SECONDS = 60
_TIDY_SECONDS = 60.0
_JUDGE_LOCK_SECONDS = 1.0
"""A damaged file is a miss at once; to remove it is not worth waiting for a directory that is being looked through."""

ForeignHeader = Callable[[int], ItemHeader | None]
"""Given the size of a file without our trailer: the header to treat it with, or None to leave it alone."""


class DiskProblem(NamedTuple):
    """One entry that `check` found damaged."""

    file_name: str
    kind: str
    """As counted in the fault log: empty, no_trailer, torn, trailer, size, digest."""
    removed: bool


class DiskStore:
    """A directory of items. Any thread for `lists`; all else blocks on I/O and is for I/O threads."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        faults: FaultLog,
        *,
        label: str = "disk",
        direct_io: bool = False,
        touch_seconds: int = _TOUCH_SECONDS,
    ) -> None:
        """Open `directory`, creating it (0700) if need be, and start to look through it in the background.

        `capacity_bytes`: what all entries of the directory may take together, whoever wrote them. `touch_seconds`: the
        least time between two notes of an entry's use in its file. Raises NotADirectoryError, OSError, ValueError.
        """
        self.capacity_bytes = capacity_bytes
        self._faults = faults
        self._label = label
        self._touch_seconds = touch_seconds
        self._directory = CacheDirectory(directory)
        self._index = DiskIndex()
        self._budget = DiskBudget(self._directory, self._index, capacity_bytes)
        self._io = PayloadIo(direct=direct_io, on_refused=partial(self._report, "direct_io_refused"))
        self._scanned = threading.Event()
        self._closing = threading.Event()
        self._scanner = threading.Thread(target=self._scan, name="disk-tier-scan", daemon=True)
        self._scanner.start()

    @property
    def num_entries(self) -> int:
        """Entries that are known. Any thread."""
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries of the directory that are known of: all, once `wait_scanned` is True."""
        return self._index.used_bytes

    @property
    def evicted(self) -> tuple[int, int]:
        """Entries and bytes that this process has evicted since the start."""
        return self._budget.evicted_entries, self._budget.evicted_bytes

    def lists(self, name: str) -> bool:
        """Whether the index has an entry of that name: a dict look-up. False means unknown. Step thread allowed."""
        return name in self._index

    def header(self, name: str, foreign: ForeignHeader | None = None) -> ItemHeader | None:
        """The header of an entry, found by its file name even before it was listed; None where there is none.

        A damaged file is removed; one without our trailer counts as damaged unless `foreign` says what it is.
        Raises OSError.
        """
        with self._opened(name) as fd:
            if fd is None:
                return None
            status = os.fstat(fd)
            try:
                header = _header_in(fd, status.st_size)
            except DamagedFile as damage:
                return self._without_header(name, fd, damage, foreign)
            if self._index.size_of(name) != status.st_size:  # another process stored it
                self._index.put(name, status.st_size, int(status.st_mtime))
            return header

    def read_into(self, name: str, header: ItemHeader, payload: memoryview) -> bool:
        """Fill `payload` with the item that `header` was read from, and verify it by its digest.

        False where it is gone, was replaced, or is damaged, in which case it is removed. An item without a digest can
        only be told by its size. Raises OSError.
        """
        with self._opened(name) as fd:
            if fd is None:
                return False
            if not header.digest and os.fstat(fd).st_size != header.payload_bytes:
                self._report("replaced", name)
                return False
            digest = self._io.read(fd, payload)
            if digest is None or header.digest not in (b"", digest):
                self._judge(name, fd, header)
                return False
        self.touch(name)
        return True

    def write(self, name: str, header: ItemHeader, payload: memoryview) -> bool:
        """Store `payload`, whose digest is in `header`, as `name`, replacing what is there; True once it can be read.

        False, and counted, when it can never be stored. Waits for the directory to have been looked through. Makes room
        and tries once more when the file system is full. Raises OSError.
        """
        try:
            trailer = encode_trailer(header)
        except ValueError as error:
            self._report("unstorable", error)
            return False
        size = padded_bytes(len(payload)) + len(trailer)
        if size > self.capacity_bytes:
            self._report("too_big", f"{name}: {size} of {self.capacity_bytes} bytes")
            return False
        try:
            self._write_file(name, payload, trailer)
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
            self._report("no_space", error)
            # The file system needs a little beyond the bytes themselves.
            if not self._budget.make_room(size + size // 20 + 4 * BLOCK_BYTES):
                raise
            self._write_file(name, payload, trailer)
        return True

    def remove(self, name: str) -> bool:
        """Remove an entry; False when there was none. Raises OSError."""
        return self._budget.remove(name)

    def touch(self, name: str) -> None:
        """Make an entry the youngest, noting that in its file at most once a minute so that restarts know of it."""
        now = int(time.time())
        if not self._index.use(name, now, self._touch_seconds):
            return
        try:
            self._directory.touch(name, now)
        except FileNotFoundError:
            self._index.discard(name)
        except OSError as error:  # a read-only directory: recency is then this process's own
            self._report("touch_failed", error)

    def entries(self) -> Iterator[DiskEntry]:
        """All entries of all deployments in the directory, least recently used first. Any thread."""
        return iter(self._index.entries())

    def evict(self, nbytes: int) -> int:
        """Remove least recently used entries until `nbytes` are freed or none is left; bytes freed. Raises OSError."""
        return self._budget.evict(nbytes)

    def check(self, *, fix: bool = False) -> Iterator[DiskProblem]:
        """Read every entry and yield those that are damaged; `fix` removes them.

        A file without a trailer may be LMCache's own: it is yielded and never removed here. Raises OSError.
        """
        self.wait_scanned()
        for entry in self.entries():
            with self._opened(entry.file_name) as fd:
                if fd is None:
                    continue
                kind = _damage(fd)
                if kind is not None:
                    removed = fix and kind != "no_trailer" and self._budget.remove(entry.file_name, fd)
                    yield DiskProblem(entry.file_name, kind, removed)

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Wait until the directory was looked through, at most `timeout` seconds; whether it was."""
        return self._scanned.wait(timeout)

    def close(self) -> None:
        """Stop and join the background thread. What is stored stays."""
        self._closing.set()
        self._directory.stop_looking()
        self._scanner.join()

    def _scan(self) -> None:
        try:
            leftovers = self._budget.first_look()
            self._scanned.set()
            # A writer that died just now is known to be dead only after a while.
            while leftovers and not self._closing.wait(_TIDY_SECONDS):
                leftovers = self._budget.tidy()
        except InterruptedError:  # closed
            pass
        except OSError as error:
            self._report("scan_failed", error)
        finally:
            self._scanned.set()

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        fd = self._directory.open_entry(name)
        if fd is None:
            self._index.discard(name)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _write_file(self, name: str, payload: memoryview, trailer: bytes) -> None:
        temp = self._budget.new_temp()
        try:
            self._io.write(temp.fd, payload, trailer)
            self._budget.publish(temp, name, padded_bytes(len(payload)) + len(trailer))
        except OSError:
            temp.discard()
            raise

    def _without_header(
        self, name: str, fd: int, damage: DamagedFile, foreign: ForeignHeader | None
    ) -> ItemHeader | None:
        if damage.kind == "no_trailer" and foreign is not None:
            return foreign(os.fstat(fd).st_size)
        if damage.kind == "other_version":  # whole, and of use to whoever wrote it
            self._report(damage.kind, name)
        else:
            self._remove_damaged(name, fd, damage.kind)
        return None

    def _judge(self, name: str, fd: int, header: ItemHeader) -> None:
        """After a payload turned out not to be `header`'s: another item was put there, or this one is damaged."""
        try:
            now = _header_in(fd, os.fstat(fd).st_size)
        except DamagedFile as damage:
            self._remove_damaged(name, fd, damage.kind)
            return
        if now.digest == header.digest:
            self._remove_damaged(name, fd, "digest")
        else:
            self._report("replaced", name)

    def _remove_damaged(self, name: str, fd: int, kind: str) -> None:
        self._report(kind, name)
        try:
            self._budget.remove(name, fd, _JUDGE_LOCK_SECONDS)
        except OSError as error:  # a miss all the same; whoever asks next tries again
            self._report("remove_failed", error)

    def _report(self, kind: str, detail: object) -> None:
        # As text: an exception would keep its frames, and with them the caller's buffers, alive in a log record.
        self._faults.report(self._label, kind, str(detail))


def _header_in(fd: int, size: int) -> ItemHeader:
    return decode_header(size, partial(os.pread, fd))


def _damage(fd: int) -> str | None:
    """What is wrong with the file, as a kind, or None."""
    try:
        header = _header_in(fd, os.fstat(fd).st_size)
    except DamagedFile as damage:
        return None if damage.kind == "other_version" else damage.kind
    return None if file_digest(fd, header.payload_bytes) == header.digest else "digest"
