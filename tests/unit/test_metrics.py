"""Metrics: the table, collecting, snapshots, and vLLM's side of the export (skipped where vLLM is not installed)."""

from __future__ import annotations

import ast
import copy
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstow import metrics as metrics_module
from kvstow.metrics import (
    BYTES_BUCKETS,
    MAX_SERIES,
    METRICS,
    SECONDS_BUCKETS,
    Metrics,
    MetricSpec,
    merge,
    split_series,
)

SOURCE = Path(metrics_module.__file__).parent
METHODS = {"count": "counter", "gauge": "gauge", "observe": "histogram"}


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_the_table_is_well_formed(name: str) -> None:
    spec = METRICS[name]
    assert name.isidentifier()
    assert name == name.lower()
    assert not name.endswith("_total")
    assert spec.help.endswith(".")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))
    assert spec.exported(name) == f"kvstow_{name}" + ("_total" if spec.kind == "counter" else "")


def test_n6_everything_that_a_hit_rate_and_tier_use_need_is_there() -> None:
    by_tier = (
        "hit_tokens",
        "hit_chunks",
        "stored_bytes",
        "loaded_bytes",
        "refused_chunks",
        "evicted_chunks",
    )
    assert all("tier" in METRICS[name].labels for name in by_tier)
    assert {"requested_tokens", "miss_chunks", "pool_used_bytes", "pool_capacity_bytes"} <= set(
        METRICS
    )
    for histogram in ("store_seconds", "load_seconds", "store_size_bytes", "load_size_bytes"):
        assert METRICS[histogram].kind == "histogram"


def uses() -> list[tuple[str, str, str, set[str]]]:
    """(where, method, name, labels) of every call in the product that counts under a literal name."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            method = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if method not in METHODS or not node.args:
                continue
            constants = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            names = [value for value in constants if isinstance(value, str)]
            if isinstance(node.args[0], ast.Constant | ast.IfExp):
                labels = {keyword.arg for keyword in node.keywords if keyword.arg}
                found += [(f"{path.name}:{node.lineno}", method, name, labels) for name in names]
    return found


def test_every_use_in_the_product_is_in_the_table() -> None:
    found = [use for use in uses() if use[3] or use[2] in METRICS]  # "abc".count("b") is no use
    assert len(found) > 10
    for where, method, name, labels in found:
        assert name in METRICS, f"{where}: {name} is not in METRICS"
        assert METRICS[name].kind == METHODS[method], f"{where}: {name} is a {METRICS[name].kind}"
        assert labels == set(METRICS[name].labels), (
            f"{where}: {name} has labels {METRICS[name].labels}, not {labels}"
        )


# --- collecting ------------------------------------------------------------------------------------------------------


def test_n1_a_scripted_trace_gives_exact_numbers_by_tier() -> None:
    m = Metrics()
    m.count("hit_chunks", 3, tier="memory")
    m.count("hit_chunks", tier="memory")
    m.count("hit_chunks", 2, tier="disk")
    m.count("requested_tokens", 4096)
    m.count("refused_chunks", 1, tier="memory", reason="full")
    m.count("refused_chunks", 1, reason="full", tier="memory")
    hits = {"hit_chunks|memory": 4, "hit_chunks|disk": 2}
    assert m.take() == {
        "counters": {**hits, "requested_tokens": 4096, "refused_chunks|memory|full": 2}
    }


def test_n2_nothing_moves_while_idle() -> None:
    m = Metrics()
    assert m.take() is None
    m.count("waits")
    m.gauge("pool_used_bytes", 5)
    m.observe("wait_seconds", 0.1)
    assert m.take() is not None
    for _ in range(100):
        m.gauge("pool_used_bytes", 5)  # what it is already
        assert m.take() is None


def test_n2_increments_are_taken_once() -> None:
    m = Metrics()
    m.count("waits", 2)
    assert m.take() == {"counters": {"waits": 2}}
    m.count("waits", 3)
    assert m.take() == {"counters": {"waits": 3}}


def test_a_gauge_that_returns_to_what_was_taken_is_no_change() -> None:
    m = Metrics()
    m.gauge("queued_bytes", 0, tier="disk")
    assert m.take() == {"gauges": {"queued_bytes|disk": 0}}
    m.gauge("queued_bytes", 7, tier="disk")
    m.gauge("queued_bytes", 0, tier="disk")
    assert m.take() is None


@pytest.mark.parametrize("value", [-1, -0.001, float("nan"), float("inf"), float("-inf")])
def test_n3_amounts_that_are_none_are_ignored(value: float) -> None:
    m = Metrics()
    m.count("waits", value)
    m.gauge("pool_used_bytes", value)
    m.observe("wait_seconds", value)
    assert m.take() is None


def test_histograms_are_kept_by_bucket() -> None:
    m = Metrics()
    for value in (0, 0.0002, 0.00021, 0.00021, 99):
        m.observe("load_seconds", value, tier="disk")
    taken = m.take()
    assert taken is not None
    assert taken["histograms"] == {
        "load_seconds|disk": [[0, 2, 0.0002], [1, 2, 0.00042], [len(SECONDS_BUCKETS), 1, 99.0]]
    }


def test_a_snapshot_is_bounded_and_plain() -> None:
    m = Metrics()
    random_ = random.Random(1)
    for _ in range(10_000):
        m.observe("store_size_bytes", random_.random() * 1e11, tier="memory")
        m.count("stored_bytes", random_.random(), tier="memory")
    taken = m.take()
    assert taken is not None
    assert len(taken["histograms"]["store_size_bytes|memory"]) <= len(BYTES_BUCKETS) + 1
    assert sum(cell[1] for cell in taken["histograms"]["store_size_bytes|memory"]) == 10_000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken)) == taken
    assert json.loads(json.dumps(taken)) == taken


@pytest.mark.parametrize("text", ["", "a|b", "A", "redis://:pw@h", "x" * 33, "a b", "é", "user\n"])
def test_no_user_text_becomes_a_label(text: str) -> None:
    m = Metrics()
    m.count("failed_chunks", tier="memory", reason=text)
    assert m.take() == {"counters": {"failed_chunks|memory|other": 1}}


def test_the_number_of_series_is_bounded_and_nothing_is_lost() -> None:
    m = Metrics()
    for i in range(100 * MAX_SERIES):
        m.count("failed_chunks", tier="memory", reason=f"r{i}")
    m.count("failed_chunks", tier="memory", reason="r3")
    taken = m.take()
    assert taken is not None
    assert len(taken["counters"]) <= MAX_SERIES + 1
    assert sum(taken["counters"].values()) == 100 * MAX_SERIES + 1
    assert taken["counters"]["failed_chunks|memory|r3"] == 2
    assert len(m._series) <= MAX_SERIES * len(METRICS)


def test_wrong_names_and_labels_are_errors() -> None:
    m = Metrics()
    for use in (
        lambda: m.count("hits"),
        lambda: m.count("hit_chunks"),
        lambda: m.count("hit_chunks", rank="0"),
        lambda: m.count("waits", tier="memory"),
        lambda: m.gauge("waits", 1),
        lambda: m.count("store_seconds", 1, tier="memory"),
    ):
        with pytest.raises(KeyError):
            use()


# --- merging ---------------------------------------------------------------------------------------------------------


def record(m: Metrics, random_: random.Random) -> None:
    tier = random_.choice(["memory", "disk"])
    match random_.randrange(3):
        case 0:
            m.count("stored_chunks", random_.randrange(5), tier=tier)
        case 1:
            m.observe("load_seconds", random_.choice([0.001, 0.25, 30.0]), tier=tier)
        case 2:
            m.gauge("queued_bytes", random_.randrange(5), tier=tier)


@pytest.mark.parametrize("seed", range(50))
def test_merged_parts_are_the_whole(seed: int) -> None:
    random_ = random.Random(seed)
    whole, parts = Metrics(), Metrics()
    merged: dict[str, Any] = {}
    for _ in range(random_.randrange(200)):
        state = random_.getstate()
        record(whole, random_)
        random_.setstate(state)
        record(parts, random_)
        if random_.random() < 0.1:
            part = parts.take() or {}
            before = copy.deepcopy((merged, part))
            result = merge(merged, part)
            assert (merged, part) == before, "merge changed its arguments"
            merged = result
    merged = merge(merged, parts.take() or {})
    total = whole.take() or {}
    assert merged.get("counters") == total.get("counters")
    assert {
        s: [[b, n] for b, n, _ in cells] for s, cells in merged.get("histograms", {}).items()
    } == {s: [[b, n] for b, n, _ in cells] for s, cells in total.get("histograms", {}).items()}
    assert merged.get("gauges", {}) == total.get("gauges", {})


def test_split_series() -> None:
    assert split_series("waits") == ("waits", ())
    assert split_series("refused_chunks|memory|full") == ("refused_chunks", ("memory", "full"))


# --- through vLLM ----------------------------------------------------------------------------------------------------


class Prom:
    """An exporter for engines 0 and 1 on the real prometheus client, and what its scrape says."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        from kvstow.vllm.metrics import KVStowPromMetrics

        self.registry = REGISTRY
        self.exporter = KVStowPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
            ["model_name", "engine"],
            {0: ["m", "0"], 1: ["m", "1"]},
        )

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            name, {"model_name": "m", "engine": str(engine), **labels}
        )


@pytest.fixture
def prom() -> Prom:
    pytest.importorskip("vllm")
    return Prom()


def test_known_series_are_there_as_zero_from_the_start(prom: Prom) -> None:
    for engine in (0, 1):
        assert prom.value("kvstow_hit_chunks_total", engine, tier="memory") == 0
        assert prom.value("kvstow_requested_tokens_total", engine) == 0
        assert prom.value("kvstow_load_seconds_count", engine, tier="memory") == 0


def test_n1_what_is_observed_is_what_is_scraped(prom: Prom) -> None:
    m = Metrics()
    m.count("hit_chunks", 3, tier="memory")
    m.count("refused_chunks", 2, tier="disk", reason="queue_full")
    m.gauge("pool_used_bytes", 77)
    values = [0.00015, 0.0002, 0.3, 0.3, 0.4, 50.0]
    for value in values:
        m.observe("load_seconds", value, tier="memory")
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(m.take()))
    prom.exporter.observe(snapshot, 1)
    prom.exporter.observe({"counters": {"hit_chunks|memory": 4}}, 1)
    assert prom.value("kvstow_hit_chunks_total", 1, tier="memory") == 7
    assert prom.value("kvstow_refused_chunks_total", 1, tier="disk", reason="queue_full") == 2
    assert prom.value("kvstow_pool_used_bytes", 1) == 77
    assert prom.value("kvstow_load_seconds_count", 1, tier="memory") == len(values)
    assert prom.value("kvstow_load_seconds_sum", 1, tier="memory") == pytest.approx(sum(values))
    for bound in SECONDS_BUCKETS:
        below = sum(value <= bound for value in values)
        assert (
            prom.value("kvstow_load_seconds_bucket", 1, tier="memory", le=repr(bound)) == below
        ), bound
    assert prom.value("kvstow_hit_chunks_total", 0, tier="memory") == 0


@pytest.mark.parametrize("bound", SECONDS_BUCKETS)
def test_observations_stay_in_their_bucket_whatever_the_rounding(bound: float, prom: Prom) -> None:
    m = Metrics()
    for _ in range(7):
        m.observe("load_seconds", bound, tier="memory")
    prom.exporter.observe(m.take() or {})
    assert prom.value("kvstow_load_seconds_bucket", tier="memory", le=repr(bound)) == 7
    lower = [b for b in SECONDS_BUCKETS if b < bound]
    if lower:
        assert prom.value("kvstow_load_seconds_bucket", tier="memory", le=repr(lower[-1])) == 0


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"counters": None},
        {"counters": {"hit_chunks|memory": -5}},
        {"counters": {"hit_chunks|memory": float("nan")}},
        {"counters": {"hit_chunks|memory": "x"}},
        {"counters": {"hit_chunks|memory": None}},
        {"counters": {"hit_chunks": 1}},
        {"counters": {"hit_chunks|a|b": 1}},
        {"counters": {"no_such": 1}},
        {"counters": {"pool_used_bytes": 1}},
        {"gauges": {"waits": 1}},
        {"gauges": {"pool_used_bytes": -1}},
        {
            "histograms": {
                "load_seconds|memory": [
                    [0, -1, 0.0],
                    [99, 1, 1.0],
                    [-1, 1, 1.0],
                    [0, 0, 0.0],
                    [0, 1, -1.0],
                ]
            }
        },
        {"unknown": {"x": 1}},
    ],
)
def test_n3_the_exporter_never_raises(data: dict[str, Any], prom: Prom) -> None:
    prom.exporter.observe(data, 0)
    prom.exporter.observe(data, 7)  # an engine that nobody announced
    assert prom.value("kvstow_hit_chunks_total", tier="memory") == 0
    assert prom.value("kvstow_load_seconds_count", tier="memory") == 0
    assert prom.value("kvstow_pool_used_bytes") == 0


class FullDisk:
    """Every call of a Prometheus client that writes its samples to a full disk."""

    def __init__(self, calls: set[str]) -> None:
        self.calls = calls
        self.failed = 0

    def fail(self, call: str) -> None:
        if call in self.calls:
            self.failed += 1
            raise OSError(28, "No space left on device")


def failing_client(disk: FullDisk) -> Any:
    """A metric class as vLLM hands over."""

    class Metric:
        def __init__(self, **options: Any) -> None:
            disk.fail("create")

        def labels(self, *values: object) -> Metric:
            disk.fail("labels")
            return self

        def inc(self, amount: float) -> None:
            disk.fail("inc")

        def set(self, value: float) -> None:
            disk.fail("set")

        def observe(self, value: float) -> None:
            disk.fail("observe")

    return Metric


@pytest.mark.parametrize("call", ["create", "labels", "inc", "set", "observe"])
def test_no_error_of_the_client_reaches_vllm_and_it_is_logged_once(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from prometheus_client import Counter, Gauge, Histogram

    from kvstow.vllm import metrics as exporter_module

    exporter_module._log_once.cache_clear()
    disk = FullDisk({call})
    metric = failing_client(disk)
    exporter = exporter_module.KVStowPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: metric, Gauge: metric, Histogram: metric},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    m = Metrics()
    m.count("hit_chunks", 3, tier="memory")
    m.gauge("pool_used_bytes", 77)
    m.observe("load_seconds", 0.1, tier="memory")
    snapshot = m.take() or {}
    for _ in range(3):
        exporter.observe(snapshot, 0)
    assert disk.failed
    lines = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(lines) <= 2, "once for each part of the exporter"
    assert all("No space left" in str(record.exc_info) for record in lines)
    disk.calls.clear()  # there is room again
    exporter.observe(snapshot, 0)


def test_one_bad_series_leaves_the_others_alone(prom: Prom) -> None:
    family = prom.exporter._families["waits"]
    prom.exporter._bound[0, "waits"] = None
    prom.exporter._families["waits"] = None
    prom.exporter.observe({"counters": {"waits": 1, "fetch_extensions": 2}})
    assert prom.value("kvstow_fetch_extensions_total") == 2
    prom.exporter._families["waits"] = family


@pytest.mark.parametrize(
    "data",
    [{"counters": 7}, {"counters": {"waits": "x"}}, {"histograms": {"wait_seconds": [["x"]]}}, 7],
)
def test_no_malformed_snapshot_reaches_vllm(data: Any, prom: Prom) -> None:
    from kvstow.vllm.metrics import KVStowStats

    prom.exporter.observe(data)
    stats = KVStowStats(data={"counters": {"waits": 1}})
    assert stats.aggregate(KVStowStats(data=data)) is stats
    stats.reduce()
    KVStowStats(data=data).reduce()


def test_a_second_engine_in_one_process_starts_afresh(prom: Prom) -> None:
    prom.exporter.observe({"counters": {"waits": 5}})
    assert prom.value("kvstow_waits_total") == 5
    again = Prom()
    assert again.value("kvstow_waits_total") == 0
    again.exporter.observe({"counters": {"waits": 1}})
    assert again.value("kvstow_waits_total") == 1


def test_stats_travel_and_add_up() -> None:
    pytest.importorskip("vllm")
    from kvstow.vllm.metrics import KVStowStats

    m = Metrics()
    m.count("hit_tokens", 128, tier="memory")
    m.observe("load_seconds", 0.25, tier="memory")
    one = KVStowStats(data=m.take())
    two = KVStowStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(one.to_dict())))
    empty = KVStowStats()
    assert empty.is_empty()
    assert not one.is_empty()
    both = empty.aggregate(one).aggregate(two)
    assert both is empty
    assert both.reduce() == {"hit_tokens[memory]": 256, "load_seconds[memory] mean": 0.25}
    assert one.data["counters"] == {"hit_tokens|memory": 128}, "aggregate changed its argument"
    both.reset()
    assert both.is_empty()


def test_a_metric_spec_is_immutable() -> None:
    with pytest.raises(AttributeError):
        MetricSpec("counter", "x.").kind = "gauge"  # type: ignore[misc]
