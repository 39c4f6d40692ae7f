# SPDX-License-Identifier: Apache-2.0
"""What the commands of `ec-cache` share: options that all of them have, reports, progress, and sizes in words.

Reading options and printing only: no command, and nothing that changes a directory, may enter. Like `cli.py` it imports
nothing that takes long before a command runs.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from connector.settings import Settings
    from storage_tiers.disk_directory import CacheDirectory
    from storage_tiers.disk_inspection import EntryReport
    from storage_tiers.disk_maintenance import Copied, Removal

__all__ = [
    "DURATIONS",
    "SIZES",
    "Place",
    "Progress",
    "Reporter",
    "Unusable",
    "amount",
    "digest_matches",
    "fixed_in_words",
    "in_bytes",
    "in_time",
    "load_config",
    "on_directory",
    "report_copies",
    "report_removals",
    "reporting",
    "table",
]

SIZES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for suffix, base in (("iB", 1 << 10), ("B", 1000))
}
"""Bytes of each unit of size."""
DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds of each unit of time."""
_PROGRESS_SECONDS = 0.5
_PROGRESS_LOG_SECONDS = 10.0


class Unusable(click.ClickException):
    """What was named cannot be used: exit status 2."""

    exit_code = 2


def amount(units: Mapping[str, int], example: str) -> Callable[..., float | None]:
    """A click callback for an option that is a number with one of `units`."""

    def convert(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", (value or "").strip())
        if value is not None and (match is None or match[2] not in units):
            known = ", ".join(unit for unit in units if unit)
            raise click.BadParameter(f"{value!r} cannot be read; write a number and one of {known}, as {example}")
        return float(match[1]) * units[match[2]] if match is not None else None

    return convert


@dataclass(frozen=True)
class Reporter:
    """How a command reports."""

    as_json: bool
    output: Path | None
    quiet: bool

    def __post_init__(self) -> None:
        """Raises click.UsageError for an --output that cannot be written: said before anything is done."""
        if self.output is not None and not self.output.parent.is_dir():
            parent = self.output.parent
            raise click.UsageError(
                f"--output {self.output}: there is no directory {parent}; make it or name another file"
            )

    def report(self, value: dict[str, Any], lines: Sequence[str]) -> None:
        """Print `value` as JSON or else `lines`, and write the same to the file of --output."""
        text = json.dumps(value, indent=2) if self.as_json else "\n".join(lines)
        if self.output is not None:
            self.output.write_text(f"{text}\n")
        if not self.quiet:
            click.echo(text)


@dataclass(frozen=True)
class Place(Reporter):
    """Where a command works and how it reports."""

    path: Path
    budget_bytes: int | None
    """What the configuration allows the directory; None where no configuration was named."""

    def directory(self) -> "CacheDirectory":
        """The cache directory, which must exist."""
        from storage_tiers.disk_inspection import open_directory

        return open_directory(self.path)

    def report(self, value: dict[str, Any], lines: Sequence[str]) -> None:
        super().report({"directory": str(self.path), **value}, lines)


def load_config(config: str | None) -> "Settings":
    """What the YAML `config` says, without one what a server would find. Raises Unusable."""
    from connector.settings import SettingsError, load_settings

    try:
        return load_settings({"config_file": config} if config else {})
    except (SettingsError, OSError) as error:
        raise Unusable(str(error)) from error


def reporting(command: Callable[..., bool]) -> Callable[..., None]:
    """Adds, innermost, the options of a report; the command gets a `Reporter` for them, first.

    `command` returns whether all was well, else the exit status is 1. What it raises about the user's input makes it 2.
    """

    @_reporting_options
    @wraps(command)
    def with_reporter(fmt: str, output: Path | None, quiet: bool, **rest: Any) -> None:
        _run(lambda: command(Reporter(fmt == "json", output, quiet), **rest))

    return with_reporter


def on_directory(command: Callable[..., bool]) -> Callable[..., None]:
    """As `reporting`, for a command that works on a cache directory: it gets a `Place`."""

    @click.option("--directory", type=click.Path(path_type=Path), metavar="DIR", help="The cache directory.")
    @click.option("--config", metavar="FILE", help="YAML that names it as local_disk. Default: as a server finds it.")
    @_reporting_options
    @wraps(command)
    def with_place(
        directory: Path | None, config: str | None, fmt: str, output: Path | None, quiet: bool, **rest: Any
    ) -> None:
        _run(lambda: command(_place(config, directory, fmt, output, quiet), **rest))

    return with_place


def _reporting_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No report on stdout and no progress: exit status only."),
        click.option(
            "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there as well."
        ),
        click.option("--format", "fmt", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True),
    ):
        command = option(command)
    return command


def _run(command: Callable[[], bool]) -> None:
    """Run it, and end with the exit status that its outcome means."""
    # LMCache announces itself at import; stderr is for what went wrong here.
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from storage_tiers.disk_inspection import BadKeyError

    try:
        good = command()
    except BrokenPipeError:
        raise
    except (OSError, BadKeyError) as error:
        raise Unusable(str(error)) from error
    if not good:
        sys.exit(1)


def _place(config: str | None, directory: Path | None, fmt: str, output: Path | None, quiet: bool) -> Place:
    budget = None
    if config is not None or directory is None:
        storage = load_config(config).storage
        directory, budget = directory or storage.disk_directory, storage.disk_bytes or None
    if directory is None:
        named = f"{config} names no local_disk" if config else "no cache directory is named"
        raise click.UsageError(f"{named}; give --directory DIR, or --config FILE of a YAML with local_disk")
    return Place(fmt == "json", output, quiet, directory, budget)


def report_removals(place: Place, done: "Sequence[Removal]") -> bool:
    """Report what was removed; whether nothing failed."""
    counts, nbytes = Counter(one.outcome for one in done), Counter[str]()
    for one in done:
        nbytes[one.outcome] += one.nbytes
    lines = [f"{one.file_name}: {one.outcome}{': ' + one.error if one.error else ''}" for one in done]
    freed = nbytes["removed"] + nbytes["planned"]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing to remove"
    place.report(
        {"removals": [one._asdict() for one in done], "counts": dict(counts), "bytes": freed},
        [*lines, f"{summary}; {in_bytes(freed)}"],
    )
    return not counts["failed"]


def report_copies(place: Place, done: "Sequence[Copied]") -> bool:
    """Report what was copied; whether nothing failed or was bad."""
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
        [*lines, f"{summary}; {in_bytes(nbytes)} copied"],
    )
    return not counts["failed"] and not counts["bad"]


def fixed_in_words(row: dict[str, Any]) -> str:
    """What `verify --fix` made of a bad entry, to put behind its line."""
    if row["error"]:
        return f" (not removed: {row['error']})"
    return " (removed)" if row["removed"] else ""


def digest_matches(report: "EntryReport") -> bool | None:
    """Of a report with payload; None where no digest is known, or the name was wrong already."""
    if report.header is None or report.problem == "name":
        return None
    return report.problem != "digest"


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    ]


def in_bytes(nbytes: float) -> str:
    """A size with its unit, for people."""
    power = max(0, min(int(nbytes).bit_length() - 1, 49) // 10)
    return f"{nbytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def in_time(seconds: float | None) -> str:
    """A time since the epoch as local time, for people; empty for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class Progress:
    """How far a command has come, on stderr: on a terminal one line that changes, in a log a line now and then."""

    def __init__(self, place: Place, verb: str) -> None:
        """Shows nothing yet; `verb` as in "verified"."""
        self._silent = place.quiet
        self._verb = verb
        self._on_terminal = sys.stderr.isatty()
        self._interval = _PROGRESS_SECONDS if self._on_terminal else _PROGRESS_LOG_SECONDS
        self._next = time.monotonic() + self._interval
        self._nbytes = 0
        self._text = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._write(last=True)

    def show(self, done: int, total: int, nbytes: int) -> None:
        """`done` of `total` entries are done, the last of which had `nbytes`."""
        self._nbytes += nbytes
        self._text = "" if self._silent else f"{self._verb} {done} of {total} entries, {in_bytes(self._nbytes)}"
        if self._text and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            self._write()

    def _write(self, *, last: bool = False) -> None:
        start = "\r" if self._on_terminal else ""
        click.echo(f"{start}{self._text}", nl=last or not self._on_terminal, err=True)
