# SPDX-License-Identifier: Apache-2.0
"""How every benchmark here tells what it measured: one table on the screen, the same figures in `build/bench.json`."""

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measuring import Samples

__all__ = ["Goal", "Table"]

RESULTS = Path(__file__).parents[2] / "build" / "bench.json"
SHM = Path("/dev/shm")
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "bytes": 1.0}
MANY_SAMPLES = 100
"""From here on a 99th percentile says something."""

_COLUMNS = {
    "case": "case",
    "n": "n",
    "median": "median",
    "min": "min",
    "max": "max",
    "p99": "p99",
    "cpu": "cpu",
    "ratio": "",
    "best": "of best",
    "cpu_ratio": "of cpu",
    "goal": "goal",
    "verdict": "",
}
_TEXT = {"case", "ratio", "goal", "verdict"}


@dataclass(frozen=True)
class Goal:
    """What the issue asks for, printed beside the figure; nothing fails by it."""

    limit: float
    """Of the median in the table's unit, or of the median ratio."""
    of_ratio: bool = False

    def __str__(self) -> str:
        return f"ratio >= {self.limit:g}" if self.of_ratio else f"< {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of a table, in its unit."""

    case: str
    samples: Samples
    reference: Samples | None
    """What the case is compared with, turn by turn."""
    goal: Goal | None

    def figures(self) -> dict[str, Any]:
        """Everything that is told of the row, by name."""
        ordered = sorted(self.samples.wall)
        figures: dict[str, Any] = {
            "samples": len(ordered),
            "median": statistics.median(ordered),
            "min": ordered[0],
            "max": ordered[-1],
        }
        if len(ordered) >= MANY_SAMPLES:
            figures["p99"] = ordered[int(0.99 * len(ordered))]
        if self.samples.cpu:
            figures["cpu_median"] = statistics.median(self.samples.cpu)
        if self.reference is not None:
            figures["ratio"] = self._ratio(self.reference)
        if self.goal is not None:
            figures |= {"goal": str(self.goal), "is_met": self._meets(self.goal, figures)}
        return figures

    def _ratio(self, reference: Samples) -> dict[str, float]:
        turns = [theirs / ours for theirs, ours in zip(reference.wall, self.samples.wall, strict=True)]
        ratio = {
            "median": statistics.median(turns),
            "min": min(turns),
            "max": max(turns),
            "of_best": min(reference.wall) / min(self.samples.wall),
        }
        if reference.cpu and self.samples.cpu:
            ratio["of_cpu"] = statistics.median(reference.cpu) / statistics.median(self.samples.cpu)
        return ratio

    def _meets(self, goal: Goal, figures: dict[str, Any]) -> bool:
        if goal.of_ratio:
            return bool(figures["ratio"]["median"] >= goal.limit)
        return bool(figures["median"] < goal.limit)


@dataclass
class Table:
    """Rows of one unit under one title; `publish` prints them and puts them into the results file."""

    key: str
    """Name in the results file."""
    title: str
    unit: str
    facts: Sequence[str] = ()
    """Sizes and circumstances."""
    compared_with: str = ""
    """What ratios are to: above 1 is faster than that."""
    rows: list[Row] = field(default_factory=list)

    def add(self, case: str, samples: Samples, *, reference: Samples | None = None, goal: Goal | None = None) -> None:
        """Append a row; measurements are in seconds, or in bytes where that is the unit."""
        scaled = self._scaled(samples)
        self.rows.append(Row(case, scaled, None if reference is None else self._scaled(reference), goal))

    def publish(self, directory: Path = SHM) -> None:
        """Print the table and keep its figures. `directory` is where files of this benchmark lie."""
        on = _machine(directory)
        print(f"\n\n{self.title}")
        for fact in (", ".join(f"{name} {value}" for name, value in on.items()), *self.facts, *self._legend()):
            print(f"  {fact}")
        for line in self._lines():
            print(f"  {line}")
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[self.key] = {
            "title": self.title,
            "unit": self.unit,
            "facts": list(self.facts),
            "ratio_to": self.compared_with,
            "machine": on,
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cases": self._cases(),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False))

    def _cases(self) -> dict[str, Any]:
        """Figures by case; an indented one belongs to the one above it that is not."""
        cases: dict[str, Any] = {}
        above = ""
        for row in self.rows:
            above = above if row.case.startswith(" ") else row.case
            name = row.case if row.case is above else f"{above}: {row.case.strip()}"
            assert name not in cases, f"two rows are called {name!r}"
            cases[name] = row.figures()
        return cases

    def _scaled(self, samples: Samples) -> Samples:
        unit = UNITS[self.unit]
        return Samples([each / unit for each in samples.wall], [each / unit for each in samples.cpu])

    def _legend(self) -> list[str]:
        if not self.compared_with:
            return []
        return [
            f"ratio: speed against {self.compared_with}, turn by turn: median (min to max); of the best turns; of "
            "processor time"
        ]

    def _lines(self) -> list[str]:
        """The table as text, without columns that no row has anything in."""
        titles = _COLUMNS | {"median": f"median {self.unit}", "ratio": "ratio"}
        body = [_cells(row) for row in self.rows]
        kept = [name for name in titles if any(cells[name] for cells in body)]
        lines = [titles, *body]
        widths = {name: max(len(cells[name]) for cells in lines) for name in kept}

        def padded(name: str, cell: str) -> str:
            return cell.ljust(widths[name]) if name in _TEXT else cell.rjust(widths[name])

        return ["  ".join(padded(name, cells[name]) for name in kept).rstrip() for cells in lines]


def _cells(row: Row) -> dict[str, str]:
    figures = row.figures()
    ratio = figures.get("ratio", {})
    return {
        "case": row.case,
        "n": str(figures["samples"]),
        **{name: _short(figures.get(name)) for name in ("median", "min", "max", "p99")},
        "cpu": _short(figures.get("cpu_median")),
        "ratio": f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else "",
        "best": f"{ratio['of_best']:.2f}" if ratio else "",
        "cpu_ratio": f"{ratio['of_cpu']:.2f}" if "of_cpu" in ratio else "",
        "goal": figures.get("goal", ""),
        "verdict": {None: "", True: "met", False: "MISSED"}[figures.get("is_met")],
    }


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _machine(directory: Path) -> dict[str, str]:
    """What this runs on; `directory` decides the file system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": f"{os.cpu_count()} (torch uses {torch.get_num_threads()})",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file system": _file_system(directory),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _file_system(directory: Path) -> str:
    """Type and mount point of the file system that holds `directory`."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    held = [(where, kind) for where, kind in mounts if directory.resolve().is_relative_to(where)]
    where, kind = max(held, key=lambda mount: len(mount[0]))
    return f"{kind} at {where}"
