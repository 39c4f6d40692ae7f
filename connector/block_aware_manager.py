# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder cache manager counting as the device does: in blocks, so that what it admits always fits there.

Which item goes first stays vLLM's decision, and so do the encoder's compute budget and the sizes by hash, both in
embeddings. No buffer and no tier may enter.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from connector.block_geometry import BlockGeometry, geometry_of
from connector.cache_manager import ReportingEncoderCacheManager
from connector.settings import load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["BlockAwareEncoderCacheManager"]

logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class _Approved:
    """What was admitted for the request that vLLM is trying to schedule, none of it allocated yet.

    vLLM tries one request at a time: it asks for item after item, naming the embeddings of those it will schedule, and
    then allocates them all or, when the request cannot run, none. Either way the next request starts at 0. An admitted
    item can also be passed over, which shows by a sum without it.
    """

    embeds: int = 0
    blocks: int = 0
    """Of the items that are not oversize."""
    is_oversize: bool = False
    """Whether an oversize item is among them."""
    newest_embeds: int = 0
    """Of the newest one, which is in the other figures only when vLLM's next sum has it."""
    newest_blocks: int = 0
    """Blocks that the newest one needs, however many."""

    def catch_up(self, capacity_blocks: int, num_embeds_to_schedule: int) -> bool:
        """Take up what vLLM's sum tells. False for a sum that no choice among the admitted gives."""
        if num_embeds_to_schedule == 0:
            self.embeds = self.blocks = 0
            self.is_oversize = False
        elif num_embeds_to_schedule == self.embeds + self.newest_embeds:
            self.embeds += self.newest_embeds
            if self.newest_blocks > capacity_blocks:
                self.is_oversize = True
            else:
                self.blocks += self.newest_blocks
        self.newest_embeds = self.newest_blocks = 0
        return num_embeds_to_schedule == self.embeds


class BlockAwareEncoderCacheManager(ReportingEncoderCacheManager):
    """Capacity, free and freeable slots are blocks.

    An item that is larger than the whole cache takes no block: it lives beside them, one at a time, and goes when its
    last request lets go of it. Sums that vLLM is not known to pass are refused until its next pass.
    """

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig") -> "BlockAwareEncoderCacheManager":
        """Called by vLLM's scheduler. `cache_size` in embeddings. Raises SettingsError for blocks that cannot do."""
        transfer = vllm_config.ec_transfer_config
        settings = load_settings(transfer.ec_connector_extra_config if transfer is not None else {})
        manager = cls(geometry_of(vllm_config, settings.behaviour, cache_size))
        manager._report_as_configured(vllm_config)
        return manager

    def __init__(self, geometry: BlockGeometry) -> None:
        """For a device with blocks of `geometry`."""
        super().__init__(geometry.capacity_blocks)
        self.geometry = geometry
        self.oversize_items = 0
        """Times since start that an item larger than the whole cache was admitted."""
        self._needed_by_hash: dict[str, int] = {}
        """Blocks that each cached item needs, more than there are for an oversize one."""
        self._approved = _Approved()

    def blocks_needed(self, request: "Request", input_id: int) -> int:
        """Blocks that the item needs on the device, be it more than there are."""
        return self.geometry.blocks_for(request.get_num_encoder_embeds(input_id))

    def is_oversize(self, blocks_needed: int) -> bool:
        """Whether an item that needs so many blocks fits into no empty cache."""
        return blocks_needed > self.geometry.capacity_blocks

    def reset(self) -> None:
        """Forget everything, as vLLM asks after a weight update, and report it."""
        self._approved = _Approved()
        self._needed_by_hash.clear()
        super().reset()

    def forget(self, mm_hash: str) -> None:
        """Unlist an item whose encoding was taken back by a preemption."""
        super().forget(mm_hash)
        self._needed_by_hash.pop(mm_hash, None)

    def can_allocate(
        self, request: "Request", input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Whether the item fits besides what is referenced and what was admitted before it; makes the room."""
        if request.request_id in self.deferred:
            return False
        num_embeds = request.get_num_encoder_embeds(input_id)
        is_known = self._approved.catch_up(self.geometry.capacity_blocks, num_embeds_to_schedule)
        if not is_known or num_embeds > encoder_compute_budget:
            return False
        needed = self.blocks_needed(request, input_id)
        fits = self._admits_oversize() if self.is_oversize(needed) else self._make_room(self._approved.blocks + needed)
        if fits:
            self._approved.newest_embeds, self._approved.newest_blocks = num_embeds, needed
        return fits

    def allocate(self, request: "Request", input_id: int) -> None:
        """Count an admitted item as held by the request. Raises RuntimeError for one that was not admitted."""
        mm_hash, num_embeds = request.mm_features[input_id].identifier, request.get_num_encoder_embeds(input_id)
        if not self._refer_to(request, input_id):
            needed = self.blocks_needed(request, input_id)
            blocks = 0 if self.is_oversize(needed) else needed
            if blocks > self.num_free_slots:
                raise RuntimeError(
                    f"item {mm_hash} was allocated without can_allocate: it takes {blocks} blocks, and "
                    f"{self.num_free_slots} are free. This vLLM uses its manager in a way that "
                    f"{type(self).__name__} does not know: leave --ec-manager-config unset."
                )
            self.num_free_slots -= blocks
            self.num_freeable_slots -= blocks
            self.num_embeds_by_hash[mm_hash] = num_embeds
            self._needed_by_hash[mm_hash] = needed
            self.cached[mm_hash] = {request.request_id}
            self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)
            self._count_oversize(mm_hash, num_embeds, needed)

    def free_encoder_input(self, request: "Request", input_id: int) -> None:
        """End the request's use of the item, which can be evicted once nobody uses it; an oversize one goes at once."""
        mm_hash = request.mm_features[input_id].identifier
        was_in_use = mm_hash not in self.freeable
        super().free_encoder_input(request, input_id)
        if was_in_use and mm_hash in self.freeable:
            # vLLM has just put it there, counted in embeddings.
            blocks = self._slots_of(mm_hash)
            self.num_freeable_slots += blocks - self.freeable[mm_hash]
            self.freeable[mm_hash] = blocks
            if self.is_oversize(self._needed_by_hash[mm_hash]):
                self._evict(mm_hash)

    def _slots_of(self, mm_hash: str) -> int:
        needed = self._needed_by_hash[mm_hash]
        return 0 if self.is_oversize(needed) else needed

    def _admits_oversize(self) -> bool:
        """One at a time: it lives beside the blocks."""
        return not (self._approved.is_oversize or any(map(self.is_oversize, self._needed_by_hash.values())))

    def _make_room(self, blocks: int) -> bool:
        """Have that many blocks free, by evicting what has been unused longest; False, and nothing evicted, if not."""
        if blocks > self.num_freeable_slots:
            return False
        while blocks > self.num_free_slots:
            self._evict(next(iter(self.freeable)))
        return True

    def _evict(self, mm_hash: str) -> None:
        """Let go of an item that nobody uses; the workers are told with this pass, or with the next."""
        self.num_free_slots += self.freeable.pop(mm_hash)
        del self.cached[mm_hash]
        del self.num_embeds_by_hash[mm_hash]
        del self._needed_by_hash[mm_hash]
        self.freed.append(mm_hash)

    def _count_oversize(self, mm_hash: str, num_embeds: int, needed: int) -> None:
        if not self.is_oversize(needed):
            return
        self.oversize_items += 1
        if self.oversize_items == 1:
            logger.warning(
                "Item %s of %d tokens needs %d blocks, and the device has %d: it is used for its requests and not "
                "cached. With device_num_blocks = %d it would be. Said once; oversize_items counts.",
                mm_hash, num_embeds, needed, self.geometry.capacity_blocks, needed + 1,
            )  # fmt: skip
