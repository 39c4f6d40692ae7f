# SPDX-License-Identifier: Apache-2.0
"""What stands on a real server's `/metrics`, against what was asked of it and what its encoder did."""

from __future__ import annotations

import pytest

from connector.metrics import METRICS
from tests.e2e.scenes import BLOCK_ITEMS, ITEMS, InBlocks, Restarted, Scrape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DEVICE = "vllm_neuron:device_encoder_cache_"
SCHEDULER = "vllm_neuron:scheduler_encoder_cache_"
TIER = "vllm:ec_tier_"


def grown(before: Scrape, after: Scrape, name: str, label: str = "") -> float:
    return after.get((f"{name}_total", label), 0.0) - before.get((f"{name}_total", label), 0.0)


@pytest.mark.parametrize(
    ("before", "after", "asked", "hits", "misses", "avoided"),
    [
        ("start", "cold", ITEMS + 1, 0, ITEMS + 1, 0),
        ("cold", "device_hit", 1, 1, 0, 0),
        ("device_hit", "evicted", 3, 0, 0, 3),
        ("second start", "restarted", 4, 0, 0, 4),
    ],
)
def test_counts_are_those_of_the_seeds_table(
    restarted: Restarted, before: str, after: str, asked: int, hits: int, misses: int, avoided: int
) -> None:
    first, then = restarted.scrapes[before], restarted.scrapes[after]
    assert grown(first, then, f"{SCHEDULER}queries") == asked
    assert grown(first, then, f"{SCHEDULER}hits") == hits
    assert grown(first, then, f"{DEVICE}queries") == misses
    assert grown(first, then, f"{DEVICE}misses") == misses
    assert grown(first, then, f"{TIER}encoder_runs") == misses
    assert grown(first, then, f"{TIER}encoder_runs_avoided") == avoided


def test_after_a_restart_the_lower_tier_served(restarted: Restarted) -> None:
    first, then = restarted.scrapes["second start"], restarted.scrapes["restarted"]
    assert grown(first, then, f"{TIER}hits", "lower") == 4
    assert grown(first, then, f"{TIER}restores", "hit") == 4
    assert then[f"{TIER}entries", "disk"] >= ITEMS + 1 - 3  # three were damaged between the two servers


def test_every_metric_stands_there_from_the_first_report_on(in_blocks: InBlocks) -> None:
    shown = {name for name, _ in in_blocks.scrapes[-1]}
    missing = {metric.exposed_name for metric in METRICS} - shown
    assert missing == {f"{TIER}faults_total"}, "which stands there once there is a fault"


def test_blocks_add_up_in_every_scrape(in_blocks: InBlocks) -> None:
    usable = 16
    for seen in in_blocks.scrapes:
        states = [seen[f"{DEVICE}{state}_blocks", ""] for state in ("active", "free", "held")]
        assert sum(states) == usable
        assert [seen[f"{TIER}device_{state}_blocks", "0"] for state in ("active", "free", "held")] == states
        assert 0 < seen[f"{DEVICE}active_real_tokens", ""] <= states[0] * 64


def test_device_counters_move_with_the_working_set(in_blocks: InBlocks) -> None:
    first, last = in_blocks.scrapes[0], in_blocks.scrapes[-1]
    asked = len(in_blocks.answers)
    assert last[f"{DEVICE}misses_total", ""] - first[f"{DEVICE}misses_total", ""] == BLOCK_ITEMS - 1
    hits = grown(first, last, f"{SCHEDULER}hits")
    assert grown(first, last, f"{SCHEDULER}queries") == asked - 1
    assert grown(first, last, f"{TIER}encoder_runs_avoided") == asked - BLOCK_ITEMS - hits
    # Every item takes four blocks; what came and is not there any more was evicted.
    came = BLOCK_ITEMS + last[f"{TIER}encoder_runs_avoided_total", ""]
    evicted_items = last[f"{DEVICE}evictions_total", ""] / 4
    assert came - 4 <= evicted_items <= came
