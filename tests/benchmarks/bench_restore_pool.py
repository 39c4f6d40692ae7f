# SPDX-License-Identifier: Apache-2.0
"""Restoring items from the CPU tier, beside a plain copy of as many bytes."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from connector.step_plan import Transfer
from tests.benchmarks.measuring import Stopwatch, Timed, by_turns, timed
from tests.benchmarks.rig import (
    DTYPE,
    SIZES,
    WIDTH,
    ConnectorRig,
    encoder_output,
    request_for,
    same_bytes,
    wait_until,
)
from tests.benchmarks.table import Goal, Table
from tests.scheduler.items import Image

pytestmark = pytest.mark.timeout(600)

ROUNDS = 60
POOL_BYTES = 256 << 20
CACHES_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MMAP_MAX_DEFAULT = 65536


class Resident:
    """One item that was saved through the connector and is resident, and memory to restore it into."""

    def __init__(self, rig: ConnectorRig, rows: int) -> None:
        self.rig = rig
        self.image = Image(f"item of {rows}", rows=rows)
        self.output = encoder_output(rows, rows)
        self.source = self.output.clone()
        self.target = torch.zeros_like(self.output)
        """Touched."""
        self._other, self._another = torch.zeros(2, CACHES_BYTES, dtype=torch.uint8)
        self._asked = 0
        self._save()
        lease = rig.hierarchy.pin_resident(rig.wanted(self.image, WIDTH))
        assert lease is not None
        offset = rig.hierarchy.segment_offset(lease)
        rig.hierarchy.release(lease)
        self._transfer = Transfer(0, self.image.identifier, offset, rows, WIDTH, DTYPE)

    def plain(self) -> Stopwatch:
        """Touched memory to touched memory."""
        self._forget()
        return timed(lambda: self.target.copy_(self.source))

    def plain_into_fresh(self) -> Stopwatch:
        """Into memory that the system has yet to provide."""
        self._forget()
        return timed(lambda: torch.empty_like(self.source).copy_(self.source))

    def from_pool(self) -> Stopwatch:
        """What a load does, but for where its target comes from."""
        self._forget()
        attached = self.rig.worker_side._attached
        assert attached is not None
        took = timed(lambda: self.target.copy_(attached.at(self._transfer)))
        assert same_bytes(self.target, self.output)
        return took

    def load(self) -> Stopwatch:
        """The worker's hook, with a plan that the scheduler's half made for a request."""
        rig, cache = self.rig, dict[str, torch.Tensor]()
        self._asked += 1
        request = request_for(f"load {self.image.rows} {self._asked}", self.image)
        assert rig.scheduler.ensure_cache_available(request, 0)
        assert rig.scheduler.has_cache_item(self.image.identifier)
        rig.scheduler.update_state_after_alloc(request, 0)
        rig.worker.bind_connector_metadata(rig.end_pass())
        self._forget()
        took = timed(lambda: rig.worker.start_load_caches(cache))
        rig.worker.clear_connector_metadata()
        assert same_bytes(cache[self.image.identifier], self.output)
        rig.settle()
        rig.end_pass(finished=[request])
        rig.residency.freed({self.image.identifier})
        return took

    def _forget(self) -> None:
        """Void the target, and what the processor's caches hold: each case would find something else in them."""
        self.target.zero_()
        self._other.copy_(self._another)

    def _save(self) -> None:
        rig, request = self.rig, request_for(f"save {self.image.rows}", self.image)
        wait_until(lambda: rig.scheduler.ensure_cache_available(request, 0))
        rig.scheduler.update_state_after_alloc(request, 0)
        rig.worker.bind_connector_metadata(rig.end_pass([request]))
        rig.worker.save_caches({self.image.identifier: self.output}, self.image.identifier)
        rig.worker.clear_connector_metadata()
        rig.settle()
        rig.end_pass(finished=[request])
        rig.residency.freed({self.image.identifier})


@pytest.fixture(scope="module")
def rig() -> Iterator[ConnectorRig]:
    made = ConnectorRig(POOL_BYTES, WIDTH)
    yield made
    assert not made.faults()
    made.close()


def test_restore_from_the_pool(rig: ConnectorRig) -> None:
    table = Table(
        "restore_pool",
        "Restoring an item from the CPU tier into the runner's cache",
        "ms",
        (
            f"[rows, {WIDTH}] {DTYPE}, Qwen2.5-VL-7B; pool faulted in, shared memory in 4 KB pages",
            "touched: memory that exists; fresh: torch.empty, whose pages the kernel provides and zeroes in the copy",
            "malloc keeps memory: start_load_caches under mallopt(M_MMAP_MAX, 0), as tcmalloc and jemalloc do",
            "caches are filled with other data before each copy; each restored item compared bit for bit",
        ),
        compared_with="plain copy, touched",
    )
    for size, rows in SIZES.items():
        item = Resident(rig, rows)
        cases: dict[str, Timed] = {
            "plain copy, touched to touched": item.plain,
            "pool to touched memory": item.from_pool,
            "start_load_caches as it is": item.load,
            "plain copy, touched to fresh": item.plain_into_fresh,
        }
        samples = by_turns(ROUNDS, cases)
        reference = samples["plain copy, touched to touched"]
        for case, values in samples.items():
            goal = Goal(0.8, of_ratio=True) if case == "pool to touched memory" else None
            table.add(f"{size}: {case}", values, reference=reference, goal=goal)
        with _malloc_that_keeps_memory():
            kept = by_turns(ROUNDS, {"plain": item.plain, "load": item.load}, warm_up=4)
        table.add(
            f"{size}: start_load_caches, malloc keeps memory",
            kept["load"],
            reference=kept["plain"],
            goal=Goal(0.8, of_ratio=True),
        )
    table.publish()


class _malloc_that_keeps_memory:  # noqa: N801 - reads as a statement
    """glibc's malloc takes nothing from mmap and gives nothing back, until the end of the block."""

    def __enter__(self) -> None:
        libc = ctypes.CDLL(None)
        assert libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)

    def __exit__(self, *_: object) -> None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MMAP_MAX_DEFAULT)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)
        libc.malloc_trim(0)
