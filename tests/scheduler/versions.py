# SPDX-License-Identifier: Apache-2.0
"""What the vLLM under test lacks, as reasons to skip a test of just that. vLLM 0.24 lacks all of it, 0.32 nothing."""

import pkgutil

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from connector.cache_manager import ReportingEncoderCacheManager
from connector.vllm_neuron import NeuronAsyncScheduler, NeuronScheduler
from connector.vllm_versions import announces_running_requests

__all__ = ["NAMES_MANAGERS", "asks_for_later_turns", "needs_named_managers", "needs_size_checks", "scheduler_class"]

NAMES_MANAGERS = "ec_manager_config" in VllmConfig.__dataclass_fields__
"""Whether vLLM takes the class of its encoder cache manager by name."""

needs_named_managers = pytest.mark.skipif(
    not NAMES_MANAGERS, reason="this vLLM has no --ec-manager-config to name an encoder cache manager in"
)


needs_size_checks = pytest.mark.skipif(
    not hasattr(Scheduler, "_reject_on_encoder_cache_embed_mismatch"),
    reason="this vLLM's scheduler takes an item on the device for another of another size under the same client's id",
)


asks_for_later_turns = pytest.mark.skipif(
    not announces_running_requests(),
    reason="this vLLM asks the connector nothing for the later turns of a streaming session: their items are encoded",
)


def scheduler_class(asynchronous: bool, manager: str | None) -> type[Scheduler]:
    """The scheduler that vLLM has; where it takes no manager by name, with the mixin of ours that puts one in.

    None asks for the one that reports, as the connector does where it can. A manager of vLLM's own is what an older
    scheduler has without the mixin.
    """
    plain: type[Scheduler] = AsyncScheduler if asynchronous else Scheduler
    chosen = ReportingEncoderCacheManager if manager is None else pkgutil.resolve_name(manager)
    if NAMES_MANAGERS or not issubclass(chosen, ReportingEncoderCacheManager):
        return plain
    base = NeuronAsyncScheduler if asynchronous else NeuronScheduler
    return type(base.__name__, (base,), {"manager_class": chosen})
