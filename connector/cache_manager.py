# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder cache manager, made to tell: what the device holds, when it was reset, and to forget on request.

A reset (weight updates, sleep) reaches the manager and no connector hook, and vLLM asks the connector before it
looks at the device. The manager is built after the connector, from a class name: the two meet in a registry, by a
token in the manager's configuration. No policy may enter: what is admitted and evicted stays vLLM's own decision.
"""

import uuid
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from connector.vllm_versions import SizedEncoderCacheManager, manager_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["DeviceResidency", "ReportingEncoderCacheManager", "install_reporting_manager"]

logger = init_logger(f"vllm.{__name__}")

TOKEN_KEY = "lmcache_neuron_ec"
_residencies: "weakref.WeakValueDictionary[str, DeviceResidency]" = weakref.WeakValueDictionary()


class DeviceResidency:
    """Which items the device's encoder cache holds, as the scheduler's manager counts them. Step thread only.

    With a reporting manager its own table is asked, which is exact even within a scheduling pass. Without one (another
    manager was named, or vLLM is too old to take one) it mirrors what the hooks tell.
    """

    def __init__(self, on_reset: Callable[[], None]) -> None:
        """`on_reset` is called after the manager has been reset."""
        self._on_reset = on_reset
        self._manager: EncoderCacheManager | None = None
        self._mirror: set[str] = set()

    def __contains__(self, mm_hash: object) -> bool:
        """Whether the device holds the item, or will after this step."""
        return mm_hash in (self._mirror if self._manager is None else self._manager.cached)

    @property
    def has_manager(self) -> bool:
        """Whether a reporting manager is in place: without one, resets go unseen."""
        return self._manager is not None

    @property
    def lookups(self) -> tuple[int, int]:
        """Items that the scheduler has looked up among those on the device, and how many were there. 0 unless told."""
        manager = self._manager
        return (manager.lookups, manager.hits) if isinstance(manager, ReportingEncoderCacheManager) else (0, 0)

    def bind(self, manager: EncoderCacheManager) -> None:
        """From now on ask `manager`."""
        self._manager = manager
        self._mirror.clear()

    def allocated(self, mm_hash: str) -> None:
        """The scheduler has given the item a place on the device."""
        if self._manager is None:
            self._mirror.add(mm_hash)

    def freed(self, mm_hashes: set[str]) -> None:
        """The scheduler has told the workers to drop these."""
        if self._manager is None:
            self._mirror -= mm_hashes

    def was_reset(self) -> None:
        """Everything on the device is void."""
        self._mirror.clear()
        self._on_reset()

    def forget(self, mm_hash: str) -> bool:
        """Unlist an item whose planned encoding will not take place. False where no reporting manager can."""
        self._mirror.discard(mm_hash)
        if not isinstance(self._manager, ReportingEncoderCacheManager):
            return False
        self._manager.forget(mm_hash)
        return True


class ReportingEncoderCacheManager(SizedEncoderCacheManager):  # type: ignore[misc, valid-type, unused-ignore]
    """vLLM's manager with its decisions unchanged: it reports resets, and can forget what was never encoded."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig") -> "ReportingEncoderCacheManager":
        """Called by vLLM's scheduler. `cache_size` in embeddings."""
        manager = cls(cache_size=cache_size)
        manager._report_as_configured(vllm_config)
        return manager

    def __init__(self, cache_size: int) -> None:
        """`cache_size` in embeddings, or in what `_slots_of` counts. Made by `create_manager`."""
        super().__init__(cache_size)
        self._residency: DeviceResidency | None = None
        self.lookups = 0
        """Items that were looked up since start."""
        self.deferred: Container[str] = ()
        """Requests that get no item in this pass: they wait for one, and vLLM (0.24) has not asked."""
        self.hits = 0
        """Of these, items that were cached."""

    def can_allocate(
        self, request: "Request", input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Whether the item fits besides what is used, as vLLM decides it."""
        if request.request_id in self.deferred:
            return False
        return bool(super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule))

    def check_and_update_cache(self, request: "Request", input_id: int) -> bool:
        """Whether the item is cached, which then counts as used by the request."""
        is_hit = self._refer_to(request, input_id)
        self.lookups += 1
        self.hits += is_hit
        return is_hit

    def _refer_to(self, request: "Request", input_id: int) -> bool:
        return bool(super().check_and_update_cache(request, input_id))

    def report_to(self, residency: DeviceResidency) -> None:
        """From now on `residency` asks this manager, and hears of its resets. Before the first request."""
        residency.bind(self)
        self._residency = residency

    def reset(self) -> None:
        """Forget everything, as vLLM asks after a weight update, and report it."""
        super().reset()
        if self._residency is not None:
            self._residency.was_reset()

    def forget(self, mm_hash: str) -> None:
        """Unlist an item that was allocated in this pass and whose encoding was taken back by a preemption."""
        references = self.cached.pop(mm_hash, None)
        if references is None:
            return
        slots = self._slots_of(mm_hash)
        del self.num_embeds_by_hash[mm_hash]
        self.num_free_slots += slots
        if self.freeable.pop(mm_hash, None) is None:
            self.num_freeable_slots += slots
        # The device holds it all the same if it was evicted and allocated again in this pass: that kept its tensor.
        self.freed.append(mm_hash)
        for request_id in references:
            logger.warning("Request %s refers to encoder item %s, whose encoding was taken back", request_id, mm_hash)

    def _slots_of(self, mm_hash: str) -> int:
        """What a cached item counts for in the capacity."""
        return self.num_embeds_by_hash[mm_hash]

    def _report_as_configured(self, vllm_config: "VllmConfig") -> None:
        """Report to the residency whose token is in the manager's configuration, if there is one."""
        config: Any = manager_config(vllm_config)
        residency = _residencies.get(config.manager_config.get(TOKEN_KEY, "")) if config is not None else None
        if residency is not None:
            self.report_to(residency)


def install_reporting_manager(vllm_config: "VllmConfig", residency: DeviceResidency) -> bool:
    """Have the scheduler that is being built use a manager that reports to `residency`.

    A class that the user has named is kept, and reports if it is one of ours. False, and nothing changed, where vLLM
    takes no manager class (0.24) or the user's cannot report. Raises what vLLM would for a name that leads nowhere.
    """
    config: Any = manager_config(vllm_config)
    if config is None:
        return False
    named = config.get_encoder_cache_manager_obj()
    if named is None:
        config.encoder_cache_manager_cls = f"{__name__}.{ReportingEncoderCacheManager.__name__}"
    elif not (isinstance(named, type) and issubclass(named, ReportingEncoderCacheManager)):
        return False
    token = uuid.uuid4().hex
    _residencies[token] = residency
    config.manager_config = {**config.manager_config, TOKEN_KEY: token}
    return True
