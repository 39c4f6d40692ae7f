# SPDX-License-Identifier: Apache-2.0
"""The CPU tier: what LMCache's own backend gets wrong must not happen here, and what its callers expect must."""

import asyncio
import gc
import math
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, TensorMemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from prometheus_client import REGISTRY

from storage_tiers.key import KeySpace
from storage_tiers.segment_memory import SegmentMemoryAllocator
from storage_tiers.shared_pool import SharedPool, view
from storage_tiers.shared_segment import SharedSegment

ROOT = Path(__file__).parents[2]
KEYS = KeySpace("org/model", torch.bfloat16)
MB = 1 << 20


PREFIX = f"test_ec_{uuid.uuid4().hex}_"


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    """Also where a test fails before it closes its pool."""
    yield
    for path in Path("/dev/shm").glob(f"{PREFIX}*"):
        path.unlink()


def new_pool(nbytes: int, board_bytes: int = 4096) -> SharedPool:
    segment = SharedSegment.create(PREFIX + uuid.uuid4().hex, nbytes, board_bytes)
    return SharedPool(LMCacheEngineConfig.from_defaults(), segment)


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    """Sixteen megabytes."""
    pool = new_pool(16 * MB)
    yield pool
    pool.close()


def key(number: int) -> CacheEngineKey:
    return KEYS.key_of(number)


def take(pool: SharedPool, nbytes: int, **options: bool) -> MemoryObj | None:
    return pool.allocate(torch.Size((nbytes // 64, 32)), torch.bfloat16, **options)


def put(pool: SharedPool, number: int, nbytes: int) -> bool:
    """Store an item that nobody holds afterwards; False when there is no room."""
    obj = take(pool, nbytes)
    if obj is None:
        return False
    pool.submit_put_task(key(number), obj)
    obj.ref_count_down()
    return True


def numbers_in(pool: SharedPool) -> list[int]:
    return [found.chunk_hash for found in pool.get_keys()]


# -- Memory -----------------------------------------------------------------------------------------------------------


def test_an_object_is_what_lmcache_expects(pool: SharedPool) -> None:
    obj = pool.allocate(torch.Size((100, 33)), torch.float16)
    assert isinstance(obj, TensorMemoryObj) and isinstance(pool, LocalCPUBackend)
    assert obj.get_memory_format() is MemoryFormat.EC_TD
    assert (obj.get_size(), obj.get_physical_size(), obj.get_ref_count()) == (6600, 8192, 1)
    assert obj.tensor is not None and obj.tensor.shape == (100, 33) and obj.tensor.dtype is torch.float16
    assert obj.get_num_tokens() == 100
    assert obj.data_ptr % 4096 == 0 and obj.shm_offset % 4096 == 0
    assert pool.used_bytes == 8192
    obj.ref_count_down()
    assert not obj.is_valid()
    assert pool.used_bytes == 0


def test_payload_is_the_logical_bytes_and_padding_can_be_zeroed(pool: SharedPool) -> None:
    obj = pool.allocate(torch.Size((1, 3)), torch.bfloat16)
    assert obj is not None and obj.tensor is not None
    pool.payload_view(obj, padded=True)[:] = b"\xff" * 4096
    obj.tensor[:] = torch.tensor([[1.0, 2.0, 3.0]])
    payload = pool.payload_view(obj)
    assert len(payload) == 6
    assert torch.frombuffer(payload, dtype=torch.bfloat16).tolist() == [1.0, 2.0, 3.0]
    pool.zero_padding(obj)
    assert bytes(pool.payload_view(obj, padded=True)) == bytes(payload) + bytes(4090)
    obj.ref_count_down()


def test_a_whole_number_of_pages_has_no_padding(pool: SharedPool) -> None:
    obj = take(pool, 8192)
    assert obj is not None and obj.tensor is not None
    obj.tensor.fill_(5)
    pool.zero_padding(obj)
    assert (obj.tensor == 5).all()
    obj.ref_count_down()


def test_a_freed_or_foreign_object_has_no_offset(pool: SharedPool) -> None:
    other = new_pool(MB)
    foreign, freed = take(other, 4096), take(pool, 4096)
    assert foreign is not None and freed is not None
    freed.ref_count_down()
    for obj in (foreign, freed):
        for call in (pool.offset_of, pool.payload_view, pool.zero_padding):
            with pytest.raises(ValueError, match="freed, or is none of this pool"):
                call(obj)
        with pytest.raises(ValueError, match="none of this pool"):
            pool.submit_put_task(key(1), obj)
        with pytest.raises(ValueError, match="none of this pool"):
            pool.replace(key(1), obj)
    assert pool.num_entries == 0
    foreign.ref_count_down()
    other.close()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_nothing_is_allocated_for_no_bytes(pool: SharedPool, shape: tuple[int, int]) -> None:
    assert pool.allocate(torch.Size(shape), torch.bfloat16) is None


def test_a_request_larger_than_the_pool_evicts_nothing() -> None:
    """LMCache evicted 30 of 30 entries for 328 MB of 256 and then returned None."""
    pool = new_pool(256 * MB)
    for number in range(30):
        assert put(pool, number, 8 * MB)
    evicted: list[CacheEngineKey] = []
    pool.set_policy(None, evicted.append)
    assert take(pool, 328 * MB) is None
    assert take(pool, 257 * MB, busy_loop=True) is None
    assert (pool.num_entries, evicted) == (30, [])
    pool.close()


def test_a_request_that_leases_make_hopeless_evicts_nothing_and_does_not_wait(pool: SharedPool) -> None:
    for number in range(16):
        assert put(pool, number, MB)
    leased = [pool.get_blocking(key(number)) for number in range(0, 16, 2)]
    started = time.monotonic()
    assert take(pool, 2 * MB, busy_loop=True) is None
    assert time.monotonic() - started < 0.09, "LMCache sleeps 0.1 s at a time here"
    assert pool.num_entries == 16
    assert put(pool, 99, MB), "room for one is made among those that nobody holds"
    for obj in leased:
        assert obj is not None
        obj.ref_count_down()
    assert put(pool, 100, 16 * MB)
    assert numbers_in(pool) == [100]


def test_without_eviction_only_free_room_is_used(pool: SharedPool) -> None:
    assert put(pool, 1, 12 * MB)
    assert take(pool, 8 * MB, eviction=False) is None
    assert numbers_in(pool) == [1]


def test_what_is_not_published_is_neither_found_nor_evicted(pool: SharedPool) -> None:
    reserved = take(pool, 10 * MB)
    assert not pool.contains(key(1)) and pool.get_keys() == []
    assert take(pool, 8 * MB) is None
    assert reserved is not None and reserved.is_valid()
    reserved.ref_count_down()


def test_a_batch_is_all_or_nothing(pool: SharedPool) -> None:
    for number in range(8):
        assert put(pool, number, 2 * MB)
    held = pool.get_blocking(key(4))
    size = torch.Size((MB // 64, 32))
    assert pool.batched_allocate(size, torch.bfloat16, 9) is None
    assert pool.num_entries == 8
    batch = pool.batched_allocate(size, torch.bfloat16, 5)
    assert batch is not None and len({obj.shm_offset for obj in batch}) == 5
    assert pool.num_entries == 5
    assert held is not None and pool.contains(key(4))
    for obj in (held, *batch):
        obj.ref_count_down()


def test_a_batch_that_fails_half_way_takes_nothing(pool: SharedPool) -> None:
    assert put(pool, 1, 14 * MB)
    size = torch.Size((MB // 64, 32))
    assert pool.batched_allocate(size, torch.bfloat16, 3, eviction=False) is None
    assert pool.used_bytes == 14 * MB


@pytest.mark.parametrize("batch_size", [0, -1])
def test_an_empty_batch_takes_nothing(pool: SharedPool, batch_size: int) -> None:
    assert not pool.batched_allocate(torch.Size((4, 4)), torch.bfloat16, batch_size)
    assert pool.used_bytes == 0


def test_mixed_sizes_reach_a_high_fill() -> None:
    """0.2 to 131 MB in 1 GB; LMCache's first fit with LRU fails at 0.58 to 0.89 of the pool."""
    pool, rng, fills = new_pool(1024 * MB), random.Random(3), []
    for number in range(400):
        free_before, evicted_before = pool.free_bytes, pool.num_entries
        assert put(pool, number, int(math.exp(rng.uniform(math.log(0.2), math.log(131))) * MB))
        if pool.num_entries <= evicted_before and free_before < 131 * MB:
            fills.append(pool.used_bytes / pool.capacity_bytes)
    assert sum(fills) / len(fills) > 0.93
    pool.close()


# -- Recency and cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["contains", "get_blocking"])
def test_what_is_used_outlives_what_is_not(pool: SharedPool, use: str) -> None:
    """In LMCache a key hit ten times was evicted first: look-ups do not count as use there."""
    for number in range(16):
        assert put(pool, number, MB)
        for _ in range(10):
            found = getattr(pool, use)(key(0))
            if use == "get_blocking":
                found.ref_count_down()
    for number in range(16, 30):
        assert put(pool, number, MB)
        pool.contains(key(0))
    assert pool.contains(key(0))
    assert sorted(numbers_in(pool)) == [0, *range(15, 30)]
    assert numbers_in(pool)[-1] == 0, "keys are listed from least to most recently used"


def test_a_small_costly_item_outlives_a_large_cheap_one(pool: SharedPool) -> None:
    costs = {1: 9.0, 2: 1.0}
    evicted: list[int] = []
    pool.set_policy(lambda found: costs[found.chunk_hash], lambda found: evicted.append(found.chunk_hash))
    assert put(pool, 1, MB)
    assert put(pool, 2, 15 * MB)
    pool.contains(key(2))
    assert put(pool, 3, MB)
    assert (evicted, sorted(numbers_in(pool))) == ([2], [1, 3])


def test_the_policy_can_keep_an_entry_and_hears_of_each_that_went(pool: SharedPool) -> None:
    seen: list[tuple[int, bool]] = []
    pool.set_policy(
        lambda found: None if found.chunk_hash % 4 == 0 else 1.0,
        lambda found: seen.append((found.chunk_hash, pool.contains(found))),
    )
    for number in range(16):
        assert put(pool, number, MB)
    assert put(pool, 100, 3 * MB)
    assert len(seen) == 3 and not any(still_there for _, still_there in seen)
    assert take(pool, 4 * MB) is None
    assert {0, 4, 8, 12} <= set(numbers_in(pool))


# -- Entries ----------------------------------------------------------------------------------------------------------


def test_putting_a_published_key_again_is_ignored_as_in_lmcache(pool: SharedPool) -> None:
    first, second = take(pool, 4096), take(pool, 4096)
    assert first is not None and second is not None
    done: list[int] = []
    pool.submit_put_task(key(1), first, on_complete_callback=lambda found: done.append(found.chunk_hash))
    pool.submit_put_task(key(1), second, on_complete_callback=lambda found: done.append(found.chunk_hash))
    assert done == [1]
    assert (first.get_ref_count(), second.get_ref_count()) == (2, 1)
    found = pool.get_blocking(key(1))
    assert found is first
    for obj in (first, first, second):
        obj.ref_count_down()
    assert pool.used_bytes == 4096


def test_replacing_leaves_a_holder_its_bytes(pool: SharedPool) -> None:
    assert put(pool, 1, 4096)
    old = pool.get_blocking(key(1))
    new = take(pool, 4096)
    assert old is not None and new is not None and old.tensor is not None
    old.tensor.fill_(1)
    assert pool.replace(key(1), new) and pool.replace(key(1), new)
    new.ref_count_down()
    assert pool.get_blocking(key(1)) is new
    assert (old.tensor == 1).all() and pool.used_bytes == 8192
    old.ref_count_down()
    assert pool.used_bytes == 4096
    new.ref_count_down()
    assert not pool.replace(key(2), take(pool, 4096) or new), "nothing was there"


def test_one_object_cannot_be_two_entries(pool: SharedPool) -> None:
    assert put(pool, 1, 4096)
    obj = pool.get_blocking(key(1))
    assert obj is not None
    with pytest.raises(ValueError, match="published already"):
        pool.submit_put_task(key(2), obj)
    with pytest.raises(ValueError, match="published already"):
        pool.replace(key(2), obj)
    obj.ref_count_down()
    assert numbers_in(pool) == [1] and obj.get_ref_count() == 1


def test_removing_a_held_entry_frees_its_bytes_with_the_last_holder(pool: SharedPool) -> None:
    assert put(pool, 1, 4096)
    obj = pool.get_blocking(key(1))
    assert obj is not None
    assert pool.remove(key(1)) and not pool.remove(key(1))
    assert not pool.contains(key(1)) and pool.get_blocking(key(1)) is None
    assert pool.used_bytes == 4096 and obj.is_valid()
    obj.ref_count_down()
    assert pool.used_bytes == 0


def test_pins_are_references_and_end_with_removal(pool: SharedPool) -> None:
    """LMCache's `pin` raises without its engine, and its monitor drops pins after 300 s."""
    assert put(pool, 1, 16 * MB)
    assert pool.contains(key(1), pin=True) and pool.pin(key(1))
    assert take(pool, MB) is None
    assert pool.unpin(key(1)) and pool.unpin(key(1)) and not pool.unpin(key(1))
    assert not pool.pin(key(2)) and not pool.unpin(key(2)) and not pool.contains(key(2), pin=True)
    assert pool.pin(key(1))
    assert pool.remove(key(1))
    assert pool.used_bytes == 0


def test_clear_evicts_what_nobody_holds(pool: SharedPool) -> None:
    evicted: list[int] = []
    pool.set_policy(None, lambda found: evicted.append(found.chunk_hash))
    for number in range(3):
        assert put(pool, number, 64 * 100)
    held = pool.get_blocking(key(1))
    assert held is not None
    assert pool.evictable_bytes == 2 * 8192
    assert pool.clear() == 200
    assert (evicted, numbers_in(pool)) == ([0, 2], [1])
    held.ref_count_down()


def test_batched_calls_of_lmcache_s_callers(pool: SharedPool) -> None:
    objs = [take(pool, 4096) for _ in range(3)]
    held = [obj for obj in objs if obj is not None]
    keys = [key(number) for number in range(3)]
    pool.batched_submit_put_task(keys, held)
    assert pool.batched_contains([*keys[:2], key(9), keys[2]]) == 2
    assert asyncio.run(pool.batched_async_contains("lookup", [*keys, key(9)], pin=True)) == 3
    assert asyncio.run(pool.batched_get_non_blocking("lookup", [keys[0], key(9), keys[1]])) == held[:1]
    held[0].ref_count_down()
    assert pool.batched_get_blocking([keys[2], key(9)]) == [held[2], None]
    held[2].ref_count_down()
    assert not pool.exists_in_put_tasks(keys[0])
    pool.touch_cache()
    assert pool.get_allocator_backend() is pool
    assert isinstance(pool.get_memory_allocator(), SegmentMemoryAllocator)
    assert pool.batched_remove(keys) == 3
    for obj in held:
        assert obj.get_ref_count() == 1, "removal took the pins along"
        obj.ref_count_down()
    assert pool.used_bytes == 0


def test_no_metrics_and_no_environment() -> None:
    """With metadata at construction, LMCache registers some 94 collectors, and a vLLM counter disappeared."""
    collectors, environment = set(REGISTRY._collector_to_names), dict(os.environ)
    pool = new_pool(MB)
    assert put(pool, 1, 4096)
    assert set(REGISTRY._collector_to_names) == collectors
    assert dict(os.environ) == environment
    assert pool.metadata is None
    pool.close()


# -- Finalizers and threads -------------------------------------------------------------------------------------------


class Garbage:
    """Holds an object in a cycle, so that only the collector ends it."""

    def __init__(self, obj: MemoryObj) -> None:
        self.obj = obj
        self.me = self


def test_an_object_collected_inside_allocate_does_not_hang(pool: SharedPool) -> None:
    """LMCache's finalizer takes the allocator's lock, which the same thread holds: it hung for ever."""
    finished = threading.Event()

    def work() -> None:
        for _ in range(300):
            obj = take(pool, 64 * 1024)
            if obj is not None:
                Garbage(obj)
        finished.set()

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # a collection at nearly every allocation, most of them under the pool's lock
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert finished.wait(60)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert pool.used_bytes == 0
    assert pool.get_memory_allocator().memcheck()


def test_a_finalizer_frees_while_another_thread_holds_the_lock(pool: SharedPool) -> None:
    obj = take(pool, 4096)
    assert obj is not None
    with pool.lock:
        thread = threading.Thread(target=obj.ref_count_down)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert pool.get_memory_allocator().ranges.used_bytes == 4096, "ranges change under the lock only"
    assert pool.used_bytes == 0


def test_dropping_an_object_frees_it_once(pool: SharedPool) -> None:
    obj = take(pool, 4096)
    assert obj is not None
    allocator = pool.get_memory_allocator()
    allocator.free(obj)
    allocator.batched_free([obj, obj])
    other = take(pool, 4096)
    obj.ref_count_down()
    del obj
    gc.collect()
    assert other is not None and pool.used_bytes == 4096
    assert other.shm_offset == 0, "the range was free again"
    other.invalidate()
    del other
    gc.collect()
    assert pool.used_bytes == 0
    assert allocator.memcheck()


def test_threads_that_put_get_replace_and_remove_leave_nothing_behind() -> None:
    """Whoever holds a reference sees one item's bytes only; in the end, bytes and counts add up."""
    pool = new_pool(4 * MB)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(600):
            number = rng.randrange(24)
            choice = rng.random()
            if choice < 0.5:
                obj = take(pool, rng.choice([4096, 65536, 500_032]))
                if obj is None:
                    continue
                pool.payload_view(obj)[:] = bytes([number]) * obj.get_size()
                if choice < 0.4:
                    pool.submit_put_task(key(number), obj)
                else:
                    pool.replace(key(number), obj)
                obj.ref_count_down()
            elif choice < 0.9:
                obj = pool.get_blocking(key(number))
                if obj is None:
                    continue
                payload = pool.payload_view(obj)
                if payload[0] != number or payload[-1] != number or payload[len(payload) // 2] != number:
                    failures.append(f"{number} holds {payload[0]}")
                obj.ref_count_down()
            else:
                pool.remove(key(number))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert all(obj.get_ref_count() == 1 for obj in pool.hot_cache.values())
    assert pool.get_memory_allocator().memcheck()
    assert pool.used_bytes == pool.evictable_bytes
    pool.clear()
    assert pool.used_bytes == 0
    pool.close()


# -- Processes and the end --------------------------------------------------------------------------------------------

WORKER = """
import sys, torch
from storage_tiers.shared_segment import SharedSegment
from storage_tiers.shared_pool import view
segment = SharedSegment.attach(sys.argv[1])
seen = view(segment, int(sys.argv[2]), (6, 5), torch.float32)
print(seen.sum().item())
seen.mul_(2)
"""


def test_two_processes_see_the_same_bytes(pool: SharedPool) -> None:
    take(pool, 4096)
    obj = pool.allocate(torch.Size((6, 5)), torch.float32)
    assert obj is not None and obj.tensor is not None
    obj.tensor[:] = torch.arange(30, dtype=torch.float32).view(6, 5)
    command = [sys.executable, "-c", WORKER, pool.segment.name, str(pool.offset_of(obj))]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert float(printed) == 435.0
    assert obj.tensor.sum() == 870.0
    obj.ref_count_down()


@pytest.mark.parametrize(("offset", "shape"), [(0, (1, 1)), (4096, (1, 1)), (8193, (1, 1)), (8192, (16 * MB, 1))])
def test_a_view_beside_the_data_area_is_refused(pool: SharedPool, offset: int, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not lie in the data area"):
        view(pool.segment, offset, shape, torch.bfloat16)


def test_closing_under_a_live_object_keeps_its_bytes() -> None:
    """LMCache unmaps there, and the next access is a segmentation fault."""
    pool = new_pool(MB)
    obj = take(pool, 4096)
    assert obj is not None and obj.tensor is not None
    pool.submit_put_task(key(1), obj)
    tensor, path = obj.tensor, pool.segment.path
    tensor.fill_(3)
    pool.close()
    pool.close()
    assert not path.exists()
    assert not pool.contains(key(1)) and take(pool, 4096) is None and pool.num_entries == 0
    del pool
    gc.collect()
    assert (tensor == 3).all()
    obj.ref_count_down()
    del obj
    gc.collect()
    assert (tensor == 3).all()


def test_closing_gives_the_memory_back() -> None:
    pool = new_pool(MB)
    assert put(pool, 1, 4096)
    pool.close()
    gc.collect()
    assert pool.segment.name not in Path("/proc/self/maps").read_text()


def test_objects_left_at_exit_print_nothing() -> None:
    script = """
import torch
from lmcache.v1.config import LMCacheEngineConfig
from storage_tiers.shared_pool import SharedPool
from storage_tiers.shared_segment import SharedSegment
pool = SharedPool(LMCacheEngineConfig.from_defaults(), SharedSegment.create(NAME, 1 << 20))
obj = pool.allocate(torch.Size((4, 4)), torch.bfloat16)
"""
    script = script.replace("NAME", repr(PREFIX + "exit"))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "torch_dev=" not in line] == []
