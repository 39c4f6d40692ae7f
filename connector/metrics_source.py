# SPDX-License-Identifier: Apache-2.0
"""Collects a snapshot of every metric from the parts that count: scheduler's side, tiers, and the ranks' gauges.

Reads only. Which metrics there are is `metrics`' business, and where a snapshot goes, `prom_metrics`'.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from connector.cache_manager import DeviceResidency
from connector.metrics import DEVICE, SCHEDULER, TIER, Snapshot, tier_figures, total
from connector.transfer_ledger import TransferLedger
from storage_tiers.hierarchy import TierHierarchy
from storage_tiers.transfer_board import RankGauge, TransferBoard, unpack_blocks

__all__ = ["MetricsSource", "ReportPacer"]

LEAST_SECONDS = 1.0
"""A step in which nothing happened to the cache reports no more often than this."""


@dataclass(slots=True)
class MetricsSource:
    """Where the figures are. Step thread only."""

    counts: Callable[[], Mapping[str, int]]
    """Totals since start by name, of the scheduler's side and everything below it."""
    hierarchy: TierHierarchy
    ledger: TransferLedger
    board: TransferBoard
    residency: DeviceResidency
    _seconds_avoided: float = 0.0

    def note_avoided(self, num_tokens: int) -> None:
        """An item of so many tokens is loaded instead of being encoded: at the encoder's pace as it is now."""
        self._seconds_avoided += num_tokens * self.board.gauge(0, RankGauge.ENCODE_SECONDS_PER_TOKEN)

    def snapshot(self) -> Snapshot:
        """Every metric as of now: 18 µs, measured with one rank and few faults."""
        snapshot = tier_figures(self.counts())
        runs = snapshot[f"{TIER}encoder_runs"][""]
        lookups, hits = self.residency.lookups
        snapshot |= {
            f"{SCHEDULER}queries": {"": lookups},
            f"{SCHEDULER}hits": {"": hits},
            f"{DEVICE}queries": {"": runs * self.board.num_ranks},
            f"{DEVICE}misses": {"": runs * self.board.num_ranks},
            f"{TIER}faults": {
                f"{tier}/{kind}": count for (tier, kind), count in self.hierarchy.faults.counts().items()
            },
            f"{TIER}queued_copies": {"": self.ledger.num_outstanding},
            f"{TIER}queued_writes": {"": self.hierarchy.pending_writes},
            f"{TIER}encoder_seconds_avoided": {"": self._seconds_avoided},
            **self._of_tiers(),
            **self._of_ranks(),
        }
        return snapshot

    def _of_tiers(self) -> Snapshot:
        usage = self.hierarchy.usage()
        return {
            f"{TIER}entries": {tier: each.entries for tier, each in usage.items()},
            f"{TIER}used_bytes": {tier: each.used_bytes for tier, each in usage.items()},
            f"{TIER}capacity_bytes": {tier: each.capacity_bytes for tier, each in usage.items()},
        }

    def _of_ranks(self) -> Snapshot:
        def gauge(which: RankGauge) -> list[float]:
            return [self.board.gauge(rank, which) for rank in range(self.board.num_ranks)]

        blocks = [unpack_blocks(packed) for packed in gauge(RankGauge.DEVICE_BLOCKS)]
        active = [each.active for each in blocks]
        held = [each.held for each in blocks]
        free = [
            max(0, int(usable) - each.active - each.held)
            for usable, each in zip(gauge(RankGauge.DEVICE_BLOCKS_TOTAL), blocks, strict=True)
        ]
        return {
            f"{DEVICE}evictions": total(gauge(RankGauge.EVICTED_BLOCKS)),
            f"{DEVICE}active_blocks": total(active),
            f"{DEVICE}free_blocks": total(free),
            f"{DEVICE}held_blocks": total(held),
            f"{DEVICE}active_real_tokens": total(gauge(RankGauge.DEVICE_REAL_TOKENS)),
            f"{TIER}device_active_blocks": _by_rank(active),
            f"{TIER}device_free_blocks": _by_rank(free),
            f"{TIER}device_held_blocks": _by_rank(held),
            f"{TIER}saved_bytes": total(gauge(RankGauge.SAVED_BYTES)),
            f"{TIER}loaded_bytes": total(gauge(RankGauge.LOADED_BYTES)),
            f"{TIER}load_seconds": total(gauge(RankGauge.LOAD_SECONDS)),
        }


class ReportPacer:
    """Says when a step's figures are worth sending: when something has happened, and now and then. Step thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._due = 0.0
        self._activity = -1

    def is_due(self, activity: int) -> bool:
        """Whether to report; `activity` is any number that grows when something happens."""
        now = self._clock()
        if activity == self._activity and now < self._due:
            return False
        self._activity, self._due = activity, now + LEAST_SECONDS
        return True


def _by_rank(values: list[int]) -> dict[str, float]:
    return {str(rank): float(value) for rank, value in enumerate(values)}
