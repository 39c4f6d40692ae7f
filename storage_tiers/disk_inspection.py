# SPDX-License-Identifier: Apache-2.0
"""What lies in a cache directory: entries one by one or counted, by their trailers or to the last byte.

Nothing here changes a file or takes a lock, so it works beside servers that use the directory: entries are published by
a rename, so an open file never changes, and one that vanishes between listing and opening is left out. Files under
construction are no entries and are never looked at.

This room knows files, trailers and reasons. What removes or adds is `disk_maintenance.py`'s.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from storage_tiers.disk_directory import CacheDirectory, is_entry_name
from storage_tiers.disk_index import DiskEntry
from storage_tiers.disk_io import file_digest
from storage_tiers.file_format import BLOCK_BYTES, DamagedFile, decode_header, encode_trailer, padded_bytes
from storage_tiers.key import KeySpace, chunk_hash_of, dtype_name, dtype_named
from storage_tiers.tier import ItemHeader

__all__ = [
    "PROBLEMS",
    "BadKeyError",
    "DirectoryStats",
    "EntryReport",
    "PruneRule",
    "Tally",
    "examine",
    "find",
    "inspect",
    "open_directory",
    "opened",
    "reports",
    "resolve",
    "stats",
    "unreadable",
]

PROBLEMS = {
    "empty": "the file is empty",
    "torn": "the trailer is cut off, damaged at its end, or followed by other bytes",
    "trailer": "the trailer does not match its digest",
    "size": "the file has another length than its trailer says",
    "name": "the item in it belongs under another file name, so it is never served",
    "padding": "the zeros between payload and trailer are no zeros",
    "digest": "the payload does not match its digest",
    "unreadable": "the file cannot be read",
    "no_trailer": "no trailer: LMCache's own file, which nothing can verify",
    "other_version": "a trailer of another format version",
}
"""What can be wrong with an entry, by the name that it is counted under."""

_UNVERIFIABLE = frozenset({"no_trailer", "other_version"})
_SCAN_BYTES = 1 << 20


class BadKeyError(LookupError):
    """A key names no entry, or several; the message says which, and what would help."""


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One entry as a look found it."""

    file_name: str
    file_bytes: int
    """Bytes of the whole file."""
    last_used: float
    """Seconds since the epoch, up to a minute old while a server uses it."""
    header: ItemHeader | None = None
    """What the trailer says; None where there is none, or it is damaged."""
    problem: str = ""
    """A key of `PROBLEMS`, or empty."""
    detail: str = ""
    """More about the problem, for people."""

    @property
    def state(self) -> Literal["ok", "unverified", "bad"]:
        """Whether the look, with or without the payload, found it whole."""
        if not self.problem:
            return "ok"
        return "unverified" if self.problem in _UNVERIFIABLE else "bad"

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types: sizes in bytes, times in seconds since the epoch, `key` the mm_hash.

        Without a trailer, model (with "-" for "/") and dtype are those of the file name and the rest is empty or None.
        """
        header = self.header
        model, *_, dtype = self.file_name.removesuffix(".pt").split("@")
        return {
            "key": header.mm_hash if header else "",
            "file_name": self.file_name,
            "state": self.state,
            "problem": self.problem,
            "detail": self.detail,
            "model": header.model if header else model,
            "fingerprint": header.fingerprint if header else "",
            "modality": header.modality if header else "",
            "shape": [header.num_tokens, header.width] if header else [],
            "dtype": dtype_name(header.dtype) if header else dtype,
            "payload_bytes": header.payload_bytes if header else None,
            "file_bytes": self.file_bytes,
            "digest": header.digest.hex() if header else "",
            "created": header.created if header else None,
            "last_used": self.last_used,
        }


@dataclass(slots=True)
class Tally:
    """A count of entries."""

    entries: int = 0
    nbytes: int = 0
    """Bytes of their files."""

    def add(self, nbytes: int) -> None:
        """Count one more, of `nbytes`."""
        self.entries += 1
        self.nbytes += nbytes


@dataclass(slots=True)
class DirectoryStats:
    """What a directory holds, by its trailers; no payload was read."""

    total: Tally = field(default_factory=Tally)
    unverified: Tally = field(default_factory=Tally)
    """Entries without a trailer, or with one of another version."""
    bad: Tally = field(default_factory=Tally)
    """Entries whose trailer or name tells that they are damaged; `verify` may find more."""
    by_model: dict[str, Tally] = field(default_factory=dict)
    by_fingerprint: dict[str, Tally] = field(default_factory=dict)
    by_modality: dict[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PruneRule:
    """Which entries: those to which every filter applies, and with `max_bytes` no more of them than must go for it."""

    max_bytes: int | None = None
    """The least recently used, until what is left in the directory takes no more than this."""
    used_before: float | None = None
    """Filter: last used before this, in seconds since the epoch."""
    fingerprint: str = ""
    """Filter: the fingerprint starts so. An entry that names no fingerprint is left alone by both filters."""
    not_fingerprint: str = ""
    """Filter: the fingerprint does not start so."""

    def applies(self, entry: DiskEntry, directory: CacheDirectory) -> bool:
        """Whether all filters apply. Reads the trailer only if one of them asks for it."""
        if self.used_before is not None and entry.last_used >= self.used_before:
            return False
        if not self.fingerprint and not self.not_fingerprint:
            return True
        report = inspect(directory, entry.file_name)
        found = report.header.fingerprint if report is not None and report.header is not None else ""
        if not found or not found.startswith(self.fingerprint):
            return False
        return not self.not_fingerprint or not found.startswith(self.not_fingerprint)


def open_directory(path: Path) -> CacheDirectory:
    """The cache directory at `path`, which must exist. Raises FileNotFoundError, NotADirectoryError, OSError."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the directory that local_disk names")
    return CacheDirectory(path)


def examine(fd: int, name: str, *, deep: bool = False) -> EntryReport:
    """Look at the entry `name`, open as `fd`: its trailer and name, and if `deep` its payload and padding.

    Padding that is not zero harms no reader: the item is served. It counts as damage because only a failing medium, or
    a foreign hand, can have changed it.

    Three things cannot be seen by design. A file cut off before its trailer looks like one that LMCache wrote: it has
    no_trailer, and is unverified. So is, without `deep`, one whose trailer is only damaged in its magic, or is not at
    its end. And an item that was put through LMCache's interface has no `mm_hash`: under another name of the same model
    and dtype it is not noticed. Raises OSError.
    """
    status = os.fstat(fd)
    report = EntryReport(name, status.st_size, status.st_mtime)
    try:
        header = decode_header(status.st_size, partial(os.pread, fd))
    except DamagedFile as damage:
        kind, detail = damage.kind, str(damage).partition(": ")[2]
        if deep and kind == "no_trailer":
            kind = "torn" if _holds_trailer(fd, status.st_size) else kind
        return replace(report, problem=kind, detail=detail)
    report = replace(report, header=header)
    if not _belongs_to(name, header):
        detail = f"it holds {header.mm_hash or 'an item'} of {header.model}, {header.dtype}"
        return replace(report, problem="name", detail=detail)
    return replace(report, problem=_damage(fd, header) if deep else "")


def inspect(directory: CacheDirectory, name: str, *, deep: bool = False) -> EntryReport | None:
    """Look at one entry, as `examine` does; None where there is none. A file that cannot be read is reported so."""
    try:
        with opened(directory, name) as fd:
            return None if fd is None else examine(fd, name, deep=deep)
    except OSError as error:
        return unreadable(directory, name, error)


def reports(directory: CacheDirectory) -> Iterator[EntryReport]:
    """All entries, least recently used first, by their trailers. Raises OSError if the directory cannot be listed."""
    for entry in directory.list_entries().oldest_first():
        report = inspect(directory, entry.file_name)
        if report is not None:
            yield report


def resolve(key: str, candidates: Iterable[tuple[str, ItemHeader | None]]) -> str:
    """The file name among `candidates` (names and trailers) that `key` means: a name, an mm_hash, or its beginning.

    Raises BadKeyError for none and for several.
    """
    by_start: list[tuple[str, str]] = []
    by_hash: list[tuple[str, str]] = []
    for name, header in candidates:
        if name == key:
            return name
        if header is not None and header.mm_hash.startswith(key):
            (by_hash if header.mm_hash == key else by_start).append((name, header.mm_hash))
    found = by_hash or by_start
    if not key or not found:
        raise BadKeyError(
            f"no entry is named by {key!r}; give an mm_hash, its beginning, or a file name, as `list` shows"
        )
    if len(found) > 1:
        some = ", ".join(f"{name} ({mm_hash})" for name, mm_hash in found[:5])
        raise BadKeyError(f"{key!r} names {len(found)} entries; give more of the mm_hash or a file name: {some}")
    return found[0][0]


def find(directory: CacheDirectory, key: str) -> str:
    """The file name of the entry that `key` means, as `resolve` does; a whole mm_hash is found without a look at all.

    Raises BadKeyError, OSError.
    """
    if is_entry_name(key) and directory.entry_status(key) is not None:
        return key
    hashed = f"@{chunk_hash_of(key):x}@"
    near = [name for name in directory.list_entries().names if hashed in name]
    looked_at = [report for name in near if (report := inspect(directory, name)) is not None]
    exact = [report for report in looked_at if report.header is not None and report.header.mm_hash == key]
    return resolve(key, ((report.file_name, report.header) for report in exact or reports(directory)))


def stats(directory: CacheDirectory) -> DirectoryStats:
    """Count all entries by what their trailers say. Raises OSError."""
    result = DirectoryStats()
    for report in reports(directory):
        result.total.add(report.file_bytes)
        if report.state != "ok":
            (result.unverified if report.state == "unverified" else result.bad).add(report.file_bytes)
        if report.header is not None:
            header = report.header
            for counts, value in (
                (result.by_model, header.model),
                (result.by_fingerprint, header.fingerprint),
                (result.by_modality, header.modality),
            ):
                counts.setdefault(value, Tally()).add(report.file_bytes)
    return result


def _damage(fd: int, header: ItemHeader) -> str:
    """What is wrong with payload and padding, as a kind; empty for nothing."""
    if file_digest(fd, header.payload_bytes) != header.digest:
        return "digest"
    padding = padded_bytes(header.payload_bytes) - header.payload_bytes
    return "" if os.pread(fd, padding, header.payload_bytes) == bytes(padding) else "padding"


def _belongs_to(name: str, header: ItemHeader) -> bool:
    """Whether an item with that trailer is looked for under that file name."""
    try:
        keys = KeySpace(header.model, header.dtype)
    except ValueError:
        return False
    # What came through LMCache's interface has no mm_hash: model and dtype are all that there is to compare.
    return name == keys.file_name_of(header.chunk_hash) if header.mm_hash else keys.chunk_hash_in(name) is not None


def _record_start() -> bytes:
    """The bytes that every trailer begins with."""
    dtype = dtype_named("half")
    assert dtype is not None
    item = ItemHeader("", "", "", "", num_tokens=1, width=1, dtype=dtype, digest=bytes(16))
    one, other = encode_trailer(item), encode_trailer(replace(item, mm_hash="a"))
    return one[: next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])]


def _holds_trailer(fd: int, file_bytes: int) -> bool:
    """Whether a trailer begins at any block of the file. Nobody else's file has these bytes at such a place."""
    start = _record_start()
    for offset in range(0, file_bytes, _SCAN_BYTES):
        piece = os.pread(fd, _SCAN_BYTES, offset)
        position = piece.find(start)
        while position >= 0:
            if position % BLOCK_BYTES == 0:
                return True
            position = piece.find(start, position + 1)
    return False


def unreadable(directory: CacheDirectory, name: str, error: OSError) -> EntryReport | None:
    """The report on an entry that cannot be opened or read; None where it has vanished meanwhile."""
    try:
        status = directory.entry_status(name)
    except OSError:
        status = DiskEntry(name, 0, 0)
    if status is None:
        return None
    return EntryReport(name, status.size, status.last_used, problem="unreadable", detail=str(error))


@contextmanager
def opened(directory: CacheDirectory, name: str) -> Iterator[int | None]:
    """A descriptor for reading the entry, or None where there is none; closed at the end. Raises OSError."""
    fd = directory.open_entry(name)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
