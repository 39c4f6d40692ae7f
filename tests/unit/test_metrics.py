# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics, and the way of a snapshot to Prometheus."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from connector.metrics import METRICS, reference, tier_figures
from connector.metrics_source import ReportPacer
from storage_tiers.transfer_board import pack_blocks, unpack_blocks
from tests.engine.server import ROOT

prom = pytest.importorskip("connector.prom_metrics", reason="this vLLM has no statistics of EC connectors (0.24)")

RUNS, HITS, USED = "vllm:ec_tier_encoder_runs", "vllm:ec_tier_hits", "vllm:ec_tier_used_bytes"


class Config:
    ec_transfer_config = None


def metrics_over(registry: CollectorRegistry) -> object:
    def of(kind: type) -> object:
        def make(**arguments: object) -> object:
            return kind(registry=registry, **arguments)

        return make

    types = {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)}
    return prom.EncoderCachePromMetrics(Config(), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def value(registry: CollectorRegistry, name: str, engine: int = 0, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": str(engine), **labels})


def test_counters_grow_by_what_totals_have_grown_and_gauges_are_set() -> None:
    registry = CollectorRegistry()
    metrics = metrics_over(registry)
    assert value(registry, f"{RUNS}_total") == 0
    metrics.observe({RUNS: {"": 3.0}, HITS: {"pool": 1, "lower": 2}, USED: {"pool": 10}}, 0)
    metrics.observe({RUNS: {"": 5.0}, HITS: {"pool": 4, "lower": 2}, USED: {"pool": 7}}, 0)
    metrics.observe({RUNS: {"": 1.0}}, 1)
    assert value(registry, f"{RUNS}_total") == 5
    assert value(registry, f"{RUNS}_total", 1) == 1
    assert value(registry, f"{HITS}_total", tier="pool") == 4
    assert value(registry, f"{HITS}_total", tier="lower") == 2
    assert value(registry, USED, tier="pool") == 7


def test_an_engine_that_starts_again_counts_on() -> None:
    registry = CollectorRegistry()
    metrics = metrics_over(registry)
    for total in (5.0, 2.0, 3.0):
        metrics.observe({RUNS: {"": total}})
    assert value(registry, f"{RUNS}_total") == 5 + 3


def test_an_intervals_line_tells_its_difference() -> None:
    stats = prom.EncoderCacheStats(data={RUNS: {"": 10.0}})
    for runs in (12.0, 17.0):
        stats = stats.aggregate(prom.EncoderCacheStats(data={RUNS: {"": runs}}))
    assert stats.reduce()["encoder runs"] == 7


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.exposed_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"(vllm_neuron:(device|scheduler)_encoder_cache|vllm:ec_tier)_[a-z_]+", metric.name)
        assert metric.help.endswith(".")
    registry = CollectorRegistry()
    metrics_over(registry)
    exposed = generate_latest(registry).decode()
    assert all(f"# TYPE {metric.exposed_name} {metric.kind}\n" in exposed for metric in METRICS)


def test_the_documentation_has_the_table_that_the_code_makes() -> None:
    """If not, `python -m connector.metrics` prints it."""
    assert reference() in (ROOT / "docs" / "metrics.md").read_text()


def test_what_the_counts_say() -> None:
    counts = {
        "load": 5,
        "load_restored": 2,
        "stage_hit": 2,
        "stage_absent": 3,
        "stage_abandoned": 1,
        "miss_lease_limit": 1,
        "encode": 4,
    }
    figures = tier_figures({**counts, "encode_taken_back": 1, "pool_eviction": 6, "pool_eviction_lost": 2})
    assert figures[RUNS] == {"": 3}
    assert figures[HITS] == {"pool": 3, "lower": 2}
    assert figures["vllm:ec_tier_misses"] == {"absent": 3, "lease_limit": 1}
    assert figures["vllm:ec_tier_restores"] == {"hit": 2, "absent": 3, "abandoned": 1}
    assert figures["vllm:ec_tier_evictions"] == {"clean": 4, "lost": 2}


def test_a_step_reports_when_something_happened_or_a_second_has_gone_by() -> None:
    now = 100.0
    pacer = ReportPacer(lambda: now)
    assert [pacer.is_due(activity) for activity in (0, 0, 1, 1)] == [True, False, True, False]
    now = 101.5
    assert [pacer.is_due(1), pacer.is_due(1)] == [True, False]


@pytest.mark.parametrize(("active", "held"), [(0, 0), (5, 0), (0, 7), (2**26 - 1, 2**26 - 1), (1, 3)])
def test_two_counts_in_one_float(active: int, held: int) -> None:
    counts = unpack_blocks(pack_blocks(active, held))
    assert (counts.active, counts.held) == (active, held)


def test_too_many_blocks_for_one_float_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit one gauge"):
        pack_blocks(1 << 26, 0)
