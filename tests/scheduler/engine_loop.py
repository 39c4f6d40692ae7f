# SPDX-License-Identifier: Apache-2.0
"""An engine in this process: vLLM's real scheduler, our connector made by vLLM's factory, one runner stand-in per rank.

Nothing of a model runs. `EngineLoop.step` is `EngineCore.step`: schedule, execute, update. Passes can be scheduled
ahead of their execution, as vLLM does with async scheduling (by one step) and with pipeline stages.
"""

import copy
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3VLConfig
from vllm.config import CacheConfig, DeviceConfig, ECTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.parallel import ParallelConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import connector
from connector import assembly, block_geometry
from connector.block_geometry import geometry_of
from connector.ec_connector import LMCacheNeuronECConnector
from connector.scheduler_side import SchedulerSide
from connector.settings import Settings
from connector.step_plan import StepPlan
from connector.worker_side import WorkerOptions, WorkerSide
from connector.workers import _make_blocks
from storage_tiers.block_mapping import BlockMapping
from storage_tiers.entry import Entry, EntryState
from storage_tiers.faults import FaultLog
from storage_tiers.hierarchy import HierarchyOptions, TierHierarchy
from storage_tiers.key import KeySpace
from storage_tiers.shared_pool import SharedPool
from storage_tiers.shared_segment import SharedSegment
from storage_tiers.tier import LowerTier
from storage_tiers.transfer_board import RankGauge, TransferBoard
from tests.scheduler.items import WIDTH, Image, kwargs_item, make_request, wanted
from tests.scheduler.runner import RunnerStandIn, Told
from tests.scheduler.versions import NAMES_MANAGERS, scheduler_class
from tests.tiers.memory_tier import DEADLINE_SECONDS, PAGE_BYTES, wait_until

MAX_STEPS = 20_000

connector.register()


@dataclass(frozen=True)
class EngineOptions:
    """What a test may want otherwise."""

    role: str = "ec_both"
    device_rows: int = 64
    """Rows of embeddings that the device's encoder cache holds, and that one pass may encode."""
    pool_pages: int = 256
    """Size of the shared pool; an item of up to 64 rows takes one page."""
    batch_tokens: int = 64
    """Most tokens of one step: longer prompts are prefilled in chunks."""
    kv_blocks: int = 1000
    block_size: int = 16
    ranks: int = 1
    async_scheduling: bool = False
    """vLLM's AsyncScheduler, one step ahead."""
    ahead: int = 0
    """Steps by which scheduling is ahead of execution all the same: one less than there are pipeline stages."""
    policy: str = "fcfs"
    prefix_caching: bool = False
    skip_slow_restores: bool = False
    """Over the tests' own tiers: whether estimates of time decide, which depend on the machine."""
    manager: str | None = None
    """Class of the encoder cache manager, as a user would name it; None leaves it to the connector."""
    largest_item: int | None = None
    """Rows of the largest item that the engine admits; None: unknown."""
    in_blocks: bool = False
    """Whether the device's cache lies in blocks of `settings["device_block_size"]` tokens, as with the worker hook."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """More fields of vLLM's SchedulerConfig."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What goes into `ec_connector_extra_config` besides the pool's size."""


def model_config() -> ModelConfig:
    """A small multimodal model's configuration, of the caller's own: vLLM changes it for the engine it is used in."""
    return copy.deepcopy(_model_config())


@lru_cache(maxsize=1)
def _model_config() -> ModelConfig:
    """Made once: it takes seconds."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    config = Qwen3VLConfig(
        text_config={
            **sizes,
            "vocab_size": 320,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        # Two levels of 16 columns: rows of WIDTH, where vLLM measures none.
        vision_config={**sizes, "depth": 2, "num_heads": 1, "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="bfloat16",
    )
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return ModelConfig(
            model=directory, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, enforce_eager=True
        )


def vllm_config(options: EngineOptions = EngineOptions()) -> VllmConfig:
    """A real configuration, whose widths vLLM has measured, where it does."""
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=options.batch_tokens,
        max_model_len=4096,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=options.async_scheduling,
        policy=options.policy,
        **options.scheduler,
    )
    cache = CacheConfig(block_size=options.block_size, enable_prefix_caching=options.prefix_caching)
    cache.num_gpu_blocks = options.kv_blocks
    transfer = ECTransferConfig(
        ec_connector="LMCacheNeuronECConnector",
        ec_role=options.role,
        ec_connector_extra_config={
            "max_local_cpu_size": options.pool_pages * PAGE_BYTES / 1024**3,
            "local_cpu": True,
            **options.settings,
        },
    )
    config = VllmConfig(
        model_config=model_config(),
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=ParallelConfig(tensor_parallel_size=options.ranks),
        device_config=DeviceConfig("cpu"),
        ec_transfer_config=transfer,
    )
    if transfer.is_ec_producer and hasattr(transfer, "mm_encoder_output_widths"):
        transfer.mm_encoder_output_widths = {"image": WIDTH, "video": WIDTH}
    if NAMES_MANAGERS:
        config.ec_manager_config.encoder_cache_manager_cls = options.manager
    if options.in_blocks:
        config.parallel_config.worker_cls = "connector.workers.BlockCacheWorker"
    return config


class EngineLoop:
    """One engine. Use it in a `with` statement: a clean end asserts that nothing has leaked."""

    def __init__(
        self,
        options: EngineOptions = EngineOptions(),
        tiers: Sequence[LowerTier] | None = (),
        attach: bool = True,
    ) -> None:
        """`tiers` lie below the pool; None builds those of the settings, by the connector's own assembly.

        `attach=False` starts no worker: `start_workers` does.
        """
        self.options = options
        self.vllm_config = vllm_config(options)
        self.told = Told()
        self.outputs: list[SchedulerOutput] = []
        """Of every pass, in order."""
        self.ended: dict[str, FinishReason] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._arrivals = 0
        init_none_hash(sha256)  # once: vLLM 0.24 makes another each time
        self.scheduler = self._make_scheduler(tiers)
        made = self.scheduler.ec_connector
        assert isinstance(made, LMCacheNeuronECConnector) and made._scheduler is not None
        self.connector = made
        self.side: SchedulerSide = made._scheduler
        parts = self.side._parts
        self.hierarchy, self.ledger, self.admission = parts.hierarchy, parts.ledger, parts.admission
        self.residency, self.board = parts.residency, parts.ledger._board
        self.pool: SharedPool = self.hierarchy._pool
        self.runners: list[RunnerStandIn] = []
        if attach:
            self.start_workers()

    # -- What a client does -----------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        parts: Sequence[int | Image],
        *,
        max_tokens: int = 1,
        priority: int = 0,
        adapter: LoRARequest | None = None,
        resumable: bool = False,
        kwargs_of: Callable[[Image], Any] = kwargs_item,
    ) -> Request:
        """Queue a request for one token more than its prompt; see `make_request`."""
        self._arrivals += 1
        hasher = get_request_block_hasher(self.options.block_size, sha256) if self.options.prefix_caching else None
        request = make_request(
            request_id,
            parts,
            max_tokens=max_tokens,
            priority=priority,
            adapter=adapter,
            arrival_time=float(self._arrivals),
            resumable=resumable,
            block_hasher=hasher,
            kwargs_of=kwargs_of,
        )
        earlier = self.told.images[request_id] if request_id in self.scheduler.requests else []
        self.told.images[request_id] = earlier + [part for part in parts if isinstance(part, Image)]
        self.scheduler.add_request(request)
        return request

    def ask(self, request_id: str, *parts: int | Image, **options: Any) -> None:
        """A request, from its arrival to its end."""
        self.add(request_id, parts, **options)
        self.run()
        assert self.ended[request_id] is FinishReason.LENGTH, f"{request_id} ended by {self.ended[request_id]}"

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def update_weights(self) -> None:
        """New weights, and the reset of every encoder cache that vLLM does then."""
        self.reset_encoder_cache()
        self.told.weights += 1

    def reset_encoder_cache(self) -> None:
        """As vLLM does: the scheduler's side at once, the workers' behind the steps that are in their queue."""
        self.scheduler.reset_encoder_cache()
        in_flight = [(output, self._execute(output)) for output in self._in_flight]
        self._in_flight.clear()
        for runner in self.runners:
            runner.reset_encoder_cache()
        for output, result in in_flight:
            self._update(output, result)

    def evict_device(self) -> None:
        """Fill the device's encoder cache with an image that nobody has seen, so that all others leave it."""
        self._arrivals += 1
        name = f"filler-{self._arrivals}"
        self.ask(name, Image(name, rows=self.options.device_rows))

    # -- The loop ---------------------------------------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        """One turn of the engine; returns what was scheduled."""
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self._in_flight.append(output)
        while len(self._in_flight) > max(self.options.ahead, self.options.async_scheduling):
            self.execute_oldest()
        return output

    def execute_oldest(self) -> None:
        """Run the step that was scheduled first, on every rank, and give the scheduler its result."""
        output = self._in_flight.popleft()
        self._update(output, self._execute(output))

    def catch_up(self) -> None:
        """Run every step that was scheduled."""
        while self._in_flight:
            self.execute_oldest()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        first, *_ = [runner.execute(output) for runner in self.runners]
        return first

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for given in self.scheduler.update_from_output(output, result).values():
            for each in given.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = each.finish_reason

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Turn until nothing is left to do, or `until` says so. Idle turns are paced, as an engine's steps are."""
        for _ in range(MAX_STEPS):
            if until():
                return
            if not self.scheduler.has_requests():
                break
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.0002)
        self.catch_up()
        assert not self.scheduler.has_unfinished_requests(), "the engine turns in circles"

    def settle(self) -> None:
        """Wait until copies and writes have ended. No hook is called."""
        wait_until(self._nothing_is_copied, "all copies have ended")
        assert not self.hierarchy.flush(DEADLINE_SECONDS), "a write hangs"

    def _nothing_is_copied(self) -> bool:
        """Whether every transfer has ended, and the end of every save was taken up, which is the moment after."""
        return not self.ledger.num_outstanding and all(e.state is not EntryState.SAVING for e in self._entries())

    # -- What a test looks at ---------------------------------------------------------------------------------------

    @property
    def encoded(self) -> Counter[str]:
        """Encoder runs by identifier."""
        return self.runners[0].encoded

    def encoder_runs(self, *images: Image) -> int:
        return sum(self.encoded[image.identifier] for image in images)

    @property
    def plans(self) -> list[StepPlan]:
        return [output.ec_connector_metadata for output in self.outputs]

    def loads(self) -> list[str]:
        """Identifiers of all loads that were planned, in order."""
        return [load.mm_hash for plan in self.plans for load in plan.loads]

    def saves(self) -> list[str]:
        """Identifiers of all saves that were planned, in order."""
        return [save.mm_hash for plan in self.plans for save in plan.saves]

    @property
    def fingerprint(self) -> str:
        return self.admission._identity.fingerprint

    def state_of(self, image: Image) -> EntryState | None:
        """Where the image stands in the pool."""
        return self.hierarchy.state_of(wanted(image, self.fingerprint))

    def leases_of(self, image: Image) -> int:
        entry = self.hierarchy._index.get(wanted(image, self.fingerprint).chunk_hash)
        return entry.leases if entry is not None else 0

    def drop_from_pool(self, *images: Image) -> None:
        """Evict from the pool what has been written below it."""
        self.settle()
        for image in images:
            assert self.hierarchy.evict(wanted(image, self.fingerprint)), f"{image} is not in the pool, or held"

    def _entries(self) -> list[Entry]:
        with self.hierarchy._lock:
            return list(self.hierarchy._index.values())

    def faults(self) -> dict[tuple[str, str], int]:
        """Faults of both sides, worker's included."""
        total: Counter[tuple[str, str]] = Counter(self.hierarchy.faults.counts())
        for runner in self.runners:
            total.update(runner.connector._worker._faults.counts())
            total.update(runner.connector._faults.counts())
        total.update(self.connector._faults.counts())
        return dict(total)

    def assert_nothing_held(self) -> None:
        """With no request left: no lease, no claim, no slot and no byte that no entry accounts for."""
        assert not self.scheduler.has_unfinished_requests()
        self.settle()
        wait_until(
            lambda: all(e.state is EntryState.RESIDENT and not e.leases for e in self._entries()),
            "every lease has ended",
        )
        assert not self.ledger.num_outstanding
        assert self.ledger._slots.num_free == self.board.num_slots
        assert self.hierarchy.claimed_bytes == 0
        assert not self.admission._records
        entries = self._entries()
        used = sum(entry.obj.get_physical_size() for entry in entries)
        wait_until(lambda: self.pool.used_bytes == used, "no byte of the pool belongs to nobody")
        assert all(entry.obj.get_ref_count() == 1 for entry in entries)
        assert self.pool._allocator.memcheck()
        for runner in self.runners:
            assert set(runner.encoder_cache) <= set(self.scheduler.encoder_cache_manager.cached) | set(
                self.scheduler.encoder_cache_manager.freed
            ), "the device holds what nobody will free"

    # -- Beginning and end ------------------------------------------------------------------------------------------

    def start_workers(self, count: int | None = None) -> None:
        """Start that many more ranks (all of them by default), and wait until they have attached."""
        first = len(self.runners)
        for rank in range(first, self.options.ranks if count is None else first + count):
            build = partial(self._worker_side, rank)
            with mock.patch.object(assembly, "build_worker_side", build):
                made = ECConnectorFactory.create_connector(self.vllm_config, ECConnectorRole.WORKER)
            self.runners.append(RunnerStandIn(made, self.told, self._block_mapping()))
        for runner in self.runners:
            wait_until(lambda runner=runner: runner.connector._worker._attached, "a worker has attached")

    def _block_mapping(self) -> BlockMapping | None:
        """What `workers.install_block_mapping` puts into a runner."""
        if not self.options.in_blocks:
            return None
        behaviour = assembly._settings_of(self.vllm_config).behaviour
        with _largest_item(self.options):
            geometry = geometry_of(self.vllm_config, behaviour, self.options.device_rows)
        return BlockMapping(partial(_make_blocks, geometry, behaviour, torch.device("cpu")), FaultLog())

    def close(self) -> None:
        """Stop as vLLM does: the workers first, then the scheduler."""
        for runner in self.runners:
            runner.connector.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> "EngineLoop":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.run()
                self.assert_nothing_held()
        finally:
            self.close()

    def _worker_side(self, rank: int, config: VllmConfig) -> WorkerSide:
        """What `assembly.build_worker_side` makes, without process groups."""
        behaviour = assembly._settings_of(config).behaviour
        return WorkerSide(
            WorkerOptions(
                engine_id=str(config.ec_transfer_config.engine_id),
                dp_rank=0,
                owner_pids=[os.getpid()],
                rank=rank,
                device=torch.device("cpu"),
                save_queue_bytes=behaviour.save_queue_bytes,
                populate_pool=False,
                save_bytes_per_step=behaviour.save_bytes_per_step,
                max_dirty_seconds=behaviour.max_dirty_seconds,
                spill_on_evict=behaviour.spill_policy == "on_evict",
            )
        )

    def _scheduler_class(self) -> type[Scheduler]:
        return scheduler_class(self.options.async_scheduling, self.options.manager)

    def _make_scheduler(self, tiers: Sequence[LowerTier] | None) -> Scheduler:
        options = self.options
        spec = FullAttentionSpec(block_size=options.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        budget = SimpleNamespace(
            encoder_compute_budget=options.device_rows,
            encoder_cache_size=options.device_rows,
        )
        hierarchy = (
            assembly._make_hierarchy if tiers is None else partial(_make_hierarchy, tiers, options.skip_slow_restores)
        )
        with (
            # vLLM's own budget asks the model's processor, and is never below the largest video.
            mock.patch.object(scheduler_module, "MultiModalBudget", lambda *_, **__: budget),
            mock.patch.object(assembly, "_make_hierarchy", hierarchy),
            _largest_item(options),
        ):
            return self._scheduler_class()(
                vllm_config=self.vllm_config,
                kv_cache_config=KVCacheConfig(options.kv_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                block_size=options.block_size,
            )


def _largest_item(options: EngineOptions) -> Any:
    """VLLM would ask the model's processor, which takes a tokenizer."""
    return mock.patch.object(block_geometry, "_largest_item_tokens", lambda *_: options.largest_item)


def _make_hierarchy(
    tiers: Sequence[LowerTier],
    skip_slow_restores: bool,
    settings: Settings,
    segment: SharedSegment,
    board: TransferBoard,
    keys: KeySpace,
    faults: FaultLog,
) -> TierHierarchy:
    """`assembly._make_hierarchy` over the test's own tiers."""
    behaviour, storage = settings.behaviour, settings.storage
    return TierHierarchy(
        SharedPool(storage.lmcache_config, segment),
        tiers,
        keys,
        HierarchyOptions(
            max_lease_bytes=int(storage.pool_bytes * behaviour.max_lease_fraction),
            persist_client_ids=behaviour.persist_client_ids,
            skip_slow_restores=skip_slow_restores,
            io_threads=behaviour.io_threads,
            io_queue_items=behaviour.io_queue_items,
        ),
        faults,
        encode_seconds_per_token=lambda: board.gauge(0, RankGauge.ENCODE_SECONDS_PER_TOKEN),
    )
