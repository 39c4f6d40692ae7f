# SPDX-License-Identifier: Apache-2.0
"""Whether this engine can be served, and which of its flags do not go together: said at start, with the remedy.

Reads vLLM's configuration and the settings. Nothing is built here, and no message repeats.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from connector.settings import Settings
from connector.vllm_versions import hosts_of_engine, manager_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "counts_plugin_blocks",
    "has_encoder",
    "has_plugin_hook",
    "refuse_unsupported",
    "runs_on_plugin",
    "warn_of_flags",
]

logger = init_logger(f"vllm.{__name__}")

PLUGIN_MODULE = "vllm_neuron"
PLUGIN_WORKER = "connector.vllm_neuron.NeuronBlockCacheWorker"
PLUGIN_SCHEDULERS = "connector.vllm_neuron.NeuronAsyncScheduler (NeuronScheduler with --no-async-scheduling)"


def runs_on_plugin(vllm_config: "VllmConfig") -> bool:
    """Whether vllm-neuron runs this engine: its own worker class, or one of ours for it."""
    scheduler, worker = vllm_config.scheduler_config.scheduler_cls, vllm_config.parallel_config.worker_cls
    return any(PLUGIN_MODULE in _name_of(each) for each in (scheduler, worker))


def counts_plugin_blocks(vllm_config: "VllmConfig") -> bool:
    """Whether the scheduler class is one of ours for vllm-neuron."""
    return "connector.vllm_neuron." in _name_of(vllm_config.scheduler_config.scheduler_cls)


def has_plugin_hook(vllm_config: "VllmConfig") -> bool:
    """Whether the worker class is ours for vllm-neuron."""
    return PLUGIN_WORKER in _name_of(vllm_config.parallel_config.worker_cls)


def has_encoder(vllm_config: "VllmConfig") -> bool:
    """Whether this engine can encode what nobody has stored: vllm-neuron's half of a pair may be the language model."""
    return not (vllm_config.additional_config or {}).get("mm_language_model_only", False)


def refuse_unsupported(vllm_config: "VllmConfig", settings: Settings) -> None:
    """Raises ValueError for an engine that cannot be served, naming what to change."""
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.is_encoder_decoder:
        raise ValueError(
            f"{vllm_config.model_config.model} is an encoder-decoder model: vLLM keeps no encoder cache for those, so "
            f"there is nothing to restore. Remove --ec-transfer-config."
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ValueError(
            f"distributed_executor_backend external_launcher with {parallel.world_size} ranks runs one scheduler per "
            f"rank, and each would own the cache. Use mp or ray, or one rank."
        )
    hosts = hosts_of_engine(vllm_config)
    if hosts > 1:
        raise ValueError(
            f"one engine spans {hosts} hosts, but its ranks share the encoder cache through one host's memory. Run one "
            f"data-parallel replica per host; replicas share items through local_disk on a shared file system."
        )
    if runs_on_plugin(vllm_config):
        _refuse_on_plugin(vllm_config, settings)


def _refuse_on_plugin(vllm_config: "VllmConfig", settings: Settings) -> None:
    role = vllm_config.ec_transfer_config.ec_role
    if role == "ec_both":
        return
    if vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"enable_prefix_caching is on in an engine with ec_role {role}: what the prefix cache holds is not "
            f"encoded, so one engine of a pair would wait for items that the other never made. Add "
            f"--no-enable-prefix-caching."
        )
    if settings.storage.disk_directory is None:
        raise ValueError(
            f"ec_role {role} is one half of a pair, and no tier is set that two engines can share. For one engine set "
            f"ec_role to ec_both; for a pair set local_disk and max_local_disk_size, with the same directory in both."
        )
    if role == "ec_producer" and not has_plugin_hook(vllm_config):
        raise ValueError(
            f"ec_role ec_producer takes --worker-cls {PLUGIN_WORKER}: by itself vllm-neuron gives a producer's items "
            f"to no connector, and nothing would be stored. For one engine set ec_role to ec_both."
        )


def warn_of_flags(vllm_config: "VllmConfig", settings: Settings) -> None:
    """Log which flags do not go together, and what is lost. Everything works all the same."""
    if runs_on_plugin(vllm_config):
        _warn_on_plugin(vllm_config, settings)
        return
    manager = manager_config(vllm_config)
    counts_blocks = str(getattr(manager, "encoder_cache_manager_cls", None)).endswith("BlockAwareEncoderCacheManager")
    has_blocks = str(vllm_config.parallel_config.worker_cls).endswith("BlockCacheWorker")
    if has_blocks and not counts_blocks:
        logger.warning(
            "Encoder cache: the worker keeps items in device blocks, and the scheduler counts embeddings: it admits "
            "more than the blocks hold, and what finds no block takes memory beside them. Add --ec-manager-config "
            """'{"encoder_cache_manager_cls": "connector.BlockAwareEncoderCacheManager"}'."""
        )
    elif counts_blocks and not has_blocks:
        logger.warning(
            "Encoder cache: the scheduler counts blocks of %d tokens, and the worker keeps plain tensors: the cache "
            "holds fewer items than it could. Add --worker-cls connector.workers.BlockCacheWorker, or drop "
            "--ec-manager-config.",
            settings.behaviour.device_block_size,
        )
    _warn_of_spill_policy(settings, has_blocks, "connector.workers.BlockCacheWorker")


def _warn_on_plugin(vllm_config: "VllmConfig", settings: Settings) -> None:
    has_hook = has_plugin_hook(vllm_config)
    if not counts_plugin_blocks(vllm_config):
        logger.warning(
            "Encoder cache: the scheduler counts tokens and the device blocks: it may admit more than there are blocks "
            "for, and vllm-neuron ends the engine then. Add --scheduler-cls %s.",
            PLUGIN_SCHEDULERS,
        )
    if not has_hook:
        logger.warning(
            "Encoder cache: without --worker-cls %s each new item is copied within the step that encodes it, and the "
            "step waits for that copy.",
            PLUGIN_WORKER,
        )
    if vllm_config.ec_transfer_config.ec_role == "ec_producer":
        logger.warning(
            "Encoder cache: with ec_role ec_producer vllm-neuron encodes and samples nothing: requests are answered by "
            "another engine, with ec_role ec_consumer. If this is the only engine, set ec_role to ec_both."
        )
    _warn_of_spill_policy(settings, has_hook, PLUGIN_WORKER)


def _warn_of_spill_policy(settings: Settings, has_hook: bool, worker_class: str) -> None:
    if settings.behaviour.spill_policy == "on_evict" and not has_hook:
        logger.warning(
            "Encoder cache: spill_policy on_evict takes device blocks (--worker-cls %s); without them new items are "
            "saved at once, as with write_behind.",
            worker_class,
        )


def _name_of(named: object) -> str:
    """The path of a class that was named or given."""
    return f"{named.__module__}.{named.__qualname__}" if isinstance(named, type) else str(named)
