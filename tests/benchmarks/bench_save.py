# SPDX-License-Identifier: Apache-2.0
"""What saving an encoder output costs the threads that run the steps, beside LMCache's own engine."""

import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from lmcache.v1.ec_engine import ECCacheEngine
from lmcache.v1.metadata import LMCacheMetadata

from connector.lmcache_config import build_config
from connector.step_plan import StepPlan
from storage_tiers.tier import digest_of
from tests.benchmarks.measuring import Samples, StallMeter, Stopwatch, by_turns, stopwatch, timed
from tests.benchmarks.rig import (
    DTYPE,
    GIB_BYTES,
    MODEL,
    PAGE_BYTES,
    PICTURE_ROWS,
    WIDTH,
    ConnectorRig,
    encoder_output,
    request_for,
    same_bytes,
    wait_until,
)
from tests.benchmarks.table import Goal, Table
from tests.scheduler.items import Image

pytestmark = pytest.mark.timeout(900)

ROUNDS = 40
ITEM_BYTES = PICTURE_ROWS * WIDTH * DTYPE.itemsize
ITEM_PAGES = -(-ITEM_BYTES // PAGE_BYTES)
POOL_ITEMS = 8
DISK_ITEMS = 6
STEP_ITEMS = 4
OUTPUTS = 3
"""Tensors that take turns as the encoder's output."""
HOOKS = ("update_state_after_alloc", "build_connector_meta", "bind", "save_caches", "clear")


class OurEngine:
    """Saves new items through the connector's hooks, and checks where their bytes ended up."""

    def __init__(self, directory: Path, outputs: Sequence[torch.Tensor], keeps_pool_full: bool) -> None:
        pool_bytes = POOL_ITEMS * ITEM_PAGES * PAGE_BYTES
        self.rig = ConnectorRig(pool_bytes, WIDTH, directory, disk_bytes=DISK_ITEMS * (ITEM_BYTES + (1 << 20)))
        self.hooks = {name: Samples() for name in HOOKS}
        self._outputs = outputs
        self._keeps_pool_full = keeps_pool_full
        self._count = 0

    def one(self) -> Stopwatch:
        """One item in a step: what both step threads do for it, from its place in the schedule to the step's end."""
        return self._checked(1)

    def several(self) -> Stopwatch:
        """As many as a step may encode; what one of them costs."""
        took = self._checked(STEP_ITEMS)
        return Stopwatch(took.wall / STEP_ITEMS, (took.cpu or 0.0) / STEP_ITEMS)

    def until_written(self) -> Stopwatch:
        """Longest delay of another thread until one item is copied, hashed and on the disk."""
        images = self._new_images(1)
        with StallMeter() as meter:
            worker = threading.Thread(target=self._save, args=(images,))
            worker.start()
            worker.join()
            self.rig.settle()
        self._check(images)
        return meter.longest

    def plan(self) -> bytes:
        """A plan with one save as it crosses to workers in other processes."""
        images = self._new_images(1)
        pickled = pickle.dumps(self._save(images)[1])
        self._check(images)
        return pickled

    def _checked(self, count: int) -> Stopwatch:
        images = self._new_images(count)
        took, _ = self._save(images)
        self._check(images)
        return took

    def _save(self, images: Sequence[Image]) -> tuple[Stopwatch, StepPlan]:
        scheduler, worker = self.rig.scheduler, self.rig.worker
        requests = [request_for(f"save {image.picture}", image) for image in images]
        for request in requests:
            wait_until(lambda request=request: scheduler.ensure_cache_available(request, 0))
        encoder_cache = {image.identifier: self._output_of(image) for image in images}
        assert not any(scheduler.has_cache_item(identifier) for identifier in encoder_cache)
        with stopwatch() as allocating:
            for request in requests:
                scheduler.update_state_after_alloc(request, 0)
        output = self.rig.scheduled(requests)
        with stopwatch() as building:
            plan = scheduler.build_connector_meta(output)
        with stopwatch() as binding:
            worker.bind_connector_metadata(plan)
        with stopwatch() as saving:
            for identifier in encoder_cache:
                worker.save_caches(encoder_cache, identifier)
        with stopwatch() as clearing:
            worker.clear_connector_metadata()
        parts = (allocating, building, binding, saving, clearing)
        if len(images) == 1:
            for name, part in zip(HOOKS, parts, strict=True):
                self.hooks[name].add(part)
        self.rig.end_pass(finished=requests)
        assert isinstance(plan, StepPlan) and len(plan.saves) == len(images)
        return Stopwatch(sum(part.wall for part in parts), sum(part.cpu or 0.0 for part in parts)), plan

    def _check(self, images: Sequence[Image]) -> None:
        """Wait for copies and writes; compare the bytes in the pool and in the files with the encoder's."""
        rig = self.rig
        rig.settle()
        for image in images:
            assert same_bytes(rig.in_pool(image, WIDTH), self._output_of(image)), "the pool holds other bytes"
            assert same_bytes(rig.on_disk(image, WIDTH), self._output_of(image)), "the file holds other bytes"
            if not self._keeps_pool_full:
                assert rig.hierarchy.evict(rig.wanted(image, WIDTH))

    def _new_images(self, count: int) -> list[Image]:
        self._count += count
        return [Image(str(self._count - number), rows=PICTURE_ROWS) for number in range(count)]

    def _output_of(self, image: Image) -> torch.Tensor:
        return self._outputs[int(image.picture) % len(self._outputs)]


class TheirEngine:
    """LMCache's encoder cache engine, called as LMCache's connector for vLLM calls it: on the worker's step thread."""

    def __init__(self, directory: Path, outputs: Sequence[torch.Tensor]) -> None:
        config = build_config(
            {
                "local_cpu": True,
                "max_local_cpu_size": POOL_ITEMS * ITEM_PAGES * PAGE_BYTES / GIB_BYTES,
                "local_disk": str(directory),
                "max_local_disk_size": DISK_ITEMS * (ITEM_BYTES + (1 << 20)) / GIB_BYTES,
            }
        )
        metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, DTYPE, (1, 1, 256, 1, 64), role="worker")
        self.engine = ECCacheEngine(config, metadata, DTYPE)
        self._disk = self.engine._storage_manager.storage_backends["LocalDiskBackend"]
        self._outputs = outputs
        self._count = 0

    def put(self) -> Stopwatch:
        took = timed(self._put)
        self._check()
        return took

    def until_written(self) -> Stopwatch:
        with StallMeter() as meter:
            worker = threading.Thread(target=self._put)
            worker.start()
            worker.join()
            self._settle()
        self._check()
        return meter.longest

    def _put(self) -> None:
        assert self.engine.put(str(self._count), self._outputs[self._count % len(self._outputs)])

    def _settle(self) -> None:
        key = self.engine._make_cache_key(str(self._count))
        wait_until(lambda: not self._disk.exists_in_put_tasks(key))

    def _check(self) -> None:
        self._settle()
        found = self.engine.get(str(self._count), "cpu")
        assert found is not None and same_bytes(found, self._outputs[self._count % len(self._outputs)])
        self._count += 1


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OurEngine, OurEngine, TheirEngine]]:
    """Ours with room in the pool, ours with a pool that is always full, and LMCache's."""
    outputs = [encoder_output(seed, PICTURE_ROWS) for seed in range(OUTPUTS)]
    roomy = OurEngine(tmp_path_factory.mktemp("roomy"), outputs, keeps_pool_full=False)
    full = OurEngine(tmp_path_factory.mktemp("full"), outputs, keeps_pool_full=True)
    theirs = TheirEngine(tmp_path_factory.mktemp("theirs"), outputs)
    yield roomy, full, theirs
    for ours in (roomy, full):
        assert not ours.rig.faults()
        ours.rig.close()
    theirs.engine.close()


def test_step_threads_cost_of_saving(engines: tuple[OurEngine, OurEngine, TheirEngine], tmp_path: Path) -> None:
    roomy, full, theirs = engines
    cases = {
        "one item in a step, room in the pool": roomy.one,
        "one item in a step, evicting another": full.one,
        f"{STEP_ITEMS} items in a step, evicting as many; each": full.several,
        "LMCache, ECCacheEngine.put": theirs.put,
    }
    samples = by_turns(ROUNDS, cases, warm_up=POOL_ITEMS + 2)
    reference = samples["LMCache, ECCacheEngine.put"]
    plan = full.plan()
    table = Table(
        "save",
        f"Saving an item of {ITEM_BYTES / 1e6:.1f} MB: time of the step threads, scheduler's and worker's together",
        "ms",
        (
            f"[{PICTURE_ROWS}, {WIDTH}] {DTYPE}: Qwen2.5-VL-7B, a picture of 2436 x 1540",
            f"pool of {POOL_ITEMS} items, disk of {DISK_ITEMS}; ours is {' + '.join(HOOKS)}",
            "copy, digest and write follow on other threads; each item compared bit by bit in pool and file",
            "between turns some 300 MB go through the processor's caches, as they do in a step of a model",
        ),
        compared_with="LMCache",
    )
    for case in list(cases)[:3]:
        table.add(case, samples[case], reference=reference, goal=Goal(0.3))
    for name, hook in full.hooks.items():
        table.add(f"  {name}, one item evicting another", Samples(hook.wall[-ROUNDS:], hook.cpu[-ROUNDS:]))
    pickling = by_turns(ROUNDS, {"plan": lambda: timed(lambda: pickle.loads(plan))})["plan"]
    table.add(f"  the plan's {len(plan)} bytes from pickle, where workers are processes", pickling)
    table.add("LMCache, ECCacheEngine.put", reference)
    table.publish(tmp_path)


def test_stall_of_other_threads_while_saving(engines: tuple[OurEngine, OurEngine, TheirEngine], tmp_path: Path) -> None:
    _, full, theirs = engines
    cases = {
        "nothing of ours runs": _nothing,
        "a thread copies, hashes and writes as much": _PlainCopies(tmp_path / "plain").until_written,
        "ours": full.until_written,
        "LMCache": theirs.until_written,
    }
    samples = by_turns(ROUNDS, cases, warm_up=POOL_ITEMS + 2)
    table = Table(
        "save_stall",
        f"Longest delay of another thread while an item of {ITEM_BYTES / 1e6:.1f} MB is saved, until it is on the disk",
        "ms",
        (f"a thread of the same process that wants to run every {StallMeter.INTERVAL_SECONDS * 1e3:g} ms",),
    )
    for case, longest in samples.items():
        table.add(case, longest)
    table.publish(tmp_path)


class _PlainCopies:
    """The work on the bytes alone, on one thread: what any save has to cost a machine with few processors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._source = encoder_output(OUTPUTS, PICTURE_ROWS)
        self._target = torch.zeros_like(self._source)

    def until_written(self) -> Stopwatch:
        with StallMeter() as meter:
            worker = threading.Thread(target=self._write)
            worker.start()
            worker.join()
        assert same_bytes(self._target, self._source)
        return meter.longest

    def _write(self) -> None:
        payload = memoryview(self._target.copy_(self._source).view(torch.uint8).reshape(-1).numpy())
        digest_of(payload)
        with self._path.open("wb") as file:
            file.write(payload)


def _nothing() -> Stopwatch:
    with StallMeter() as meter:
        time.sleep(0.1)
    return meter.longest
