# SPDX-License-Identifier: Apache-2.0
"""One stretch of memory that several processes map: a file under /dev/shm with a header page, a board and a data area.

This room knows files, locks and mappings. What the board says and what lies in the data area must not enter, nor may
Python's `SharedMemory`: its resource tracker unlinks what an attached process merely looked at.

The creator holds an flock on the file for as long as it lives, and the kernel drops it however the process ends. So a
file that can be locked has no owner and may be removed, and one that cannot must be left alone.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Collection
from pathlib import Path

import torch

__all__ = ["SharedSegment", "find_live_segment", "remove_leftovers", "segment_name"]

PAGE_BYTES = 4096
SHM_DIRECTORY = Path("/dev/shm")
SEGMENT_PREFIX = "lmcache_neuron_ec_"

_MAGIC = b"NRNECSEG"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
"""magic, version, reserved, bytes in total, bytes of the board. The magic is written last: it means complete."""
_POPULATE_BYTES = 16 << 20
"""A slice of populating takes about 15 ms: how long a stop may have to wait for it."""
_FALLOCATE_BYTES = 256 << 20
_CREATE_TRIES = 64
_CREATE_RETRY_SECONDS = 0.001
_MADV_POPULATE_WRITE = 23
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedSegment:
    """A mapped segment. `create` makes and owns one, `attach` maps one that another process (or this one) owns."""

    def __init__(self, path: Path, mapping: mmap.mmap, board_bytes: int, lock_fd: int | None) -> None:
        """Use `create` or `attach`. `lock_fd` is the descriptor that holds the owner's lock, None when attached."""
        self.path = path
        self.board_bytes = board_bytes
        self.nbytes = len(mapping)
        self._mapping = mapping
        self._lock_fd = lock_fd
        self._closed = False
        self._tensor: torch.Tensor | None = None
        if lock_fd is not None:
            _owned.add(self)

    @classmethod
    def create(
        cls, name: str, data_bytes: int, board_bytes: int = 0, directory: Path = SHM_DIRECTORY
    ) -> "SharedSegment":
        """Make, lock, allocate and map the segment `name`: a header page, `board_bytes` and `data_bytes`, both aligned.

        Takes about 0.25 s per GB; the bytes are zero. A leftover of the same name without an owner is replaced.
        Raises FileExistsError when a live process owns that name, OSError (ENOSPC, naming the sizes) when `directory`
        cannot hold it, ValueError for a size that is not positive or not a multiple of 4096.
        """
        if data_bytes <= 0 or board_bytes < 0 or data_bytes % PAGE_BYTES or board_bytes % PAGE_BYTES:
            raise ValueError(f"segment sizes must be multiples of {PAGE_BYTES}: data {data_bytes}, board {board_bytes}")
        path = _path_of(name, directory)
        total = PAGE_BYTES + board_bytes + data_bytes
        lock_fd = _create_locked(path)
        try:
            _reserve(lock_fd, path, total)
            mapping = _map(path, total)
            _HEADER.pack_into(mapping, 0, b"", _VERSION, 0, total, board_bytes)
            mapping[: len(_MAGIC)] = _MAGIC
        except BaseException:  # raised again: not even an interrupted start may leave a file behind
            path.unlink(missing_ok=True)
            os.close(lock_fd)
            raise
        return cls(path, mapping, board_bytes, lock_fd)

    @classmethod
    def attach(cls, name: str, directory: Path = SHM_DIRECTORY) -> "SharedSegment":
        """Map the segment `name` of another process; takes microseconds, its pages fault in later or by `populate`.

        Raises FileNotFoundError when there is none, ValueError when it is not complete yet, of another version or no
        segment at all, PermissionError when another user owns it.
        """
        path = _path_of(name, directory)
        fd = os.open(path, _OPEN_FLAGS)
        try:
            board_bytes, total = _read_header(fd, path)
            return cls(path, mmap.mmap(fd, total), board_bytes, None)
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        """The name to `attach` by."""
        return self.path.name

    @property
    def data_offset(self) -> int:
        """Where the data area begins, in bytes from the segment's start; a multiple of 4096."""
        return PAGE_BYTES + self.board_bytes

    @property
    def data_bytes(self) -> int:
        """Size of the data area."""
        return self.nbytes - self.data_offset

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable. The mapping stays for as long as the view lives. Raises ValueError when closed."""
        return memoryview(self._mapping)

    @property
    def board_memory(self) -> memoryview:
        """The bytes of the board. Raises ValueError when closed."""
        return self.buffer[PAGE_BYTES : self.data_offset]

    @property
    def data(self) -> memoryview:
        """The bytes of the data area. Raises ValueError when closed."""
        return self.buffer[self.data_offset :]

    def tensor(self) -> torch.Tensor:
        """All bytes as one uint8 tensor, shared with `buffer`. Raises ValueError when closed."""
        if self._tensor is None:
            # torch keeps a reference to the object it is given, but not the buffer lock: a memoryview of its own,
            # which nobody releases, keeps the mapping from being unmapped under the tensor.
            self._tensor = torch.frombuffer(memoryview(self._mapping), dtype=torch.uint8)
        return self._tensor

    def populate(self, stop: threading.Event) -> int:
        """Fault in this process's mapping, so that no copy pays for it; 0.5 to 2.7 s per GB for fresh memory.

        For a background thread of the caller, in owner and attached processes alike; other threads run meanwhile and
        no byte changes. Returns the bytes done, fewer than `nbytes` once `stop` is set or the segment is closed.
        Raises OSError where the kernel cannot provide the memory.
        """
        try:
            whole = self.tensor()
        except ValueError:  # closed before this thread got here
            return 0
        done = 0
        while done < self.nbytes and not (stop.is_set() or self._closed):
            size = min(_POPULATE_BYTES, self.nbytes - done)
            if _libc.madvise(whole.data_ptr() + done, size, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code in (errno.EINTR, errno.EAGAIN):
                    continue
                if code != errno.EINVAL:
                    raise OSError(code, f"cannot populate {self.path}: {os.strerror(code)}")
                # Kernels before 5.14. One read per page: a write could undo another thread's.
                whole[done : done + size : PAGE_BYTES].max()
            done += size
        return done

    def close(self) -> None:
        """Give up the segment: the owner removes the file, so nobody can attach any more. Twice is once.

        Views and tensors stay valid, here and in other processes: the memory goes with the last of them.
        """
        if self._closed:
            return
        self._closed = True
        self._tensor = None
        if self._lock_fd is not None:
            _owned.discard(self)
            _unlink_same(self.path, self._lock_fd)
            os.close(self._lock_fd)
            self._lock_fd = None
        with contextlib.suppress(BufferError):  # views live: the mapping is undone when the last of them goes
            self._mapping.close()

    def _forget_lock(self) -> None:
        """In a forked child: the lock, shared by fork, must end with the parent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def segment_name(engine_id: str, dp_rank: int, owner_pid: int) -> str:
    """The name of an engine's segment: a safe file name whatever `engine_id` holds, and unlike any other engine's."""
    digest = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
    return f"{SEGMENT_PREFIX}{digest}_dp{dp_rank}_p{owner_pid}"


def find_live_segment(
    engine_id: str, dp_rank: int, owner_pids: Collection[int], directory: Path = SHM_DIRECTORY
) -> str | None:
    """The name of the complete segment that one of `owner_pids` owns and still lives, or None. Never raises OSError.

    For a worker that was told nothing: it asks for its parents' and its own process id. A few system calls per id.
    """
    for pid in owner_pids:
        path = _path_of(segment_name(engine_id, dp_rank, pid), directory)
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except OSError:
            continue
        try:
            _read_header(fd, path)
            if not _try_lock(fd):
                return path.name
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
    return None


def remove_leftovers(prefix: str = SEGMENT_PREFIX, directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove the segments whose name starts with `prefix` and whose owner is gone; returns their names.

    Never touches one whose owner lives, nor what may not be opened (another user's). Raises ValueError for an empty
    prefix, OSError when `directory` cannot be listed.
    """
    if not prefix:
        raise ValueError("an empty prefix would match files that are not ours")
    ours = (path for path in sorted(directory.iterdir()) if path.name.startswith(prefix))
    return [path.name for path in ours if _remove_if_dead(path)]


def _path_of(name: str, directory: Path) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name for a segment")
    return directory / name


def _create_locked(path: Path) -> int:
    """A descriptor of the new, empty and locked file `path`. Raises FileExistsError when a live process owns it."""
    for _ in range(_CREATE_TRIES):
        try:
            fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            # Locked may also mean that another process is just removing it as a leftover: that passes, an owner stays.
            if not _remove_if_dead(path):
                time.sleep(_CREATE_RETRY_SECONDS)
            continue
        # Between open and lock another process may take the file for a leftover: then it is gone, and we try again.
        if _try_lock(fd) and _is_same_file(path, fd):
            return fd
        os.close(fd)
    raise FileExistsError(errno.EEXIST, "a live process owns this segment", str(path))


def _reserve(fd: int, path: Path, total: int) -> None:
    """Allocate every page now: later, a full file system would be a SIGBUS in the middle of a copy."""
    stats = os.fstatvfs(fd)
    available = stats.f_bavail * stats.f_frsize
    try:
        if total > available:
            raise OSError(errno.ENOSPC, "No space left on device")
        for start in range(0, total, _FALLOCATE_BYTES):
            os.posix_fallocate(fd, start, min(_FALLOCATE_BYTES, total - start))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        message = f"the segment needs {total} bytes, {path.parent} had {available} bytes left"
        raise OSError(errno.ENOSPC, message, str(path)) from error


def _map(path: Path, total: int) -> mmap.mmap:
    """Map by a descriptor of its own: a mapping keeps a duplicate, which must not keep the lock alive in a child."""
    fd = os.open(path, _OPEN_FLAGS)
    try:
        return mmap.mmap(fd, total)
    finally:
        os.close(fd)


def _read_header(fd: int, path: Path) -> tuple[int, int]:
    """`(bytes of the board, bytes in total)`. Raises ValueError for what is no complete segment of this version."""
    stats = os.fstat(fd)
    if stats.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "the segment belongs to another user", str(path))
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(f"{path} is not a complete segment")
    _, version, _, total, board_bytes = _HEADER.unpack(raw)
    if version != _VERSION:
        raise ValueError(f"{path} has layout version {version}, this program has {_VERSION}")
    if total != stats.st_size or board_bytes % PAGE_BYTES or total <= PAGE_BYTES + board_bytes:
        raise ValueError(f"{path} says {total} bytes, {board_bytes} of them a board, and has {stats.st_size}")
    return board_bytes, total


def _remove_if_dead(path: Path) -> bool:
    """Unlink `path` if no process holds its lock; whether it was removed."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:  # gone, a symbolic link, or another user's
        return False
    try:
        return _try_lock(fd) and _unlink_same(path, fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Take the lock without waiting; False when another descriptor holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(path: Path, fd: int) -> bool:
    """Whether `path` still leads to the file that `fd` has open."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _unlink_same(path: Path, fd: int) -> bool:
    """Unlink `path` unless another file has taken its place; whether it was unlinked."""
    if not _is_same_file(path, fd):
        return False
    path.unlink(missing_ok=True)
    return True


_owned: "weakref.WeakSet[SharedSegment]" = weakref.WeakSet()


def _forget_locks_in_child() -> None:
    for segment in list(_owned):
        segment._forget_lock()
    _owned.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)
