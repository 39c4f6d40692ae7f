# SPDX-License-Identifier: Apache-2.0
"""What is measured, under which name and in which unit: one catalogue for `/metrics`, the documentation and dashboards.

Names and meanings, and one snapshot of figures that others have counted. Nothing of vLLM or Prometheus may enter: how a
snapshot gets to `/metrics` is `prom_metrics`'.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric", "Snapshot", "reference", "tier_figures", "total"]

Snapshot = dict[str, dict[str, float]]
"""Per metric, a value by its own label's value ("" without one). Counters are totals since the engine's start."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series, or one per value of its label."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str | None = None
    """A label besides vLLM's own, which name model and engine."""

    @property
    def exposed_name(self) -> str:
        """As it stands on `/metrics`, where counters end in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


DEVICE = "vllm_neuron:device_encoder_cache_"
SCHEDULER = "vllm_neuron:scheduler_encoder_cache_"
TIER = "vllm:ec_tier_"

METRICS: tuple[Metric, ...] = (
    Metric(f"{SCHEDULER}queries", "counter", "Items that the scheduler looked up among those on the device."),
    Metric(f"{SCHEDULER}hits", "counter", "Of these, items that the device held."),
    Metric(f"{DEVICE}queries", "counter", "Items that were given to the encoder, added up over ranks."),
    Metric(f"{DEVICE}misses", "counter", "Of these, items that were encoded, added up over ranks."),
    Metric(f"{DEVICE}evictions", "counter", "Device blocks freed by evictions, added up over ranks; 0 without blocks."),
    Metric(f"{DEVICE}active_blocks", "gauge", "Device blocks that items own, added up over ranks."),
    Metric(f"{DEVICE}free_blocks", "gauge", "Device blocks that can be handed out, added up over ranks."),
    Metric(f"{DEVICE}held_blocks", "gauge", "Device blocks of freed items that are still read, added up over ranks."),
    Metric(f"{DEVICE}active_real_tokens", "gauge", "Tokens in active blocks, pads not counted, added up over ranks."),
    Metric(f"{TIER}device_active_blocks", "gauge", "Device blocks that items own.", "rank"),
    Metric(f"{TIER}device_free_blocks", "gauge", "Device blocks that can be handed out.", "rank"),
    Metric(f"{TIER}device_held_blocks", "gauge", "Device blocks of freed items that are still read.", "rank"),
    Metric(f"{TIER}encoder_runs", "counter", "Items that were encoded, each once, however many ranks took part."),
    Metric(f"{TIER}encoder_runs_avoided", "counter", "Items that were loaded instead of being encoded."),
    Metric(
        f"{TIER}encoder_seconds_avoided",
        "counter",
        "Seconds that those would have taken the encoder, by its mean so far. Measured on a CPU only; 0 elsewhere.",
    ),
    Metric(f"{TIER}hits", "counter", "Items served by a tier: pool, without a restore; lower, after one.", "tier"),
    Metric(f"{TIER}misses", "counter", "Items that no tier could serve, by reason.", "reason"),
    Metric(f"{TIER}restores", "counter", "Restores from lower tiers into the pool, by outcome.", "outcome"),
    Metric(f"{TIER}saves", "counter", "Items that were to be kept, by outcome.", "outcome"),
    Metric(f"{TIER}evictions", "counter", "Items that left the pool; lost: without a copy in a lower tier.", "kind"),
    Metric(f"{TIER}faults", "counter", "Faults by tier and kind, as `tier/kind`; each was served as a miss.", "kind"),
    Metric(f"{TIER}staging_waits", "counter", "Requests that waited for bytes."),
    Metric(f"{TIER}staging_deadlines_missed", "counter", "Requests that waited in vain and had their items encoded."),
    Metric(f"{TIER}saved_bytes", "counter", "Bytes copied from the device into the pool."),
    Metric(f"{TIER}loaded_bytes", "counter", "Bytes copied from the pool onto devices, added up over ranks."),
    Metric(f"{TIER}load_seconds", "counter", "Seconds that step threads spent on these, added up over ranks."),
    Metric(f"{TIER}entries", "gauge", "Items that a tier holds.", "tier"),
    Metric(f"{TIER}used_bytes", "gauge", "Bytes that a tier holds, padding included.", "tier"),
    Metric(f"{TIER}capacity_bytes", "gauge", "Bytes that a tier may hold.", "tier"),
    Metric(f"{TIER}queued_copies", "gauge", "Copies between device and pool that have not ended, dirty ones too."),
    Metric(f"{TIER}queued_writes", "gauge", "Items that lower tiers have yet to take."),
)
"""Every metric there is, in the order of the documentation."""


def reference() -> str:
    """The table of `docs/metrics.md`, in Markdown. `python -m connector.metrics` prints it."""
    rows = ["| metric | kind | label | meaning |", "|---|---|---|---|"]
    rows += [f"| `{m.exposed_name}` | {m.kind} | {m.label or ''} | {m.help} |" for m in METRICS]
    return "\n".join(rows) + "\n"


def tier_figures(counts: Mapping[str, int]) -> Snapshot:
    """What the counts of admission, hierarchy and ledger say, by metric."""
    # Both are counted where a load is planned: a difference between counts of different moments could fall.
    loads, restored = counts.get("load", 0), counts.get("load_restored", 0)
    return {
        f"{TIER}encoder_runs": _one(counts.get("encode", 0) - counts.get("encode_taken_back", 0)),
        f"{TIER}encoder_runs_avoided": _one(loads),
        f"{TIER}hits": {"pool": loads - restored, "lower": restored},
        f"{TIER}misses": _misses(counts),
        f"{TIER}restores": _starting_with("stage_", counts),
        f"{TIER}saves": {
            "saved": counts.get("save", 0),
            "failed": counts.get("save_failed", 0) + counts.get("save_copy_failed", 0),
            "written": counts.get("write", 0),
            "write_failed": counts.get("write_failed", 0),
            "no_transfer_slot": counts.get("no_transfer_slot", 0),
            "width_unknown": counts.get("save_without_width", 0),
        },
        f"{TIER}evictions": {
            "clean": counts.get("pool_eviction", 0) - counts.get("pool_eviction_lost", 0),
            "lost": counts.get("pool_eviction_lost", 0),
        },
        f"{TIER}staging_waits": _one(counts.get("staging_wait", 0)),
        f"{TIER}staging_deadlines_missed": _one(counts.get("staging_deadline_missed", 0)),
    }


def _misses(counts: Mapping[str, int]) -> dict[str, float]:
    """Claims that were refused at once, and restores that found nothing or failed."""
    restores = _starting_with("stage_", counts)
    return _starting_with("miss_", counts) | {
        outcome: value for outcome, value in restores.items() if outcome not in ("hit", "abandoned")
    }


def _one(value: float) -> dict[str, float]:
    return {"": value}


def _starting_with(prefix: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in counts.items() if name.startswith(prefix)}


def total(values: Iterable[float]) -> dict[str, float]:
    """The sum, as the value of a metric without a label of its own."""
    return _one(sum(values))


if __name__ == "__main__":
    sys.stdout.write(reference())
