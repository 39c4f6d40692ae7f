# SPDX-License-Identifier: Apache-2.0
"""`ec-cache`: look after a cache directory, also while servers use it.

This room has commands and printing only; what they do is `storage_tiers.disk_maintenance`'s and `disk_inspection`'s.
Those import torch and LMCache for names of dtypes, seconds in all, so they are imported by the command that runs.

Exit status: 0 fine; 1 a problem was found, or some entries failed; 2 wrong usage or unusable input.
"""

import json
import os
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from storage_tiers.disk_directory import CacheDirectory
    from storage_tiers.disk_inspection import EntryReport, Tally
    from storage_tiers.disk_maintenance import Copied, Removal

__all__ = ["main"]

_SIZES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for suffix, base in (("iB", 1 << 10), ("B", 1000))
}
_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PROGRESS_SECONDS = 0.5
_PROGRESS_LOG_SECONDS = 10.0
_SHORT = 12
"""Digits of a fingerprint that a table shows; enough to tell two apart, and to name one as a prefix."""
_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "used": lambda row: -row["last_used"],
    "created": lambda row: -(row["created"] or 0),
    "size": lambda row: -row["file_bytes"],
    "model": lambda row: (row["model"], row["key"]),
    "key": lambda row: (row["key"], row["file_name"]),
}


class _Unusable(click.ClickException):
    """What was named cannot be used: exit status 2."""

    exit_code = 2


def _amount(units: Mapping[str, int], example: str) -> Callable[..., float | None]:
    """A click callback for an option that is a number with one of `units`."""

    def convert(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", (value or "").strip())
        if value is not None and (match is None or match[2] not in units):
            known = ", ".join(unit for unit in units if unit)
            raise click.BadParameter(f"{value!r} cannot be read; write a number and one of {known}, as {example}")
        return float(match[1]) * units[match[2]] if match is not None else None

    return convert


@dataclass(frozen=True)
class _Place:
    """Where a command works and how it reports: the options that all commands have."""

    path: Path
    budget_bytes: int | None
    """What the configuration allows the directory; None where no configuration was named."""
    as_json: bool
    output: Path | None
    quiet: bool

    def directory(self) -> "CacheDirectory":
        """The cache directory, which must exist."""
        from storage_tiers.disk_inspection import open_directory

        return open_directory(self.path)

    def report(self, value: dict[str, Any], lines: Sequence[str]) -> None:
        """Print `value` as JSON or else `lines`, and write the same to the file of --output."""
        value = {"directory": str(self.path), **value}
        text = json.dumps(value, indent=2) if self.as_json else "\n".join(lines)
        if self.output is not None:
            self.output.write_text(f"{text}\n")
        if not self.quiet:
            click.echo(text)


def _place(config: str | None, directory: Path | None, fmt: str, output: Path | None, quiet: bool) -> _Place:
    budget = None
    if config is not None or directory is None:
        from connector.settings import SettingsError, load_settings

        try:
            storage = load_settings({"config_file": config} if config else {}).storage
        except (SettingsError, OSError) as error:
            raise _Unusable(str(error)) from error
        directory, budget = directory or storage.disk_directory, storage.disk_bytes or None
    if directory is None:
        named = f"{config} names no local_disk" if config else "no cache directory is named"
        raise click.UsageError(f"{named}; give --directory DIR, or --config FILE of a YAML with local_disk")
    if output is not None and not output.parent.is_dir():  # said before anything is done
        raise click.UsageError(
            f"--output {output}: there is no directory {output.parent}; make it or name another file"
        )
    return _Place(directory, budget, fmt == "json", output, quiet)


def _common(command: Callable[..., bool]) -> Callable[..., None]:
    """Adds, innermost, the options that all commands have; the command gets a `_Place` for them, first.

    `command` returns whether all was well, else the exit status is 1. What it raises about the user's input makes it 2.
    """

    @click.option("--directory", type=click.Path(path_type=Path), metavar="DIR", help="The cache directory.")
    @click.option("--config", metavar="FILE", help="YAML that names it as local_disk. Default: as a server finds it.")
    @click.option("--format", "fmt", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True)
    @click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there as well.")
    @click.option("-q", "--quiet", is_flag=True, help="No report on stdout and no progress: exit status only.")
    @wraps(command)
    def with_place(
        directory: Path | None, config: str | None, fmt: str, output: Path | None, quiet: bool, **rest: Any
    ) -> None:
        # LMCache announces itself at import; stderr is for what went wrong here.
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        from storage_tiers.disk_inspection import BadKeyError

        try:
            good = command(_place(config, directory, fmt, output, quiet), **rest)
        except BrokenPipeError:
            raise
        except (OSError, BadKeyError) as error:
            raise _Unusable(str(error)) from error
        if not good:
            sys.exit(1)

    return with_place


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Look after an encoder cache directory, also while servers use it.

    Exit status: 0 fine; 1 a problem was found or some entries failed; 2 wrong usage or unusable input.
    """


@main.command("list")
@click.option(
    "--sort",
    type=click.Choice(list(_SORTS)),
    default="used",
    show_default=True,
    help="Youngest first, largest first, by name.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show only the first N.")
@_common
def list_entries(place: _Place, sort: str, limit: int | None) -> bool:
    """List the entries, by their trailers: no payload is read."""
    from storage_tiers.disk_inspection import reports

    rows = sorted((report.as_dict() for report in reports(place.directory())), key=_SORTS[sort])
    shown = rows[:limit]
    table = _table(
        ["key", "model", "fingerprint", "modality", "shape", "dtype", "bytes", "created", "last used", "state"],
        [
            [
                row["key"] or row["file_name"],
                row["model"],
                row["fingerprint"][:_SHORT],
                row["modality"],
                "x".join(map(str, row["shape"])),
                row["dtype"],
                _size(row["file_bytes"]),
                _when(row["created"]),
                _when(row["last_used"]),
                row["state"] if row["state"] != "bad" else f"bad: {row['problem']}",
            ]
            for row in shown
        ],
    )
    total = sum(row["file_bytes"] for row in rows)
    note = f"{len(shown)} of {len(rows)} entries shown, {_size(total)} in all"
    place.report({"entries": shown, "total_entries": len(rows), "total_bytes": total}, [*table, note])
    return True


@main.command()
@click.argument("key")
@_common
def describe(place: _Place, key: str) -> bool:
    """Show all that is known of one entry, and whether its bytes are as they were written.

    KEY: an mm_hash, the beginning of one that is unique, or a file name.
    """
    from storage_tiers.disk_inspection import PROBLEMS, find, inspect

    directory = place.directory()
    name = find(directory, key)
    report = inspect(directory, name, deep=True)
    if report is None:
        raise FileNotFoundError(f"{name} has just been removed by somebody else; nothing is left to describe")
    row = report.as_dict() | {"digest_matches": _digest_matches(report), "why": PROBLEMS.get(report.problem, "")}
    words = row | {
        "shape": " x ".join(map(str, row["shape"])),
        "created": _when(row["created"]),
        "last_used": _when(row["last_used"]),
        "digest_matches": {True: "yes", False: "no", None: "unknown"}[row["digest_matches"]],
    }
    place.report(
        row, [f"{name.replace('_', ' '):<16} {value}" for name, value in words.items() if value not in ("", None)]
    )
    return report.state != "bad"


@main.command()
@_common
def stats(place: _Place) -> bool:
    """Count entries and bytes, by their trailers: no payload is read."""
    from storage_tiers.disk_inspection import stats as count

    found = count(place.directory())
    budget = place.budget_bytes
    of_budget = f" of {_size(budget)}" if budget else ""
    lines = _table(
        ["", "entries", "bytes"],
        [
            ["all", str(found.total.entries), f"{_size(found.total.nbytes)}{of_budget}"],
            ["no trailer", str(found.unverified.entries), _size(found.unverified.nbytes)],
            ["damaged trailer", str(found.bad.entries), _size(found.bad.nbytes)],
        ],
    )
    for title in ("model", "fingerprint", "modality"):
        tallies: dict[str, Tally] = getattr(found, f"by_{title}")
        ordered = sorted(tallies.items(), key=lambda item: -item[1].nbytes)
        rows = [[name or "(none)", str(tally.entries), _size(tally.nbytes)] for name, tally in ordered]
        lines += ["", *_table([title, "entries", "bytes"], rows)]
    place.report(asdict(found) | {"budget_bytes": budget}, lines)
    return True


@main.command()
@click.option("--fix", is_flag=True, help="Remove what is bad.")
@click.option(
    "--strict",
    is_flag=True,
    help="An entry without a trailer is bad too: it is LMCache's own, or was cut off before its trailer.",
)
@_common
def verify(place: _Place, fix: bool, strict: bool) -> bool:
    """Read every byte of every entry and name those that are not as they were written."""
    from storage_tiers.disk_inspection import PROBLEMS
    from storage_tiers.disk_maintenance import verify as verdicts

    bad: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with _Progress(place, "verified") as progress:
        for verdict in verdicts(place.directory(), fix=fix, strict=strict):
            progress.show(verdict.done, verdict.total, verdict.entry.file_bytes)
            counts.update(["checked", verdict.entry.state, *["removed"] * verdict.removed])
            if verdict.is_bad:
                why = PROBLEMS.get(verdict.entry.problem, "")
                bad.append(verdict.entry.as_dict() | {"why": why, "removed": verdict.removed, "error": verdict.error})
    lines = [f"{row['file_name']}: {row['problem']}: {row['why']}" + _fixed_in_words(row) for row in bad]
    shown = {name: counts[name] for name in ("checked", "ok", "unverified", "removed")}
    summary = ", ".join([*(f"{count} {name}" for name, count in shown.items()), f"{len(bad)} bad"])
    place.report({**shown, "bad": bad}, [*lines, summary])
    return not bad


@main.command()
@click.option(
    "--max-size",
    callback=_amount(_SIZES, "8GiB"),
    metavar="SIZE",
    help="Only as much as must go until all entries take no more: 8GiB.",
)
@click.option(
    "--older-than",
    callback=_amount(_DURATIONS, "7d"),
    metavar="TIME",
    help="Only what was not used for so long: 12h, 7d.",
)
@click.option("--fingerprint", default="", metavar="PREFIX", help="Only what has a fingerprint that starts so.")
@click.option(
    "--not-fingerprint", default="", metavar="PREFIX", help="Only what has a fingerprint that starts otherwise."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, say what would go.")
@_common
def prune(
    place: _Place,
    max_size: float | None,
    older_than: float | None,
    fingerprint: str,
    not_fingerprint: str,
    dry_run: bool,
) -> bool:
    """Remove entries, least recently used first, to which all of the options apply; one at least is needed."""
    from storage_tiers.disk_inspection import PruneRule
    from storage_tiers.disk_maintenance import prune as removals

    if max_size is None and older_than is None and not fingerprint and not not_fingerprint:
        raise click.UsageError(
            "nothing says what to remove; give --max-size, --older-than, --fingerprint or --not-fingerprint"
        )
    before = None if older_than is None else time.time() - older_than
    rule = PruneRule(None if max_size is None else int(max_size), before, fingerprint, not_fingerprint)
    done = list(removals(place.directory(), rule, dry_run=dry_run))
    return _report_removals(place, done)


@main.command()
@click.argument("key")
@_common
def evict(place: _Place, key: str) -> bool:
    """Remove one entry. KEY: an mm_hash, the beginning of one that is unique, or a file name."""
    from storage_tiers.disk_inspection import find
    from storage_tiers.disk_maintenance import Removal, Remover

    directory = place.directory()
    name = find(directory, key)
    entry = directory.entry_status(name)
    return _report_removals(
        place, [Remover(directory).remove(entry) if entry is not None else Removal(name, 0, "gone")]
    )


@main.command()
@click.argument("destination", type=click.Path(path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--accept-unverified", is_flag=True, help="Copy LMCache's own files too, which nothing can verify.")
@_common
def export(place: _Place, destination: Path, keys: tuple[str, ...], accept_unverified: bool) -> bool:
    """Copy good entries, all or those of the KEYs, to DESTINATION: a directory, or a new file named *.tar."""
    from storage_tiers.disk_directory import CacheDirectory
    from storage_tiers.disk_maintenance import Copied, DirectorySource, copy_into, copy_to_tar

    source = DirectorySource(place.directory(), keys)
    if destination.suffix == ".tar":
        done: list[Copied] = []
        copy_to_tar(destination, source, accept_unverified=accept_unverified, on_copied=done.append)
    else:
        _refuse_same(place.path, destination)
        done = list(copy_into(CacheDirectory(destination), source, accept_unverified=accept_unverified))
    return _report_copies(place, done)


@main.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--accept-unverified", is_flag=True, help="Copy LMCache's own files too, which nothing can verify.")
@_common
def import_entries(place: _Place, source: Path, keys: tuple[str, ...], accept_unverified: bool) -> bool:
    """Copy entries, all or those of the KEYs, from SOURCE: a directory, or a tar file that `export` made.

    Each is verified before it is published. A good entry that is there already stays. With --config, old entries
    make room within max_local_disk_size; else the next server that stores something makes it.
    """
    from storage_tiers.disk_directory import CacheDirectory
    from storage_tiers.disk_inspection import open_directory
    from storage_tiers.disk_maintenance import NO_LIMIT, DirectorySource, TarSource, copy_into

    with ExitStack() as stack:
        if source.is_file():
            try:
                found: DirectorySource | TarSource = TarSource(stack.enter_context(tarfile.open(source, "r:")), keys)
            except tarfile.TarError as error:
                raise _Unusable(f"{source} is no whole tar file ({error}); name one that `export` made") from error
        else:
            _refuse_same(place.path, source)
            found = DirectorySource(open_directory(source), keys)
        capacity = place.budget_bytes or NO_LIMIT
        into = CacheDirectory(place.path)
        done = list(copy_into(into, found, capacity_bytes=capacity, accept_unverified=accept_unverified))
    return _report_copies(place, done)


def _refuse_same(one: Path, other: Path) -> None:
    if one.resolve() == other.resolve():
        raise click.UsageError(f"{other} is the cache directory itself; name another one")


def _report_removals(place: _Place, done: "Sequence[Removal]") -> bool:
    counts, nbytes = Counter(one.outcome for one in done), Counter[str]()
    for one in done:
        nbytes[one.outcome] += one.nbytes
    lines = [f"{one.file_name}: {one.outcome}{': ' + one.error if one.error else ''}" for one in done]
    freed = nbytes["removed"] + nbytes["planned"]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing to remove"
    place.report(
        {"removals": [one._asdict() for one in done], "counts": dict(counts), "bytes": freed},
        [*lines, f"{summary}; {_size(freed)}"],
    )
    return not counts["failed"]


def _report_copies(place: _Place, done: "Sequence[Copied]") -> bool:
    counts = Counter(one.outcome for one in done)
    nbytes = sum(one.nbytes for one in done if one.outcome == "copied")
    lines = [
        f"{one.file_name}: {one.outcome}{': ' + one.detail if one.detail else ''}"
        for one in done
        if one.outcome != "copied"
    ]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no entries"
    place.report(
        {"entries": [one._asdict() for one in done], "counts": dict(counts), "bytes": nbytes},
        [*lines, f"{summary}; {_size(nbytes)} copied"],
    )
    return not counts["failed"] and not counts["bad"]


def _fixed_in_words(row: dict[str, Any]) -> str:
    if row["error"]:
        return f" (not removed: {row['error']})"
    return " (removed)" if row["removed"] else ""


def _digest_matches(report: "EntryReport") -> bool | None:
    """Of a report with payload; None where no digest is known, or the name was wrong already."""
    if report.header is None or report.problem == "name":
        return None
    return report.problem != "digest"


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    ]


def _size(nbytes: float) -> str:
    power = max(0, min(int(nbytes).bit_length() - 1, 49) // 10)
    return f"{nbytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class _Progress:
    """How far a command has come, on stderr: on a terminal one line that changes, in a log a line now and then."""

    def __init__(self, place: _Place, verb: str) -> None:
        self._silent = place.quiet
        self._verb = verb
        self._on_terminal = sys.stderr.isatty()
        self._interval = _PROGRESS_SECONDS if self._on_terminal else _PROGRESS_LOG_SECONDS
        self._next = time.monotonic() + self._interval
        self._nbytes = 0
        self._text = ""

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._write(last=True)

    def show(self, done: int, total: int, nbytes: int) -> None:
        """`done` of `total` entries are done, the last of which had `nbytes`."""
        self._nbytes += nbytes
        self._text = "" if self._silent else f"{self._verb} {done} of {total} entries, {_size(self._nbytes)}"
        if self._text and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            self._write()

    def _write(self, *, last: bool = False) -> None:
        start = "\r" if self._on_terminal else ""
        click.echo(f"{start}{self._text}", nl=last or not self._on_terminal, err=True)


if __name__ == "__main__":
    main(prog_name="ec-cache")
