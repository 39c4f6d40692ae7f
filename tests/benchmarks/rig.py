# SPDX-License-Identifier: Apache-2.0
"""The product as it runs, without a model: connector halves made by vLLM's factory, and the tiers alone.

Both halves live in this process, as in an engine with one rank, where they share the interpreter with each other and
with every background thread of ours.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

import connector
from connector import assembly
from connector.ec_connector import LMCacheNeuronECConnector
from connector.lmcache_config import build_config
from connector.model_identity import ModelIdentity, model_facts
from connector.worker_side import WorkerOptions, WorkerSide
from storage_tiers.disk_tier import DiskTier
from storage_tiers.faults import FaultLog
from storage_tiers.hierarchy import HierarchyOptions, TierHierarchy
from storage_tiers.key import KeySpace, WantedItem
from storage_tiers.shared_pool import SharedPool, view
from storage_tiers.shared_segment import SharedSegment, segment_name
from storage_tiers.tier import ItemHeader, LowerTier
from tests.scheduler.engine_loop import EngineOptions, vllm_config
from tests.scheduler.items import Image, make_request

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
DTYPE = torch.bfloat16
PAGE_BYTES = 4096
GIB_BYTES = 1 << 30
KEYS = KeySpace(MODEL, DTYPE)
FINGERPRINT = "5" * 64

WIDTH = 3584
PICTURE_ROWS = 87 * 55
"""Qwen2.5-VL-7B, one picture of 2436 x 1540 pixels: [4785, 3584] of bfloat16 are 34.3 MB."""
CLIP_ROWS = 7 * 79 * 33
"""The same model, 14 frames of 2212 x 924 pixels: [18249, 3584] are 130.8 MB."""
SIZES = {"34.3 MB": PICTURE_ROWS, "130.8 MB": CLIP_ROWS}

PATIENCE_SECONDS = 120.0

connector.register()


class ConnectorRig:
    """One engine's connector: both halves, with the tiers of its settings and one worker that has attached."""

    def __init__(self, pool_bytes: int, width: int, directory: Path | None = None, disk_bytes: int = GIB_BYTES) -> None:
        """Ready once the pool is faulted in on both sides and the directory has been looked through."""
        disk = (
            {} if directory is None else {"local_disk": str(directory), "max_local_disk_size": disk_bytes / GIB_BYTES}
        )
        self.config = _engine_config(EngineOptions(pool_pages=pool_bytes // PAGE_BYTES, settings=disk))
        self.config.ec_transfer_config.mm_encoder_output_widths = {"image": width}
        self.scheduler = _connector(self.config, ECConnectorRole.SCHEDULER)
        with mock.patch.object(assembly, "build_worker_side", _worker_side):
            self.worker = _connector(self.config, ECConnectorRole.WORKER)
        assert self.scheduler._scheduler is not None and self.worker._worker is not None
        self.side, self.worker_side = self.scheduler._scheduler, self.worker._worker
        parts = self.side._parts
        self.hierarchy, self.ledger, self.admission = parts.hierarchy, parts.ledger, parts.admission
        self.residency = parts.residency
        self.pool: SharedPool = self.hierarchy._pool
        for thread in threading.enumerate():
            if thread.name in ("ec-populate", "ec-attach", "disk-tier-scan"):
                thread.join()
        wait_until(parts.is_ready)

    @property
    def fingerprint(self) -> str:
        return self.admission._identity.fingerprint

    def wanted(self, image: Image, width: int) -> WantedItem:
        return WantedItem(image.identifier, image.rows, image.modality, self.fingerprint, width)

    def in_pool(self, image: Image, width: int) -> torch.Tensor:
        """The pool's memory of a resident item, by the offset that workers are told. Not held."""
        lease = self.hierarchy.pin_resident(self.wanted(image, width))
        assert lease is not None, "the item is not in the pool"
        offset = self.hierarchy.segment_offset(lease)
        self.hierarchy.release(lease)
        return view(self.pool.segment, offset, (image.rows, width), DTYPE)

    def on_disk(self, image: Image, width: int) -> torch.Tensor:
        """A stored item as the disk tier reads and verifies it."""
        disk = self.hierarchy._lower._tiers[0]
        header = disk.probe(self.wanted(image, width))
        assert header is not None, "the item is not on the disk"
        held = torch.empty(image.rows, width, dtype=DTYPE)
        assert disk.read_into(header, memoryview(held.view(torch.uint8).reshape(-1).numpy()))
        return held

    def scheduled(self, encodes: Sequence[Request] = (), finished: Sequence[Request] = ()) -> SchedulerOutput:
        """A pass that encodes item 0 of each of `encodes`."""
        output = SchedulerOutput.make_empty()
        output.scheduled_encoder_inputs = {request.request_id: [0] for request in encodes}
        output.num_scheduled_tokens = {request.request_id: request.num_tokens for request in encodes} or {"other": 1}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.finished_req_ids = {request.request_id for request in finished}
        return output

    def end_pass(self, encodes: Sequence[Request] = (), finished: Sequence[Request] = ()) -> object:
        """What the scheduler says when a pass is over; the plan for the workers."""
        return self.scheduler.build_connector_meta(self.scheduled(encodes, finished))

    def settle(self) -> None:
        """Wait until copies, reads and writes have ended."""
        wait_until(lambda: not self.ledger.num_outstanding)
        assert not self.hierarchy.flush(PATIENCE_SECONDS)

    def faults(self) -> dict[tuple[str, str], int]:
        """Everything that any part has counted as a fault."""
        logs = (self.hierarchy.faults, self.worker_side._faults, self.scheduler._faults, self.worker._faults)
        return {kind: count for log in logs for kind, count in log.counts().items()}

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class TierRig:
    """Pool and hierarchy without vLLM's hooks, over one tier or none."""

    def __init__(self, pool_bytes: int, open_lower: Callable[[], LowerTier] | None = None) -> None:
        """The pool is faulted in before `open_lower` is called."""
        size = -(-pool_bytes // PAGE_BYTES) * PAGE_BYTES
        name = segment_name(f"bench-{time.monotonic_ns()}", 0, os.getpid())
        segment = SharedSegment.create(name, size)
        segment.populate(threading.Event())
        self.faults = FaultLog()
        self.pool = SharedPool(build_config({"max_local_cpu_size": size / GIB_BYTES}), segment)
        lower = [] if open_lower is None else [open_lower()]
        options = HierarchyOptions(max_lease_bytes=size, skip_slow_restores=False)
        self.hierarchy = TierHierarchy(self.pool, lower, KEYS, options, self.faults)

    def close(self) -> None:
        self.hierarchy.close()


def new_disk(directory: Path, *, direct_io: bool = False, capacity_bytes: int = 16 * GIB_BYTES) -> DiskTier:
    """The disk tier on `directory`, which may not be looked through yet."""
    return DiskTier(directory, capacity_bytes, KEYS, FaultLog(), direct_io=direct_io)


def header_of(mm_hash: str, rows: int, width: int, fingerprint: str = FINGERPRINT, digest: bytes = b"") -> ItemHeader:
    return ItemHeader(mm_hash, MODEL, fingerprint, "image", rows, width, DTYPE, digest, created=1.0)


def request_for(name: str, *images: Image) -> Request:
    """A request whose prompt is the images with some text around them."""
    return make_request(name, [4, *images, 4])


def encoder_output(seed: int, rows: int, width: int = WIDTH) -> torch.Tensor:
    """Random rows in memory that is touched: every byte differs from run to run of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, width * DTYPE.itemsize), dtype=torch.uint8, generator=generator).view(DTYPE)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: random bits hold NaNs, which equal nothing as numbers."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def wait_until(predicate: Callable[[], object], pause_seconds: float = 0.0005) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not predicate():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(pause_seconds)


def model_fingerprint() -> str:
    """What a `ConnectorRig` takes for the fingerprint of its model."""
    return ModelIdentity(model_facts(_engine_config(EngineOptions()), sample_weights=True), {}).fingerprint


def _engine_config(options: EngineOptions) -> VllmConfig:
    """The test engine's, under the name of a real model: names decide how long file names are."""
    config = vllm_config(options)
    config.model_config = copy(config.model_config)
    config.model_config.model = MODEL
    return config


def _connector(config: VllmConfig, role: ECConnectorRole) -> LMCacheNeuronECConnector:
    made = ECConnectorFactory.create_connector(config, role)
    assert isinstance(made, LMCacheNeuronECConnector)
    return made


def _worker_side(config: VllmConfig) -> WorkerSide:
    """What `assembly.build_worker_side` makes for the only rank, without process groups."""
    behaviour = assembly._settings_of(config).behaviour
    return WorkerSide(
        WorkerOptions(
            engine_id=str(config.ec_transfer_config.engine_id),
            dp_rank=0,
            owner_pids=[os.getpid()],
            rank=0,
            device=torch.device("cpu"),
            save_queue_bytes=behaviour.save_queue_bytes,
            populate_pool=True,
        )
    )
