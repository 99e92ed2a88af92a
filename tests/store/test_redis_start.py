"""What vLLM's start-up refuses with a Redis tier, because nothing would ever be found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.codec.shape import KVShape
from kvstow.errors import UnsupportedError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import parse

start: Any = pytest.importorskip("kvstow.vllm.start", exc_type=ImportError)

WITH_REDIS = parse(None, {}, {"redis.url": "unix:///nowhere/sock"})


def prepare(monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None, effective: Any = WITH_REDIS) -> None:
    monkeypatch.setattr(start, "load", lambda _: effective)
    monkeypatch.setattr(start, "variable", lambda _: seed)
    monkeypatch.setattr(start, "block_geometry", lambda *_: None)
    transfer = SimpleNamespace(kv_connector="KVStowConnector", kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    start.prepare_scheduler(SimpleNamespace(kv_transfer_config=transfer, cache_config=cache), None)


@pytest.mark.parametrize("seed", [None, "random"])
def test_c1_a_random_root_hash_is_refused_by_name_and_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    with pytest.raises(RuntimeError, match=r"tier redis outlives this process.*PYTHONHASHSEED=0.*sha256"):
        prepare(monkeypatch, "xxhash", seed)


@pytest.mark.parametrize(("algorithm", "seed"), [("sha256", None), ("xxhash", "0"), ("xxhash", "1")])
def test_c1_a_root_hash_that_others_have_too_is_served(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    prepare(monkeypatch, algorithm, seed)


def test_without_the_tier_a_random_root_hash_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "xxhash", None, parse(None, {}, {}))


def lower_tiers(not_persistent: str | None, effective: Any = WITH_REDIS) -> list[Any]:
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank_local=0))
    identity = SimpleNamespace(not_persistent=not_persistent, namespace=b"")
    layout = ChunkLayout((GroupLayout(16, 1, (4096,)),))
    shapes = [[KVShape.unknown("float32", 4096)]]
    tiers: list[Any] = start._lower_tiers(config, effective.settings, layout, shapes, identity, SystemClock(), Metrics())
    return tiers


def test_kv_without_an_identity_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"redis\.url is set, .*: random weights"):
        lower_tiers("random weights")


def test_redis_comes_after_the_disk(tmp_path: Any) -> None:
    pytest.importorskip("redis")
    both = parse(None, {}, {"redis.url": "unix:///nowhere/sock", "disk.paths": str(tmp_path), "disk.size": "1GB"})
    tiers = lower_tiers(None, both)
    assert [tier.name for tier in tiers] == ["disk", "redis"]
    assert all(tier.close(5.0) for tier in tiers)
