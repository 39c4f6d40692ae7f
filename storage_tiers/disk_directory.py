# SPDX-License-Identifier: Apache-2.0
"""The directory of the disk tier: which names are entries, how a file is opened, written aside, published and listed.

This room makes one system call after the other and decides nothing: no budget, no digest and no index may enter.

Only names like `<model>@1@0@<hex>@<dtype>.pt` are ever listed, counted or removed, whatever deployment they belong to;
everything else that lies in the directory is somebody else's. Files under construction are named
`.<host>-<pid>-<nonce>.tmp` and locked (flock) by their writer until they are published, so that a dead writer's
leftover can be told from a live writer's file.
"""

import fcntl
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, ELOOP, ENOENT, ENXIO, EPERM, EROFS
from pathlib import Path

from filelock import FileLock
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE

from storage_tiers.disk_index import DiskEntry, Listing, pause

__all__ = ["CacheDirectory", "TempFile", "is_entry_name"]

_ENTRY_NAME = re.compile(rf"[^@/]+@1@0@(?:0|[1-9a-f][0-9a-f]{{0,15}})@(?:{'|'.join(STR_DTYPE_TO_TORCH_DTYPE)})\.pt\Z")
_TEMP_NAME = re.compile(r"\.([0-9a-f]+-[0-9]+)-[0-9a-f]+\.tmp\Z")
_LOCK_NAME = ".evictor.lock"
_LEFTOVER_SECONDS = 60.0
"""An unlocked temporary file this old has no writer, even where flock does not reach (a writer on another NFS host)."""
_LOCK_POLL_SECONDS = 0.005


def is_entry_name(name: str) -> bool:
    """Whether a file of that name is an entry. Any thread."""
    return _ENTRY_NAME.match(name) is not None


class TempFile:
    """A file under construction; `publish` it or `discard` it."""

    def __init__(self, directory: Path, writer: str) -> None:
        """Create it, locked, mode 0600, in `directory`. Raises OSError."""
        while True:
            self._path = directory / f".{writer}-{secrets.token_hex(8)}.tmp"
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if self._lock():
                return
            os.close(self.fd)

    def publish(self, path: Path) -> None:
        """Give it its real name, replacing what has it, and close it. Raises OSError; `discard` it then.

        Not synced: the page cache outlives the process, and after a power cut the digest tells a torn file, which is a
        miss. Waiting for the medium would cost every save what it saves only then.
        """
        self._path.replace(path)
        os.close(self.fd)

    def discard(self) -> None:
        """Remove it and close it. Raises OSError where it cannot be removed."""
        try:
            self._path.unlink(missing_ok=True)  # missing where the directory itself was removed
        finally:
            os.close(self.fd)

    def _lock(self) -> bool:
        """Take the lock; False where somebody who removes leftovers was faster."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self.fd).st_nlink > 0


class CacheDirectory:
    """One directory of cache files. Any thread; every call blocks on the file system."""

    def __init__(self, path: Path) -> None:
        """Create the directory, mode 0700, where it is missing.

        Raises NotADirectoryError where the path is something else, and OSError where it cannot be created or listed.
        """
        self.path = path
        host = zlib.crc32(os.uname().nodename.encode())
        self._writer = f"{host:08x}-{os.getpid()}"
        self._stop_looking = threading.Event()
        self._lock = FileLock(path / _LOCK_NAME, mode=0o600, poll_interval=_LOCK_POLL_SECONDS, thread_local=False)
        self.create()
        os.scandir(path).close()

    def create(self) -> None:
        """Create the directory, mode 0700, unless it is there. Raises as the constructor does."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(f"disk tier: {self.path} is a file, a directory is needed") from None

    def path_of(self, name: str) -> Path:
        """The path of the entry `name`."""
        return self.path / name

    def new_temp(self) -> TempFile:
        """A file to write to. Raises OSError."""
        return TempFile(self.path, self._writer)

    def open_entry(self, name: str) -> int | None:
        """A descriptor for reading the entry, which the caller closes; None where no regular file has that name.

        Raises OSError where the store fails.
        """
        try:
            # A link, pipe or socket of that name is not ours; without these flags the open would follow it or hang.
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (ENOENT, ELOOP, ENXIO):
                raise
            return None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def entry_status(self, name: str) -> DiskEntry | None:
        """Size and last use of the entry `name` as the file system has them, or None where there is none.

        Raises OSError.
        """
        try:
            status = (self.path / name).stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        return DiskEntry(name, status.st_size, max(0, status.st_mtime_ns) // 1_000_000_000)

    def touch(self, name: str, now: int) -> None:
        """Say in the file itself that the entry was used at `now`, seconds since the epoch. Raises OSError."""
        os.utime(self.path / name, (now, now))

    def unlink(self, name: str) -> None:
        """Remove the entry `name`. Raises FileNotFoundError, OSError."""
        (self.path / name).unlink()

    def is_still(self, name: str, fd: int) -> bool:
        """Whether the entry `name` is the file open as `fd`, not one that replaced it since. Raises OSError."""
        try:
            return os.path.samestat((self.path / name).stat(follow_symlinks=False), os.fstat(fd))
        except FileNotFoundError:
            return False

    def modified_ns(self) -> int:
        """When a file was last added, renamed or removed, in ns since the epoch; 0 where the directory is gone."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def free_bytes(self) -> int:
        """Bytes that the file system would still take from us. Raises OSError."""
        usage = os.statvfs(self.path)
        return usage.f_bavail * usage.f_frsize

    @contextmanager
    def locked(self, timeout_seconds: float) -> Iterator[None]:
        """Be the only process that publishes into or removes from the directory; created again should it be gone.

        Raises TimeoutError, which is an OSError, and OSError where no lock file can be made. One thread at a time.
        """
        self.create()
        with self._lock.acquire(timeout=timeout_seconds):
            yield

    def list_entries(self) -> Listing:
        """All entries of all deployments. Pauses often, so that it can run beside the step thread.

        Raises OSError, InterruptedError (which is one) after `stop_looking`.
        """
        listing, now = Listing(), time.time_ns()
        with os.scandir(self.path) as found:
            for done, item in enumerate(found):
                pause(done)
                if self._stop_looking.is_set():
                    raise InterruptedError(f"disk tier: closed while {self.path} was being read")
                if not is_entry_name(item.name):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed since the directory was read
                    continue
                if stat.S_ISREG(status.st_mode):
                    # A clock that was wrong once must not keep a file young for years.
                    listing.add(item.name, status.st_size, min(max(status.st_mtime_ns, 0), now))
        return listing

    def stop_looking(self) -> None:
        """End `list_entries`, in whichever thread it runs."""
        self._stop_looking.set()

    def tidy(self) -> bool:
        """Remove temporary files whose writer died, and create the lock file. True when temporary files remain.

        A directory that may only be read is left as it is. Raises OSError.
        """
        try:
            # Made now, so that the first publication does not see the directory change by it.
            os.close(os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with os.scandir(self.path) as found:
                names = [item.name for item in found if _TEMP_NAME.match(item.name)]
            gone = [self._remove_leftover(name) for name in names]
            return not all(gone)
        except OSError as error:
            if error.errno not in (EROFS, EACCES, EPERM):
                raise
            return False

    def _remove_leftover(self, name: str) -> bool:
        """Whether the temporary file `name` is gone."""
        match = _TEMP_NAME.match(name)
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # published meanwhile
            return True
        try:
            # A process identity like ours and no lock: a former life's (containers start with the same pid each time).
            is_ours = match is not None and match[1] == self._writer
            if not is_ours and time.time() - os.fstat(fd).st_mtime < _LEFTOVER_SECONDS:
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / name).unlink()
        except BlockingIOError:  # being written
            return False
        except FileNotFoundError:  # published meanwhile
            pass
        finally:
            os.close(fd)
        return True
