"""kvstow under the name of LMCache's connector: which class vLLM takes, and whose settings are read."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from kvstow.errors import SettingsError
from kvstow.vllm import start
from kvstow.vllm.connector import KVStowConnector
from kvstow.vllm.lmcache import LMCacheConnectorV1
from tests.engine_contract.stack import Shape
from tests.engine_contract.vllm_scheduler import Driver

pytestmark = pytest.mark.contract

BLOCK: dict[str, Any] = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_connector_module_path": "kvstow.vllm.lmcache",
    "kv_role": "kv_both",
}


def config(workers: int = 1, **transfer: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**{**BLOCK, **transfer}),
        parallel_config=SimpleNamespace(world_size=workers),
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")


def test_the_modules_path_is_stronger_than_the_name_that_vllm_has_registered() -> None:
    assert "LMCacheConnectorV1" in KVConnectorFactory._registry
    found: Any = KVConnectorFactory.get_connector_class(config().kv_transfer_config)
    assert found is LMCacheConnectorV1
    assert issubclass(found, KVStowConnector)
    assert not supports_hma(found), (
        "vLLM then takes its one-group fallback, as with KVStowConnector"
    )


def test_lmcaches_variables_are_read_under_its_name_and_sizes_are_of_every_worker() -> None:
    effective = start._settings(config(workers=4))
    assert effective.settings.memory.size == 8 << 30
    assert effective.sources["memory.size"] == "LMCACHE_MAX_LOCAL_CPU_SIZE"


def test_they_are_not_read_under_kvstows_own_name() -> None:
    own = config(kv_connector="KVStowConnector", kv_connector_module_path=None)
    assert start._settings(own).sources["memory.size"] == "default"
    own.kv_transfer_config.kv_connector_extra_config = {"lmcache.chunk_size": 3}
    with pytest.raises(SettingsError, match=r"unknown setting lmcache\.chunk_size"):
        start._settings(own)


def test_vllms_command_line_is_read_under_both_names() -> None:
    both = config(kv_connector_extra_config={"lmcache.chunk_size": 64, "memory.policy": "s3fifo"})
    effective = start._settings(both)
    assert effective.settings.chunk_size == 64
    assert effective.settings.memory.policy == "s3fifo"


@pytest.mark.parametrize(("priority", "stored"), [(1, True), (2, False), (0, True)])
def test_requests_above_the_priority_limit_are_restored_and_not_stored(
    priority: int, stored: bool
) -> None:
    driver = Driver(Shape(prefix_caching=False))
    side = driver.stack.side
    side._rules = replace(side._rules, priority_limit=1)
    prompt = list(range(40))

    def hit_tokens(name: str, priority: int) -> float:
        driver.add(name, prompt).priority = priority
        driver.run(name)
        driver.settle()
        return driver.stack.counter("hit_tokens")

    assert hit_tokens("first", priority) == 0
    assert (hit_tokens("second", 9) > 0) is stored, (
        "whoever stored it, a request of any priority may restore it"
    )
    driver.close()


def test_o1_an_error_of_the_engines_own_checks_names_lmcaches_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    monkeypatch.setenv("LMCACHE_CHUNKSIZE", "256")
    monkeypatch.setattr(start, "check_ranks", lambda *_: None)
    monkeypatch.setattr(start, "block_geometry", lambda *_: SimpleNamespace(block_tokens=48))
    hello: Any = SimpleNamespace(
        shard=(0, 0), groups=[SimpleNamespace(block_bytes=4096)], backends="x"
    )
    nothing: Any = None
    with caplog.at_level(logging.INFO, "kvstow"), pytest.raises(SettingsError) as error:
        start.scheduler_side(config(workers=2), nothing, {(0, 0): hello})
    assert "chunk_size 256 is not a multiple of vLLM's block size 48: set it to 240 or 288" in str(
        error.value
    )
    assert str(error.value).endswith("(chunk_size is from LMCACHE_CHUNK_SIZE)")
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert (
        said[
            "LMCache settings: max_local_cpu_size is of each worker, kvstow's sizes are per "
            "engine: 2 GiB x 2 = "
            "memory.size 4GiB"
        ]
        == "INFO"
    )
    assert (
        said[
            "LMCache settings: LMCACHE_CHUNKSIZE is not a key of LMCache's and is ignored; did you "
            "mean chunk_size?"
        ]
        == "WARNING"
    )


def test_c1_a_random_root_hash_with_a_tier_of_lmcaches_is_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://h")
    monkeypatch.setattr(start, "variable", lambda _: None)
    monkeypatch.setattr(start, "block_geometry", lambda *_: None)
    one = config()
    one.cache_config = SimpleNamespace(prefix_caching_hash_algo="xxhash")
    one.scheduler_config = SimpleNamespace(policy="fcfs")
    nothing: Any = None
    with pytest.raises(RuntimeError, match="PYTHONHASHSEED"):
        start.prepare_scheduler(one, nothing)
    monkeypatch.delenv("LMCACHE_REMOTE_URL")
    start.prepare_scheduler(one, nothing)
    assert one.kv_transfer_config.kv_load_failure_policy == "recompute", (
        "the blocks as they are recompute failed loads"
    )


@pytest.mark.parametrize(
    ("policy", "caching"), [("priority", True), ("priority", False), ("fcfs", True)]
)
def test_priorities_with_prefix_caching_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str, caching: bool
) -> None:
    monkeypatch.setattr(start, "block_geometry", lambda *_: None)
    one = config()
    one.scheduler_config = SimpleNamespace(policy=policy)
    one.cache_config = SimpleNamespace(enable_prefix_caching=caching)
    nothing: Any = None
    with caplog.at_level(logging.WARNING, "kvstow"):
        start.prepare_scheduler(one, nothing)
    assert ("blocks it never computed" in caplog.text) is (policy == "priority" and caching)
