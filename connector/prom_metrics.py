# SPDX-License-Identifier: Apache-2.0
"""The way of a snapshot to vLLM's `/metrics`: the stats object that the engine sends, and the metrics it is written to.

Two processes meet here by vLLM's own hooks: the engine core makes `EncoderCacheStats`, the API server observes them.
What is measured is decided in `metrics`.
"""

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from connector.metrics import METRICS, Metric, Snapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EncoderCachePromMetrics", "EncoderCacheStats"]

LOGGED = {
    "vllm:ec_tier_encoder_runs": "encoder runs",
    "vllm:ec_tier_encoder_runs_avoided": "avoided",
    "vllm:ec_tier_saved_bytes": "bytes saved",
    "vllm:ec_tier_loaded_bytes": "bytes loaded",
}
"""What vLLM's periodic line says of an interval. The connector's own line has every count."""


class EncoderCacheStats(ECConnectorStats):  # type: ignore[misc, unused-ignore]
    """A snapshot, as `data`. Counters are totals, so that a lost one loses nothing: the newest says it all."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> "EncoderCacheStats":
        """The newer of the two, remembering where the interval began."""
        begins = self.data.get("begins", self.data)
        return EncoderCacheStats(data={**other.data, "begins": begins})

    def reduce(self) -> dict[str, int | float]:
        """What happened between the first snapshot of the interval and the last."""
        begins = self.data.get("begins", {})
        return {
            text: round(sum(self.data.get(name, {}).values()) - sum(begins.get(name, {}).values()), 3)
            for name, text in LOGGED.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class EncoderCachePromMetrics(ECConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Every metric of the catalogue, for each engine behind this API server. Its logging thread only."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Registers them; called once by vLLM."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = {"counter": metric_types[Counter], "gauge": metric_types[Gauge]}
        self._families = {
            metric.name: make[metric.kind](
                name=metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *([metric.label] if metric.label is not None else [])],
                **({"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}),
            )
            for metric in METRICS
        }
        self._children: dict[tuple[str, int, str], Any] = {}
        self._totals: dict[tuple[str, int, str], float] = {}
        for engine in per_engine_labelvalues:
            for metric in METRICS:
                if metric.label is None:  # there from the start, at 0
                    self._child(metric, engine, "")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Write a snapshot of engine number `engine_idx`."""
        snapshot: Snapshot = transfer_stats_data
        for metric in METRICS:
            for value_of_label, value in snapshot.get(metric.name, {}).items():
                child = self._child(metric, engine_idx, value_of_label)
                if metric.kind == "gauge":
                    child.set(value)
                    continue
                key = (metric.name, engine_idx, value_of_label)
                before = self._totals.get(key, 0.0)
                # A total that has fallen is that of a new engine process under the same number.
                child.inc(value - before if value >= before else value)
                self._totals[key] = value

    def _child(self, metric: Metric, engine: int, value_of_label: str) -> Any:
        key = (metric.name, engine, value_of_label)
        child = self._children.get(key)
        if child is None:
            own = [value_of_label] if metric.label is not None else []
            child = self._families[metric.name].labels(*self.per_engine_labelvalues[engine], *own)
            self._children[key] = child
        return child
