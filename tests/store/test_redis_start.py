"""What vLLM's start-up refuses with a Redis tier, because nothing would ever be found again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from kvstow.backends.descriptor import HashRoot
from kvstow.backends.redis.envelope import chunk_name
from kvstow.codec.shape import KVShape
from kvstow.errors import UnsupportedError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import parse
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key
from kvstow.tiers.hash_root import entry_key
from tests.rigs.tiers import open_tier

start: Any = pytest.importorskip("kvstow.vllm.start", exc_type=ImportError)

LAYOUT = ChunkLayout((GroupLayout(16, 1, (4096,)),))
WITH_REDIS = parse(None, {}, {"redis.url": "unix:///nowhere/sock"})


def prepare(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None, effective: Any = WITH_REDIS
) -> None:
    monkeypatch.setattr(start, "load", lambda _: effective)
    monkeypatch.setattr(start, "variable", lambda _: seed)
    monkeypatch.setattr(start, "block_geometry", lambda *_: None)
    transfer = SimpleNamespace(
        kv_connector="KVStowConnector",
        kv_connector_extra_config={},
        kv_load_failure_policy="recompute",
    )
    cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    scheduler = SimpleNamespace(policy="fcfs")
    config = SimpleNamespace(
        kv_transfer_config=transfer, cache_config=cache, scheduler_config=scheduler
    )
    start.prepare_scheduler(config, None)


@pytest.mark.parametrize("seed", [None, "random"])
def test_c1_a_random_root_hash_is_refused_by_name_and_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    with pytest.raises(
        RuntimeError, match=r"tier redis outlives this process.*PYTHONHASHSEED=0.*sha256"
    ):
        prepare(monkeypatch, "xxhash", seed)


@pytest.mark.parametrize(
    ("algorithm", "seed"), [("sha256", None), ("xxhash", "0"), ("xxhash", "1")]
)
def test_c1_a_root_hash_that_others_have_too_is_served(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    prepare(monkeypatch, algorithm, seed)


def test_without_the_tier_a_random_root_hash_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "xxhash", None, parse(None, {}, {}))


def lower_tiers(not_persistent: str | None, effective: Any = WITH_REDIS) -> list[Any]:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_rank_local=0),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    identity = SimpleNamespace(
        not_persistent=not_persistent, namespace=bytes(32), root=lambda: ("all else", "seed 0")
    )
    identity.describe = lambda: {"namespace": "", "block hash root": "seed 0"}
    shapes = [[KVShape.unknown("float32", 4096)]]
    parts = start._Parts(
        vllm_config=config,
        kv_cache_config=None,
        settings=effective.settings,
        layout=LAYOUT,
        pages=[],
        identity=identity,
        clock=SystemClock(),
        metrics=Metrics(),
    )
    with patch.object(start, "kv_shapes", return_value=shapes):
        tiers: list[Any] = start._lower_tiers(parts, None)
    return tiers


def test_kv_without_an_identity_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"redis\.url is set, .*: random weights"):
        lower_tiers("random weights")


def test_redis_comes_after_the_disk(tmp_path: Any) -> None:
    pytest.importorskip("redis")
    both = parse(
        None,
        {},
        {"redis.url": "unix:///nowhere/sock", "disk.paths": str(tmp_path), "disk.size": "1GB"},
    )
    tiers = lower_tiers(None, both)
    assert [tier.name for tier in tiers] == ["disk", "redis"]
    assert all(tier.close(5.0) for tier in tiers)


# --- engines whose hashes begin elsewhere ----------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    redis_server = pytest.importorskip("tests.rigs.redis_server", exc_type=ImportError)
    server = redis_server.RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


def built(server: Any, about: str, word: str, prefix: str = "kvstow:", clock: Any = None) -> Any:
    settings = parse(None, {}, {"redis.url": server.url, "redis.prefix": prefix}).settings
    return open_tier(
        settings, LAYOUT, clock=clock or SystemClock(), metrics=Metrics(), root=(about, word)
    )


def test_c1_two_engines_with_different_seeds_do_not_miss_in_silence(server: Any) -> None:
    one = built(server, "model", "seed 0")
    entry = chunk_name(b"kvstow:", entry_key(HashRoot("model", ""))).decode()
    with pytest.raises(
        RuntimeError,
        match=rf"another root \(seed 0; here seed 1\).*PYTHONHASHSEED.*{entry}",
    ):
        built(server, "model", "seed 1")
    others = (
        built(server, "model", "seed 0"),
        built(server, "other model", "seed 1"),
        built(server, "model", "x", "b:"),
    )
    assert server.ask("EXISTS", entry) == 1
    for tier in (one, *others):
        assert tier.close(5.0)


def test_c1_a_seed_that_only_shows_later_is_logged_once(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    port, one = server.port, built(server, "model", "seed 0", clock=clock)
    assert one is not None
    server.ask("FLUSHALL")  # it lost the entry, and another engine was first
    other = built(server, "model", "seed 7", clock=clock)
    for _ in range(3):
        clock.advance(31.0)
        one._store.contains([make_key(1)])
    said = [
        record.getMessage() for record in caplog.records if "another root" in record.getMessage()
    ]
    assert len(said) == 1
    assert f"127.0.0.1:{port}" in said[0]
    assert one.close(5.0)
    assert other.close(5.0)


@pytest.mark.parametrize(
    "hinder", [("CONFIG", "SET", "maxmemory", "1"), ("ACL", "SETUSER", "default", "-set")]
)
def test_a_server_that_takes_no_entry_does_not_keep_the_tier_from_starting(
    server: Any, hinder: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    server.ask(*hinder)
    tier = built(server, "model", "seed 0")
    assert caplog.records == []
    assert tier._store.contains([make_key(1)]) == [False]
    assert tier.close(5.0)
