# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: what is loaded, what is saved, and the plan that tells the workers.

One scheduling pass runs from the first question to `build_plan`. Within it every answer stands, and what was answered
stays pinned. Nothing here touches a tier: it asks the hierarchy, which knows.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from connector.activity_log import ActivityLog
from connector.admission import Admission, RequestedItem
from connector.cache_manager import DeviceResidency
from connector.metrics import Snapshot
from connector.metrics_source import MetricsSource, ReportPacer
from connector.step_plan import StepPlan, Transfer
from connector.transfer_ledger import TransferLedger
from storage_tiers.entry import Lease
from storage_tiers.hierarchy import TierHierarchy
from storage_tiers.key import WantedItem
from storage_tiers.tier import ItemHeader
from storage_tiers.transfer_board import TransferBoard

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerParts", "SchedulerSide"]

logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class SchedulerParts:
    """What the scheduler's half works with; it closes what it is given."""

    hierarchy: TierHierarchy
    ledger: TransferLedger
    admission: Admission
    residency: DeviceResidency
    board: TransferBoard
    """Where ranks publish their gauges."""
    segment_name: str
    model: str
    """Model name as in the key."""
    dtype: torch.dtype
    """The encoder's output dtype."""
    is_producer: bool
    is_consumer: bool
    is_ready: Callable[[], bool]
    """Whether every participating worker has attached."""
    runs_plans_of_prefills_only: bool = False
    """Whether the runner drops the plan of a step in which no prompt goes on, as vllm-neuron's does by itself."""
    log_interval_seconds: float = 10.0
    """The least time between two lines that sum up what the cache has done."""
    flush_seconds: float = 5.0
    """Longest wait at a clean stop for lower tiers to take what was saved."""
    closers: Sequence[Callable[[], None]] = ()
    """What else must end with this side, called before the hierarchy is closed."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A transfer of this pass: memory and slot are held until it goes into a plan or is taken back."""

    lease: Lease
    slot: int


class SchedulerSide:
    """Answers the scheduler's hooks. Step thread only, but for `close`."""

    def __init__(self, parts: SchedulerParts) -> None:
        """Takes over `parts`."""
        self._parts = parts
        self._hierarchy = parts.hierarchy
        self._ledger = parts.ledger
        self._admission = parts.admission
        self._plan_number = 0
        self._answers: dict[WantedItem, bool] = {}
        self._pins: dict[str, _Planned] = {}
        self._loads: dict[str, _Planned] = {}
        self._saves: dict[str, _Planned] = {}
        self._encodes: dict[str, tuple[str, int]] = {}
        self._allocated: set[str] = set()
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._pacer = ReportPacer()
        self._source = MetricsSource(self.figures, self._hierarchy, self._ledger, parts.board, parts.residency)
        self._activity = ActivityLog(parts.log_interval_seconds, self.figures)

    @property
    def residency(self) -> DeviceResidency:
        """What the device holds."""
        return self._parts.residency

    # -- Hooks of one pass ------------------------------------------------------------------------------------------

    def ensure_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether `request` can go on; False defers it, and the others run."""
        return self._admission.ensure(request, num_computed_tokens)

    def has_item(self, mm_hash: str) -> bool:
        """Whether the item can be loaded in this step. The first answer of a pass stands until `build_plan`."""
        wanted = self._admission.wanted(mm_hash)
        if wanted is None or not self._parts.is_consumer:
            return False
        answer = self._answers.get(wanted)
        if answer is None:
            answer = self._answers[wanted] = self._pin(wanted)
        return answer

    def allocated(self, request: "Request", index: int) -> None:
        """The scheduler has made room on the device for an item that will be loaded or encoded in this step."""
        item = self._admission.item_of(request, index)
        mm_hash = item.wanted.mm_hash
        self._allocated.add(mm_hash)
        self._parts.residency.allocated(mm_hash)
        if self._answers.get(item.wanted, False):
            pin = self._pins.pop(mm_hash, None)
            if pin is not None:
                self._take_back_loads_of({mm_hash})
                self._loads[mm_hash] = pin
                self.counts["load"] += 1
                self.counts["load_restored"] += self._hierarchy.take_restored(pin.lease)
                self._source.note_avoided(item.wanted.num_tokens)
        else:
            self._take_back_loads_of({mm_hash})
            self._encodes[mm_hash] = (request.request_id, index)
            self.counts["encode"] += 1
            if self._parts.is_producer and item.cacheable:
                self._plan_save(item)
        self._admission.settle(item)

    def build_plan(self, output: "SchedulerOutput") -> StepPlan:
        """End the pass: the plan that goes out with `output`, which is not changed."""
        freed = set(output.free_encoder_mm_hashes)
        if not self._parts.residency.has_manager:
            freed -= self._allocated  # 0.24 names hashes that it allocated again
        self._parts.residency.freed(freed)
        self._take_back_unscheduled(output.scheduled_encoder_inputs)
        self._take_back(self._pins)
        self._take_back_loads_of(freed)
        self._admission.finish(output.finished_req_ids)
        self._plan_number += 1
        plan = StepPlan(self._plan_number, self._parts.segment_name)
        # A runner drops the plan of a step that it has no use for: loads wait for the next one.
        if self._will_be_carried_out(output):
            plan.loads = self._hand_out(self._loads, is_save=False)
            plan.saves = self._hand_out(self._saves, is_save=True)
        self._end_pass()
        self._activity.log_if_due()
        return plan

    def finished(self, request_id: str) -> None:
        """A request has ended."""
        self._admission.finish((request_id,))

    def take_unavailable(self) -> set[str]:
        """Requests that vLLM must fail, since an item of theirs is nowhere and cannot be encoded."""
        return self._admission.take_unavailable()

    def was_reset(self) -> None:
        """The device's cache was reset between two passes: nothing planned or leased for it stands any more."""
        self._take_back(self._loads)
        self._take_back(self._pins)
        self._take_back_saves(list(self._saves))
        self._end_pass()
        self._admission.forget_all()

    def take_snapshot(self) -> Snapshot | None:
        """Every metric as of now, for a step that has something to report, else None. Some 0.3 µs for one that has not.

        Something to report: an item was loaded, encoded or looked up, or a second has gone by.
        """
        lookups, _ = self._parts.residency.lookups
        if not self._pacer.is_due(lookups + self.counts["load"] + self.counts["encode"]):
            return None
        return self._source.snapshot()

    def figures(self) -> dict[str, int]:
        """Totals since start by name: what was loaded, encoded and saved, why items were missed, and what failed."""
        faults = {f"fault {tier}/{kind}": count for (tier, kind), count in self._hierarchy.faults.counts().items()}
        return {
            **self.counts,
            **self._admission.counts,
            **self._ledger.counts(),
            **self._hierarchy.counts(),
            **faults,
            "items in pool": self._hierarchy.num_entries,
        }

    # -- The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take up last reports, give lower tiers time to take what was saved, say what they could not. Any thread."""
        if self._closed:
            return
        self._closed = True
        started = time.monotonic()
        self._activity.log()
        lost_transfers = self._ledger.close()
        left = self._hierarchy.flush(self._parts.flush_seconds)
        self._admission.forget_all()
        for close in self._parts.closers:
            close()
        self._hierarchy.close()
        seconds = time.monotonic() - started
        if lost_transfers or left:
            logger.warning(
                "Encoder cache: stopped after %.1f s with %d copies unfinished and %d items not yet below the pool",
                seconds, lost_transfers, left,
            )  # fmt: skip
        else:
            logger.info("Encoder cache: stopped after %.1f s, everything saved is below the pool", seconds)

    # -- Parts of a pass --------------------------------------------------------------------------------------------

    def _will_be_carried_out(self, output: "SchedulerOutput") -> bool:
        if not self._parts.runs_plans_of_prefills_only:
            return output.total_num_scheduled_tokens > 0
        cached = output.scheduled_cached_reqs
        return bool(output.scheduled_new_reqs) or any(
            map(self._admission.is_prefilling, cached.req_ids, cached.num_computed_tokens)
        )

    def _pin(self, wanted: WantedItem) -> bool:
        if not self._parts.is_ready() or wanted.mm_hash in self._pins:
            return False  # a second item under the same client-given id: only one of them can be right
        slot = self._ledger.reserve()
        if slot is None:
            self.counts["no_transfer_slot"] += 1
            return False
        lease = self._hierarchy.pin_resident(wanted)
        if lease is None:
            self._ledger.give_back(slot)
            return False
        self._pins[wanted.mm_hash] = _Planned(lease, slot)
        return True

    def _plan_save(self, item: RequestedItem) -> None:
        """Reserve what a save needs; without it the item is encoded and not kept, which is counted."""
        wanted = item.wanted
        if wanted.width is None:
            self.counts["save_without_width"] += 1
            return
        header = ItemHeader(
            mm_hash=wanted.mm_hash,
            model=self._parts.model,
            fingerprint=wanted.fingerprint,
            modality=wanted.modality,
            num_tokens=wanted.num_tokens,
            width=wanted.width,
            dtype=self._parts.dtype,
        )
        slot = self._ledger.reserve()
        if slot is None:
            self.counts["no_transfer_slot"] += 1
            return
        lease = self._hierarchy.begin_save(header)
        if lease is None:
            self._ledger.give_back(slot)
            return
        self._saves[wanted.mm_hash] = _Planned(lease, slot)

    def _take_back_unscheduled(self, scheduled: dict[str, list[int]]) -> None:
        """Undo encodes that a preemption removed from the step after they were planned.

        The manager must forget them: it would list as cached what was never encoded, and the engine would die of it.
        """
        lost = [
            mm_hash
            for mm_hash, (request_id, index) in self._encodes.items()
            if index not in scheduled.get(request_id, ())
        ]
        for mm_hash in lost:
            self.counts["encode_taken_back"] += 1
            if not self._parts.residency.forget(mm_hash):
                logger.warning_once(
                    "Encoder cache: a preemption took back an encoder run, and the encoder cache manager in use cannot "
                    "be told; vLLM may die of it. Leave --ec-manager-config unset, or do without priority scheduling."
                )
        self._take_back_saves(lost)

    def _take_back_saves(self, mm_hashes: Iterable[str]) -> None:
        for mm_hash in mm_hashes:
            planned = self._saves.pop(mm_hash, None)
            if planned is not None:
                self._hierarchy.finish_save(planned.lease, succeeded=False)
                self._ledger.give_back(planned.slot)

    def _take_back_loads_of(self, freed: set[str]) -> None:
        """A load that waited for tokens while its item was freed would fill what nobody frees."""
        self._take_back({mm_hash: self._loads.pop(mm_hash) for mm_hash in freed & self._loads.keys()})

    def _end_pass(self) -> None:
        self._answers.clear()
        self._encodes.clear()
        self._allocated.clear()

    def _take_back(self, planned: dict[str, _Planned]) -> None:
        for each in planned.values():
            self._hierarchy.release(each.lease)
            self._ledger.give_back(each.slot)
        planned.clear()

    def _hand_out(self, planned: dict[str, _Planned], is_save: bool) -> tuple[Transfer, ...]:
        """Turn what is planned into transfers of this plan, and have the ledger watch them."""
        transfers = []
        for mm_hash, each in planned.items():
            header = each.lease.entry.header
            assert header is not None  # resident or reserved: its shape is known
            offset = self._hierarchy.segment_offset(each.lease)
            self._ledger.open(each.slot, self._plan_number, each.lease, is_save)
            transfers.append(Transfer(each.slot, mm_hash, offset, header.num_tokens, header.width, header.dtype))
        planned.clear()
        return tuple(transfers)
