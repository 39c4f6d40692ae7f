# SPDX-License-Identifier: Apache-2.0
"""The `ECConnectorBase` that vLLM loads: routes each hook to the half for its role, and guards its edge.

Nothing else may enter. A hook that vLLM's version does not call is not missed, and arguments it adds are ignored.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from connector.step_plan import StepPlan
from storage_tiers.faults import FaultLog

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from connector.cache_manager import ReportingEncoderCacheManager
    from connector.plugin_blocks import PluginBlocks
    from connector.prom_metrics import EncoderCachePromMetrics, EncoderCacheStats
    from connector.scheduler_side import SchedulerSide
    from connector.worker_side import EncoderCache, WorkerSide
    from storage_tiers.block_mapping import ItemBlocks
    from storage_tiers.device_copy import BlockCopies

__all__ = ["LMCacheNeuronECConnector"]

T = TypeVar("T")

WORKER_CLOSE_SECONDS = 2.0
"""Longest wait at a clean stop for copies that are queued: vLLM follows SIGTERM by SIGKILL within seconds."""


class LMCacheNeuronECConnector(ECConnectorBase):
    """Encoder outputs on LMCache's storage tiers, restored before prefill instead of being encoded again."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        """Called by vLLM, once per role and process. Raises SettingsError or ValueError for what cannot work."""
        super().__init__(vllm_config=vllm_config, role=role)
        from connector import assembly

        self._faults = FaultLog()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._plugin_copies: BlockCopies | None = None
        self._plugin_blocks: PluginBlocks | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = assembly.build_scheduler_side(vllm_config)
        else:
            self._worker = assembly.build_worker_side(vllm_config)

    # -- Scheduler --------------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int, *_: Any, **__: Any) -> bool:
        """Whether the request can be scheduled: False while it waits for bytes from a lower tier."""
        return self._guarded("ensure", True, self._of_scheduler().ensure_available, request, num_computed_tokens)

    def has_cache_item(self, identifier: str, *_: Any, **__: Any) -> bool:
        """Whether the item will be loaded instead of being encoded in this step."""
        return self._guarded("has_item", False, self._of_scheduler().has_item, identifier)

    def update_state_after_alloc(self, request: "Request", index: int, *_: Any, **__: Any) -> None:
        """The item has got its place on the device: it will be loaded, or encoded and saved."""
        self._guarded("allocated", None, self._of_scheduler().allocated, request, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """The plan for the workers. Not guarded: loads that were promised must not be lost in silence."""
        return self._of_scheduler().build_plan(scheduler_output)

    def use_manager(self, manager: "ReportingEncoderCacheManager") -> None:
        """For a scheduler class that has put in a manager of its own: from now on ask it, and hear of its resets."""
        manager.report_to(self._of_scheduler().residency)

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Release what the request holds in the pool."""
        self._guarded("finished", None, self._of_scheduler().finished, request.request_id)
        return False, None

    def take_unavailable_requests(self) -> set[str]:
        """Requests that need an item which nobody has and nobody can encode."""
        return self._guarded("unavailable", set(), self._of_scheduler().take_unavailable)

    def get_ec_connector_stats(self) -> "EncoderCacheStats | None":
        """What there is to report of this step, by way of vLLM's own statistics; None from a worker, or if nothing."""
        if self._scheduler is None:
            return None
        snapshot = self._guarded("stats", None, self._scheduler.take_snapshot)
        if snapshot is None:
            return None
        from connector.prom_metrics import EncoderCacheStats

        return EncoderCacheStats(data=snapshot)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> "EncoderCacheStats":
        """Statistics as they come out of the engine core's message."""
        from connector.prom_metrics import EncoderCacheStats

        return EncoderCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "EncoderCachePromMetrics":
        """The metrics that the API server shows on `/metrics`."""
        from connector.prom_metrics import EncoderCachePromMetrics

        return EncoderCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- Worker -----------------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepPlan):
            self._guarded("bind", None, self._of_worker().bind, connector_metadata)

    def before_reset(self) -> None:
        """For a worker hook, ahead of the runner's reset: items that wait to be saved are saved."""
        self._guarded("before_reset", None, self._of_worker().before_reset)

    def before_step(self, plan: ECConnectorMetadata, freed: Collection[str], blocks: "ItemBlocks") -> None:
        """For the worker hook, ahead of the runner's step: spill, free and restore in device blocks.

        Not guarded, as `start_load_caches`.
        """
        if isinstance(plan, StepPlan):
            self._of_worker().before_step(plan, freed, blocks)

    def after_step(self, plan: ECConnectorMetadata, blocks: "ItemBlocks") -> None:
        """For the worker hook of vllm-neuron, whose runner announces nothing: take up what the step has encoded."""
        if isinstance(plan, StepPlan):
            self._guarded("after_step", None, self._of_worker().after_step, plan, blocks)

    def start_load_caches(self, encoder_cache: "EncoderCache", *_: Any, **__: Any) -> None:
        """Copy the plan's items into the runner's cache. Not guarded: without them the step would be wrong.

        vllm-neuron's runner calls this once per step, behind the encoder, with the cache object that is its own: there
        the plan's saves are made here, too.
        """
        if hasattr(encoder_cache, "allocate"):
            self._of_worker().write_through(self.plugin_blocks(encoder_cache))
        else:
            self._of_worker().load(encoder_cache)

    def save_caches(self, encoder_cache: "EncoderCache", mm_hash: str, *_: Any, **__: Any) -> None:
        """An item has been encoded: queue its copy into the pool."""
        self._guarded("save", None, self._of_worker().save, encoder_cache, mm_hash)

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        self._guarded("finish_step", None, self._of_worker().finish_step)
        super().clear_connector_metadata()

    # -- Worker, under vllm-neuron ----------------------------------------------------------------------------------

    def register_and_serve(self, buffer: "torch.Tensor", *_: Any, **__: Any) -> None:
        """Once at start: the device's buffer, `[num_blocks, block_size, fat_dim]`. Chooses how to write into it.

        A device that takes no eager writes compiles a graph here, which takes seconds to minutes. Raises SettingsError
        for a buffer that the scheduler counts wrongly.
        """
        from connector import assembly

        self._plugin_copies = assembly.build_plugin_copies(self._vllm_config, buffer)

    def wait_for_load(self) -> set[str]:
        """Hashes that could not be loaded: none, ever, since a load is only planned for bytes that are in memory."""
        return set()

    def plugin_blocks(self, encoder_cache: Any) -> "PluginBlocks":
        """The plugin's cache object as plans are carried out on it; the same for every step."""
        from connector import assembly
        from connector.plugin_blocks import PluginBlocks

        if self._plugin_blocks is None:
            copies = self._plugin_copies or assembly.build_plugin_copies(self._vllm_config, encoder_cache.buffer)
            self._plugin_blocks = PluginBlocks(encoder_cache, copies, self._faults)
        return self._plugin_blocks

    # -- Both -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """A clean stop. Nothing relies on it: vLLM may be killed first."""
        if self._scheduler is not None:
            self._guarded("close", None, self._scheduler.close)
        if self._worker is not None:
            self._guarded("close", None, self._worker.close, WORKER_CLOSE_SECONDS)

    def _of_scheduler(self) -> "SchedulerSide":
        if self._scheduler is None:
            raise RuntimeError("a scheduler's hook was called on a worker's connector")
        return self._scheduler

    def _of_worker(self) -> "WorkerSide":
        if self._worker is None:
            raise RuntimeError("a worker's hook was called on the scheduler's connector")
        return self._worker

    def _guarded(self, hook: str, otherwise: T, call: Callable[..., T], *args: Any) -> T:
        """The one place where an unforeseen error of ours becomes a miss: counted, logged, and the engine goes on."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - the edge of a hook
            self._faults.report("connector", f"{hook}_failed", f"{type(error).__name__}: {error}")
            return otherwise
