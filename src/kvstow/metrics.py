"""The table of all metrics, and the object that collects them.

A ``Metrics`` is passed to each object that counts and is called from its owner's thread only: it
holds no lock. Once a step the owner takes the changes since the last step, a small plain dict that
travels to the exporter. An idle engine has no changes, so no metrics move.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Snapshot = dict[str, dict[str, Any]]
"""``{"counters": {series: increment}, "gauges": {series: value}, "histograms": {series: cells}}``

A cell is ``[bucket, count, sum]``. A series is ``name|label value|...`` in the order of the table's
labels. Only dicts, lists, strings and numbers.
"""

SEPARATOR: Final = "|"
OTHER: Final = "other"
MAX_SERIES: Final = 64  # of one metric: it bounds the exporter's memory, far above what tiers need

SECONDS_BUCKETS: Final = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)
BYTES_BUCKETS: Final = tuple(float(1 << n) for n in range(16, 35, 2))  # 64 KiB to 16 GiB

_INFINITY: Final = float("inf")
_LABEL_VALUE: Final = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    ``buckets`` are a histogram's upper bounds, ascending, without the infinite one.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def exported(self, name: str) -> str:
        """Returns the exported name: ``kvstow_<name>``, for counters with ``_total``."""
        return f"kvstow_{name}_total" if self.kind == "counter" else f"kvstow_{name}"


def _counter(help_: str, *labels: str) -> MetricSpec:
    return MetricSpec("counter", help_, labels)


def _gauge(help_: str, *labels: str) -> MetricSpec:
    return MetricSpec("gauge", help_, labels)


def _histogram(help_: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec("histogram", help_, labels, buckets)


METRICS: Final[Mapping[str, MetricSpec]] = {
    "requested_tokens": _counter(
        "Prompt tokens of requests that asked the cache, the engine's own hits excluded."
    ),
    "hit_tokens": _counter(
        "Prompt tokens restored instead of computed, by the tier they came from.", "tier"
    ),
    "hit_chunks": _counter("Chunks found, by the tier they came from.", "tier"),
    "miss_chunks": _counter("Full chunks asked for and not found in any tier."),
    "stored_chunks": _counter("Chunks written to a tier, where lookups find them.", "tier"),
    "stored_bytes": _counter("Bytes of the chunks written to a tier.", "tier"),
    "stored_raw_bytes": _counter(
        "Bytes of the same chunks before the tier's codec made them smaller.", "tier"
    ),
    "loaded_chunks": _counter("Chunks read from a tier and used.", "tier"),
    "loaded_bytes": _counter("Bytes of the chunks read from a tier and used.", "tier"),
    "evicted_chunks": _counter("Chunks that a tier dropped to make room.", "tier"),
    "refused_chunks": _counter("Chunks that a tier refused, by reason.", "tier", "reason"),
    "failed_chunks": _counter(
        "Chunks whose transfer failed, by reason. Each is a miss, recomputed.", "tier", "reason"
    ),
    "corrupt_chunks": _counter(
        "Chunks that failed their check when read. Each is a miss and is dropped.", "tier"
    ),
    "maintenance_failures": _counter(
        "Times that a tier's background work ended by an unforeseen error and was started again.",
        "tier",
    ),
    "fetch_deadline_exceeded": _counter("Fetches that a request stopped waiting for.", "tier"),
    "fetch_decisions": _counter("Decisions to load or to compute, by tier.", "tier", "decision"),
    "fetch_extensions": _counter(
        "Times that a request went on waiting because its fetch made progress."
    ),
    "waits": _counter("Requests that waited for a fetch."),
    "encode_seconds": _counter(
        "Seconds of worker threads that a tier's codec took to encode chunks.", "tier"
    ),
    "decode_seconds": _counter(
        "Seconds of worker threads that a tier's codec took to decode chunks.", "tier"
    ),
    "store_seconds": _histogram(
        "Seconds to store a batch of chunks in a tier.", SECONDS_BUCKETS, "tier"
    ),
    "load_seconds": _histogram(
        "Seconds to load a batch of chunks from a tier.", SECONDS_BUCKETS, "tier"
    ),
    "store_size_bytes": _histogram(
        "Bytes of a batch of chunks stored in a tier.", BYTES_BUCKETS, "tier"
    ),
    "load_size_bytes": _histogram(
        "Bytes of a batch of chunks loaded from a tier.", BYTES_BUCKETS, "tier"
    ),
    "wait_seconds": _histogram("Seconds that a request waited for a fetch.", SECONDS_BUCKETS),
    "chunk_tokens": _gauge("Tokens of a chunk: what is stored, found and restored together."),
    "prefill_seconds_per_token": _gauge("Seconds to compute a prompt token, as learned."),
    "load_fixed_seconds": _gauge(
        "Seconds that each read of a tier takes whatever its size, as learned.", "tier"
    ),
    "load_seconds_per_byte": _gauge(
        "Seconds that each byte adds to a read, queue included, as learned.", "tier"
    ),
    "pool_used_bytes": _gauge("Bytes of the host pool in use."),
    "pool_capacity_bytes": _gauge("Bytes of the host pool."),
    "pool_leased_slots": _gauge("Slots of the host pool that are pinned by a lease."),
    "direct_used_bytes": _gauge("Bytes of direct storage in use."),
    "direct_capacity_bytes": _gauge("Bytes of direct storage."),
    "direct_leased_slots": _gauge("Slots of direct storage that are pinned by a lease."),
    "direct_engine": _gauge("1 for the engine that direct storage runs on.", "engine"),
    "queued_bytes": _gauge("Bytes waiting to be written to a tier.", "tier"),
    "tier_state": _gauge(
        "A tier's breaker: 0 serving, 1 being probed, 2 open (bypassed, or not written).", "tier"
    ),
    "tier_paths_down": _gauge(
        "Directories of a tier that are out of use, or are not written.", "tier"
    ),
}


def split_series(series: str) -> tuple[str, tuple[str, ...]]:
    """Splits a series into its metric's name and its label values."""
    name, *values = series.split(SEPARATOR)
    return name, tuple(values)


class Metrics:
    """Collects metrics of the table between two calls of ``take``, on one thread.

    An unknown name or label is a programming error (KeyError). A label value that isn't a short
    lower-case word, or beyond ``MAX_SERIES`` of a metric, is counted as ``other``: no user text
    gets into a label. Negative and non-finite amounts are ignored.
    """

    def __init__(self) -> None:
        self._series: dict[object, str] = {}
        self._known: dict[str, set[str]] = {}
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._gauges_taken: dict[str, float] = {}
        self._histograms: dict[str, dict[int, list[float]]] = {}

    def count(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Adds ``value`` to a counter."""
        key = (name, *labels.items()) if labels else name
        series = self._series.get(key) or self._open(key, name, labels, "counter")
        if 0 < value < _INFINITY:
            self._counters[series] = self._counters.get(series, 0) + value

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Sets a gauge."""
        key = (name, *labels.items()) if labels else name
        series = self._series.get(key) or self._open(key, name, labels, "gauge")
        if self._gauges_taken.get(series) == value:
            self._gauges.pop(series, None)
        elif 0 <= value < _INFINITY:
            self._gauges[series] = value

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Adds one observation to a histogram, which keeps each bucket's count and sum."""
        key = (name, *labels.items()) if labels else name
        series = self._series.get(key) or self._open(key, name, labels, "histogram")
        if not 0 <= value < _INFINITY:
            return
        cells = self._histograms.setdefault(series, {})
        cell = cells.setdefault(bisect_left(METRICS[name].buckets, value), [0, 0.0])
        cell[0] += 1
        cell[1] += value

    def take(self) -> Snapshot | None:
        """Returns the increments since the last call, or None if nothing changed."""
        taken: Snapshot = {}
        if self._counters:
            taken["counters"] = self._counters
            self._counters = {}
        if self._gauges:
            taken["gauges"] = self._gauges
            self._gauges_taken.update(self._gauges)
            self._gauges = {}
        if self._histograms:
            taken["histograms"] = {
                series: [[bucket, *cell] for bucket, cell in sorted(cells.items())]
                for series, cells in self._histograms.items()
            }
            self._histograms = {}
        return taken or None

    def _open(self, key: object, name: str, labels: Mapping[str, str], kind: str) -> str:
        """Returns the series of a metric and its label values, and remembers it under ``key``."""
        spec = METRICS[name]
        if spec.kind != kind or labels.keys() != set(spec.labels):
            raise KeyError(
                f"{name} is a {spec.kind} with labels {spec.labels}; used as {kind} with "
                f"{tuple(labels)}"
            )
        values = [
            labels[label] if _LABEL_VALUE.fullmatch(labels[label]) else OTHER
            for label in spec.labels
        ]
        series = SEPARATOR.join((name, *values))
        known = self._known.setdefault(name, set())
        if series not in known and len(known) >= MAX_SERIES:
            return SEPARATOR.join((name, *(OTHER for _ in spec.labels)))
        known.add(series)
        if len(self._series) < MAX_SERIES * len(METRICS):
            self._series[key] = series
        return series


def merge(a: Snapshot, b: Snapshot) -> Snapshot:
    """Returns both snapshots as one: counters and histograms add up, a gauge has ``b``'s value."""
    merged: Snapshot = {}
    counters = dict(a.get("counters", {}))
    for series, value in b.get("counters", {}).items():
        counters[series] = counters.get(series, 0) + value
    gauges = {**a.get("gauges", {}), **b.get("gauges", {})}
    histograms = dict(a.get("histograms", {}))
    for series, cells in b.get("histograms", {}).items():
        histograms[series] = _merge_cells(histograms.get(series, []), cells)
    for part, values in (("counters", counters), ("gauges", gauges), ("histograms", histograms)):
        if values:
            merged[part] = values
    return merged


def _merge_cells(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    by_bucket = {int(bucket): [count, total] for bucket, count, total in a}
    for bucket, count, total in b:
        cell = by_bucket.setdefault(int(bucket), [0, 0.0])
        cell[0] += count
        cell[1] += total
    return [[bucket, *cell] for bucket, cell in sorted(by_bucket.items())]
