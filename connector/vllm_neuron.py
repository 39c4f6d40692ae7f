# SPDX-License-Identifier: Apache-2.0
"""What vllm-neuron takes beyond vLLM's own seams: a worker class, and scheduler classes that count blocks.

    --worker-cls connector.vllm_neuron.NeuronBlockCacheWorker
    --scheduler-cls connector.vllm_neuron.NeuronAsyncScheduler     (or NeuronScheduler with --no-async-scheduling)

The plugin's packages are imported when its worker is asked for, and not before. What is copied and when is the worker
side's, what is admitted the manager's; only the seams may enter.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from connector.block_aware_manager import BlockAwareEncoderCacheManager
from connector.block_geometry import BlockGeometry
from connector.cache_manager import ReportingEncoderCacheManager
from connector.ec_connector import LMCacheNeuronECConnector
from connector.plugin_blocks import missing_from
from connector.step_plan import NothingToLoad, StepPlan
from connector.vllm_versions import announces_running_requests, fails_unavailable_requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    NeuronBlockCacheWorker: Any
    """The plugin's worker with a block cache under which more tiers lie, for `--worker-cls`. Made by `__getattr__`."""

__all__ = [
    "NeuronAsyncScheduler",
    "NeuronBlockCacheWorker",
    "NeuronEncoderCacheManager",
    "NeuronScheduler",
    "worker_class",
]

logger = init_logger(f"vllm.{__name__}")

WORKER_CLASS = "NeuronBlockCacheWorker"
PLUGIN_WORKERS = ("vllm_neuron.vllm.worker.neuron_worker.NeuronWorker", "vllm_neuron.worker.neuron_worker.NeuronWorker")
"""Where revisions of the plugin keep the class that `--worker-cls auto` stands for."""


def __getattr__(name: str) -> Any:
    if name == WORKER_CLASS:
        made = globals()[name] = worker_class(_plugin_worker())
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- Worker ------------------------------------------------------------------------------------------------------------


def worker_class(base: Any) -> Any:
    """A subclass of the plugin's worker class `base` that carries out the plan around each step of its runner."""

    class NeuronBlockCacheWorker(base):
        """The plugin's worker: ahead of a step it spills, frees and restores blocks; behind it, it takes up new items.

        The runner finds nothing left to free and nothing to load.
        """

        _taken_over: Any = None

        def _encoder_cache(self) -> Any:
            """The runner's device cache, checked when it is first seen; None without one. Raises RuntimeError."""
            cache = getattr(self.model_runner, "encoder_cache", None)
            if cache is not None and cache is not self._taken_over:
                _take_over(cache)
                self._taken_over = cache
            return cache

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            """Load the model, and see that the plugin's device cache is one that we know.

            Raises ValueError beside another connector than ours, RuntimeError for a device cache of another kind.
            """
            _refuse_other_connector(self.vllm_config)
            super().load_model(*args, **kwargs)
            if self._encoder_cache() is None:
                logger.warning("Encoder cache: %s finds no encoder cache in the model runner so far", WORKER_CLASS)

        def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
            """One step. Steps that only decode make no call of their own to the connector, and are served, too."""
            connector, plan, cache = _connector(), scheduler_output.ec_connector_metadata, self._encoder_cache()
            if connector is None or cache is None or not isinstance(plan, StepPlan):
                return super().execute_model(scheduler_output, *args, **kwargs)
            blocks = connector.plugin_blocks(cache)
            freed = scheduler_output.free_encoder_mm_hashes
            connector.before_step(plan, freed, blocks)
            # In place: the plugin hangs attributes of its own onto this very object.
            scheduler_output.free_encoder_mm_hashes = []
            scheduler_output.ec_connector_metadata = NothingToLoad()
            try:
                output = super().execute_model(scheduler_output, *args, **kwargs)
            finally:
                scheduler_output.free_encoder_mm_hashes = freed
                scheduler_output.ec_connector_metadata = plan
            connector.after_step(plan, blocks)
            return output

        def reset_encoder_cache(self) -> None:
            """Forget every item on the device, once nothing reads them."""
            connector = _connector()
            if connector is not None:
                connector.before_reset()
            super().reset_encoder_cache()

        def shutdown(self) -> None:
            """Stop: the plugin tells no connector, and dirty items would be lost."""
            connector = _connector()
            if connector is not None:
                connector.shutdown()
            super().shutdown()

    return NeuronBlockCacheWorker


def _connector() -> LMCacheNeuronECConnector | None:
    connector = get_ec_transfer() if has_ec_transfer() else None
    return connector if isinstance(connector, LMCacheNeuronECConnector) else None


def _refuse_other_connector(vllm_config: "VllmConfig") -> None:
    transfer = vllm_config.ec_transfer_config
    named = transfer.ec_connector if transfer is not None else None
    if named != LMCacheNeuronECConnector.__name__:
        raise ValueError(
            f"--worker-cls and --scheduler-cls name classes of connector.vllm_neuron, which go with ec_connector "
            f"{LMCacheNeuronECConnector.__name__}, and --ec-transfer-config names {named or 'none'}. Name ours there, "
            f"or drop both flags."
        )


def _take_over(encoder_cache: Any) -> None:
    """Check the plugin's cache object, and have it hold no freed blocks back: nobody reads them but the worker hook."""
    missing = missing_from(encoder_cache)
    if missing:
        raise RuntimeError(
            f"vllm-neuron {_plugin_version()} keeps its encoder outputs in a {type(encoder_cache).__name__} without "
            f"{', '.join(missing)}: {WORKER_CLASS} does not know how to spill and restore there. Drop --worker-cls, or "
            f"use a revision of vllm-neuron for vLLM 0.24 with an on-device encoder cache."
        )
    if encoder_cache.min_hold_time_ms:
        logger.info(
            "Encoder cache: blocks are reused at once, not after %s ms: no other engine reads this device's memory",
            encoder_cache.min_hold_time_ms,
        )
        encoder_cache.min_hold_time_ms = 0.0


def _plugin_worker() -> Any:
    """The plugin's worker class. Raises ImportError that says what to install or to change."""
    if importlib.util.find_spec("vllm_neuron") is None:
        raise ImportError(
            f"--worker-cls connector.vllm_neuron.{WORKER_CLASS} takes the vllm-neuron plugin, and vllm_neuron is not "
            f"installed here. Install it from AWS (docs/neuron.md says how); on a CPU or GPU use --worker-cls "
            f"connector.workers.BlockCacheWorker instead."
        )
    for path in PLUGIN_WORKERS:
        module, name = path.rsplit(".", 1)
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("vllm_neuron"):
                raise
    raise ImportError(
        f"vllm-neuron {_plugin_version()} has no worker class at {' or '.join(PLUGIN_WORKERS)}: this revision is not "
        f"one that {WORKER_CLASS} knows. Use one for vLLM 0.24, or drop --worker-cls: docs/neuron.md says what is lost."
    )


def _plugin_version() -> str:
    for distribution in ("vllm-neuron", "vllm_neuron"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


# -- Scheduler ---------------------------------------------------------------------------------------------------------


class NeuronEncoderCacheManager(BlockAwareEncoderCacheManager):
    """Counts as the plugin's encoder fills blocks: an image densely, a video by whole frames.

    An item that no empty cache holds is not admitted: that encoder writes into blocks, and has no other place. Nor is
    one of another size under the id of one that is there, which vLLM 0.24 would serve with the other's rows.
    """

    def __init__(self, geometry: BlockGeometry) -> None:
        """For a device with blocks of `geometry`."""
        super().__init__(geometry)
        self.mismatched: set[str] = set()
        """Requests with such an item, until the scheduler has failed them."""

    def blocks_needed(self, request: "Request", input_id: int) -> int:
        """Blocks that the encoder takes for the item; a restored one, which is dense, takes no more."""
        feature = request.mm_features[input_id]
        num_tokens = request.get_num_encoder_embeds(input_id)
        if feature.modality != "video":
            return self.geometry.blocks_for(num_tokens)
        block_size = self.geometry.block_size
        frames = _frames_of(feature.data)
        if frames is None or num_tokens % frames:
            # A block of whole frames, each no larger than the block, is more than half full.
            dense, most = self.geometry.blocks_for(num_tokens), -(-2 * num_tokens // block_size)
            return max(dense, min(most, self.geometry.capacity_blocks))
        frames_per_block = block_size // max(1, num_tokens // frames)
        if not frames_per_block:
            return self.geometry.capacity_blocks + 1  # the encoder splits no frame: it would end the engine
        return -(-frames // frames_per_block)

    def can_allocate(
        self, request: "Request", input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Whether the item fits, as for any device; never for a request that is about to be failed."""
        if request.request_id in self.mismatched:
            return False
        return super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)

    def _refer_to(self, request: "Request", input_id: int) -> bool:
        cached = self.num_embeds_by_hash.get(request.mm_features[input_id].identifier)
        if cached is not None and cached != request.get_num_encoder_embeds(input_id):
            self.mismatched.add(request.request_id)
            return False
        return super()._refer_to(request, input_id)

    def _admits_oversize(self) -> bool:
        return False


class _BlockCounting:
    """Scheduler mixin: puts the manager in that counts blocks, and fails requests that could only wait for ever."""

    manager_class: type[ReportingEncoderCacheManager] = NeuronEncoderCacheManager
    encoder_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. Raises ValueError beside another connector than ours, SettingsError for blocks that cannot do."""
        super().__init__(*args, **kwargs)
        self._unservable: set[str] = set()
        _refuse_other_connector(self.vllm_config)  # type: ignore[attr-defined]
        connector = self.ec_connector  # type: ignore[attr-defined]
        size = self.encoder_cache_manager.cache_size
        if size:
            manager = self.manager_class.create_manager(cache_size=size, vllm_config=self.vllm_config)  # type: ignore[attr-defined]
            connector.use_manager(manager)
            self.encoder_cache_manager = manager

    def add_request(self, request: "Request") -> None:
        """Queue a request. One that no empty device could serve is failed in the next step, with a log line."""
        manager = self.encoder_cache_manager
        why = _unservable(request, manager) if isinstance(manager, NeuronEncoderCacheManager) else None
        if why is not None:
            self._unservable.add(request.request_id)
            logger.warning("Request %s is failed: %s", request.request_id, why)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One pass. Where vLLM asks for waiting requests only, running ones are asked for here, and deferred alike."""
        manager = self.encoder_cache_manager
        if not announces_running_requests() and isinstance(manager, ReportingEncoderCacheManager):
            manager.deferred = {
                request.request_id
                for request in self.running  # type: ignore[attr-defined]
                if request.mm_features
                and not self.ec_connector.ensure_cache_available(request, request.num_computed_tokens)  # type: ignore[attr-defined]
            }
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Take up a step's results, and end what can never be scheduled."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self._forget_ended_waiters()
        failed, self._unservable = self._unservable, set()
        manager = self.encoder_cache_manager
        if isinstance(manager, NeuronEncoderCacheManager):
            failed |= manager.mismatched
            manager.mismatched = set()
        if not fails_unavailable_requests():
            failed |= self.ec_connector.take_unavailable_requests()  # type: ignore[attr-defined]
        known = [self.requests[each] for each in failed if each in self.requests]  # type: ignore[attr-defined]
        requests = [request for request in known if not request.is_finished()]
        if requests:
            ids = {request.request_id for request in requests}
            self.finish_requests(ids, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
        for request in requests:
            ended = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        return outputs

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        """A request has ended. 0.24 tells no connector of that; to be told twice does no harm."""
        self.ec_connector.request_finished(request)  # type: ignore[attr-defined]
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _forget_ended_waiters(self) -> None:
        """A preempted request can end by a step in flight while it waits for bytes: 0.24 would run it again."""
        waiting: Any = getattr(self, "skipped_waiting", ())
        ended = [request for request in waiting if request.is_finished()]
        if ended:
            waiting.remove_requests(ended)


class NeuronScheduler(_BlockCounting, Scheduler):  # type: ignore[misc, unused-ignore]
    """vLLM's scheduler over blocks, for `--scheduler-cls` with `--no-async-scheduling`."""


class NeuronAsyncScheduler(_BlockCounting, AsyncScheduler):  # type: ignore[misc, unused-ignore]
    """vLLM's asynchronous scheduler over blocks, for `--scheduler-cls`."""


def _unservable(request: "Request", manager: NeuronEncoderCacheManager) -> str | None:
    """Why no empty device could serve the request, and what to change; None where one could."""
    sizes: dict[str, int] = {}
    geometry = manager.geometry
    for index, feature in enumerate(request.mm_features):
        num_tokens, needed = request.get_num_encoder_embeds(index), manager.blocks_needed(request, index)
        if sizes.setdefault(feature.identifier, num_tokens) != num_tokens:
            return f"two of its items are called {feature.identifier}, and are of different sizes"
        if manager.is_oversize(needed) and geometry.blocks_for(num_tokens) <= geometry.capacity_blocks:
            return (
                f"a video of {num_tokens} tokens does not fit the device by whole frames: {geometry.capacity_blocks} "
                f"blocks of {geometry.block_size}, and no frame in two. Larger vision_attention_block_size or "
                f"encoder_cache_num_blocks in --additional-config would do."
            )
        if manager.is_oversize(needed):
            return (
                f"one of its items takes {needed} blocks of {geometry.block_size} tokens, and the device has "
                f"{geometry.capacity_blocks}. Set encoder_cache_num_blocks in --additional-config to {needed + 1} or "
                f"more."
            )
    return None


def _frames_of(data: Any) -> int | None:
    """Frames of a video, from its processed grid `[t, h, w]`; None where this process does not see it."""
    grid = data.get("video_grid_thw") if isinstance(data, Mapping) else None
    values = getattr(grid, "data", None)
    if not isinstance(values, torch.Tensor) or values.numel() < 3:
        return None
    return int(values.reshape(-1)[0]) or None
