# SPDX-License-Identifier: Apache-2.0
"""What the vLLM versions in use do differently: the one room that looks, by what the installed classes have.

0.24 is what vllm-neuron pins, 0.32 what everything else here is written for; no version number is compared. No policy
of ours may enter, only one answer for all versions.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = [
    "SizedEncoderCacheManager",
    "announces_running_requests",
    "data_parallel_index",
    "encoder_cache_size",
    "encoder_output_widths",
    "fails_unavailable_requests",
    "hosts_of_engine",
    "largest_item_tokens",
    "manager_config",
    "participants",
]


class _SizesByHash(EncoderCacheManager):  # type: ignore[misc, unused-ignore]
    """An older manager with what the newer ones have: sizes by hash, and no item that is both freed and cached."""

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.num_embeds_by_hash: dict[str, int] = {}

    def reset(self) -> None:
        super().reset()
        self.num_embeds_by_hash.clear()

    def allocate(self, request: "Request", input_id: int) -> None:
        super().allocate(request, input_id)
        mm_hash = request.mm_features[input_id].identifier
        self.num_embeds_by_hash[mm_hash] = request.get_num_encoder_embeds(input_id)

    def get_freed_mm_hashes(self) -> list[str]:
        freed = [mm_hash for mm_hash in super().get_freed_mm_hashes() if mm_hash not in self.cached]
        for mm_hash in freed:
            self.num_embeds_by_hash.pop(mm_hash, None)
        return freed


SizedEncoderCacheManager: type[EncoderCacheManager] = (
    EncoderCacheManager if hasattr(EncoderCacheManager(0), "num_embeds_by_hash") else _SizesByHash
)
"""vLLM's manager, with `num_embeds_by_hash`: embeddings of each item that is cached."""


def manager_config(vllm_config: "VllmConfig") -> Any | None:
    """Where the class of the encoder cache manager is named, None where vLLM takes none (0.24)."""
    return getattr(vllm_config, "ec_manager_config", None)


def fails_unavailable_requests() -> bool:
    """Whether vLLM asks the connector which requests it must fail. 0.24 would let them wait for ever."""
    return hasattr(ECConnectorBase, "take_unavailable_requests")


def encoder_output_widths(vllm_config: "VllmConfig") -> Mapping[str, int]:
    """Columns of an embedding by modality: as vLLM has measured them at start, or else by the model's configuration.

    0.24 measures nothing; there a vision tower's own `out_hidden_size` counts, once for each deepstack level more.
    """
    measured = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None)
    if measured is not None:
        return dict(measured)
    vision = getattr(vllm_config.model_config.hf_config, "vision_config", None)
    if vision is None:
        return {}
    base = getattr(vision, "out_hidden_size", None) or vllm_config.model_config.get_hidden_size()
    width = int(base) * (1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()))
    return {"image": width, "video": width}


def announces_running_requests() -> bool:
    """Whether vLLM asks for running requests, too, if their items are at hand. 0.24 asks for waiting ones only."""
    return hasattr(Scheduler, "_ec_transfer_pending")


def largest_item_tokens(vllm_config: "VllmConfig") -> int | None:
    """Tokens of the largest item that the engine admits, as vLLM's own budget has them; takes a second or so."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    takes_no_cache = "enable_cache" in inspect.signature(MultiModalBudget.__init__).parameters
    budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, **({"enable_cache": False} if takes_no_cache else {}))
    return max(budget.mm_max_toks_per_item.values(), default=None)


def encoder_cache_size(vllm_config: "VllmConfig") -> int:
    """The scheduler's budget in embeddings, worked out as vLLM's scheduler does; asks the model's processor."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    return int(MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY).encoder_cache_size)


def participants(vllm_config: "VllmConfig") -> int:
    """Ranks that run the encoder's hooks: tensor-parallel x prefill-context-parallel, in pipeline stage 0."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1))


def hosts_of_engine(vllm_config: "VllmConfig") -> int:
    """Hosts that one engine's ranks run on."""
    return int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1))


def data_parallel_index(vllm_config: "VllmConfig") -> int:
    """Which replica this is, also where vLLM runs replicas as engines of their own and calls each of them rank 0."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
