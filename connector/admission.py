# SPDX-License-Identifier: Apache-2.0
"""What requests wait for and hold: per request and item, whether its bytes are ready, on their way, or to be encoded.

Answers `ensure_cache_available`, which vLLM calls for every request at every step, so everything here is dictionary
work. What is scheduled, and what goes into a plan, is the scheduler side's.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from storage_tiers.entry import EntryState, Lease
from storage_tiers.hierarchy import TierHierarchy
from storage_tiers.key import WantedItem

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Admission", "Identity", "RequestedItem"]

ATTACH_GRACE_SECONDS = 30.0
"""How long requests may wait for workers to attach, from the first that asks. Attaching takes milliseconds; a worker
that never does (on another host, say) must not delay every request by a deadline."""

ASK_AGAIN_SECONDS = 0.02
"""How often the tiers are asked for an item that only another engine can encode: a look-up on an I/O thread each."""

PASSTHROUGH_MODALITIES = frozenset({"prompt_embeds"})
"""Not encoded at all: the client's tensor is put into the encoder cache as it is."""


class Identity(Protocol):
    """Whatever knows what, besides an item's hash, its encoding depends on."""

    def fingerprint_for(self, request: "Request", identifier: str) -> str | None:
        """The fingerprint of an item of `request`, or None while it is being worked out on another thread."""

    def width_of(self, modality: str) -> int | None:
        """Columns of an embedding of that modality, None where nobody has measured them."""


@dataclass(slots=True, eq=False)
class RequestedItem:
    """One multimodal input of one request."""

    wanted: WantedItem
    end: int
    """Position behind its last placeholder token: computed tokens beyond it need the item no more."""
    data: Any
    """vLLM's processed item, for `has_tensor`."""
    cacheable: bool
    lease: Lease | None = None
    missed: bool = False
    """It will be encoded for this request, whatever the tiers say later."""
    ask_again_at: float = 0.0
    """Not before then, of an item that the tiers did not have."""
    _has_tensor: bool | None = field(init=False, default=None)

    def has_tensor(self) -> bool:
        """Whether it could be encoded. A consumer may be sent items that only carry a size. Found out when asked."""
        if self._has_tensor is None:
            self._has_tensor = not self.wanted.num_tokens or _has_tensor(self.data)
        return self._has_tensor

    @property
    def asked(self) -> WantedItem | None:
        """What to ask the tiers for."""
        return self.wanted if self.cacheable else None


@dataclass(slots=True, eq=False)
class _Record:
    request_id: str
    prompt_tokens: int
    items: list[RequestedItem] = field(default_factory=list)
    by_hash: dict[str, RequestedItem] = field(default_factory=dict)
    end: int = 0
    """Position behind the last item: a request that has computed this far never waits again."""
    deadline: float | None = None
    unavailable: bool = False


class Admission:
    """The requests that the scheduler has asked about. Step thread only, but for `counts`."""

    def __init__(
        self,
        hierarchy: TierHierarchy,
        identity: Identity,
        is_on_device: Callable[[str], bool],
        is_ready: Callable[[], bool],
        is_consumer: bool,
        staging_deadline_seconds: float,
        has_encoder: bool = True,
        defers_preempted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_on_device(mm_hash)` tells what the device holds; `is_ready()` whether every worker has attached.

        Without `has_encoder` another engine stores what this one needs, and may be about to: items are waited for.
        Without `defers_preempted` vLLM would run a preempted request that ends while it waits, and die of it: such a
        request waits for nothing.
        """
        self._defers_preempted = defers_preempted
        self._has_encoder = has_encoder
        self._hierarchy = hierarchy
        self._identity = identity
        self._is_on_device = is_on_device
        self._is_ready = is_ready
        self._is_consumer = is_consumer
        self._deadline_seconds = staging_deadline_seconds
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._asking: _Record | None = None
        self._unavailable: set[str] = set()
        self._attach_deadline: float | None = None
        self.counts: Counter[str] = Counter()

    def ensure(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether `request` can go on: True unless it waits for bytes, or needs some that nobody can give it."""
        record = self._record_of(request)
        self._asking = record
        identified = len(record.items) == len(request.mm_features)
        if not self._is_consumer or (identified and record.end <= num_computed_tokens):
            self._release_all(record)
            return True
        waiting = [item for item in record.items if self._is_waiting(record, item, num_computed_tokens)]
        if not waiting and identified:
            record.deadline = None
            return not record.unavailable
        if self._is_deferrable(request) and self._may_wait_on(record):
            return False
        self._identify(record, request, give_up=True)
        for item in record.items:
            if self._is_waiting(record, item, num_computed_tokens):
                self._miss(record, item)
        return not record.unavailable

    def wanted(self, mm_hash: str) -> WantedItem | None:
        """What the request that is being scheduled asks for under `mm_hash`, or any other request if that one does not.

        None where no tier is to be asked. vLLM 0.24 does not announce running requests, hence the second part.
        """
        asking = self._asking
        if asking is not None and mm_hash in asking.by_hash:
            return asking.by_hash[mm_hash].asked
        for record in self._records.values():
            if mm_hash in record.by_hash:
                return record.by_hash[mm_hash].asked
        return None

    def is_prefilling(self, request_id: str, num_computed_tokens: int) -> bool:
        """Whether a request with items has part of its prompt before it. False for one that is not known here."""
        record = self._records.get(request_id)
        return record is not None and num_computed_tokens < record.prompt_tokens

    def item_of(self, request: "Request", index: int) -> RequestedItem:
        """The record of item number `index` of `request`."""
        record = self._record_of(request)
        self._identify(record, request, give_up=True)
        return record.items[index]

    def settle(self, item: RequestedItem) -> None:
        """The item has been given its place in a step: the request's own claim has served its purpose."""
        item.missed = False
        self._release(item)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended, and release what they hold."""
        for request_id in request_ids:
            record = self._records.pop(request_id, None)
            if record is not None:
                self._release_all(record)
            self._unavailable.discard(request_id)

    def forget_all(self) -> None:
        """Release everything: what was wanted is no longer what would be right."""
        for record in self._records.values():
            self._release_all(record)
        self._records.clear()
        self._asking = None

    def take_unavailable(self) -> set[str]:
        """Requests that need an item which is nowhere and cannot be encoded; each is named once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    # -- One request ------------------------------------------------------------------------------------------------

    def _record_of(self, request: "Request") -> _Record:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = _Record(request.request_id, request.num_prompt_tokens)
        if len(record.items) < len(request.mm_features):  # a new request, or a streaming session's next items
            self._identify(record, request, give_up=False)
        return record

    def _identify(self, record: _Record, request: "Request", give_up: bool) -> None:
        """Work out what the request's items are; those whose identity is not known yet are left, or given up."""
        for index in range(len(record.items), len(request.mm_features)):
            fingerprint = self._identity.fingerprint_for(request, request.mm_features[index].identifier)
            if fingerprint is None and not give_up:
                return
            item = self._new_item(request, index, fingerprint)
            record.items.append(item)
            self._hierarchy.note_use(item.wanted)
            record.end = max(record.end, item.end)
            same = record.by_hash.setdefault(item.wanted.mm_hash, item)
            if same.wanted != item.wanted:
                # One client-given id for items that differ: vLLM asks by id alone, so no answer could be right.
                for each in record.items:
                    each.cacheable &= each.wanted.mm_hash != item.wanted.mm_hash

    def _new_item(self, request: "Request", index: int, fingerprint: str | None) -> RequestedItem:
        feature = request.mm_features[index]
        wanted = WantedItem(
            mm_hash=feature.identifier,
            num_tokens=request.get_num_encoder_embeds(index),
            modality=feature.modality,
            fingerprint=fingerprint or "",
            width=self._identity.width_of(feature.modality),
        )
        encoded = feature.modality not in PASSTHROUGH_MODALITIES and wanted.num_tokens > 0
        return RequestedItem(
            wanted=wanted,
            end=feature.mm_position.offset + feature.mm_position.length,
            data=feature.data if self._has_encoder else None,
            cacheable=encoded and fingerprint is not None,
        )

    def _is_deferrable(self, request: "Request") -> bool:
        return self._defers_preempted or not request.num_preemptions

    def _may_wait_on(self, record: _Record) -> bool:
        """Whether a request that waits has time left; its first call starts the clock."""
        now = self._clock()
        if record.deadline is None:
            record.deadline = now + self._deadline_seconds
            self.counts["staging_wait"] += 1
        if now < record.deadline:
            return True
        record.deadline = None
        self.counts["staging_deadline_missed"] += 1
        return False

    def _is_waiting(self, record: _Record, item: RequestedItem, num_computed_tokens: int) -> bool:
        """Take one item as far as it goes without waiting; whether its bytes are still on their way."""
        if item.end <= num_computed_tokens or self._stays_on_device(record, item, num_computed_tokens):
            self._release(item)
            return False
        if item.missed:
            return False
        if not item.cacheable:
            self._miss(record, item)
            return False
        if not self._is_ready():
            return self._may_wait_for_workers(record, item)
        if item.lease is None:
            if self._clock() < item.ask_again_at:
                return True
            item.lease = self._hierarchy.acquire(item.wanted, can_be_encoded=item.has_tensor)
        state = item.lease.state if item.lease is not None else EntryState.GONE
        if state is EntryState.GONE and not self._has_encoder:
            self._release(item)
            item.ask_again_at = self._clock() + ASK_AGAIN_SECONDS
            return True
        if state is EntryState.GONE:
            self._miss(record, item)
        return state in (EntryState.STAGING, EntryState.SAVING)

    def _may_wait_for_workers(self, record: _Record, item: RequestedItem) -> bool:
        now = self._clock()
        if self._attach_deadline is None:
            self._attach_deadline = now + ATTACH_GRACE_SECONDS
        if now < self._attach_deadline:
            return True
        self.counts["miss_workers_not_attached"] += 1
        self._miss(record, item)
        return False

    def _stays_on_device(self, record: _Record, item: RequestedItem, num_computed_tokens: int) -> bool:
        """Whether the device holds the item, and will when its turn comes.

        Room for another item of the request may be made by evicting this one, before the request refers to it. Then one
        with pixels is encoded; one without needs its bytes at hand.
        """
        if not self._is_on_device(item.wanted.mm_hash):
            return False
        return item.has_tensor() or all(
            other.end <= num_computed_tokens or self._is_on_device(other.wanted.mm_hash) for other in record.items
        )

    def _miss(self, record: _Record, item: RequestedItem) -> None:
        self._release(item)
        item.missed = True
        if not item.has_tensor():
            # Encoding it would end the engine: the client sent a size and no pixels. vLLM fails the request instead.
            self.counts["unavailable"] += 1
            record.unavailable = True
            self._unavailable.add(record.request_id)

    def _release(self, item: RequestedItem) -> None:
        if item.lease is not None:
            self._hierarchy.release(item.lease)
            item.lease = None

    def _release_all(self, record: _Record) -> None:
        for item in record.items:
            self._release(item)


def _has_tensor(data: Any) -> bool:
    """Whether an item's processed data holds pixels, audio or embeddings: any tensor that is not mere indices.

    With vLLM's shared-memory processor cache only the workers see it, and here is its address.
    """
    if data is None:
        return False
    return "address" in data or any(_holds_content(element.data) for element in data.values())


def _holds_content(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and (value.is_floating_point() or value.dtype == torch.uint8)
    return isinstance(value, list | tuple) and any(_holds_content(each) for each in value)
