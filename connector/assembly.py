# SPDX-License-Identifier: Apache-2.0
"""Builds the two halves from vLLM's configuration: the only room that knows which part goes where.

Refuses at start what cannot work, with the remedy. No hook and no policy may enter.
"""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.logger import init_logger

from connector import vllm_versions
from connector.admission import Admission
from connector.block_geometry import geometry_of
from connector.cache_manager import DeviceResidency, install_reporting_manager
from connector.capacity import check_capacity
from connector.engine_checks import (
    counts_plugin_blocks,
    has_encoder,
    has_plugin_hook,
    refuse_unsupported,
    runs_on_plugin,
    warn_of_flags,
)
from connector.lmcache_config import SettingsError
from connector.model_identity import ModelIdentity, model_facts
from connector.scheduler_side import SchedulerParts, SchedulerSide
from connector.settings import Settings, describe, load_settings
from connector.transfer_ledger import TransferLedger
from connector.worker_side import WorkerOptions, WorkerSide
from storage_tiers.device_copy import BlockCopies, copies_for
from storage_tiers.disk_tier import DiskTier
from storage_tiers.faults import FaultLog
from storage_tiers.hierarchy import HierarchyOptions, TierHierarchy
from storage_tiers.key import KeySpace
from storage_tiers.shared_pool import SharedPool
from storage_tiers.shared_segment import SharedSegment, remove_leftovers, segment_name
from storage_tiers.tier import LowerTier
from storage_tiers.transfer_board import RankGauge, TransferBoard

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["build_plugin_copies", "build_scheduler_side", "build_worker_side"]

logger = init_logger(f"vllm.{__name__}")

TYPICAL_TOKENS = 1024
"""A 1024 x 1024 image in Qwen3-VL: a token for each 32 x 32 pixels."""


def build_scheduler_side(vllm_config: "VllmConfig") -> SchedulerSide:
    """The scheduler's half with every tier, in the process that owns them.

    Raises SettingsError for a wrong setting or a size that does not fit, ValueError for an engine it cannot serve.
    """
    settings = _settings_of(vllm_config)
    refuse_unsupported(vllm_config, settings)
    remove_leftovers()
    check_capacity(settings.storage)
    faults = FaultLog(settings.behaviour.log_interval_seconds)
    keys = KeySpace(vllm_config.model_config.model, vllm_config.model_config.dtype, settings.behaviour.namespace)
    identity = _make_identity(vllm_config, settings)
    segment, board = _make_segment(vllm_config, settings)
    hierarchy = _make_hierarchy(settings, segment, board, keys, faults)
    _log_start(settings, identity, segment, keys)
    warn_of_flags(vllm_config, settings)

    def on_reset() -> None:
        # Called by the manager, which is built after `side`.
        if settings.behaviour.reset_invalidates:
            identity.begin_epoch()
        side.was_reset()
        if settings.behaviour.reset_invalidates:
            hierarchy.forget_all()

    residency = _make_residency(vllm_config, on_reset)
    is_ready = _latched(board.attached)
    config = vllm_config.ec_transfer_config
    admission = Admission(
        hierarchy,
        identity,
        residency.__contains__,
        is_ready,
        config.is_ec_consumer,
        settings.behaviour.staging_deadline_seconds,
        has_encoder(vllm_config),
        # A version that asks for running requests also forgets preempted ones that end; our scheduler class does both.
        defers_preempted=vllm_versions.announces_running_requests() or counts_plugin_blocks(vllm_config),
    )
    side = SchedulerSide(
        SchedulerParts(
            hierarchy=hierarchy,
            ledger=TransferLedger(board, hierarchy),
            admission=admission,
            residency=residency,
            board=board,
            segment_name=segment.name,
            model=keys.key_model_name,
            dtype=keys.dtype,
            is_producer=config.is_ec_producer,
            is_consumer=config.is_ec_consumer,
            is_ready=is_ready,
            runs_plans_of_prefills_only=runs_on_plugin(vllm_config) and not has_plugin_hook(vllm_config),
            log_interval_seconds=settings.behaviour.log_interval_seconds,
            closers=(identity.close, _populate_in_background(settings, segment, faults)),
        )
    )
    return side


def build_worker_side(vllm_config: "VllmConfig") -> WorkerSide:
    """One rank's half, in the worker's process. Built long before the scheduler's: it looks for the pool by itself."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
    from vllm.platforms import current_platform

    settings = _settings_of(vllm_config)
    tp_group = get_tp_group()
    rank = get_pcp_group().rank_in_group * tp_group.world_size + tp_group.rank_in_group
    return WorkerSide(
        WorkerOptions(
            engine_id=str(vllm_config.ec_transfer_config.engine_id),
            dp_rank=vllm_versions.data_parallel_index(vllm_config),
            owner_pids=[os.getpid(), *(parent.pid for parent in psutil.Process().parents())],
            rank=rank,
            device=_device_of(current_platform),
            save_queue_bytes=settings.behaviour.save_queue_bytes,
            populate_pool=settings.behaviour.populate_pool,
            save_bytes_per_step=settings.behaviour.save_bytes_per_step,
            max_dirty_seconds=settings.behaviour.max_dirty_seconds,
            spill_on_evict=settings.behaviour.spill_policy == "on_evict",
            takes_part=get_pp_group().is_first_rank,
        )
    )


def build_plugin_copies(vllm_config: "VllmConfig", buffer: torch.Tensor) -> BlockCopies:
    """How to write into vllm-neuron's device buffer `[num_blocks, block_size, fat_dim]`, in the worker's process.

    Raises SettingsError for a buffer that is not what the scheduler counts, or that holds other rows than are stored.
    """
    num_blocks, block_size, fat_dim = buffer.shape
    widths = set(vllm_versions.encoder_output_widths(vllm_config).values())
    if widths and fat_dim not in widths:
        raise SettingsError(
            f"vllm-neuron's device cache has rows of {fat_dim} columns, and this model's embeddings have "
            f"{' or '.join(map(str, sorted(widths)))}: what is stored could not be restored. Drop --ec-transfer-config"
        )
    if buffer.dtype != vllm_config.model_config.dtype:
        raise SettingsError(
            f"vllm-neuron's device cache holds {buffer.dtype}, and the model's dtype is "
            f"{vllm_config.model_config.dtype}: what is stored could not be restored. Set --dtype to "
            f"{str(buffer.dtype).removeprefix('torch.')}"
        )
    behaviour = _settings_of(vllm_config).behaviour
    if counts_plugin_blocks(vllm_config):
        geometry = geometry_of(vllm_config, behaviour, vllm_versions.encoder_cache_size(vllm_config))
        if block_size != geometry.block_size or num_blocks < geometry.num_blocks:
            raise SettingsError(
                f"vllm-neuron's device cache has {num_blocks} blocks of {block_size} tokens, and the scheduler counts "
                f"{geometry.num_blocks} of {geometry.block_size}, by vision_attention_block_size and "
                f"encoder_cache_num_blocks in additional_config: say there what the plugin makes. Where neither stands "
                f"there, set device_block_size to {block_size} and device_num_blocks to {num_blocks} in "
                f"ec_connector_extra_config"
            )
    return copies_for(buffer, behaviour.device_copy)


def _settings_of(vllm_config: "VllmConfig") -> Settings:
    return load_settings(vllm_config.ec_transfer_config.ec_connector_extra_config)


def _latched(check: Callable[[], bool]) -> Callable[[], bool]:
    """`check` until it says yes, and yes from then on: workers that have attached stay attached."""
    passed = False

    def latched() -> bool:
        nonlocal passed
        passed = passed or check()
        return passed

    return latched


def _make_identity(vllm_config: "VllmConfig", settings: Settings) -> ModelIdentity:
    facts = model_facts(vllm_config, settings.behaviour.weight_fingerprint == "sample")
    return ModelIdentity(facts, vllm_versions.encoder_output_widths(vllm_config))


def _make_residency(vllm_config: "VllmConfig", on_reset: Callable[[], None]) -> DeviceResidency:
    residency = DeviceResidency(on_reset)
    if not install_reporting_manager(vllm_config, residency) and not counts_plugin_blocks(vllm_config):
        logger.warning(
            "Encoder cache: this scheduler's encoder cache manager cannot report resets. After weights were updated in "
            "place, restart the engine or set another namespace: stored items would be served as they are."
        )
    return residency


def _make_segment(vllm_config: "VllmConfig", settings: Settings) -> tuple[SharedSegment, TransferBoard]:
    ranks, slots = vllm_versions.participants(vllm_config), settings.behaviour.transfer_slots
    replica = vllm_versions.data_parallel_index(vllm_config)
    name = segment_name(str(vllm_config.ec_transfer_config.engine_id), replica, os.getpid())
    segment = SharedSegment.create(name, settings.storage.pool_bytes, TransferBoard.nbytes_for(ranks, slots))
    return segment, TransferBoard(segment.board_memory, ranks, slots)


def _make_hierarchy(
    settings: Settings, segment: SharedSegment, board: TransferBoard, keys: KeySpace, faults: FaultLog
) -> TierHierarchy:
    storage, behaviour = settings.storage, settings.behaviour
    lower: list[LowerTier] = []
    if storage.disk_directory is not None:
        lower.append(
            DiskTier(
                storage.disk_directory,
                storage.disk_bytes,
                keys,
                faults,
                direct_io=storage.direct_io,
                accept_unverified=behaviour.accept_unverified_files,
            )
        )
    options = HierarchyOptions(
        max_lease_bytes=int(storage.pool_bytes * behaviour.max_lease_fraction),
        persist_client_ids=behaviour.persist_client_ids,
        skip_slow_restores=behaviour.skip_slow_restores,
        io_threads=behaviour.io_threads,
        io_queue_items=behaviour.io_queue_items,
        staging_overdue_seconds=2 * behaviour.staging_deadline_seconds,
    )
    return TierHierarchy(
        SharedPool(storage.lmcache_config, segment),
        lower,
        keys,
        options,
        faults,
        encode_seconds_per_token=lambda: board.gauge(0, RankGauge.ENCODE_SECONDS_PER_TOKEN),
    )


def _populate_in_background(settings: Settings, segment: SharedSegment, faults: FaultLog) -> Any:
    """Fault the pool in on a thread of its own; returns what stops and joins it."""
    stop = threading.Event()

    def populate() -> None:
        try:
            segment.populate(stop)
        except OSError as error:
            faults.report("pool", "populate_failed", error)

    thread = threading.Thread(target=populate, name="ec-populate", daemon=True)
    if settings.behaviour.populate_pool:
        thread.start()

    def close() -> None:
        stop.set()
        if thread.is_alive():
            thread.join(1.0)

    return close


def _device_of(platform: Any) -> torch.device:
    """The device that this worker's runner computes on."""
    kind = platform.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _log_start(settings: Settings, identity: ModelIdentity, segment: SharedSegment, keys: KeySpace) -> None:
    """One table of all settings, where each came from, and what the sizes mean for this model's items."""
    rows = [("setting", "value", "from"), *describe(settings), *_holdings(settings, identity, keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)
    logger.info("Encoder cache: pool %s, fingerprint %s\n%s", segment.name, identity.fingerprint[:16], table)


def _holdings(settings: Settings, identity: ModelIdentity, keys: KeySpace) -> list[tuple[str, str, str]]:
    """Rows that say how many images of a typical size each tier holds, where the width of a row is known."""
    width = identity.width_of("image")
    if width is None:
        return []
    token_bytes = width * keys.dtype.itemsize
    origin = f"{token_bytes} bytes per token: {width} columns, {keys.dtype}"
    rows = []
    for name, size in (("pool holds", settings.storage.pool_bytes), ("disk holds", settings.storage.disk_bytes)):
        tokens = size // token_bytes
        if tokens:
            rows.append((name, f"{tokens:,} tokens, {tokens // TYPICAL_TOKENS:,} images of 1024 x 1024", origin))
    return rows
