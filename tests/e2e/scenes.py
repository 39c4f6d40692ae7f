# SPDX-License-Identifier: Apache-2.0
"""What is done to real servers, once per test session: each scene runs its servers and returns what was seen."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.checkpoint import checkpoint
from tests.engine.client import Answer, ServerError
from tests.engine.encoder_probe import ProbeEvent
from tests.engine.media import PHOTOGRAPHS, clip, photographs
from tests.engine.server import ROOT, ServerOptions, VllmServer

MODELS = ROOT / "build" / "models"
SLOW_DISK = Path(__file__).parent / "slow_disk"
SHM = Path("/dev/shm")
ITEMS = 10
"""Pictures of 256 tokens and, as item number `ITEMS`, a clip: the device's cache holds four of them."""
CLIP = ITEMS


@dataclass
class Seen:
    """What a server answered and did, by item."""

    answers: dict[int, Answer] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    """Encoder runs while the item was asked for."""

    @property
    def total_runs(self) -> int:
        """Encoder runs over all items."""
        return sum(self.runs.values())


def options(
    role: str | None, directory: Path, extra: Mapping[str, Any] | None = None, **overrides: Any
) -> ServerOptions:
    """A server with the connector in `role` on `directory`, with settings in `extra`; or without a connector."""
    if role is None:
        return ServerOptions(**overrides)
    settings = {
        "max_local_cpu_size": 0.25,
        "local_disk": str(directory),
        "max_local_disk_size": 1.0,
        "log_interval_seconds": 1.0,
        "skip_slow_restores": False,
        **(extra or {}),
    }
    config = {"ec_connector": "LMCacheNeuronECConnector", "ec_role": role, "ec_connector_extra_config": settings}
    return ServerOptions(ec_transfer_config=config, **overrides)


def server(workdir: Path, how: ServerOptions) -> VllmServer:
    """A server of the small checkpoint, not started."""
    return VllmServer(checkpoint(MODELS), workdir, how)


def ask(running: VllmServer, item: int, **body: Any) -> Answer:
    """Ask about one item."""
    if item == CLIP:
        return running.chat("What happens?", video=clip(), **body)
    return running.chat("What is it?", images=[photographs(ITEMS)[item]], **body)


def ask_all(running: VllmServer, items: Sequence[int]) -> Seen:
    """Ask about each item in turn."""
    seen = Seen()
    for item in items:
        before = running.encoder_runs()
        seen.answers[item] = ask(running, item)
        seen.runs[item] = running.encoder_runs() - before
    return seen


def wait_until(condition: Any, deadline_s: float = 20.0) -> bool:
    """Whether `condition()` became true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def stored(directory: Path) -> list[Path]:
    """The items in a cache directory."""
    return sorted(directory.glob("*.pt"))


def segments(running: VllmServer) -> set[str]:
    """Names of the shared segments that the server's processes own; others may test on this machine as well."""
    return {path.name for pid in running.pids for path in SHM.glob(f"lmcache_neuron_ec_*_p{pid}")}


Scrape = dict[tuple[str, str], float]
"""Value of each of our metrics on `/metrics`, by its name there and the value of its own label ("" without one)."""


def scrape(running: VllmServer) -> Scrape:
    """Our metrics as they stand on the server's `/metrics`."""
    values: Scrape = {}
    for family in text_string_to_metric_families(running.metrics()):
        for sample in family.samples:
            if sample.name.startswith(("vllm_neuron:", "vllm:ec_tier_")) and not sample.name.endswith("_created"):
                own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                values[sample.name, own[0] if own else ""] = sample.value
    return values


@dataclass
class Slow:
    """What happened while the disk took a second per read."""

    read_seconds: float
    alone_ttft_s: list[float]
    """A small request with nothing beside it."""
    beside_ttft_s: list[float]
    """The same request, begun and ended while another waits for the disk."""
    waited: Answer
    waited_runs: int
    """Encoder runs for the request that waited."""
    late: Answer
    late_runs: int
    """Encoder runs for an item whose read took longer than the deadline."""


@dataclass
class Restarted:
    """A server, killed, and another one on the same directory, whose disk turns slow in the end."""

    cold: Seen
    device_hit: Seen
    evicted: Seen
    events: list[ProbeEvent]
    files: int
    owned: set[str]
    """Segments of the server that was killed, while it ran."""
    still_in_shm: set[str]
    """Those of them that are left after the next start."""
    restarted: Seen
    damaged: Seen
    """Items whose files were flipped, cut short or emptied while no server ran."""
    after_damage: Seen
    slow: Slow
    scrapes: dict[str, Scrape]
    """Our metrics by the phase after which they were read; "start" and "second start" before the first question."""
    first_log: str
    second_log: str


def restart_scene(base: Path) -> Restarted:
    """Cold, repeated, evicted, killed with SIGKILL, damaged, started again, slowed down."""
    directory, control = base / "cache", base / "delay"
    base.mkdir(parents=True, exist_ok=True)
    control.write_text("0")
    environment = {"SLOW_DISK_SECONDS_FILE": str(control), "PYTHONPATH": str(SLOW_DISK)}
    how = options("ec_both", directory, environment=environment)
    first = server(base / "server", how).start()
    scrapes = {"start": scrape(first)}
    cold = ask_all(first, range(ITEMS + 1))
    scrapes["cold"] = scrape(first)
    device_hit = ask_all(first, [CLIP])
    scrapes["device_hit"] = scrape(first)
    evicted = ask_all(first, [0, 1, 2])
    scrapes["evicted"] = scrape(first)
    assert wait_until(lambda: len(stored(directory)) == ITEMS + 1)
    files, events, first_log = len(stored(directory)), first.events(), first.log()
    owned = segments(first)
    first.kill()
    hashes = [event.identifier for event in events if event.kind == "gathered"]
    for item, damage in ((0, _flip), (1, _cut), (2, _empty)):
        damage(_file_of(directory, hashes[item]))
    second = server(base / "server", how).start()
    try:
        still = {name for name in owned if (SHM / name).exists()}
        scrapes["second start"] = scrape(second)
        restarted = ask_all(second, [*range(3, 6), CLIP])
        scrapes["restarted"] = scrape(second)
        damaged = ask_all(second, [0, 1, 2])
        ask_all(second, [3, 4, 5, CLIP])
        after_damage = ask_all(second, [0, 1, 2])
        slow = _slow(second, control)
        second_log = second.log()
    finally:
        second.stop()
    return Restarted(
        cold, device_hit, evicted, events, files, owned, still, restarted, damaged, after_damage, slow,
        scrapes, first_log, second_log,
    )  # fmt: skip


def _slow(running: VllmServer, control: Path) -> Slow:
    """Items 6 and 7 have not been asked for since the start: they are on the disk alone."""
    read_seconds = 1.0
    small = [ask(running, 5, max_tokens=1).ttft_s for _ in range(9)]
    control.write_text(str(read_seconds))
    runs = running.encoder_runs()
    beside: list[float] = []
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, running, 6)
        waiting.add_done_callback(lambda _: done.set())
        time.sleep(0.1)  # its pictures are processed before the engine sees it
        while not done.is_set():
            small_too = ask(running, 5, max_tokens=1)
            if not done.is_set():
                beside.append(small_too.ttft_s)
        waited = waiting.result()
    waited_runs = running.encoder_runs() - runs
    control.write_text("6")
    runs = running.encoder_runs()
    late = ask(running, 7)
    late_runs = running.encoder_runs() - runs
    control.write_text("0")
    return Slow(read_seconds, small, beside, waited, waited_runs, late, late_runs)


def _file_of(directory: Path, mm_hash: str) -> Path:
    from storage_tiers.key import chunk_hash_of

    (found,) = directory.glob(f"*@1@0@{chunk_hash_of(mm_hash):x}@*.pt")
    return found


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@dataclass
class TensorParallel:
    """Two ranks on one pool."""

    cold: Seen
    evicted: Seen
    events: list[ProbeEvent]
    """Of both ranks."""
    files: int
    segments: set[str]


def tensor_parallel_scene(base: Path) -> TensorParallel:
    """Six pictures, of which the first have left the device when they are asked for again."""
    directory = base / "cache"
    running = server(base / "server", options("ec_both", directory, tensor_parallel=2)).start()
    try:
        cold = ask_all(running, range(6))
        evicted = ask_all(running, [0, 1])
        assert wait_until(lambda: len(stored(directory)) == 6)
        return TensorParallel(cold, evicted, running.events(rank=None), len(stored(directory)), segments(running))
    finally:
        running.stop()


@dataclass
class Disaggregated:
    """One engine that only encodes, one that only loads, on one directory."""

    produced: int
    """Encoder runs of the producer."""
    files: int
    consumed: Seen
    new_to_both: Seen
    """An item that the producer was never asked for, which the consumer encodes."""
    files_after: int


def disaggregated_scene(base: Path) -> Disaggregated:
    """Four items encoded by the producer, then asked of the consumer while the producer is gone."""
    directory = base / "cache"
    producer = server(base / "producer", options("ec_producer", directory)).start()
    try:
        for item in (0, 1, 2, CLIP):
            _encode_only(producer, item)
        assert wait_until(lambda: len(stored(directory)) == 4)
        produced, files = producer.encoder_runs(), len(stored(directory))
    finally:
        producer.stop()
    consumer = server(base / "consumer", options("ec_consumer", directory)).start()
    try:
        consumed = ask_all(consumer, [0, 1, 2, CLIP])
        new_to_both = ask_all(consumer, [3])
        return Disaggregated(produced, files, consumed, new_to_both, len(stored(directory)))
    finally:
        consumer.stop()


def _encode_only(producer: VllmServer, item: int) -> None:
    """A producer generates nothing worth reading: what it answers is not looked at."""
    with contextlib.suppress(ServerError):
        ask(producer, item, max_tokens=1)


BLOCK_ITEMS = 20
"""Pictures of 256 and 225 tokens: five times what the device holds."""


@dataclass
class InBlocks:
    """A server whose device cache lies in blocks, asked for far more than it holds."""

    answers: list[tuple[int, Answer]]
    """Item and answer, in the order of the questions: each item three times."""
    plain: dict[int, Answer]
    """By item, from the server without a connector."""
    runs: int
    events: list[ProbeEvent]
    log: str
    scrapes: list[Scrape]
    """Our metrics after each answer."""
    files_before: int
    """Items on the disk while the server ran: what has left the device."""
    files_after: int
    """Items on the disk after it was asked to end."""


def blocks_scene(base: Path, plain: VllmServer) -> InBlocks:
    """Every item three times, in random order, on a device that holds four of them; saved only as they leave it."""
    directory = base / "cache"
    how = options(
        "ec_both",
        directory,
        extra={"device_block_size": 64, "spill_policy": "on_evict", "max_dirty_seconds": 3600.0},
        arguments=[
            "--shutdown-timeout", "10",
            "--worker-cls", "connector.workers.BlockCacheWorker",
            "--ec-manager-config", json.dumps({"encoder_cache_manager_cls": "connector.BlockAwareEncoderCacheManager"}),
        ],
    )  # fmt: skip
    order = [item for item in range(BLOCK_ITEMS) for _ in range(3)]
    random.Random(3).shuffle(order)
    with server(base / "server", how) as running:
        answers, scrapes = [], []
        for item in order:
            answers.append((item, _ask_block_item(running, item)))
            scrapes.append(scrape(running))
        assert wait_until(lambda: len(stored(directory)) >= BLOCK_ITEMS - 4)
        runs, events, before = running.encoder_runs(), running.events(), len(stored(directory))
        running.stop(grace_s=30.0)
        log = running.log()
    expected = {item: _ask_block_item(plain, item) for item in range(BLOCK_ITEMS)}
    return InBlocks(answers, expected, runs, events, log, scrapes, before, len(stored(directory)))


def _ask_block_item(running: VllmServer, item: int) -> Answer:
    distinct = photographs(len(PHOTOGRAPHS)) + photographs(BLOCK_ITEMS - len(PHOTOGRAPHS), side=480)
    return running.chat("What is it?", images=[distinct[item]])
