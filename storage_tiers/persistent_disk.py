# SPDX-License-Identifier: Apache-2.0
"""The disk tier as LMCache sees it: a storage plugin over the same files.

This room translates LMCache's keys and memory objects into names, headers and payloads. What is stored, verified and
evicted, and how, is `disk_store.py`'s; our own hierarchy goes through `disk_tier.py` and never through here.

LMCache names an item by 64 bits of its hash. So a get here is answered for any item under that name whose model, dtype
and digest are right, whatever its fingerprint. A put here knows neither `mm_hash` nor fingerprint nor modality and
leaves them empty: LMCache gets it back, verified; our hierarchy takes it for another item, unless `accept_unverified`.

To load it, in LMCache's YAML (the directory should be no `local_disk` of LMCache's own, which writes in place):

    storage_plugins: [disk]
    extra_config:
      storage_plugin.disk.module_path: storage_tiers.persistent_disk
      storage_plugin.disk.class_name: PersistentDiskBackend
      storage_plugin.disk.directory: /var/cache/ec    # default: local_disk
      storage_plugin.disk.max_size_gb: 100            # GiB; default: max_local_disk_size
      storage_plugin.disk.direct_io: false            # default: use_odirect
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface, StoragePluginInterface
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from storage_tiers.disk_directory import is_entry_name
from storage_tiers.disk_store import DiskStore
from storage_tiers.faults import FaultLog
from storage_tiers.key import chunk_hash_of
from storage_tiers.tier import ItemHeader, digest_of

__all__ = ["PersistentDiskBackend"]

_MAX_PENDING_PUTS = 64
"""Each keeps its memory object in LMCache's pool until it is written."""

OnComplete = Callable[[CacheEngineKey], None]


class PersistentDiskBackend(StoragePluginInterface):
    """An LMCache storage backend for encoder outputs that finds its files again after a restart.

    It serves keys of LMCache's encoder cache (world size 1, worker 0, no tags) and 2-D tensors; others are not stored.
    No call raises OSError: a fault is a miss and is counted in `faults`.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig | None = None,
        dst_device: str = "cpu",
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As LMCache's plugin loader calls it. Raises ValueError without directory or size, OSError for a bad one."""
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        directory, capacity_bytes, direct_io = _options(config)
        self.faults = FaultLog()
        self.store = DiskStore(directory, capacity_bytes, self.faults, direct_io=direct_io)
        """The files, for administration: entries, check, evict, used_bytes."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="persistent-disk-put")
        self._lock = threading.Lock()
        self._pending: set[str] = set()

    def __str__(self) -> str:
        return type(self).__name__

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether the file is there with a whole trailer of that model and dtype: one open and a read of 4096 bytes."""
        return self.pin(key) if pin else self._header(key) is not None

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return _name_of(key) in self._pending

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: OnComplete | None = None,
    ) -> list[Future[None]] | None:
        """Write in the background. What is pending, is no encoder output, or is too much at once is left out."""
        futures = []
        for key, obj in zip(keys, objs, strict=True):
            name = _name_of(key)
            if name is None or len(obj.get_shape()) != 2 or obj.get_dtype() != key.dtype:
                self._report("unstorable", key)
            elif self._claim(name):
                obj.ref_count_up()
                futures.append(self._writer.submit(self._put, key, name, obj, on_complete_callback))
        return futures or None

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """The item, verified, in memory of `local_cpu_backend`; None for a miss or where there is no memory at once."""
        header = self._header(key)
        if header is None:
            return None
        shape = torch.Size((header.num_tokens, header.width))
        obj = self.get_allocator_backend().allocate(shape, header.dtype, fmt=MemoryFormat.EC_TD, busy_loop=False)
        if obj is None:
            self._report("no_memory", key)
            return None
        try:
            if self.store.read_into(_name_of(key) or "", header, _bytes_of(obj)):
                return obj
        except OSError as error:
            self._report("read_failed", error)
        obj.ref_count_down()
        return None

    def pin(self, key: CacheEngineKey) -> bool:
        """Make it the youngest and tell whether it is there. No file needs more: an open one outlives its removal."""
        present = self._header(key) is not None
        if present:
            self.store.touch(_name_of(key) or "")
        return present

    def unpin(self, key: CacheEngineKey) -> bool:
        return self._header(key) is not None

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        name = _name_of(key)
        try:
            return name is not None and self.store.remove(name)
        except OSError as error:
            self._report("remove_failed", error)
            return False

    def touch_cache(self) -> None:
        """Nothing to do: recency is noted with each use."""

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """Raises RuntimeError in LMCache's scheduler role, which has no memory to read into."""
        if self.local_cpu_backend is None:
            raise RuntimeError(f"{self}: no local_cpu_backend to allocate from")
        return self.local_cpu_backend

    def close(self) -> None:
        """Finish pending puts and stop the threads. What is stored stays."""
        self._writer.shutdown()
        self.store.close()

    def _header(self, key: CacheEngineKey) -> ItemHeader | None:
        name = _name_of(key)
        if name is None:
            return None
        try:
            # LMCache's own files say no shape: they are left to LMCache.
            header = self.store.header(name, lambda size: None)
        except OSError as error:
            self._report("probe_failed", error)
            return None
        if header is None or (header.model, header.dtype) != (key.model_name, key.dtype):
            return None
        return header if header.mm_hash == "" or chunk_hash_of(header.mm_hash) == key.chunk_hash else None

    def _claim(self, name: str) -> bool:
        with self._lock:
            if name in self._pending:
                return False
            if len(self._pending) >= _MAX_PENDING_PUTS:
                self._report("put_queue_full", name)
                return False
            self._pending.add(name)
            return True

    def _put(self, key: CacheEngineKey, name: str, obj: MemoryObj, on_complete: OnComplete | None) -> None:
        stored = False
        try:
            payload = _bytes_of(obj)
            stored = self.store.write(name, _anonymous_header(key, obj.get_shape(), digest_of(payload)), payload)
        except OSError as error:
            self._report("write_failed", error)
        finally:
            with self._lock:
                self._pending.discard(name)
            obj.ref_count_down()
        if stored and on_complete is not None:
            try:
                on_complete(key)
            except Exception as error:  # noqa: BLE001 - a stranger's code at the edge of our thread
                self._report("callback_failed", repr(error))

    def _report(self, kind: str, detail: object) -> None:
        self.faults.report("disk", kind, str(detail))


def _name_of(key: CacheEngineKey) -> str | None:
    """The file name of `key`, or None when it is no key of LMCache's encoder cache."""
    name = f"{key.to_string().replace('/', '-')}.pt"
    return name if is_entry_name(name) else None


def _anonymous_header(key: CacheEngineKey, shape: Sequence[int], digest: bytes) -> ItemHeader:
    return ItemHeader(
        mm_hash="",
        model=key.model_name,
        fingerprint="",
        modality="",
        num_tokens=shape[0],
        width=shape[1],
        dtype=key.dtype,
        digest=digest,
        created=time.time(),
    )


def _bytes_of(obj: MemoryObj) -> memoryview:
    """The tensor's memory as plain bytes. LMCache's `byte_array` has a format that Python cannot slice and cast."""
    return memoryview(obj.tensor.view(torch.uint8).reshape(-1).numpy())


def _options(config: LMCacheEngineConfig | None) -> tuple[Path, int, bool]:
    """Directory, bytes and direct I/O. The loader does not say under which name it loads: we look for our class."""
    extra: dict[str, Any] = (config.extra_config or {}) if config is not None else {}
    names = (config.storage_plugins or []) if config is not None else []
    ours = [name for name in names if extra.get(f"storage_plugin.{name}.class_name") == PersistentDiskBackend.__name__]

    def option(key: str, default: Any) -> Any:
        return next(
            (value for name in ours if (value := extra.get(f"storage_plugin.{name}.{key}")) is not None), default
        )

    directory = option("directory", (getattr(config, "local_disk", None) or "").split(",")[0].strip())
    gibibytes = float(option("max_size_gb", getattr(config, "max_local_disk_size", 0.0)))
    if not directory or gibibytes <= 0:
        raise ValueError(
            f"{PersistentDiskBackend.__name__}: directory {directory!r}, size {gibibytes} GiB; set "
            "storage_plugin.<name>.directory and .max_size_gb in extra_config, or local_disk and max_local_disk_size"
        )
    return Path(directory), int(gibibytes * (1 << 30)), bool(option("direct_io", extra.get("use_odirect", False)))
