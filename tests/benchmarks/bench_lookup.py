# SPDX-License-Identifier: Apache-2.0
"""What vLLM's two questions cost per item, with 100,000 items on the disk and in the pool."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from storage_tiers.entry import EntryState
from tests.benchmarks.many import MANY, ROWS, WIDTH, tiny_image, tiny_payload
from tests.benchmarks.measuring import Samples, settle_memory, stopwatch
from tests.benchmarks.rig import GIB_BYTES, PAGE_BYTES, ConnectorRig, header_of, request_for, wait_until
from tests.benchmarks.table import Goal, Table
from tests.scheduler.items import Image

pytestmark = pytest.mark.timeout(900)

REQUESTS = 1000
PER_PASS = 100
"""Requests that one scheduling pass asks about."""
BATCH_ITEMS = 8
BURST = 32
"""Requests with an item below that arrive at once."""
FILL_ITEMS = 500
"""Items that may wait to be found on the disk while the pool is filled."""
GOAL = Goal(20)


@pytest.fixture(scope="module")
def rig(full_directory: Path) -> Iterator[ConnectorRig]:
    """An engine that has all items of the directory in its pool as well, as after it has restored them all."""
    made = ConnectorRig((MANY + REQUESTS) * PAGE_BYTES, WIDTH, full_directory, disk_bytes=16 * GIB_BYTES)
    fingerprint, hierarchy = made.fingerprint, made.hierarchy
    for number in range(MANY):
        mm_hash = tiny_image(number).identifier
        lease = hierarchy.begin_save(header_of(mm_hash, ROWS, WIDTH, fingerprint))
        assert lease is not None and lease.entry.obj is not None
        made.pool.payload_view(lease.entry.obj)[:] = tiny_payload(mm_hash)
        hierarchy.finish_save(lease, succeeded=True)
        if number % FILL_ITEMS == 0:
            made.settle()
    made.settle()
    assert hierarchy.num_entries == MANY == hierarchy.counts()["write"]
    assert sum(1 for _ in hierarchy._lower._tiers[0].store.entries()) == MANY
    yield made
    assert not made.faults()
    made.close()


class Asking:
    """Requests that ask as vLLM's scheduler does: availability of all, then item by item whether it can be loaded."""

    def __init__(self, rig: ConnectorRig, name: str, images: Sequence[Sequence[Image]]) -> None:
        self.rig = rig
        self.requests = [request_for(f"{name}-{number}", *each) for number, each in enumerate(images)]
        self._identifiers = [[image.identifier for image in each] for each in images]
        self._items = len(images[0])

    def ask(self, expected: bool, *, computed: int = 0, has_items: bool = True) -> Samples:
        """Time per item, one sample per request; passes end in between, outside of the measurement."""
        ensure, has_item = self.rig.scheduler.ensure_cache_available, self.rig.scheduler.has_cache_item
        samples = Samples()
        for number, (request, identifiers) in enumerate(zip(self.requests, self._identifiers, strict=True)):
            with stopwatch() as watch:
                available = ensure(request, computed)
                answers = [has_item(identifier) for identifier in identifiers] if has_items and available else []
            samples.add(watch, self._items)
            assert available is expected and all(answers)
            if number % PER_PASS == PER_PASS - 1:
                self.rig.end_pass()
        self.rig.end_pass()
        return samples

    def finish(self) -> None:
        self.rig.end_pass(finished=self.requests)
        assert self.rig.hierarchy.claimed_bytes == 0


def test_look_ups_among_many(rig: ConnectorRig, full_directory: Path) -> None:
    table = Table(
        "lookup",
        f"ensure_cache_available + has_cache_item, per item: {MANY:,} items on the disk and in the pool",
        "µs",
        (
            f"{REQUESTS} requests each, passes of {PER_PASS}, through the connector's hooks",
            "what is on the device or on its way is asked for by ensure_cache_available only, as vLLM does",
            "below: first evicted from the pool; staged bytes are compared byte for byte",
        ),
    )
    settle_memory()
    for items in (1, BATCH_ITEMS):
        _resident(rig, table, items)
    _on_device(rig, table)
    _passed(rig, table)
    _below(rig, table, "listed on disk only", tiny_image, EntryState.RESIDENT)
    _below(rig, table, "unknown everywhere", lambda number: Image(f"nobody-has-{number}", rows=ROWS), EntryState.GONE)
    assert rig.hierarchy.num_entries == MANY
    table.publish(full_directory)


def _resident(rig: ConnectorRig, table: Table, items: int) -> None:
    stride = MANY // (REQUESTS * items)
    images = [[tiny_image((r * items + i) * stride + 1) for i in range(items)] for r in range(REQUESTS)]
    asking = Asking(rig, f"resident {items}", images)
    table.add(f"resident, new request with {items} item{'s' if items > 1 else ''}", asking.ask(True), goal=GOAL)
    table.add("  the same requests again", asking.ask(True), goal=GOAL)
    asking.finish()


def _on_device(rig: ConnectorRig, table: Table) -> None:
    images = [[tiny_image(number * 3 + 2)] for number in range(REQUESTS)]
    for (image,) in images:
        assert rig.hierarchy.evict(rig.wanted(image, WIDTH))
        rig.residency.allocated(image.identifier)
    asking = Asking(rig, "device", images)
    table.add("on the device, new request", asking.ask(True, has_items=False), goal=GOAL)
    table.add("  the same requests again", asking.ask(True, has_items=False), goal=GOAL)
    asking.finish()
    rig.residency.freed({image.identifier for (image,) in images})
    assert rig.hierarchy.num_entries == MANY - REQUESTS, "what the device holds was staged all the same"
    asking = Asking(rig, "back", images)
    for request in asking.requests:
        wait_until(lambda request=request: rig.scheduler.ensure_cache_available(request, 0), 0.0001)
    asking.finish()


def _passed(rig: ConnectorRig, table: Table) -> None:
    images = [[tiny_image(r * BATCH_ITEMS + i) for i in range(BATCH_ITEMS)] for r in range(REQUESTS)]
    asking = Asking(rig, "decode", images)
    asking.ask(True)
    computed = asking.requests[0].num_tokens
    asking.ask(True, computed=computed, has_items=False)
    samples = asking.ask(True, computed=computed, has_items=False)
    table.add(f"decode step, all {BATCH_ITEMS} items passed", samples, goal=GOAL)
    asking.finish()


def _below(rig: ConnectorRig, table: Table, what: str, image_of: Callable[[int], Image], outcome: EntryState) -> None:
    """Requests whose item has to be looked for below: one after the other, then many at once."""
    is_there = outcome is EntryState.RESIDENT
    first, waiting, after, burst = Samples(), Samples(), Samples(), Samples()
    for number in range(REQUESTS // 4):
        _evict(rig, [image_of(number)], is_there)
        asking = Asking(rig, f"{what}-{number}", [[image_of(number)]])
        first.extend(asking.ask(False))
        waiting.extend(_while_waiting(asking))
        wait_until(lambda asking=asking: rig.scheduler.ensure_cache_available(asking.requests[0], 0), 0.0001)
        after.extend(asking.ask(True, has_items=is_there))
        _check(rig, asking, [image_of(number)], is_there)
    for number in range(0, REQUESTS, BURST):
        images = [image_of(each) for each in range(number, number + BURST)]
        _evict(rig, images, is_there)
        asking = Asking(rig, f"{what}-burst-{number}", [[image] for image in images])
        burst.extend(asking.ask(False))
        for request in asking.requests:
            wait_until(lambda request=request: rig.scheduler.ensure_cache_available(request, 0), 0.0001)
        _check(rig, asking, images, is_there)
    table.add(f"{what}, new request", first, goal=GOAL)
    table.add("  asked again while it waits", waiting, goal=GOAL)
    table.add(f"  asked again when it is {'there' if is_there else 'known to be nowhere'}", after, goal=GOAL)
    table.add(f"  {BURST} such requests at once", burst, goal=GOAL)


def _while_waiting(asking: Asking) -> Samples:
    """One more question, unless the answer has come by then."""
    samples = Samples()
    with stopwatch() as watch:
        available = asking.rig.scheduler.ensure_cache_available(asking.requests[0], 0)
    if not available:
        samples.add(watch)
    return samples


def _evict(rig: ConnectorRig, images: Sequence[Image], is_there: bool) -> None:
    for image in images if is_there else ():
        assert rig.hierarchy.evict(rig.wanted(image, WIDTH))


def _check(rig: ConnectorRig, asking: Asking, images: Sequence[Image], is_there: bool) -> None:
    """End the requests; compare what was staged with what was planted."""
    asking.finish()
    rig.settle()
    for image in images if is_there else ():
        staged = rig.in_pool(image, WIDTH).view(torch.uint8)
        assert staged.numpy().tobytes() == tiny_payload(image.identifier)
