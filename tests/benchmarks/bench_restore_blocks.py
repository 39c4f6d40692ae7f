# SPDX-License-Identifier: Apache-2.0
"""Restoring items from the pool into blocks of the device cache, beside a plain copy and LMCache's own engine."""

import os
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from lmcache.v1.ec_engine import ECCacheEngine
from lmcache.v1.metadata import LMCacheMetadata

from connector.lmcache_config import build_config
from storage_tiers.device_copy import EagerCopies
from storage_tiers.shared_pool import view
from storage_tiers.shared_segment import SharedSegment, segment_name
from tests.benchmarks.measuring import Stopwatch, Timed, by_turns, timed
from tests.benchmarks.rig import CLIP_ROWS, DTYPE, GIB_BYTES, MODEL, SIZES, WIDTH, encoder_output, same_bytes
from tests.benchmarks.table import Goal, Table

pytestmark = pytest.mark.timeout(600)

ROUNDS = 40
BLOCK_SIZE = 256
NUM_BLOCKS = 2 * -(-CLIP_ROWS // BLOCK_SIZE) + 1
"""Twice the larger item, so that its blocks need not touch, and scratch."""
POOL_BYTES = 256 << 20
CACHES_BYTES = 64 << 20


class Item:
    """One item's bytes in the pool, in LMCache's engine and in ordinary memory, and blocks to restore it into."""

    def __init__(self, pool: SharedSegment, buffer: torch.Tensor, theirs: ECCacheEngine, rows: int) -> None:
        self.output = encoder_output(rows, rows)
        self._copies, self._buffer, self._theirs, self._key = EagerCopies(buffer), buffer, theirs, f"item of {rows}"
        self._pooled = view(pool, pool.data_offset, (rows, WIDTH), DTYPE)
        self._target = torch.zeros_like(self.output)
        self._other, self._another = torch.zeros(2, CACHES_BYTES, dtype=torch.uint8)
        count = -(-rows // BLOCK_SIZE)
        self.adjacent = list(range(count))
        self.scattered = list(range(0, 2 * count, 2))[::-1]
        self._pooled.copy_(self.output)
        assert theirs.put(self._key, self.output)

    def plain(self) -> Stopwatch:
        """Touched memory to touched memory."""
        self._forget()
        return timed(lambda: self._target.copy_(self.output))

    def into_adjacent(self) -> Stopwatch:
        return self._into(self.adjacent)

    def into_scattered(self) -> Stopwatch:
        """No block beside another, last block first: one copy for each."""
        return self._into(self.scattered)

    def out_of_scattered(self) -> Stopwatch:
        """A spill: the reverse, into touched memory."""
        self._copies.write(self.scattered, self._pooled)
        self._forget(keeps_blocks=True)
        took = timed(lambda: self._copies.read(self.scattered, len(self._target), self._target))
        assert same_bytes(self._target, self.output)
        return took

    def by_lmcache(self) -> Stopwatch:
        """As LMCache's connector calls it; what it returns is a new tensor each time, not freed in the measurement."""
        self._forget()
        found: list[torch.Tensor | None] = []
        took = timed(lambda: found.append(self._theirs.get(self._key, "cpu")))
        assert found[0] is not None and same_bytes(found[0], self.output)
        return took

    def _into(self, block_ids: Sequence[int]) -> Stopwatch:
        self._forget()
        took = timed(lambda: self._copies.write(block_ids, self._pooled))
        blocks = self._buffer[list(block_ids)].view(-1, WIDTH)
        assert same_bytes(blocks[: len(self.output)], self.output)
        assert not blocks[len(self.output) :].any()
        return took

    def _forget(self, keeps_blocks: bool = False) -> None:
        """Void the targets, and what the processor's caches hold: each case would find something else in them."""
        self._target.zero_()
        if not keeps_blocks:
            self._buffer.zero_()
        self._other.copy_(self._another)


@pytest.fixture(scope="module")
def pool() -> Iterator[SharedSegment]:
    """A worker's mapping of a pool that another mapping owns, faulted in."""
    name = segment_name(f"bench-{time.monotonic_ns()}", 0, os.getpid())
    owner = SharedSegment.create(name, POOL_BYTES)
    attached = SharedSegment.attach(name)
    for mapping in (owner, attached):
        mapping.populate(threading.Event())
    yield attached
    attached.close()
    owner.close()


@pytest.fixture(scope="module")
def theirs() -> Iterator[ECCacheEngine]:
    """LMCache's engine with its CPU memory alone, which has room for both items."""
    config = build_config({"local_cpu": True, "max_local_cpu_size": 2 * POOL_BYTES / GIB_BYTES})
    metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, DTYPE, (1, 1, 256, 1, 64), role="worker")
    engine = ECCacheEngine(config, metadata, DTYPE)
    yield engine
    engine.close()


def test_restore_into_blocks(pool: SharedSegment, theirs: ECCacheEngine) -> None:
    buffer = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, WIDTH, dtype=DTYPE)
    table = Table(
        "restore_blocks",
        "Restoring an item from the pool into blocks",
        "ms",
        (
            f"[rows, {WIDTH}] {DTYPE}, Qwen2.5-VL-7B; CPU buffer [{NUM_BLOCKS}, {BLOCK_SIZE}, {WIDTH}], faulted in",
            "pool: a worker's mapping, faulted in, shared memory in 4 KB pages; eager copies, one per run of blocks",
            "LMCache: items in its own CPU memory; get returns a new tensor each time, blocks are not filled",
            "caches are filled with other data before each copy; each restored item compared bit for bit",
        ),
        compared_with="plain copy, touched",
    )
    for size, rows in SIZES.items():
        item = Item(pool, buffer, theirs, rows)
        cases: dict[str, Timed] = {
            "plain copy, touched to touched": item.plain,
            "pool to adjacent blocks": item.into_adjacent,
            "pool to scattered blocks": item.into_scattered,
            "scattered blocks to touched memory": item.out_of_scattered,
            "LMCache, ECCacheEngine.get": item.by_lmcache,
        }
        samples = by_turns(ROUNDS, cases)
        plain, get = samples["plain copy, touched to touched"], samples["LMCache, ECCacheEngine.get"]
        for case, values in samples.items():
            goal = Goal(0.8, of_ratio=True) if case.startswith("pool") else None
            table.add(f"{size}: {case}", values, reference=plain, goal=goal)
            if case.startswith(("pool", "plain")):  # the plain copy's is about the most that a restore can reach
                table.add("  its ratio to LMCache's get", values, reference=get, goal=Goal(10, of_ratio=True))
    table.publish()
