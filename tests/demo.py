# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: a real server answers about pictures and a clip, cold, warm, evicted and restarted.

    make demo

Prints one table, and writes it to build/demo.json and build/demo.png. The exit status is 0 only if every answer equals
the cold one, text and log-probabilities, and the vision encoder ran exactly where it had to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.engine.checkpoint import TowerShape, checkpoint
from tests.engine.client import Answer, ServerError
from tests.engine.media import clip, photograph, photographs
from tests.engine.server import ROOT, EngineStartError, ServerOptions, VllmServer

BUILD = ROOT / "build"
PHASES = ("cold", "device_hit", "lower_tier_hit", "restart")
TOWER = TowerShape(depth=12, width=512)
"""Large enough that encoding is most of the time to a cold first token."""
PICTURES = 8
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Phase:
    """What one phase showed."""

    encoder_runs: int
    """Items that the vision tower encoded, as counted inside the worker."""
    items: int
    """Items that were asked about."""
    ttft_p50_s: float
    """Median seconds to the first token."""
    speedup: float
    """The cold median divided by this one."""


@dataclass(frozen=True)
class Item:
    """One picture or the clip."""

    name: str
    images: tuple[bytes, ...] = ()
    video: bytes | None = None

    def ask(self, server: VllmServer) -> Answer:
        """Ask the server about it."""
        return server.chat(f"What is in the {self.name}?", images=self.images, video=self.video)


WARM_UP = (Item("warm-up", images=(photograph("gravel"),)), Item("warm-up", video=clip(skip=60)))
"""Asked about first after each start, so that no phase pays for the compilation of kernels."""


class Pass:
    """All four phases against one kind of server, with a connector or without."""

    def __init__(self, label: str, model: Path, options: ServerOptions, store: Path) -> None:
        self.label = label
        self.store = store
        workdir = BUILD / "demo" / label.replace(" ", "-")
        shutil.rmtree(workdir, ignore_errors=True)
        self.server = VllmServer(model, workdir, options)
        self.items = [Item(f"picture {i}", images=(jpeg,)) for i, jpeg in enumerate(photographs(PICTURES))]
        self.items.append(Item("clip", video=clip()))
        self.answers: dict[str, list[Answer]] = {phase: [] for phase in PHASES}
        self.runs: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.taken_up: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.warm_up_runs: list[int] = []

    def run(self) -> None:
        """Run the four phases, and leave no server behind."""
        try:
            self._start()
            for item in self.items:
                self._ask("cold", item)
                self._ask("device_hit", item)
            self._told("cold", "device_hit")
            # All items together are larger than the device's cache, so each was evicted when its turn comes again.
            for item in self.items:
                self._ask("lower_tier_hit", item)
            self._told("lower_tier_hit")
            self._settle()
            self.server.stop()
            self._start()
            for item in self.items:
                self._ask("restart", item)
            self._told("restart")
        finally:
            self.server.stop()

    def phases(self) -> dict[str, Phase]:
        """Return the figures of the phases."""
        medians = {phase: statistics.median(answer.ttft_s for answer in self.answers[phase]) for phase in PHASES}
        return {
            phase: Phase(
                encoder_runs=self.runs[phase],
                items=len(self.answers[phase]),
                ttft_p50_s=round(medians[phase], 4),
                speedup=round(medians["cold"] / medians[phase], 2),
            )
            for phase in PHASES
        }

    def differing(self, reference: list[Answer]) -> list[str]:
        """Return the phase and item of each answer that is not exactly the reference's."""
        return [
            f"{self.label}, {phase}, {item.name}"
            for phase in PHASES
            for item, answer, cold in zip(self.items, self.answers[phase], reference, strict=True)
            if not answer.same_as(cold)
        ]

    def wrong_runs(self, must_encode: Collection[str], must_restore: Collection[str]) -> list[str]:
        """Return a sentence for each phase in which the encoder ran for other items than it must.

        An item of a phase that must restore has to come into the device's cache anew without an encoder run; one that
        was still there would show nothing.
        """
        faults = [
            f"{self.label}, {phase}: the encoder ran for {self.runs[phase]} of {len(self.items)} items"
            for phase in PHASES
            if self.runs[phase] != (len(self.items) if phase in must_encode else 0)
        ]
        faults += [
            f"{self.label}, {phase}: only {self.taken_up[phase]} of {len(self.items)} items had left the device"
            for phase in must_restore
            if self.taken_up[phase] < len(self.items)
        ]
        if "restart" in must_restore and self.warm_up_runs[-1]:
            faults.append(f"{self.label}, restart: the encoder ran for the first requests")
        return faults

    def _start(self) -> None:
        """Start the server and let it compile its kernels, with media that are not among the items."""
        say(f"{self.label}: starting vllm serve (about 35 s)")
        started = time.monotonic()
        self.server.start(progress=say)
        say(f"{self.label}: healthy after {time.monotonic() - started:.0f} s; warming up")
        for item in WARM_UP:
            item.ask(self.server)
        self.warm_up_runs.append(self.server.encoder_runs())

    def _ask(self, phase: str, item: Item) -> None:
        """Ask about one item, and note the answer and the encoder runs that it took."""
        runs, taken_up = self.server.encoder_runs(), len(self.server.events("gathered"))
        self.answers[phase].append(item.ask(self.server))
        self.runs[phase] += self.server.encoder_runs() - runs
        self.taken_up[phase] += len(self.server.events("gathered")) - taken_up

    def _told(self, *phases: str) -> None:
        for phase in phases:
            say(f"{self.label}: {phase}: {len(self.items)} items, {self.runs[phase]} encoder runs")

    def _settle(self) -> None:
        """Wait until the directory holds a file for each item; `vllm serve` kills its engine when it is stopped."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.server.options.ec_transfer_config is not None and time.monotonic() < deadline:
            stored = [path for path in self.store.rglob("*") if path.suffix in (".pt", ".safetensors")]
            if len(stored) >= len(self.items) + len(WARM_UP):
                return
            time.sleep(0.1)


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[demo] {text}", flush=True)


def connector_options(connector: str, store: Path) -> ServerOptions:
    """Return how to start a server with the connector of that name, storing below the directory `store`."""
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    sizing = BUILD / "demo" / "lmcache.yaml"
    sizing.parent.mkdir(parents=True, exist_ok=True)
    sizing.write_text(
        "local_cpu: true\n"
        "max_local_cpu_size: 0.25\n"
        f'local_disk: "file://{store}/"\n'
        "max_local_disk_size: 1.0\n"
    )  # fmt: skip
    extra = {"shared_storage_path": str(store)} if connector == "ECExampleConnector" else {}
    return ServerOptions(
        ec_transfer_config={"ec_connector": connector, "ec_role": "ec_both", "ec_connector_extra_config": extra},
        environment={"LMCACHE_CONFIG_FILE": str(sizing)},
    )


def table(passes: Mapping[str, Mapping[str, Phase]]) -> str:
    """Return the table of all passes and phases."""
    rows = [f"{'':16}{'phase':16}{'encoder runs':>14}{'TTFT median':>14}{'speed-up':>10}"]
    for label, phases in passes.items():
        for name, phase in phases.items():
            runs = f"{phase.encoder_runs} of {phase.items}"
            rows.append(f"{label:16}{name:16}{runs:>14}{phase.ttft_p50_s:>12.3f} s{phase.speedup:>9.1f}x")
    return "\n".join(rows)


def draw(passes: Mapping[str, Mapping[str, Phase]], path: Path) -> None:
    """Write a bar chart of the time to the first token, by phase, to `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.0), layout="constrained")
    width = 0.8 / len(passes)
    for index, (label, phases) in enumerate(passes.items()):
        places = [place + (index - (len(passes) - 1) / 2) * width for place in range(len(phases))]
        bars = axes.bar(places, [phase.ttft_p50_s * 1000 for phase in phases.values()], width, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=9)
    axes.set_xticks(range(len(PHASES)), [phase.replace("_", " ") for phase in PHASES])
    axes.set_ylabel("median time to first token (ms)")
    axes.set_title("Time to first token, small Qwen3-VL on this machine's CPU")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> int:
    """Run the demo; return its exit status."""
    parser = argparse.ArgumentParser(description="The main job, shown on a real server.")
    parser.add_argument("--connector", default="LMCacheNeuronECConnector", help="for developers: another one")
    connector = parser.parse_args().connector
    started = time.monotonic()
    say("making the model, where it is not there yet")
    model = checkpoint(BUILD / "models", TOWER).resolve()
    store = (BUILD / "demo-cache").resolve()
    ours = Pass("connector", model, connector_options(connector, store), store)
    plain = Pass("no connector", model, ServerOptions(), store)
    try:
        ours.run()
        plain.run()
    except (EngineStartError, ServerError) as error:
        say(f"failed: {error}")
        return 2

    with_connector, without = ours.phases(), plain.phases()
    cold = ours.answers["cold"]
    different = ours.differing(cold) + plain.differing(cold)
    passes = {"connector": with_connector, "no connector": without}
    print(f"\n{table(passes)}\n")
    result = {
        "phases": {name: asdict(phase) for name, phase in with_connector.items()},
        "no_connector": {name: asdict(phase) for name, phase in without.items()},
        "answers_equal": not different,
    }
    (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(passes, BUILD / "demo.png")
    say(f"wrote build/demo.json and build/demo.png; {time.monotonic() - started:.0f} s in all")

    faults = [f"the answer differs from the cold one: {place}" for place in different]
    faults += ours.wrong_runs(must_encode={"cold"}, must_restore=("lower_tier_hit", "restart"))
    faults += plain.wrong_runs(must_encode={"cold", "lower_tier_hit", "restart"}, must_restore=())
    for fault in faults:
        say(f"WRONG: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
