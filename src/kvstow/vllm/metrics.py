"""kvstow's metrics on their way through vLLM, to its log and its ``/metrics``.

No error leaves this module, neither of the metrics nor of the Prometheus client: vLLM calls it
while it streams answers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstow.metrics import METRICS, OTHER, MetricSpec, merge, split_series

logger = logging.getLogger("kvstow")

Function = TypeVar("Function", bound=Callable[..., Any])

KINDS: Final = (("counters", "counter"), ("gauges", "gauge"), ("histograms", "histogram"))
HOST_TIER = "memory"


@functools.cache
def _log_once(what: str) -> None:
    """Logs the exception that is being handled, once for each ``what``."""
    logger.exception("%s failed; metrics of kvstow may be wrong or missing from now on", what)


def contained(fallback: object) -> Callable[[Function], Function]:
    """Makes a function return ``fallback`` where it would raise."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                _log_once(function.__qualname__)
                return fallback

        return cast(Function, call)

    return wrap


class KVStowStats(KVConnectorStats):
    """Changes since the last report: a snapshot of ``kvstow.metrics``.

    VLLM sends ``data`` between processes.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self._merge(other)
        return self

    @contained(None)
    def _merge(self, other: KVConnectorStats) -> None:
        self.data = merge(self.data, other.data)

    def reduce(self) -> dict[str, int | float]:
        """Returns counts, gauges and means of histograms, for vLLM's periodic log line."""
        return _reduced(self.data)


@contained({})
def _reduced(data: dict[str, Any]) -> dict[str, int | float]:
    reduced: dict[str, int | float] = {}
    for part in ("counters", "gauges"):
        for series, value in data.get(part, {}).items():
            reduced[_shown(series)] = round(value, 3)
    for series, cells in data.get("histograms", {}).items():
        count = sum(cell[1] for cell in cells)
        total = sum(cell[2] for cell in cells)
        reduced[f"{_shown(series)} mean"] = round(total / max(1, count), 6)
    return reduced


def _shown(series: str) -> str:
    name, values = split_series(series)
    return f"{name}{list(values)}".replace("'", "") if values else name


_collectors: list[Any] = []  # of the last exporter in this process


class KVStowPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the table, named ``kvstow_…``, with vLLM's own labels first.

    They use the classes that vLLM hands over, so that they work with several API servers and with
    Ray.
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
        self._families: dict[str, Any] = {}
        self._bound: dict[tuple[int, str], Any] = {}
        for name, spec in METRICS.items():
            self._register(name, spec)

    @contained(None)
    def _register(self, name: str, spec: MetricSpec) -> None:
        """Registers one metric.

        Series whose labels are known in advance are there, as 0, from the first scrape on.
        """
        classes = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        more: dict[str, Any] = {}
        if spec.kind == "gauge":
            more = {"multiprocess_mode": "mostrecent"}
        elif spec.kind == "histogram":
            more = {"buckets": spec.buckets}
        family = classes[spec.kind](
            name=spec.exported(name),
            documentation=spec.help,
            labelnames=[*self._labelnames, *spec.labels],
            **more,
        )
        _collectors.append(family)
        self._families[name] = family
        for engine in self.per_engine_labelvalues:
            if spec.labels == ("tier",):
                self._metric(engine, f"{name}|{HOST_TIER}")
            elif not spec.labels:
                self._metric(engine, name)

    def _metric(self, engine: int, series: str) -> Any | None:
        """Returns the metric of one series, or None if the series isn't in the table."""
        bound = self._bound.get((engine, series))
        if bound is None:
            name, values = split_series(series)
            labels = self.per_engine_labelvalues.get(engine)
            family = self._families.get(name)
            if labels is None or family is None or len(values) != len(METRICS[name].labels):
                return None
            bound = family.labels(*labels, *(value or OTHER for value in values))
            self._bound[engine, series] = bound
        return bound

    @contained(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for part, kind in KINDS:
            for series, value in (transfer_stats_data.get(part) or {}).items():
                self._observe_series(engine_idx, kind, series, value)

    @contained(None)
    def _observe_series(self, engine: int, kind: str, series: str, value: Any) -> None:
        metric = self._metric(engine, series)
        spec = METRICS.get(split_series(series)[0])
        if metric is None or spec is None or spec.kind != kind:
            return
        if kind == "histogram":
            _observe_cells(metric, spec.buckets, value)
        elif not _is_amount(value):
            return
        elif kind == "counter":
            metric.inc(value)
        else:
            metric.set(value)


def _observe_cells(metric: Any, buckets: tuple[float, ...], cells: Any) -> None:
    """Adds each bucket's observations to a histogram, every one as the bucket's mean.

    So counts and sum come out right through the client's public interface.
    """
    for bucket, count, total in cells:
        valid = _is_amount(count) and _is_amount(total) and 0 <= bucket <= len(buckets)
        if not valid or not count:
            continue
        low = math.nextafter(buckets[bucket - 1], math.inf) if bucket else 0.0
        high = buckets[bucket] if bucket < len(buckets) else math.inf
        mean = min(max(total / count, low), high)  # rounding must not move it to a neighbour
        for _ in range(int(count)):
            metric.observe(mean)


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _unregister_previous() -> None:
    """Removes the metrics of an engine that ran in this process before.

    VLLM does the same with its own.
    """
    while _collectors:
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(_collectors.pop())
