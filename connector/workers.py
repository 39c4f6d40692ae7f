# SPDX-License-Identifier: Apache-2.0
"""The worker class for `--worker-cls`: puts the block cache under vLLM's runner and runs the plan ahead of its step.

Only the seams between vLLM's worker and our parts: what is copied, and when, is the worker side's, where it lies the
block cache's. Importing this imports vLLM's worker for the platform in use.
"""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.logger import init_logger
from vllm.platforms import current_platform

from connector import vllm_versions
from connector.block_geometry import BlockGeometry, geometry_of
from connector.ec_connector import LMCacheNeuronECConnector
from connector.settings import BehaviourSettings, load_settings
from connector.step_plan import StepPlan
from storage_tiers.block_mapping import BlockMapping
from storage_tiers.device_blocks import DeviceBlockCache
from storage_tiers.faults import FaultLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

__all__ = ["BlockCacheWorker", "install_block_mapping", "run_plan"]

logger = init_logger(f"vllm.{__name__}")


class BlockCacheWorker(PlatformWorker):  # type: ignore[misc, valid-type, unused-ignore]
    """vLLM's worker with its encoder cache in device blocks, for `--worker-cls connector.workers.BlockCacheWorker`."""

    _blocks: BlockMapping | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then put the block cache in: before vLLM profiles memory, so that it is counted.

        Raises SettingsError for blocks that cannot hold the largest item.
        """
        super().load_model(*args, **kwargs)
        self._blocks = install_block_mapping(self.vllm_config, self.model_runner, self.device)

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """One step: the plan's spills, frees and loads, then the runner's own."""
        if self._blocks is not None:
            connector = get_ec_transfer() if has_ec_transfer() else None
            scheduler_output = run_plan(scheduler_output, connector, self._blocks)
        return super().execute_model(scheduler_output, *args, **kwargs)


def install_block_mapping(vllm_config: "VllmConfig", runner: Any, device: torch.device) -> BlockMapping | None:
    """Replace the runner's encoder cache by a mapping over device blocks; None where there is none to replace.

    Worker's main thread, before the first item. Raises SettingsError.
    """
    config = vllm_config.ec_transfer_config
    size = _encoder_cache_size(vllm_config, runner)
    if config is None or config.ec_connector != LMCacheNeuronECConnector.__name__ or not size:
        logger.warning(
            "Encoder cache: --worker-cls %s does nothing here: it takes --ec-transfer-config with ec_connector %s, and "
            "a model with an encoder",
            BlockCacheWorker.__name__, LMCacheNeuronECConnector.__name__,
        )  # fmt: skip
        return None
    behaviour = load_settings(config.ec_connector_extra_config).behaviour
    geometry = geometry_of(vllm_config, behaviour, size)
    faults = FaultLog(behaviour.log_interval_seconds)
    mapping = BlockMapping(partial(_make_blocks, geometry, behaviour, device), faults)
    holder = runner.encoder_cache
    if hasattr(holder, "encoder_outputs"):  # the V2 runner, whose connector wrapper keeps the inner mapping
        holder.encoder_outputs = mapping
        if hasattr(runner.ec_connector, "encoder_cache"):
            runner.ec_connector.encoder_cache = mapping
    else:
        runner.encoder_cache = mapping
    return mapping


def run_plan(output: "SchedulerOutput", connector: Any, blocks: BlockMapping) -> "SchedulerOutput":
    """Carry out what the step's plan says of device blocks; what the runner is to be given instead of `output`.

    A hash that is both freed and loaded in one step (vLLM 0.24) is no longer among the freed: the runner would drop
    what was just restored. Step thread. Raises RuntimeError when a load is out of reach.
    """
    plan = output.ec_connector_metadata
    freed = output.free_encoder_mm_hashes
    if not isinstance(plan, StepPlan) or not isinstance(connector, LMCacheNeuronECConnector):
        return output
    connector.before_step(plan, freed, blocks)
    loaded = {load.mm_hash for load in plan.loads}
    if loaded.isdisjoint(freed):
        return output
    return dataclasses.replace(output, free_encoder_mm_hashes=[each for each in freed if each not in loaded])


def _encoder_cache_size(vllm_config: "VllmConfig", runner: Any) -> int:
    """The scheduler's budget in embeddings, 0 without an encoder: worked out as vLLM's scheduler does."""
    if getattr(runner, "encoder_cache", None) is None:
        return 0
    budget = getattr(runner, "mm_budget", None)
    if budget is not None:
        return int(budget.encoder_cache_size)
    return vllm_versions.encoder_cache_size(vllm_config) if getattr(runner, "supports_mm_inputs", False) else 0


def _make_blocks(
    geometry: BlockGeometry, behaviour: BehaviourSettings, device: torch.device, width: int, dtype: torch.dtype
) -> DeviceBlockCache:
    cache = DeviceBlockCache(
        geometry.num_blocks,
        geometry.block_size,
        width,
        dtype=dtype,
        device=device,
        min_hold_time_ms=behaviour.device_min_hold_ms,
        copy_strategy=behaviour.device_copy,
    )
    logger.info(
        "Encoder cache: %d blocks of %d tokens x %d columns on %s, %.3f GiB",
        geometry.capacity_blocks, geometry.block_size, width, device, cache.buffer.nbytes / 1024**3,
    )  # fmt: skip
    return cache
