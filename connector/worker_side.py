# SPDX-License-Identifier: Apache-2.0
"""The worker's half: carries out a StepPlan by copies between the runner's encoder cache and the shared pool.

Decides nothing. A load is copied on the step thread, which waits for those bytes anyway; a save is handed to the copy
thread. No tier below the pool and no look-up may enter this room.
"""

import threading
import time
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from connector.copy_thread import CopyThread
from connector.step_plan import StepPlan, Transfer
from storage_tiers.block_mapping import ItemBlocks, ItemSource
from storage_tiers.faults import FaultLog
from storage_tiers.shared_segment import SharedSegment, find_live_segment
from storage_tiers.transfer_board import RankGauge, RankView, TransferBoard, TransferStatus, pack_blocks

__all__ = ["WorkerOptions", "WorkerSide"]

logger = init_logger(f"vllm.{__name__}")

ATTACH_POLL_SECONDS = 0.05
"""How often a worker that was told nothing looks for its engine's segment."""

EncoderCache = MutableMapping[str, torch.Tensor] | ItemBlocks


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker must know before the first plan comes."""

    engine_id: str
    dp_rank: int
    owner_pids: Collection[int]
    """Processes that may be the engine's: this one and its parents."""
    rank: int
    """Counted over tensor-parallel x prefill-context-parallel ranks; rank 0 saves."""
    device: torch.device
    save_queue_bytes: int
    populate_pool: bool
    save_bytes_per_step: int = 256 << 20
    """Bytes of items in blocks that one step hands to the copy thread as due; the rest waits for later steps."""
    max_dirty_seconds: float = 30.0
    """Longest time that an item in blocks waits for its copy."""
    spill_on_evict: bool = False
    """Whether items in blocks are copied when they leave the device or grow old, instead of soon."""
    takes_part: bool = True
    """False on later pipeline stages, where no encoder runs: they attach to nothing and ignore plans."""


@dataclass(frozen=True, slots=True)
class _Attachment:
    segment: SharedSegment
    board: RankView
    bytes: torch.Tensor
    """The whole segment, uint8."""

    def at(self, transfer: Transfer) -> torch.Tensor:
        raw = self.bytes[transfer.offset : transfer.offset + transfer.nbytes]
        return raw.view(transfer.dtype).view(transfer.shape)


class WorkerSide:
    """One rank's end of the pool. All methods but `close` are called from the worker's step thread."""

    def __init__(self, options: WorkerOptions) -> None:
        """Starts to look for the engine's segment in the background."""
        self._options = options
        self._faults = FaultLog()
        self._attached: _Attachment | None = None
        self._attach_lock = threading.Lock()
        self._plan: StepPlan | None = None
        self._saves: dict[str, Transfer] = {}
        self._blocks: ItemBlocks | None = None
        self._loaded_plan = 0
        self._save_allowance = 0
        self._encode_started: float | None = None
        self._gauges = dict.fromkeys(RankGauge, 0.0)
        self._gauges_lock = threading.Lock()
        self._copies = CopyThread(options.save_queue_bytes, self._place_of, self._finish_save, self._faults)
        self._stopping = threading.Event()
        self._attacher = threading.Thread(target=self._attach_when_found, name="ec-attach", daemon=True)
        if options.takes_part:
            self._attacher.start()

    # -- One step ---------------------------------------------------------------------------------------------------

    def bind(self, plan: StepPlan) -> None:
        """Take up the plan of the step that begins."""
        if not self._options.takes_part:
            return
        self._plan = plan
        self._save_allowance = self._options.save_bytes_per_step
        if not self._options.spill_on_evict:
            self._copies.expedite(self._save_allowance)
        if self._attached is None:
            self._attach(plan.segment)
        self._saves = {save.mm_hash: save for save in plan.saves} if self._options.rank == 0 else {}
        self._encode_started = time.perf_counter() if self._saves else None

    def load(self, encoder_cache: EncoderCache) -> None:
        """Copy all the plan's loads from the pool into `encoder_cache`, on the runner's device.

        Raises RuntimeError when the segment is out of reach: this step cannot be run without those items.
        """
        if self._plan is not None and self._plan.number != self._loaded_plan:
            self._load(self._plan, encoder_cache)
        self._encode_started = time.perf_counter() if self._saves else None

    def before_step(self, plan: StepPlan, freed: Collection[str], blocks: ItemBlocks) -> None:
        """For the worker hook, ahead of the runner's step: spill what is evicted, free it, restore the plan's loads.

        `freed` are the hashes that the scheduler has evicted. Raises what `load` raises.
        """
        if not self._options.takes_part:
            return
        if freed:
            self._copies.spill(set(freed))
            self._count(RankGauge.EVICTED_BLOCKS, sum(blocks.discard(mm_hash) for mm_hash in freed))
        self._blocks = blocks
        if blocks.has_orphans:
            self._copies.expedite_all_but(blocks)
        if plan.loads:
            if self._attached is None:
                self._attach(plan.segment)
            self._load(plan, blocks)

    def after_step(self, plan: StepPlan, blocks: ItemBlocks) -> None:
        """For a worker hook under a runner that calls nothing of its own: take up what the step has encoded."""
        self.bind(plan)
        self._encode_started = None  # it began before anybody told
        self._save_new(blocks)
        self.finish_step()

    def write_through(self, blocks: ItemBlocks) -> None:
        """For a runner that calls once per step, behind the encoder: all of the plan's copies, here and now.

        Raises what `load` raises.
        """
        self.load(blocks)
        self._encode_started = None
        self._copies.spill(self._save_new(blocks))
        blocks.settle()  # the copy thread may have been quicker, and nobody tells us when the blocks go

    def before_reset(self) -> None:
        """The device's cache is about to be emptied: finish the copies that wait, and those that run."""
        self._copies.spill(None)
        if self._blocks is not None:
            self._blocks.settle()

    def _save_new(self, blocks: ItemBlocks) -> list[str]:
        """Queue the plan's saves of items that are there; their hashes."""
        new = [mm_hash for mm_hash in self._saves if mm_hash in blocks]
        for mm_hash in new:
            self.save(blocks, mm_hash)
        return new

    def _load(self, plan: StepPlan, encoder_cache: EncoderCache) -> None:
        if not plan.loads:
            return
        attached = self._attached
        if attached is None:
            raise RuntimeError(f"a load was planned, but the shared segment {plan.segment} cannot be attached")
        started = time.perf_counter()
        for load in plan.loads:
            source = attached.at(load)
            if isinstance(encoder_cache, ItemBlocks):
                encoder_cache.load(load.mm_hash, source, self._options.device)
            else:
                target = torch.empty(load.shape, dtype=load.dtype, device=self._options.device)
                encoder_cache[load.mm_hash] = target.copy_(source)
            attached.board.set_status(load.slot, TransferStatus.DONE)
        self._loaded_plan = plan.number
        self._count(RankGauge.LOADED_BYTES, sum(load.nbytes for load in plan.loads))
        self._count(RankGauge.LOAD_SECONDS, time.perf_counter() - started)

    def save(self, encoder_cache: EncoderCache, mm_hash: str) -> None:
        """Queue the copy of a freshly encoded item into the pool, if the plan asks for it. Copies nothing itself."""
        self._note_encode_seconds()
        save = self._saves.pop(mm_hash, None)
        attached = self._attached
        if save is None or attached is None:
            return
        source = _source_of(encoder_cache, mm_hash)
        if not _is_as_planned(source, save):
            source.release()
            got = " + ".join(f"{view.dtype}{list(view.shape)}" for view in source.views)
            self._faults.report("device", "unexpected_shape", f"{mm_hash}: {got}, planned {save.dtype}{save.shape}")
            self._finish_save(save, succeeded=False)
            return
        attached.board.set_status(save.slot, TransferStatus.DEFERRED)
        if not self._submit(save, source):
            source.release()
            self._finish_save(save, succeeded=False)

    def finish_step(self) -> None:
        """The step is over: saves of its plan that never came will not come any more."""
        plan, self._plan = self._plan, None
        self._saves = {}
        if plan is None or self._attached is None:
            return
        self._attached.board.set_gauge(RankGauge.SAVE_QUEUE_BYTES, self._copies.queued_bytes)
        self._publish_occupancy(self._attached.board)
        self._attached.board.complete_plan(plan.number)

    def close(self, timeout_seconds: float) -> None:
        """Finish queued copies, stop both threads, let go of the segment. Any thread; later calls do nothing."""
        self._stopping.set()
        left = self._copies.close(timeout_seconds)
        if left:
            self._faults.report("device", "save_abandoned", f"{left} bytes not copied in {timeout_seconds} s")
        if self._attacher.is_alive():
            self._attacher.join(timeout_seconds)
        attached, self._attached = self._attached, None
        if attached is not None and not left:
            attached.segment.close()

    def _submit(self, save: Transfer, source: ItemSource) -> bool:
        try:
            taken = self._copies.submit(save, source, self._delay_of(save, source))
        except Exception as error:  # noqa: BLE001 - whatever a device's runtime raises: its item is not kept, that is all
            self._faults.report("device", "save_failed", f"{save.mm_hash}: {type(error).__name__}: {error}")
            return False
        if not taken:
            self._faults.report("device", "save_queue_full", f"{save.nbytes} bytes of {save.mm_hash}")
        return taken

    def _delay_of(self, save: Transfer, source: ItemSource) -> float:
        """Seconds that a copy may wait: in blocks it keeps no memory alive that is not there anyway."""
        if not source.in_blocks:
            return 0.0
        self._save_allowance -= save.nbytes
        is_due = not self._options.spill_on_evict and self._save_allowance > -save.nbytes
        return 0.0 if is_due else self._options.max_dirty_seconds

    # -- Attaching --------------------------------------------------------------------------------------------------

    def _attach_when_found(self) -> None:
        """Thread: find the engine's segment, attach, then fault it in so that no load pays for it."""
        options = self._options
        while self._attached is None and not self._stopping.is_set():
            name = find_live_segment(options.engine_id, options.dp_rank, options.owner_pids)
            if name is not None:
                self._attach(name)
            self._stopping.wait(ATTACH_POLL_SECONDS)
        attached = self._attached
        if attached is None or not options.populate_pool:
            return
        try:
            attached.segment.populate(self._stopping)
        except OSError as error:
            self._faults.report("pool", "populate_failed", error)

    def _attach(self, name: str) -> None:
        """Map the segment and say so on the board; a failure is reported, and the next plan tries again."""
        with self._attach_lock:
            if self._attached is not None:
                return
            try:
                segment = SharedSegment.attach(name)
                board = TransferBoard.attach(segment.board_memory).rank(self._options.rank)
            except (OSError, ValueError, IndexError) as error:
                self._faults.report("pool", "attach_failed", f"{name}: {error}")
                return
            self._attached = _Attachment(segment, board, segment.tensor())
            board.attach()
            logger.info("Encoder cache: rank %d attached to shared pool %s", self._options.rank, name)

    def _place_of(self, save: Transfer) -> torch.Tensor:
        """Copy thread: the pool's memory for a save."""
        attached = self._attached
        if attached is None:
            raise RuntimeError(f"the segment was let go of before {save.mm_hash} was copied")
        return attached.at(save)

    # -- Reports ----------------------------------------------------------------------------------------------------

    def _finish_save(self, save: Transfer, succeeded: bool) -> None:
        """Step thread or copy thread."""
        attached = self._attached
        if attached is None:
            return
        attached.board.set_status(save.slot, TransferStatus.DONE if succeeded else TransferStatus.FAILED)
        if succeeded:
            self._count(RankGauge.SAVED_BYTES, save.nbytes)
        else:
            self._count(RankGauge.SAVE_FAILURES, 1)

    def _publish_occupancy(self, board: RankView) -> None:
        occupancy = self._blocks.occupancy() if self._blocks is not None else None
        if occupancy is not None:
            board.set_gauge(RankGauge.DEVICE_BLOCKS_TOTAL, occupancy.usable)
            board.set_gauge(RankGauge.DEVICE_BLOCKS, pack_blocks(occupancy.active, occupancy.held))
            board.set_gauge(RankGauge.DEVICE_REAL_TOKENS, occupancy.real_tokens)

    def _count(self, which: RankGauge, amount: float) -> None:
        """Add to a gauge that counts since start. Step thread or copy thread."""
        attached = self._attached
        with self._gauges_lock:
            self._gauges[which] += amount
            if attached is not None:
                attached.board.set_gauge(which, self._gauges[which])

    def _note_encode_seconds(self) -> None:
        """Publish what the encoder took per token, at the first item that comes out of it in this step.

        Only on the CPU, where the host's clock and the device's are one; elsewhere the gauge stays 0, "unknown".
        """
        started, self._encode_started = self._encode_started, None
        tokens = sum(save.num_tokens for save in self._plan.saves) if self._plan is not None else 0
        if started is None or not tokens or self._attached is None or self._options.device.type != "cpu":
            return
        seconds = time.perf_counter() - started
        self._attached.board.set_gauge(RankGauge.ENCODE_SECONDS_PER_TOKEN, seconds / tokens)


def _source_of(encoder_cache: EncoderCache, mm_hash: str) -> ItemSource:
    if isinstance(encoder_cache, ItemBlocks):
        return encoder_cache.source_of(mm_hash)
    return ItemSource((encoder_cache[mm_hash],))


def _is_as_planned(source: ItemSource, save: Transfer) -> bool:
    """Whether its views, one below the other, are of the planned shape and dtype."""
    if any(view.ndim != 2 or view.shape[1] != save.width or view.dtype != save.dtype for view in source.views):
        return False
    return sum(len(view) for view in source.views) == save.num_tokens
