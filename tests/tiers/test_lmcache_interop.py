# SPDX-License-Identifier: Apache-2.0
"""LMCache's own classes on our files, ours on theirs, and our disk tier as their storage plugin."""

import asyncio
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import storage_plugin_launcher
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from storage_tiers.key import KeySpace
from storage_tiers.persistent_disk import PersistentDiskBackend
from tests.tiers.contract import MODEL, Damage, Stored, make_item, read
from tests.tiers.disk_rig import DiskRig, put, served

POOL_BYTES = 64 << 20
METADATA = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.bfloat16, (1, 2, 16, 1, 8))


def config_for(directory: Path | None = None, **changes: Any) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        local_cpu=True,
        max_local_cpu_size=0.1,
        local_disk=None if directory is None else str(directory),
        max_local_disk_size=0.25,
        **changes,
    )


def plugin_config(**options: Any) -> LMCacheEngineConfig:
    where = {"module_path": PersistentDiskBackend.__module__, "class_name": PersistentDiskBackend.__name__}
    extra = {f"storage_plugin.ours.{key}": value for key, value in (where | options).items()}
    return config_for(storage_plugins=["ours"], extra_config=extra)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path / "cache")
    yield rig
    rig.close()


@pytest.fixture
def cpu() -> Iterator[LocalCPUBackend]:
    backend = LocalCPUBackend(config_for(), None, "cpu", memory_allocator=MixedMemoryAllocator(POOL_BYTES))
    yield backend
    backend.clear()
    backend.close()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def plugin(rig: DiskRig, cpu: LocalCPUBackend) -> Iterator[PersistentDiskBackend]:
    """Loaded by LMCache's loader."""
    backends = load(plugin_config(directory=str(rig.directory), max_size_gb=0.5), cpu)
    plugin = backends["ours"]
    assert isinstance(plugin, PersistentDiskBackend)
    yield plugin
    plugin.close()


def load(config: LMCacheEngineConfig, cpu: LocalCPUBackend | None) -> OrderedDict[str, Any]:
    backends: OrderedDict[str, Any] = OrderedDict()
    storage_plugin_launcher(config, METADATA, None, cpu, "cpu", backends)
    return backends


def key_of(item: Stored, keys: KeySpace) -> CacheEngineKey:
    return keys.key_of(item[0].chunk_hash)


def bytes_of(obj: MemoryObj | None) -> bytes | None:
    """The tensor's bytes; releases the object."""
    if obj is None:
        return None
    data = obj.tensor.contiguous().view(torch.uint8).numpy().tobytes()
    obj.ref_count_down()
    return bytes(data)


def memory_of(item: Stored, cpu: LocalCPUBackend) -> MemoryObj:
    header, payload = item
    shape = torch.Size((header.num_tokens, header.width))
    obj = cpu.allocate(shape, header.dtype, fmt=MemoryFormat.EC_TD, busy_loop=False)
    obj.tensor.view(torch.uint8).reshape(-1).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return obj


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# LMCache's disk backend.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direct", [False, True])
def test_lmcache_reads_our_file(
    rig: DiskRig, cpu: LocalCPUBackend, loop: asyncio.AbstractEventLoop, dtype: torch.dtype, direct: bool
) -> None:
    keys = KeySpace(MODEL, dtype)
    item = make_item("a", 64, 1024, keys)
    rig.open(keys).write(item[0], memoryview(item[1]))
    config = config_for(rig.directory, extra_config={"use_odirect": direct})
    theirs = LocalDiskBackend(config, loop, cpu, "cpu", None, METADATA)
    shape = torch.Size((item[0].num_tokens, item[0].width))
    theirs.insert_key(key_of(item, keys), len(item[1]), shape, dtype, MemoryFormat.EC_TD)
    assert bytes_of(theirs.get_blocking(key_of(item, keys))) == item[1]
    theirs.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_we_read_lmcaches_file_where_accepted(
    rig: DiskRig, cpu: LocalCPUBackend, loop: asyncio.AbstractEventLoop, dtype: torch.dtype
) -> None:
    keys = KeySpace(MODEL, dtype)
    item = make_item("a", keys=keys)
    theirs = LocalDiskBackend(config_for(rig.directory), loop, cpu, "cpu", None, METADATA)
    obj = memory_of(item, cpu)
    theirs.batched_submit_put_task([key_of(item, keys)], [obj])
    obj.ref_count_down()
    wait_for(lambda: theirs.contains(key_of(item, keys)))
    theirs.close()
    assert read(rig.open(keys, accept_unverified=True), item[0].as_wanted()) == item[1]
    assert read(rig.open(keys), item[0].as_wanted()) is None


# Our disk tier as LMCache's storage plugin.


def test_the_loader_loads_it_and_gets_what_our_tier_stored(rig: DiskRig, plugin: PersistentDiskBackend) -> None:
    keys = KeySpace(MODEL, torch.bfloat16)
    item = make_item("a" * 64, 100, 512)
    assert not plugin.contains(key_of(item, keys))
    rig.open().write(item[0], memoryview(item[1]))
    assert plugin.contains(key_of(item, keys))
    obj = plugin.get_blocking(key_of(item, keys))
    assert obj is not None
    assert (obj.get_shape(), obj.get_dtype()) == (torch.Size((100, 512)), torch.bfloat16)
    assert obj.get_memory_format() is MemoryFormat.EC_TD
    assert bytes_of(obj) == item[1]
    absent = key_of(make_item("absent"), keys)
    assert plugin.batched_contains([key_of(item, keys), absent]) == 1
    assert [bytes_of(obj) for obj in plugin.batched_get_blocking([key_of(item, keys), absent])] == [item[1], None]
    assert not plugin.faults.counts()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_lmcache_puts_it_gets_after_a_restart(
    rig: DiskRig, plugin: PersistentDiskBackend, cpu: LocalCPUBackend, dtype: torch.dtype
) -> None:
    keys = KeySpace(MODEL, dtype)
    item = make_item("a", 9, 777, keys)
    obj = memory_of(item, cpu)
    done: list[CacheEngineKey] = []
    futures = plugin.batched_submit_put_task([key_of(item, keys)], [obj], on_complete_callback=done.append)
    obj.ref_count_down()
    assert futures is not None
    for future in futures:
        future.result(20)
    assert done == [key_of(item, keys)]
    assert not plugin.exists_in_put_tasks(key_of(item, keys))
    assert cpu.memory_allocator.memcheck()
    again = load(plugin_config(directory=str(rig.directory), max_size_gb=0.5), cpu)["ours"]
    assert bytes_of(again.get_blocking(key_of(item, keys))) == item[1]
    again.close()


def test_our_hierarchy_gets_what_lmcache_put_only_where_accepted(
    rig: DiskRig, plugin: PersistentDiskBackend, cpu: LocalCPUBackend
) -> None:
    keys = KeySpace(MODEL, torch.bfloat16)
    item = make_item("a")
    obj = memory_of(item, cpu)
    for future in plugin.batched_submit_put_task([key_of(item, keys)], [obj]) or []:
        future.result(20)
    obj.ref_count_down()
    assert rig.open().probe(item[0].as_wanted()) is None
    accepting = rig.open(accept_unverified=True)
    found = accepting.probe(item[0].as_wanted())
    assert found is not None
    assert (found.fingerprint, found.digest) == ("", item[0].digest)
    assert read(accepting, item[0].as_wanted()) == item[1]
    assert accepting.probe(make_item("a", rows=5)[0].as_wanted()) is None
    assert plugin.contains(key_of(item, keys))


def test_what_is_no_encoder_output_is_left_out(plugin: PersistentDiskBackend, cpu: LocalCPUBackend) -> None:
    obj = cpu.allocate(torch.Size((2, 3, 16, 8)), torch.bfloat16, fmt=MemoryFormat.KV_2LTD, busy_loop=False)
    key = CacheEngineKey(MODEL, 1, 0, 5, torch.bfloat16)
    others = [
        CacheEngineKey(MODEL, 8, 3, 5, torch.bfloat16),
        CacheEngineKey(MODEL, 1, 0, -5, torch.bfloat16),
        CacheEngineKey(MODEL, 1, 0, 5, torch.bfloat16, {"lmcache.tag.ec": "trailer"}),
    ]
    assert plugin.batched_submit_put_task([key, *others], [obj] * 4) is None
    assert plugin.faults.count("disk", "unstorable") == 4
    for other in (key, *others):
        assert not plugin.contains(other)
        assert plugin.get_blocking(other) is None
        assert plugin.remove(other) is False
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_damage_without_memory_and_removal(rig: DiskRig, plugin: PersistentDiskBackend, cpu: LocalCPUBackend) -> None:
    keys = KeySpace(MODEL, torch.bfloat16)
    tier = rig.open()
    for name in ("a", "b"):
        put(tier, name)
    rig.damage("a", Damage.FLIPPED_PAYLOAD)
    assert plugin.contains(key_of(make_item("a"), keys), pin=True)
    assert plugin.get_blocking(key_of(make_item("a"), keys)) is None
    assert plugin.faults.count("disk", "digest") == 1
    assert not plugin.pin(key_of(make_item("a"), keys))
    assert plugin.unpin(key_of(make_item("b"), keys))
    everything = cpu.allocate(torch.Size((POOL_BYTES - 4096, 1)), torch.uint8, fmt=MemoryFormat.EC_TD, busy_loop=False)
    assert plugin.get_blocking(key_of(make_item("b"), keys)) is None
    assert plugin.faults.count("disk", "no_memory") == 1
    everything.ref_count_down()
    assert bytes_of(plugin.get_blocking(key_of(make_item("b"), keys))) == make_item("b")[1]
    assert plugin.remove(key_of(make_item("b"), keys))
    assert not served(tier, "b")
    assert cpu.memory_allocator.memcheck()


def test_files_of_lmcaches_own_backend_are_left_alone(rig: DiskRig, plugin: PersistentDiskBackend) -> None:
    item = make_item("a")
    rig.plant_foreign("a", item[1])
    key = key_of(item, KeySpace(MODEL, torch.bfloat16))
    assert not plugin.contains(key)
    assert plugin.get_blocking(key) is None
    assert rig.holds("a")


def test_sizes_come_from_lmcaches_settings_where_the_plugin_has_none(tmp_path: Path, cpu: LocalCPUBackend) -> None:
    plugin = PersistentDiskBackend(config_for(tmp_path), "cpu", METADATA, cpu, None)
    assert plugin.store.capacity_bytes == 1 << 28
    assert (plugin.get_allocator_backend(), str(plugin)) == (cpu, "PersistentDiskBackend")
    plugin.close()
    with pytest.raises(ValueError, match=r"storage_plugin\.<name>\.directory"):
        PersistentDiskBackend(config_for(), "cpu", METADATA, cpu, None)


THROUGH_THE_STORAGE_MANAGER = """
import sys, torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

directory, chunk_hash = sys.argv[1], int(sys.argv[2])
extra = {"module_path": "storage_tiers.persistent_disk", "class_name": "PersistentDiskBackend",
         "directory": directory, "max_size_gb": 0.5}
config = LMCacheEngineConfig.from_defaults(
    local_cpu=True, max_local_cpu_size=0.1, storage_plugins=["ours"],
    extra_config={f"storage_plugin.ours.{key}": value for key, value in extra.items()})
metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, torch.bfloat16, (1, 2, 16, 1, 8), role="worker")
manager = StorageManager(config, metadata, EventManager())
key = CacheEngineKey("org/model", 1, 0, chunk_hash, torch.bfloat16)
assert manager.contains(key) == "ours", manager.contains(key)
obj = manager.get(key)
sys.stdout.buffer.write(b"PAYLOAD:" + obj.tensor.contiguous().view(torch.uint8).numpy().tobytes())
obj.ref_count_down()
manager.close()
"""


def test_through_lmcaches_storage_manager(rig: DiskRig) -> None:
    """In a process of its own: a storage manager changes the environment and the metrics registry."""
    header, payload = make_item("a" * 64)
    rig.open().write(header, memoryview(payload))
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_THE_STORAGE_MANAGER, rig.directory, str(header.chunk_hash)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split(b"PAYLOAD:")[1][: len(payload)] == payload
