# SPDX-License-Identifier: Apache-2.0
"""An engine under vllm-neuron, by its contract: vLLM's real scheduler, our connector, and the plugin's workers.

What `EngineLoop` does with a runner stand-in of vLLM's own kind, this does with the contract's; with our worker and
scheduler classes, or with `--ec-transfer-config` alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from connector import vllm_neuron, vllm_versions
from connector.block_geometry import geometry_of
from connector.ec_connector import LMCacheNeuronECConnector
from connector.settings import load_settings
from storage_tiers.tier import LowerTier
from tests.neuron.contract_cache import EncoderCacheBlocks, device_compiler
from tests.neuron.contract_plugin import ContractWorker
from tests.neuron.items import kwargs_of
from tests.scheduler import engine_loop
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import WIDTH, Image
from tests.scheduler.runner import Told

MERGE_FACTOR = 4
PLUGIN_WORKER = "vllm_neuron.vllm.worker.neuron_worker.NeuronWorker"
OUR_WORKER = "connector.vllm_neuron.NeuronBlockCacheWorker"


@dataclass(frozen=True)
class NeuronOptions(EngineOptions):
    """What a test may want otherwise of an engine under vllm-neuron."""

    block_tokens: int = 8
    """Tokens of a device block: the plugin's attention block, merged."""
    num_blocks: int | None = None
    """The plugin's option; None: as many as the scheduler's budget takes, and the scratch block."""
    hook: bool = True
    """Whether `--worker-cls` is ours."""
    counts_blocks: bool = True
    """Whether `--scheduler-cls` is ours."""
    min_hold_time_ms: float = 0.0
    refuse_eager_writes: bool = False
    copies_metadata: bool = True
    """False: the `uni` executor, whose worker is given the scheduler's own objects."""
    more_blocks: int = 0
    """Blocks that the plugin makes besides, or fewer: it disagrees with what it was told."""
    language_model_only: bool = False
    """The plugin's option for the half of a pair that has no encoder."""


class PluginRank:
    """One rank's worker, with what `EngineLoop` looks at."""

    def __init__(self, worker: Any, connector: LMCacheNeuronECConnector) -> None:
        self.worker = worker
        self.connector = connector

    @contextmanager
    def _as_its_process(self) -> Iterator[None]:
        """VLLM keeps one connector per process, and here are all ranks in one."""
        with (
            mock.patch.object(vllm_neuron, "get_ec_transfer", lambda: self.connector),
            mock.patch.object(vllm_neuron, "has_ec_transfer", lambda: True),
        ):
            yield

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        with self._as_its_process():
            # Each rank gets an output of its own, as from a queue between processes.
            return self.worker.execute_model(replace(output))

    def shutdown(self) -> None:
        with self._as_its_process():
            self.worker.shutdown()

    def reset_encoder_cache(self) -> None:
        with self._as_its_process():
            self.worker.reset_encoder_cache()

    @property
    def cache(self) -> EncoderCacheBlocks:
        return self.worker.model_runner.encoder_cache

    @property
    def encoder_cache(self) -> list[str]:
        """The hashes that the device holds."""
        return [mm_hash for mm_hash, _ in self.cache.items()]

    @property
    def encoded(self) -> Counter[str]:
        return self.worker.model_runner.encoded

    @property
    def unfilled(self) -> list[tuple[str, str]]:
        return self.worker.model_runner.unfilled


VLLM_CONFIG = engine_loop.vllm_config


class NeuronLoop(EngineLoop):
    """One engine under vllm-neuron. A clean end asserts that nothing has leaked, and that no item was missed."""

    options: NeuronOptions
    runners: list[PluginRank]  # type: ignore[assignment]

    def __init__(
        self, options: NeuronOptions = NeuronOptions(), tiers: Sequence[LowerTier] | None = (), **more: Any
    ) -> None:
        with mock.patch.object(engine_loop, "vllm_config", neuron_config):
            super().__init__(options, tiers, **more)

    def add(self, request_id: str, parts: Sequence[int | Image], **options: Any) -> Any:
        return super().add(request_id, parts, **{"kwargs_of": kwargs_of, **options})

    def start_workers(self, count: int | None = None) -> None:
        """Start the ranks, each with the plugin's worker or with ours on top of it."""
        with mock.patch.object(engine_loop, "RunnerStandIn", self._start_rank):
            super().start_workers(count)

    def assert_nothing_missed(self) -> None:
        """No placeholder was left unfilled, and no allocation slept."""
        for rank in self.runners:
            assert rank.unfilled == [], "an item was silently skipped"
            assert not rank.cache.slept_seconds, "the step thread slept"

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self.assert_nothing_missed()

    def _scheduler_class(self) -> type[Scheduler]:
        if not self.options.counts_blocks:
            return AsyncScheduler if self.options.async_scheduling else Scheduler
        return vllm_neuron.NeuronAsyncScheduler if self.options.async_scheduling else vllm_neuron.NeuronScheduler

    def _start_rank(self, connector: Any, told: Told, blocks: None) -> PluginRank:
        options, config = self.options, self.vllm_config
        geometry = geometry_of(
            config, load_settings(config.ec_transfer_config.ec_connector_extra_config).behaviour, options.device_rows
        )
        worker_class = vllm_neuron.worker_class(ContractWorker) if options.hook else ContractWorker
        worker = worker_class(
            config,
            connector,
            told,
            len(self.runners),
            {
                "num_blocks": geometry.num_blocks + options.more_blocks,
                "block_size": options.block_tokens,
                "fat_dim": WIDTH,
                "min_hold_time_ms": options.min_hold_time_ms,
                "refuse_eager_writes": options.refuse_eager_writes,
            },
            copies_metadata=options.copies_metadata,
        )
        with (
            mock.patch.object(vllm_versions, "encoder_cache_size", lambda _: options.device_rows),
            mock.patch.dict("storage_tiers.device_copy.copies_for.__kwdefaults__", {"backend": device_compiler}),
        ):
            worker.load_model()
        return PluginRank(worker, connector)


def neuron_config(options: NeuronOptions) -> Any:
    """`vllm_config` with the plugin's options, and the classes that our flags name."""
    config = VLLM_CONFIG(replace(options, ranks=1))
    # Behind vLLM's checks: the model here, which nobody runs, has fewer attention heads than trn2 has ranks.
    config.parallel_config.tensor_parallel_size = options.ranks
    config.additional_config = {
        "vision_neuron_config": {
            "vision_attention_block_size": options.block_tokens * MERGE_FACTOR,
            **({} if options.num_blocks is None else {"encoder_cache_num_blocks": options.num_blocks}),
        },
        **({"mm_language_model_only": True} if options.language_model_only else {}),
    }
    config.parallel_config.worker_cls = OUR_WORKER if options.hook else PLUGIN_WORKER
    if options.counts_blocks:
        kind = "NeuronAsyncScheduler" if options.async_scheduling else "NeuronScheduler"
        config.scheduler_config.scheduler_cls = f"connector.vllm_neuron.{kind}"
    return config
