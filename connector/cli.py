# SPDX-License-Identifier: Apache-2.0
"""`ec-cache`: look after a cache directory, also while servers use it.

This room has commands only; what they do is `storage_tiers.disk_maintenance`'s, `disk_inspection`'s and
`cache_plan`'s, how they print is `cli_output`'s. All but the last import torch and LMCache, seconds in all, so they are
imported by the command that runs.

Exit status: 0 fine; 1 a problem was found, or some entries failed; 2 wrong usage or unusable input.
"""

import os
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from connector import cli_output as out
from connector.cli_output import Place, Reporter, in_bytes, on_directory, reporting, table

if TYPE_CHECKING:
    from storage_tiers.disk_inspection import Tally

__all__ = ["main"]

_SHORT = 12
"""Digits of a fingerprint that a table shows; enough to tell two apart, and to name one as a prefix."""
_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "used": lambda row: -row["last_used"],
    "created": lambda row: -(row["created"] or 0),
    "size": lambda row: -row["file_bytes"],
    "model": lambda row: (row["model"], row["key"]),
    "key": lambda row: (row["key"], row["file_name"]),
}


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
@on_directory
def list_entries(place: Place, sort: str, limit: int | None) -> bool:
    """List the entries, by their trailers: no payload is read."""
    from storage_tiers.disk_inspection import reports

    rows = sorted((report.as_dict() for report in reports(place.directory())), key=_SORTS[sort])
    shown = rows[:limit]
    lines = table(
        ["key", "model", "fingerprint", "modality", "shape", "dtype", "bytes", "created", "last used", "state"],
        [
            [
                row["key"] or row["file_name"],
                row["model"],
                row["fingerprint"][:_SHORT],
                row["modality"],
                "x".join(map(str, row["shape"])),
                row["dtype"],
                in_bytes(row["file_bytes"]),
                out.in_time(row["created"]),
                out.in_time(row["last_used"]),
                row["state"] if row["state"] != "bad" else f"bad: {row['problem']}",
            ]
            for row in shown
        ],
    )
    total = sum(row["file_bytes"] for row in rows)
    note = f"{len(shown)} of {len(rows)} entries shown, {in_bytes(total)} in all"
    place.report({"entries": shown, "total_entries": len(rows), "total_bytes": total}, [*lines, note])
    return True


@main.command()
@click.argument("key")
@on_directory
def describe(place: Place, key: str) -> bool:
    """Show all that is known of one entry, and whether its bytes are as they were written.

    KEY: an mm_hash, the beginning of one that is unique, or a file name.
    """
    from storage_tiers.disk_inspection import PROBLEMS, find, inspect

    directory = place.directory()
    name = find(directory, key)
    report = inspect(directory, name, deep=True)
    if report is None:
        raise FileNotFoundError(f"{name} has just been removed by somebody else; nothing is left to describe")
    row = report.as_dict() | {"digest_matches": out.digest_matches(report), "why": PROBLEMS.get(report.problem, "")}
    words = row | {
        "shape": " x ".join(map(str, row["shape"])),
        "created": out.in_time(row["created"]),
        "last_used": out.in_time(row["last_used"]),
        "digest_matches": {True: "yes", False: "no", None: "unknown"}[row["digest_matches"]],
    }
    place.report(
        row, [f"{name.replace('_', ' '):<16} {value}" for name, value in words.items() if value not in ("", None)]
    )
    return report.state != "bad"


@main.command()
@on_directory
def stats(place: Place) -> bool:
    """Count entries and bytes, by their trailers: no payload is read."""
    from storage_tiers.disk_inspection import stats as count

    found = count(place.directory())
    budget = place.budget_bytes
    of_budget = f" of {in_bytes(budget)}" if budget else ""
    lines = table(
        ["", "entries", "bytes"],
        [
            ["all", str(found.total.entries), f"{in_bytes(found.total.nbytes)}{of_budget}"],
            ["no trailer", str(found.unverified.entries), in_bytes(found.unverified.nbytes)],
            ["damaged trailer", str(found.bad.entries), in_bytes(found.bad.nbytes)],
        ],
    )
    for title in ("model", "fingerprint", "modality"):
        tallies: dict[str, Tally] = getattr(found, f"by_{title}")
        ordered = sorted(tallies.items(), key=lambda item: -item[1].nbytes)
        rows = [[name or "(none)", str(tally.entries), in_bytes(tally.nbytes)] for name, tally in ordered]
        lines += ["", *table([title, "entries", "bytes"], rows)]
    place.report(asdict(found) | {"budget_bytes": budget}, lines)
    return True


@main.command()
@click.option("--fix", is_flag=True, help="Remove what is bad.")
@click.option(
    "--strict",
    is_flag=True,
    help="An entry without a trailer is bad too: it is LMCache's own, or was cut off before its trailer.",
)
@on_directory
def verify(place: Place, fix: bool, strict: bool) -> bool:
    """Read every byte of every entry and name those that are not as they were written."""
    from storage_tiers.disk_inspection import PROBLEMS
    from storage_tiers.disk_maintenance import verify as verdicts

    bad: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with out.Progress(place, "verified") as progress:
        for verdict in verdicts(place.directory(), fix=fix, strict=strict):
            progress.show(verdict.done, verdict.total, verdict.entry.file_bytes)
            counts.update(["checked", verdict.entry.state, *["removed"] * verdict.removed])
            if verdict.is_bad:
                why = PROBLEMS.get(verdict.entry.problem, "")
                bad.append(verdict.entry.as_dict() | {"why": why, "removed": verdict.removed, "error": verdict.error})
    lines = [f"{row['file_name']}: {row['problem']}: {row['why']}" + out.fixed_in_words(row) for row in bad]
    shown = {name: counts[name] for name in ("checked", "ok", "unverified", "removed")}
    summary = ", ".join([*(f"{count} {name}" for name, count in shown.items()), f"{len(bad)} bad"])
    place.report({**shown, "bad": bad}, [*lines, summary])
    return not bad


@main.command()
@click.option(
    "--max-size",
    callback=out.amount(out.SIZES, "8GiB"),
    metavar="SIZE",
    help="Only as much as must go until all entries take no more: 8GiB.",
)
@click.option(
    "--older-than",
    callback=out.amount(out.DURATIONS, "7d"),
    metavar="TIME",
    help="Only what was not used for so long: 12h, 7d.",
)
@click.option("--fingerprint", default="", metavar="PREFIX", help="Only what has a fingerprint that starts so.")
@click.option(
    "--not-fingerprint", default="", metavar="PREFIX", help="Only what has a fingerprint that starts otherwise."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, say what would go.")
@on_directory
def prune(
    place: Place,
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
    return out.report_removals(place, done)


@main.command()
@click.argument("key")
@on_directory
def evict(place: Place, key: str) -> bool:
    """Remove one entry. KEY: an mm_hash, the beginning of one that is unique, or a file name."""
    from storage_tiers.disk_inspection import find
    from storage_tiers.disk_maintenance import Removal, Remover

    directory = place.directory()
    name = find(directory, key)
    entry = directory.entry_status(name)
    return out.report_removals(
        place, [Remover(directory).remove(entry) if entry is not None else Removal(name, 0, "gone")]
    )


@main.command()
@click.argument("destination", type=click.Path(path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--accept-unverified", is_flag=True, help="Copy LMCache's own files too, which nothing can verify.")
@on_directory
def export(place: Place, destination: Path, keys: tuple[str, ...], accept_unverified: bool) -> bool:
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
    return out.report_copies(place, done)


@main.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--accept-unverified", is_flag=True, help="Copy LMCache's own files too, which nothing can verify.")
@on_directory
def import_entries(place: Place, source: Path, keys: tuple[str, ...], accept_unverified: bool) -> bool:
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
                raise out.Unusable(f"{source} is no whole tar file ({error}); name one that `export` made") from error
        else:
            _refuse_same(place.path, source)
            found = DirectorySource(open_directory(source), keys)
        capacity = place.budget_bytes or NO_LIMIT
        into = CacheDirectory(place.path)
        done = list(copy_into(into, found, capacity_bytes=capacity, accept_unverified=accept_unverified))
    return out.report_copies(place, done)


@main.command()
@click.argument("model")
@click.option("--config", metavar="FILE", help="The server's YAML. Default: as a server finds it.")
@click.option("--block-size", type=click.IntRange(min=1), metavar="N", help="Tokens of a device block.")
@click.option("--num-blocks", type=click.IntRange(min=2), metavar="N", help="Device blocks, one of them scratch.")
@click.option("--item", "items", multiple=True, metavar="SIZE", help="1024x1024, or video:FRAMESxWIDTHxHEIGHT; repeat.")
@reporting
def plan(
    reporter: Reporter,
    model: str,
    config: str | None,
    block_size: int | None,
    num_blocks: int | None,
    items: tuple[str, ...],
) -> bool:
    """Say what items of a model take, how many each tier holds, and the flags for `vllm serve`.

    MODEL: a directory with a config.json, such a file, or a name in the local Hugging Face cache; nothing is fetched.
    Status 1: a tier cannot hold, or never serves, one of the items.
    """
    from connector.cache_plan import DEFAULT_ITEMS, PlanError, describe, plan_for, read_encoder, sizes_of

    config = config or os.environ.get("LMCACHE_CONFIG_FILE") or None
    sizes = sizes_of(out.load_config(config), block_size, num_blocks)
    set_here = {"config_file": config, "device_block_size": block_size, "device_num_blocks": num_blocks}
    try:
        found = plan_for(model, read_encoder(model), sizes, items or DEFAULT_ITEMS, set_here)
    except PlanError as error:
        raise out.Unusable(str(error)) from error
    heads, titles, rows = describe(found)
    problems = [f"! {problem}" for problem in found.problems]
    reporter.report(found.as_dict(), [*heads, "", *table(titles, rows), *problems, "", found.command])
    return not found.problems


def _refuse_same(one: Path, other: Path) -> None:
    if one.resolve() == other.resolve():
        raise click.UsageError(f"{other} is the cache directory itself; name another one")


if __name__ == "__main__":
    main(prog_name="ec-cache")
