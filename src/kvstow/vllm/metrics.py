"""kvstow's metrics on their way through vLLM: from scheduler and workers to its log and its ``/metrics``."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstow.metrics import METRICS, OTHER, MetricSpec, merge, split_series

HOST_TIER = "memory"


class KVStowStats(KVConnectorStats):
    """What changed since the last report: a snapshot of ``kvstow.metrics``. vLLM sends ``data`` between processes."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line: counts of the interval, gauges as they are, the mean of histograms."""
        reduced: dict[str, int | float] = {}
        for part in ("counters", "gauges"):
            for series, value in self.data.get(part, {}).items():
                reduced[_shown(series)] = round(value, 3)
        for series, cells in self.data.get("histograms", {}).items():
            count = sum(cell[1] for cell in cells)
            reduced[f"{_shown(series)} mean"] = round(
                sum(cell[2] for cell in cells) / max(1, count), 6
            )
        return reduced


def _shown(series: str) -> str:
    name, values = split_series(series)
    return f"{name}{list(values)}".replace("'", "") if values else name


class KVStowPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the table, named ``kvstow_…``, with vLLM's own labels first.

    They go through the classes that vLLM hands over, so that they work with several API servers and with Ray.
    ``observe`` never raises: it runs while a request's answer is streamed.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_previous()
        self._families = {
            name: self._family(name, spec, labelnames) for name, spec in METRICS.items()
        }
        self._bound: dict[tuple[int, str], Any] = {}
        for engine in (
            per_engine_labelvalues
        ):  # what can be known in advance is there, as 0, from the first scrape on
            for name, spec in METRICS.items():
                if spec.labels == ("tier",):
                    self._metric(engine, f"{name}|{HOST_TIER}")
                elif not spec.labels:
                    self._metric(engine, name)

    def _family(self, name: str, spec: MetricSpec, labelnames: list[str]) -> Any:
        kinds = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        more: dict[str, Any] = {}
        if spec.kind == "gauge":
            more = {"multiprocess_mode": "mostrecent"}
        elif spec.kind == "histogram":
            more = {"buckets": spec.buckets}
        return kinds[spec.kind](
            name=spec.exported(name),
            documentation=spec.help,
            labelnames=[*labelnames, *spec.labels],
            **more,
        )

    def _metric(self, engine: int, series: str) -> Any | None:
        """The metric of one series, None for one that isn't in the table."""
        bound = self._bound.get((engine, series))
        if bound is None:
            name, values = split_series(series)
            labels = self.per_engine_labelvalues.get(engine)
            if labels is None or name not in METRICS or len(values) != len(METRICS[name].labels):
                return None
            bound = self._families[name].labels(*labels, *(value or OTHER for value in values))
            self._bound[engine, series] = bound
        return bound

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for part, kind in (
            ("counters", "counter"),
            ("gauges", "gauge"),
            ("histograms", "histogram"),
        ):
            for series, value in (transfer_stats_data.get(part) or {}).items():
                metric = self._metric(engine_idx, series)
                spec = METRICS.get(split_series(series)[0])
                if metric is None or spec is None or spec.kind != kind:
                    continue
                if kind == "histogram":
                    _observe_cells(metric, spec.buckets, value)
                elif _is_amount(value):
                    metric.inc(value) if kind == "counter" else metric.set(value)


def _observe_cells(metric: Any, buckets: tuple[float, ...], cells: Any) -> None:
    """Put a bucket's observations into the histogram: as often as there were, each the bucket's mean, so that counts
    and sum come out right through the public interface alone."""
    for bucket, count, total in cells:
        if (
            not (_is_amount(count) and _is_amount(total) and 0 <= bucket <= len(buckets))
            or not count
        ):
            continue
        low = math.nextafter(buckets[bucket - 1], math.inf) if bucket else 0.0
        high = buckets[bucket] if bucket < len(buckets) else math.inf
        mean = min(max(total / count, low), high)  # rounding must not move it to a neighbour
        for _ in range(int(count)):
            metric.observe(mean)


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _unregister_previous() -> None:
    """A second engine in one process registers the same names; vLLM does the same for its own."""
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, Counter | Gauge | Histogram) and collector._name.startswith(
            "kvstow_"
        ):
            REGISTRY.unregister(collector)
