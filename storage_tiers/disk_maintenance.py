# SPDX-License-Identifier: Apache-2.0
"""Looking after a cache directory from outside: verify and mend, prune, evict, copy entries in and out.

Everything here works beside servers that use the directory. What removes or publishes goes through `DiskBudget`, as a
server's own eviction does: under the lock that all processes share, one file at a time, and seen by each of them in the
modification time of the directory, so that their budgets stay right. Whether bytes are good is `disk_inspection.py`'s
to say. No model, no tier of a running engine and no printing may enter.
"""

import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal, NamedTuple

from storage_tiers.disk_budget import DiskBudget
from storage_tiers.disk_directory import CacheDirectory, TempFile, is_entry_name
from storage_tiers.disk_index import DiskEntry, DiskIndex
from storage_tiers.disk_inspection import EntryReport, PruneRule, examine, find, inspect, opened, resolve, unreadable
from storage_tiers.file_format import DamagedFile, decode_header
from storage_tiers.tier import ItemHeader

__all__ = [
    "NO_LIMIT",
    "Copied",
    "DirectorySource",
    "Removal",
    "Remover",
    "TarSource",
    "Verdict",
    "copy_into",
    "copy_to_tar",
    "prune",
    "verify",
]

NO_LIMIT = 1 << 62
"""Bytes; the budget of who only removes: what a directory may take is its servers' to say."""

_PRUNE_LOOKS = 4
"""Looks at a directory that others fill while it is pruned; each removes what came since the one before."""
_COPY_BYTES = 1 << 20


class Verdict(NamedTuple):
    """`verify` on one entry, and how far it has come."""

    entry: EntryReport
    is_bad: bool
    removed: bool
    error: str
    """Why a bad entry could not be removed, or empty."""
    done: int
    """Entries looked at so far, this one included."""
    total: int
    """Entries that were listed at the start."""


class Removal(NamedTuple):
    """What became of one entry that was to go."""

    file_name: str
    nbytes: int
    """Bytes of the file."""
    outcome: Literal["planned", "removed", "gone", "in_use", "failed"]
    """`gone`: somebody else removed it first. `in_use`: it was used or replaced since it was chosen, and stays."""
    error: str = ""
    """Why it failed, or empty."""


class Copied(NamedTuple):
    """What became of one entry that was to be copied."""

    file_name: str
    nbytes: int
    """Bytes of the file."""
    outcome: Literal["copied", "exists", "unverified", "bad", "failed"]
    """`exists`: a good entry of that name is there and stays. `unverified`, `bad`: not copied."""
    detail: str = ""
    """The problem or error, or empty."""


class Remover:
    """Removes entries the way a server's eviction does. One thread at a time."""

    def __init__(self, directory: CacheDirectory) -> None:
        """For entries of `directory`; takes no lock yet."""
        self._directory = directory
        self._budget = DiskBudget(directory, DiskIndex(), NO_LIMIT)

    def remove_open(self, name: str, fd: int) -> bool:
        """Remove the entry while it is the file open as `fd`; False when it no longer is.

        Raises OSError, and TimeoutError (one) when another process holds the directory for 30 s.
        """
        return self._budget.remove(name, fd)

    def remove(self, entry: DiskEntry, *, unless_used: bool = False) -> Removal:
        """Remove the entry, with `unless_used` only if nobody used or replaced it since it was listed."""
        result = partial(Removal, entry.file_name, entry.size)
        try:
            with opened(self._directory, entry.file_name) as fd:
                if fd is None:
                    return result("gone")
                if unless_used and int(os.fstat(fd).st_mtime) > entry.last_used:
                    return result("in_use")
                return result("removed" if self.remove_open(entry.file_name, fd) else "in_use")
        except OSError as error:
            return result("failed", str(error))


def verify(directory: CacheDirectory, *, fix: bool = False, strict: bool = False) -> Iterator[Verdict]:
    """Read every byte of every entry and yield a verdict on each; `fix` removes the bad ones.

    An entry that nothing can verify, LMCache's own, counts as bad only if `strict`. What cannot be read is bad and is
    not removed. What escapes by design: see `examine`. Raises OSError if the directory cannot be listed.
    """
    remover = Remover(directory)
    names = directory.list_entries().names
    for done, name in enumerate(names, 1):
        verdict = _verdict(directory, name, remover if fix else None, strict)
        if verdict is not None:
            yield Verdict(*verdict, done, len(names))


def prune(directory: CacheDirectory, rule: PruneRule, *, dry_run: bool = False) -> Iterator[Removal]:
    """Remove what `rule` says, least recently used first, or only say what that would be.

    An entry that was used or replaced since it was listed stays; for a size the directory is then looked at again, a
    few times. Raises OSError if the directory cannot be listed.
    """
    remover = Remover(directory)
    failed: set[str] = set()
    for _ in range(1 if rule.max_bytes is None or dry_run else _PRUNE_LOOKS):
        chosen = _chosen(directory, rule, failed)
        for entry in chosen:
            if dry_run:
                yield Removal(entry.file_name, entry.size, "planned")
                continue
            removal = remover.remove(entry, unless_used=True)
            if removal.outcome == "failed":
                failed.add(entry.file_name)
            yield removal
        if not chosen:
            return


class DirectorySource:
    """The entries of a cache directory, to copy from."""

    def __init__(self, directory: CacheDirectory, keys: Sequence[str] = ()) -> None:
        """All entries, or those that `keys` name as `find` does. Raises BadKeyError, OSError."""
        self._directory = directory
        self._names = [find(directory, key) for key in keys] or directory.list_entries().names

    @property
    def names(self) -> Sequence[str]:
        """File names of the entries that were asked for. One may have vanished by the time it is opened."""
        return self._names

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes] | None]:
        """The entry for reading, None where it has vanished. Raises OSError."""
        with opened(self._directory, name) as fd, ExitStack() as stack:
            yield None if fd is None else stack.enter_context(open(fd, "rb", closefd=False))

    def last_used(self, name: str) -> float:
        """Seconds since the epoch, 0 where it has vanished. Raises OSError."""
        status = self._directory.entry_status(name)
        return status.last_used if status is not None else 0.0


class TarSource:
    """The entries in a tar file, to copy from. Nothing else in it is looked at, and no path in it is followed."""

    def __init__(self, archive: tarfile.TarFile, keys: Sequence[str] = ()) -> None:
        """All entries, or those that `keys` name as `resolve` does. Raises BadKeyError, OSError, tarfile.TarError."""
        self._archive = archive
        self._members = {
            name: member
            for member in archive
            if member.isreg() and not member.issparse() and is_entry_name(name := PurePosixPath(member.name).name)
        }
        if keys:
            headers = [(name, self._header(name)) for name in self._members]
            wanted = {resolve(key, headers) for key in keys}
            self._members = {name: member for name, member in self._members.items() if name in wanted}

    @property
    def names(self) -> Sequence[str]:
        """File names of the entries that were asked for."""
        return list(self._members)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes] | None]:
        """The entry for reading. Raises OSError, tarfile.TarError."""
        file = self._archive.extractfile(self._members[name])
        assert file is not None, "only regular members are kept"
        with file:
            yield file

    def last_used(self, name: str) -> float:
        """Seconds since the epoch."""
        return self._members[name].mtime

    def _header(self, name: str) -> ItemHeader | None:
        with self.open(name) as file:
            assert file is not None

            def read_at(nbytes: int, offset: int) -> bytes:
                file.seek(offset)
                return file.read(nbytes)

            try:
                return decode_header(self._members[name].size, read_at)
            except DamagedFile:
                return None


def copy_into(
    directory: CacheDirectory,
    source: DirectorySource | TarSource,
    *,
    capacity_bytes: int = NO_LIMIT,
    accept_unverified: bool = False,
) -> Iterator[Copied]:
    """Publish the entries of `source` in `directory`, each verified there first; a good one that is there stays.

    Least recently used entries make room within `capacity_bytes`; without it a server makes it with its next
    publication. `accept_unverified` copies LMCache's own files too. Raises OSError if the directory cannot be listed.
    """
    budget = DiskBudget(directory, DiskIndex(), capacity_bytes)
    for name in source.names:
        try:
            copied = _publish(directory, budget, source, name, accept_unverified)
        except (OSError, tarfile.TarError) as error:
            copied = Copied(name, 0, "failed", str(error))
        if copied is not None:
            yield copied


def copy_to_tar(
    path: Path, source: DirectorySource, *, accept_unverified: bool = False, on_copied: Callable[[Copied], None]
) -> None:
    """Write the good entries of `source` to a new tar file, which gets its name when it is whole, and report on each.

    Raises FileExistsError where `path` is there, OSError.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; remove it or name another file")
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    try:
        temporary.touch(0o600, exist_ok=False)
        with temporary.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in source.names:
                copied = _add_to_tar(archive, source, name, accept_unverified)
                if copied is not None:
                    on_copied(copied)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _verdict(
    directory: CacheDirectory, name: str, remover: Remover | None, strict: bool
) -> tuple[EntryReport, bool, bool, str] | None:
    """Report, whether it is bad, whether it was removed, and why not; None where the entry has vanished."""
    try:
        with opened(directory, name) as fd:
            if fd is None:
                return None
            report = examine(fd, name, deep=True)
            is_bad = report.state == "bad" or (strict and report.state == "unverified")
            if remover is None or not is_bad:
                return report, is_bad, False, ""
            try:
                return report, True, remover.remove_open(name, fd), ""
            except OSError as error:
                return report, True, False, str(error)
    except OSError as error:
        lost = unreadable(directory, name, error)
        return None if lost is None else (lost, True, False, "")


def _chosen(directory: CacheDirectory, rule: PruneRule, failed: set[str]) -> list[DiskEntry]:
    listing = directory.list_entries()
    excess = NO_LIMIT if rule.max_bytes is None else sum(listing.sizes) - rule.max_bytes
    chosen = []
    for entry in listing.oldest_first():
        if excess <= 0:
            break
        if entry.file_name not in failed and rule.applies(entry, directory):
            chosen.append(entry)
            excess -= entry.size
    return chosen


def _refusal(report: EntryReport, accept_unverified: bool) -> Copied | None:
    """Why an entry is not copied, or None if it is."""
    if report.state == "ok" or (report.state == "unverified" and accept_unverified):
        return None
    return Copied(report.file_name, report.file_bytes, report.state, report.problem)


def _publish(
    directory: CacheDirectory,
    budget: DiskBudget,
    source: DirectorySource | TarSource,
    name: str,
    accept_unverified: bool,
) -> Copied | None:
    """Copy one entry under a temporary name, verify it there, and publish it; None where it has vanished."""
    present = inspect(directory, name, deep=True)
    if present is not None and present.state == "ok":
        return Copied(name, present.file_bytes, "exists")
    with source.open(name) as file:
        if file is None:
            return None
        temp = budget.new_temp()
        published = False
        try:
            with open(temp.fd, "wb", closefd=False) as target:
                shutil.copyfileobj(file, target, _COPY_BYTES)
            copied = _judge(temp, name, accept_unverified)
            if copied.outcome == "copied":
                now = time.time()
                os.utime(temp.fd, (now, min(now, source.last_used(name))))
                budget.publish(temp, name, copied.nbytes)
                published = True
            return copied
        finally:
            if not published:
                temp.discard()


def _judge(temp: TempFile, name: str, accept_unverified: bool) -> Copied:
    report = examine(temp.fd, name, deep=True)
    return _refusal(report, accept_unverified) or Copied(name, report.file_bytes, "copied", report.problem)


def _add_to_tar(archive: tarfile.TarFile, source: DirectorySource, name: str, accept_unverified: bool) -> Copied | None:
    """Add one entry if it is good; None where it has vanished. Raises OSError where the archive cannot be written."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(source.open(name))
            report = examine(file.fileno(), name, deep=True) if file is not None else None
        except OSError as error:
            return Copied(name, 0, "failed", str(error))
        if file is None or report is None:
            return None
        refused = _refusal(report, accept_unverified)
        if refused is not None:
            return refused
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = report.file_bytes, report.last_used, 0o600
        archive.addfile(member, file)
        return Copied(name, report.file_bytes, "copied", report.problem)
