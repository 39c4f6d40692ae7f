# SPDX-License-Identifier: Apache-2.0
"""Counters only ever grow, whatever happens between two snapshots: Prometheus takes a fall for a new process."""

from connector.metrics import METRICS
from storage_tiers.transfer_board import RankGauge
from tests.scheduler.engine_loop import EngineLoop, EngineOptions
from tests.scheduler.items import Image
from tests.scheduler.lower_tiers import WatchedTier

COUNTERS = [metric.name for metric in METRICS if metric.kind == "counter"]


def test_counters_only_grow() -> None:
    pictures = [Image(f"picture-{number}", 16) for number in range(6)]
    with EngineLoop(EngineOptions(device_rows=32), [WatchedTier()]) as engine:
        before = engine.side._source.snapshot()
        for number, picture in enumerate([*pictures, *pictures, *pictures[:4]]):
            engine.runners[0].connector._worker._attached.board.set_gauge(  # type: ignore[union-attr]
                RankGauge.ENCODE_SECONDS_PER_TOKEN, 1.0 / (1 + number)
            )
            if number == len(pictures):
                engine.drop_from_pool(*pictures)
            engine.add(f"{number}", [picture])
            while engine.scheduler.has_requests():
                engine.step()
                now = engine.side._source.snapshot()
                fallen = [
                    (name, label)
                    for name in COUNTERS
                    for label, value in before.get(name, {}).items()
                    if now[name][label] < value
                ]
                assert not fallen
                before = now
        assert before["vllm:ec_tier_hits"]["lower"] == len(pictures)
        assert before["vllm:ec_tier_hits"]["pool"] == 4
        assert before["vllm:ec_tier_encoder_seconds_avoided"][""] > 0
