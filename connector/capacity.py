# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can hold what was set: shared memory, the disk, and the right to write there.

Tries, and removes what it tried with. What is allowed besides, and where a value came from, is `settings.py`'s.
"""

import errno
import os
import tempfile
from pathlib import Path

from connector.lmcache_config import SettingsError
from connector.settings import GIB_BYTES, PAGE_BYTES, StorageSettings, in_words

__all__ = ["check_capacity"]


def check_capacity(storage: StorageSettings, shm_dir: Path = Path("/dev/shm")) -> None:
    """Make sure that this machine can hold what `storage` asks for; a missing disk directory is created, 0700.

    For the process that owns the tiers, at start, before the pool is created and after leftovers of dead processes are
    gone from `shm_dir`. Writes and removes one small file in the directory: permission bits say nothing about root, nor
    about a read-only mount. Raises SettingsError.
    """
    _check_pool(storage, shm_dir)
    if storage.disk_directory is not None:
        _check_directory(storage, storage.disk_directory)
        _check_disk(storage, storage.disk_directory)


def _check_pool(storage: StorageSettings, shm_dir: Path) -> None:
    """Raises SettingsError for a pool that `shm_dir` has no room for."""
    origin = storage.origins["max_local_cpu_size"]
    value = storage.pool_bytes / GIB_BYTES
    try:
        free = _free_bytes(shm_dir)
    except OSError as error:
        allowed = f"a pool in {shm_dir}, which cannot be used ({error.strerror})"
        raise SettingsError.bad_value("max_local_cpu_size", origin, value, allowed) from error
    if storage.pool_bytes > free:
        allowed = f"at most {in_words('free_bytes', free)}, what {shm_dir} has free (in a container, raise --shm-size)"
        raise SettingsError.bad_value("max_local_cpu_size", origin, value, allowed)


def _check_directory(storage: StorageSettings, directory: Path) -> None:
    """Creates `directory` and writes to it. Raises SettingsError where that fails, but not for a full disk."""
    try:
        _make_private(directory)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=directory) as probe:
            probe.write(bytes(PAGE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        # A disk filled by what we stored before is what the budget is for; whether it holds enough is checked next.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and directory.is_dir():
            return
        allowed = f"a directory that can be created and written to ({error.strerror})"
        raise SettingsError.bad_value("local_disk", storage.origins["local_disk"], str(directory), allowed) from error


def _make_private(directory: Path) -> None:
    """Create `directory` and what is missing above it, all 0700: stored items are somebody's pictures."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _check_disk(storage: StorageSettings, directory: Path) -> None:
    """Raises SettingsError for a budget that the disk cannot hold, what is in `directory` already included."""
    free = _free_bytes(directory)
    if storage.disk_bytes <= free:
        return
    room = free + _held_bytes(directory, enough=storage.disk_bytes - free)
    if storage.disk_bytes > room:
        value = storage.disk_bytes / GIB_BYTES
        allowed = f"at most {in_words('room_bytes', room)}, what is free on that disk or in {directory} already"
        raise SettingsError.bad_value("max_local_disk_size", storage.origins["max_local_disk_size"], value, allowed)


def _held_bytes(directory: Path, enough: int) -> int:
    """Bytes on disk of the files in `directory`, counted until they are `enough`: there may be 100,000 of them."""
    held = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if held >= enough:
                break
            try:
                held += entry.stat(follow_symlinks=False).st_blocks * 512 if entry.is_file(follow_symlinks=False) else 0
            except FileNotFoundError:
                continue  # Another engine on the same directory has evicted it.
    return held


def _free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user can still write under `directory`. Raises OSError."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize
