"""LMCache's configuration as kvstow's: every key of it, every source, and what is said of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.disk.settings import DiskSettings
from kvstow.errors import SettingsError
from kvstow.settings import Effective, Settings, leaves, parse, parse_lmcache
from kvstow.settings import lmcache as module
from kvstow.settings.lmcache_keys import EXTRA_KEYS, EXTRA_MAPPED, KEYS, Fate, SourcedValue
from kvstow.settings.lmcache_translate import DEFAULT_POOL_GIB, MINIMAL_POOL_GIB, translate
from kvstow.settings.lmcache_values import GIB
from kvstow.settings.sources import value_of
from kvstow.settings.yamlfile import parse_yaml

#: The keys of LMCache 0.5.6: `_CONFIG_DEFINITIONS` of its lmcache/v1/config.py, all of them.
LMCACHE_KEYS = """
chunk_size local_cpu max_local_cpu_size local_cpu_use_hugepages reserve_local_cpu_size local_disk
local_disk_path_sharding max_local_disk_size remote_url remote_serde use_layerwise save_decode_cache
pre_caching_hash_algorithm enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens
blend_special_str retrieve_locations store_location enable_p2p p2p_host p2p_init_ports p2p_lookup_ports mp_host mp_port
enable_controller lmcache_instance_id controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids
lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time enable_pd pd_role pd_buffer_size pd_buffer_device
pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port
pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode
pd_skip_proxy_notification pd_bidirectional transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device gds_path
gds_path_sharding gds_buffer_size maru_path maru_pool_size use_gds gds_backend audit_actual_remote_url
internal_api_server_host extra_config save_unfull_chunk blocking_timeout_secs external_lookup_client py_enable_gc
cache_policy numa_mode enable_async_loading internal_api_server_enabled internal_api_server_port_start priority_limit
internal_api_server_include_index_list internal_api_server_socket_path_prefix runtime_plugin_locations storage_plugins
remote_storage_plugins lookup_timeout_ms min_retrieve_tokens hit_miss_ratio lookup_server_worker_ids
enable_scheduler_bypass_lookup script_allowed_imports run_script_api_enabled enable_lazy_memory_allocator
lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size
enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy enable_kv_events use_gpu_connector_v3
pin_timeout_sec pin_check_interval_sec remote_config_url app_id enable_hidden_state_cache max_hidden_state_cpu_size
hidden_state_layers hidden_states_retrieve_mode
""".split()  # noqa: SIM905 (a list of 108 lines)

Strings = dict[str, str]

#: Of each mapped key a value, what must be given with it, and what it comes to.
MAPPED: dict[str, tuple[str, Strings, dict[str, Any]]] = {
    "chunk_size": ("512", {}, {"chunk_size": 512}),
    "local_cpu": (
        "False",
        {"remote_url": "redis://h"},
        {"memory.size": int(DEFAULT_POOL_GIB * GIB)},
    ),
    "max_local_cpu_size": ("1.5", {}, {"memory.size": 3 * GIB // 2}),
    "local_disk": ("file:///a/,/b", {"max_local_disk_size": "2"}, {"disk.paths": ("/a", "/b")}),
    "max_local_disk_size": ("2", {"local_disk": "/a"}, {"disk.size": 2 * GIB}),
    "local_disk_path_sharding": (
        "by_gpu",
        {"local_disk": "/a", "max_local_disk_size": "1"},
        {"disk.spread": "device"},
    ),
    "remote_url": ("rediss://u:p@h:1/2", {}, {"redis.url": "rediss://u:p@h:1/2"}),
    "remote_storage_plugins": (
        "redis",
        {"extra_config": '{"remote_storage_plugin.redis.redis_url": "redis://r"}'},
        {"redis.url": "redis://r"},
    ),
    "remote_serde": ("cachegen", {"remote_url": "redis://h"}, {"redis.codec": "quantized"}),
    "blocking_timeout_secs": ("3", {"remote_url": "redis://h"}, {"redis.timeout_ms": 3000}),
    "save_decode_cache": ("True", {}, {"save_decode": True}),
    "min_retrieve_tokens": ("77", {}, {"fetch.min_tokens": 77}),
    "priority_limit": ("-2", {}, {"priority_limit": -2}),
    "cache_policy": ("LFU", {}, {"memory.policy": "s3fifo", "disk.policy": "s3fifo"}),
    "storage_plugins": ("RDSBackend", {}, {"direct.engine": "rds"}),
    "extra_config": (
        '{"rds_buffer_size": 3, "rds_max_chunks": 9, "rds_failure_policy": "raise"}',
        {"storage_plugins": "RDSBackend"},
        {"direct.staging_size": 3 << 20, "direct.max_chunks": 9, "direct.failure_policy": "raise"},
    ),
}
LEAVES = {leaf.key: leaf for leaf in leaves()}
RDS = {
    "LMCACHE_LOCAL_CPU": "False",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0",
    "LMCACHE_CHUNK_SIZE": "1024",
    "LMCACHE_USE_LAYERWISE": "False",
    "LMCACHE_STORAGE_PLUGINS": "RDSBackend",
    "LMCACHE_EXTRA_CONFIG": """{
        "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
        "storage_plugin.RDSBackend.class_name": "RDSBackend",
        "rds_buffer_size": 2048,
        "rds_failure_policy": "ignore"
    }""",
}


def variables(**given: str) -> dict[str, str]:
    return {f"LMCACHE_{name.upper()}": value for name, value in given.items()}


def given(*, workers: int = 1, extra: dict[str, Any] | None = None, **keys: str) -> Effective:
    return parse_lmcache(variables(**keys), extra, workers=workers)


def refused(*, extra: dict[str, Any] | None = None, **keys: str) -> str:
    with pytest.raises(SettingsError) as error:
        given(extra=extra, **keys)
    return str(error.value)


def of(effective: Effective, key: str) -> Any:
    value = value_of(effective.settings, LEAVES[key])
    return value.reveal() if hasattr(value, "reveal") else value


def said(effective: Effective) -> str:
    return "\n".join(note.text for note in effective.notes)


def warned(effective: Effective) -> str:
    return "\n".join(note.text for note in effective.notes if note.warns)


@pytest.fixture
def yaml_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Pretends that a file holds this text."""

    def write(text: str) -> str:
        monkeypatch.setattr(
            module, "read_yaml", lambda path, named_by: parse_yaml(text.encode(), path) or {}
        )
        return "/etc/lmcache.yaml"

    return write


# --- every key -------------------------------------------------------------------------------------------------------


def test_o1_every_key_of_lmcaches_has_one_fate() -> None:
    assert len(LMCACHE_KEYS) == len(set(LMCACHE_KEYS)) == 108
    assert sorted(KEYS) == sorted(LMCACHE_KEYS)
    assert {name for name, key in KEYS.items() if key.fate is Fate.MAPPED} == set(MAPPED)
    assert all(key.why for key in KEYS.values())


@pytest.mark.parametrize("name", MAPPED)
def test_o1_o2_a_mapped_key_becomes_a_setting_and_its_source_is_shown(name: str) -> None:
    value, beside, comes_to = MAPPED[name]
    effective = given(**{name: value}, **beside)
    for key, wanted in comes_to.items():
        assert of(effective, key) == wanted
        assert effective.sources[key].startswith("LMCACHE_") or name == "local_cpu"
    without = given(**beside)
    assert effective != without, "it changes what is set, or what is said"


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.fate is Fate.REFUSED])
def test_o1_a_refused_key_stops_the_start_says_why_and_may_be_off(name: str) -> None:
    error = refused(**{name: "0.5" if name == "hit_miss_ratio" else "True"})
    assert (
        f"LMCache's {name} (from LMCACHE_{name.upper()}) can't be served: {KEYS[name].why}. Remove it"
        == error
    )
    effective = given(**{name: "False"})
    assert f"LMCache's {name}: off, as in kvstow" in said(effective)


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.fate is Fate.WARNED])
def test_a_key_that_kvstow_goes_on_without_is_a_warning_and_may_be_off(name: str) -> None:
    effective = given(**{name: "True"})
    assert effective.settings == given().settings
    text = f"LMCache's {name} (from LMCACHE_{name.upper()}) has no effect: {KEYS[name].why}"
    assert warned(effective) == text
    assert warned(given(**{name: "False"})) == ""


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.fate is Fate.IGNORED])
def test_o1_an_ignored_key_changes_nothing_and_one_line_says_why(name: str) -> None:
    effective = given(**{name: "7"})
    assert effective.settings == given().settings
    [line] = [note.text for note in effective.notes if f"LMCACHE_{name.upper()}" in note.text]
    assert line.startswith(f"LMCACHE_{name.upper()}: ignored. ")
    assert line.lower().endswith(KEYS[name].why.lower())


def test_keys_ignored_for_one_reason_share_a_line() -> None:
    effective = given(pd_role="sender", pd_buffer_size="1", use_layerwise="True")
    lines = [note.text for note in effective.notes if "enable_pd" in note.text]
    assert lines == ["LMCACHE_PD_BUFFER_SIZE, LMCACHE_PD_ROLE: ignored. Part of enable_pd"]
    assert said(effective).count("beside other requests' steps") == 1


def test_what_mapped_keys_become_exists() -> None:
    """Sections are others' business; a name that changes there must not be found out by a user."""
    named = {key for _, _, comes_to in MAPPED.values() for key in comes_to}
    assert named <= set(LEAVES)


def test_nothing_given_is_kvstows_defaults_but_for_lmcaches_pool() -> None:
    effective = parse_lmcache({}, None, workers=1)
    assert effective.settings.memory.size == int(DEFAULT_POOL_GIB * GIB)
    assert effective.sources["memory.size"] == "LMCache's default"
    assert [key for key, source in effective.sources.items() if source != "default"] == [
        "memory.size"
    ]
    assert effective.settings.section(DiskSettings) == Settings().section(DiskSettings)


# --- sources ---------------------------------------------------------------------------------------------------------


def test_the_file_is_weaker_than_variables_and_those_than_vllms_command_line(
    yaml_file: Callable[[str], str],
) -> None:
    path = yaml_file("chunk_size: 1\nmax_local_cpu_size: 1\nsave_decode_cache: true\n")
    env = {"LMCACHE_CONFIG_FILE": path, **variables(chunk_size="2", max_local_cpu_size="2")}
    effective = parse_lmcache(env, {"lmcache.chunk_size": 3}, workers=1)
    assert (of(effective, "chunk_size"), of(effective, "memory.size")) == (3, 2 * GIB)
    assert of(effective, "save_decode") is True
    assert effective.sources["chunk_size"] == "lmcache.chunk_size in kv_connector_extra_config"
    assert effective.sources["memory.size"] == "LMCACHE_MAX_LOCAL_CPU_SIZE"
    assert effective.sources["save_decode"] == f"save_decode_cache in {path}"


def test_kvstows_own_settings_win_and_that_is_said_once() -> None:
    env = {**variables(chunk_size="2", max_local_cpu_size="2"), "KVSTOW_CHUNK_SIZE": "8"}
    effective = parse_lmcache(env, {"memory.size": "7GB"}, workers=1)
    assert (of(effective, "chunk_size"), of(effective, "memory.size")) == (8, 7 * 10**9)
    assert warned(effective).splitlines() == [
        "kvstow's own settings win over LMCache's: chunk_size (KVSTOW_CHUNK_SIZE), memory.size "
        "(kv_connector_extra_config)"
    ]


def test_sizes_of_a_worker_become_sizes_of_an_engine_and_that_is_said() -> None:
    effective = given(
        workers=8, max_local_cpu_size="20", local_disk="/a", max_local_disk_size="200"
    )
    assert (of(effective, "memory.size"), of(effective, "disk.size")) == (160 * GIB, 1600 * GIB)
    assert "kvstow's sizes are per engine: 20 GiB x 8 = memory.size 160GiB" in said(effective)
    assert "kvstow's sizes are per engine: 200 GiB x 8 = disk.size 1600GiB" in said(effective)


@pytest.mark.parametrize("written", ["redis://u:p@h", '"redis://u:p@h"', "'redis://u:p@h'"])
def test_quotes_around_a_variables_value_are_not_part_of_it(written: str) -> None:
    assert of(given(remote_url=written), "redis.url") == "redis://u:p@h"


def test_older_names_are_taken() -> None:
    assert of(given(external_backends="RDSBackend"), "direct.engine") == "rds"
    assert "enable_pd" in refused(enable_xpyd="True")


def test_o1_unknown_keys_are_named_with_the_nearest(yaml_file: Callable[[str], str]) -> None:
    env = {
        "LMCACHE_CONFIG_FILE": yaml_file("chunk_sise: 1\n"),
        "LMCACHE_LOCAL_DISC": "/a",
        "LMCACHE_QQ": "1",
    }
    effective = parse_lmcache(env, {"lmcache.remote_serd": "x"}, workers=1)
    assert warned(effective).splitlines() == [
        "chunk_sise in /etc/lmcache.yaml is not a key of LMCache's and is ignored; did you mean chunk_size?",
        "LMCACHE_LOCAL_DISC is not a key of LMCache's and is ignored; did you mean local_disk?",
        "LMCACHE_QQ is not a key of LMCache's and is ignored; nothing is named like it",
        "lmcache.remote_serd in kv_connector_extra_config is not a key of LMCache's and is ignored; did you mean "
        "remote_serde?",
    ]


def test_variables_that_are_no_keys() -> None:
    effective = parse_lmcache(
        {
            "LMCACHE_LOG_LEVEL": "INFO",
            "LMCACHE_SERVICE_HOST": "10.0.0.1",
            "LMCACHE_PORT": "tcp://10.0.0.1:80",
        },
        {"lmcache_rpc_port": "x", "discard_partial_chunks": False},
        workers=1,
    )
    assert warned(effective) == ""
    assert "LMCACHE_LOG_LEVEL is ignored: kvstow logs as vLLM does" in said(effective)
    assert "lmcache_rpc_port in kv_connector_extra_config is ignored" in said(effective)
    assert "SERVICE_HOST" not in said(effective)


def test_o1_a_variable_that_asks_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="set kv_role to kv_consumer"):
        parse_lmcache({"LMCACHE_FORCE_SKIP_SAVE": "1"}, None, workers=1)
    assert (
        parse_lmcache({"LMCACHE_FORCE_SKIP_SAVE": ""}, None, workers=1).settings == given().settings
    )


def test_o1_a_missing_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"/nowhere\.yaml \(named by LMCACHE_CONFIG_FILE\)"):
        parse_lmcache({"LMCACHE_CONFIG_FILE": "/nowhere.yaml"}, None, workers=1)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("chunk_size", "abc", "an integer"),
        ("chunk_size", "1.5", "an integer"),
        ("local_cpu", "yes", "true or false"),
        ("max_local_cpu_size", "5XB", "a number of GiB"),
        ("max_local_cpu_size", "auto", "a number of GiB"),
        ("max_local_cpu_size", "-1", "a number of GiB from 0 up"),
        ("max_local_cpu_size", "nan", "a number of GiB from 0 up"),
        ("remote_serde", "kivi", "naive or cachegen"),
        ("cache_policy", "MRU", "LRU, LFU or FIFO"),
        ("local_disk_path_sharding", "by_moon", "by_gpu"),
        ("extra_config", "{", "a JSON object"),
        ("extra_config", "[" * 100_000, "a JSON object"),
        ("extra_config", "[1]", "a mapping"),
    ],
)
def test_o1_a_wrong_value_names_key_source_and_what_was_expected(
    key: str, value: str, wanted: str
) -> None:
    error = refused(**{key: value})
    assert f"LMCache's {key}" in error
    assert f"(from LMCACHE_{key.upper()}): expected {wanted}" in error


def test_an_empty_value_is_as_if_it_were_not_given() -> None:
    assert given(chunk_size="", remote_url=" ", local_disk="").settings == given().settings


def test_a_disk_without_a_size_is_no_disk_as_in_lmcache() -> None:
    effective = given(local_disk="/a")
    assert effective.settings.section(DiskSettings).paths is None
    assert "max_local_disk_size is 0: no disk tier, as in LMCache" in warned(effective)
    assert "local_disk isn't set: no disk tier" in said(given(max_local_disk_size="3"))


def test_a_relative_disk_path_is_refused_by_its_lmcache_name() -> None:
    assert "disk.paths" in refused(local_disk="kv", max_local_disk_size="1")
    assert "LMCACHE_LOCAL_DISK" in refused(local_disk="kv", max_local_disk_size="1")


@pytest.mark.parametrize(
    ("url", "comes_to"),
    [
        ("redis://10.0.0.10:6379", {"redis.url": "redis://10.0.0.10:6379"}),
        ("unix:///run/redis.sock", {"redis.url": "unix:///run/redis.sock"}),
        ("valkey://h:1", {"redis.url": "redis://h:1"}),
        ("valkeys://u:p@h:1", {"redis.url": "rediss://u:p@h:1"}),
        (
            "redis-sentinel://u:p@a:1,b:2",
            {"redis.url": "redis://u:p@a:1,b:2", "redis.topology": "sentinel"},
        ),
        (
            "redis-cluster://a:1,redis-cluster://b:2",
            {"redis.url": "redis://a:1,b:2", "redis.topology": "cluster"},
        ),
    ],
)
def test_remote_urls(url: str, comes_to: dict[str, Any]) -> None:
    effective = given(remote_url=url)
    assert {key: of(effective, key) for key in comes_to} == comes_to


@pytest.mark.parametrize(
    ("url", "extra", "comes_to"),
    [
        (
            "s3://b.s3.us-east-1.amazonaws.com",
            {"s3_region": "r"},
            {"objects.url": "s3://b", "objects.region": "r"},
        ),
        ("s3://my.b.s3-us-west-2.amazonaws.com/p/q", {}, {"objects.url": "s3://my.b/p/q"}),
        ("s3://b", {}, {"objects.url": "s3://b"}),
        (
            "s3://b.minio.internal:9000",
            {},
            {"objects.url": "s3://b", "objects.endpoint": "https://minio.internal:9000"},
        ),
        (
            "s3://b.minio:9000",
            {"disable_tls": True},
            {
                "objects.url": "s3://b",
                "objects.endpoint": "http://minio:9000",
                "objects.allow_http": True,
            },
        ),
        (
            "s3://localhost:8080/bench",
            {"disable_tls": True},
            {
                "objects.url": "s3://bench",
                "objects.endpoint": "http://localhost:8080",
                "objects.allow_http": True,
            },
        ),
        (
            "s3://10.0.0.7:9000/b/p",
            {},
            {"objects.url": "s3://b/p", "objects.endpoint": "https://10.0.0.7:9000"},
        ),
        (
            "s3://[::1]:9000/b",
            {},
            {"objects.url": "s3://b", "objects.endpoint": "https://[::1]:9000"},
        ),
        (
            "s3://minio:9000/b",
            {},
            {"objects.url": "s3://b", "objects.endpoint": "https://minio:9000"},
        ),
        (
            "s3://s3.storage.example/b/p",
            {"s3_file_prefix": "q/"},
            {"objects.url": "s3://b/p/q", "objects.endpoint": "https://s3.storage.example"},
        ),
        ("s3://s3.us-east-1.amazonaws.com/b", {}, {"objects.url": "s3://b"}),
        ("s3://s3-us-west-2.amazonaws.com/b", {}, {"objects.url": "s3://b"}),
        (
            "mooncakestore://h:50051/",
            {"metadata_server": "http://h/m", "mooncake_protocol": "rdma", "protocol": "tcp"},
            {
                "mooncake.master": "h:50051",
                "mooncake.metadata": "http://h/m",
                "mooncake.protocol": "rdma",
                "mooncake.segment_size": 2 * 3_355_443_200,
            },
        ),
        (
            "mooncakestore://",
            {
                "master_server_address": "h:1",
                "protocol": "rdma",
                "device_name": "mlx5_0",
                "global_segment_size": 8 << 20,
                "local_hostname": "n1",
            },
            {
                "mooncake.master": "h:1",
                "mooncake.protocol": "rdma",
                "mooncake.device": "mlx5_0",
                "mooncake.segment_size": 16 << 20,
                "mooncake.local_hostname": "n1",
            },
        ),
    ],
)
def test_remote_urls_of_object_stores_and_mooncake(
    url: str, extra: dict[str, Any], comes_to: dict[str, Any]
) -> None:
    keys = {
        "remote_url": url,
        "extra_config": extra,
        "remote_serde": "cachegen",
        "blocking_timeout_secs": 2,
    }
    entries, _ = translate({key: SourcedValue(value, key) for key, value in keys.items()}, 2)
    got = {entry.key: entry.value for entry in entries}
    section = next(iter(comes_to)).partition(".")[0]
    both = {f"{section}.codec": "quantized", f"{section}.timeout_ms": 2000}
    assert {key: value for key, value in got.items() if key.startswith(section)} == {
        **comes_to,
        **both,
    }
    assert parse(None, {}, base=entries).sources[f"{section}.codec"] == "remote_serde", (
        "and kvstow takes them"
    )


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///b", "s3://s3.us-east-1.amazonaws.com", "s3://minio:9000/"]
)
def test_an_s3_url_without_a_bucket_is_refused(url: str) -> None:
    assert "names no bucket" in refused(remote_url=url)


@pytest.mark.parametrize(
    ("url", "extra", "comes_to"),
    [
        (
            "resp://h:1",
            {"username": "default", "password": "p@ss"},
            {"redis.url": "redis://default:p%40ss@h:1"},
        ),
        (
            "valkey://h:1",
            {"valkey_password": "p", "valkey_database": 3, "tls_enable": True},
            {"redis.url": "rediss://:p@h:1/3"},
        ),
        (
            "valkey://a:1, b:2",
            {"valkey_mode": "cluster"},
            {"redis.url": "redis://a:1,b:2", "redis.topology": "cluster"},
        ),
        (
            "redis://u:p@h/2",
            {"username": "x", "valkey_database": 0},
            {"redis.url": "redis://u:p@h/2"},
        ),
    ],
)
def test_what_extra_config_says_of_redis_becomes_part_of_its_url(
    url: str, extra: dict[str, Any], comes_to: dict[str, Any]
) -> None:
    effective = given(remote_url=url, extra_config=json.dumps(extra))
    assert {key: of(effective, key) for key in comes_to} == comes_to
    assert warned(effective) == ""
    assert "expected standalone or cluster" in refused(
        remote_url=url, extra_config='{"valkey_mode": "ring"}'
    )


def test_mooncake_without_a_master_is_refused() -> None:
    assert "names no master" in refused(remote_url="mooncakestore://")
    assert "names no master" in refused(remote_storage_plugins="mooncakestore")


@pytest.mark.parametrize(
    "scheme", ["lm", "infinistore", "fs", "hf3fs", "azure", "bigtable", "eic", "mock", "audit"]
)
def test_remote_urls_of_tiers_that_kvstow_lacks_are_refused_without_their_password(
    scheme: str,
) -> None:
    error = refused(remote_url=f"{scheme}://user:hunter2@host:1")
    assert f"kvstow has no {scheme}:// tier" in error
    assert "hunter2" not in error


def test_remote_settings_without_a_remote_tier_say_so() -> None:
    assert "remote_serde, blocking_timeout_secs: ignored. No remote tier is set" in said(
        given(remote_serde="naive", blocking_timeout_secs="1")
    )


def test_remote_storage_plugins_that_kvstow_lacks_are_refused() -> None:
    assert "names fs: kvstow has redis and mooncakestore" in refused(remote_storage_plugins="fs")
    assert of(given(remote_storage_plugins="redis.one"), "redis.url") == "redis://localhost:6379"


def test_local_cpu_false_keeps_a_pool_and_says_so_and_is_refused_alone() -> None:
    effective = given(local_cpu="False", max_local_cpu_size="1", remote_url="redis://h")
    assert of(effective, "memory.size") == GIB
    assert "local_cpu false: the pool stays" in said(effective)
    assert "no other tier is set" in refused(local_cpu="False")
    assert "more than 0: no other tier is set" in refused(max_local_cpu_size="0")


@pytest.mark.parametrize(
    "lower",
    [
        {"local_disk": "/d", "max_local_disk_size": "9"},
        {"remote_url": "redis://h"},
        {"storage_plugins": "mine"},
    ],
)
def test_no_pool_beside_a_lower_tier_is_a_minimal_one_and_a_warning(lower: Strings) -> None:
    effective = given(workers=2, max_local_cpu_size="0", **lower)
    assert of(effective, "memory.size") == 2 * MINIMAL_POOL_GIB * GIB
    assert "each worker has 1 GiB" in warned(effective)


@pytest.mark.parametrize(
    ("written", "size"),
    [("100 GB", 100 * GIB), ("1.5GiB", 3 * GIB // 2), ("512MB", GIB // 2), ("2g", 2 * GIB)],
)
def test_a_size_may_have_a_unit_which_is_lmcaches(written: str, size: int) -> None:
    effective = given(
        max_local_cpu_size=written, local_disk="/d", max_local_disk_size=written, workers=2
    )
    assert (of(effective, "memory.size"), of(effective, "disk.size")) == (2 * size, 2 * size)
    assert "memory.size" in said(effective), "and it is shown"


@pytest.mark.parametrize("value", [True, "True", "true"])
def test_a_disk_that_is_switched_on_without_a_directory_is_a_warning(value: object) -> None:
    extra = {"lmcache.local_disk": value, "lmcache.max_local_disk_size": 9}
    effective = given(extra=extra)
    assert effective.settings.section(DiskSettings).paths is None
    assert "local_disk is true and names no directory" in warned(effective)


@pytest.mark.parametrize("value", [False, "False", None])
def test_a_disk_that_is_switched_off_is_none(value: object) -> None:
    effective = given(extra={"lmcache.local_disk": value})
    assert effective.settings.section(DiskSettings).paths is None
    assert warned(effective) == ""


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/kim")
    effective = given(local_disk="~/a,file://~/b/", max_local_disk_size="1")
    assert of(effective, "disk.paths") == ("/home/kim/a", "/home/kim/b")
    assert "local_disk ~/a is /home/kim/a" in said(effective)


# --- plug-ins and extra_config -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_the_rbln_block_selects_direct_storage(workers: int) -> None:
    effective = parse_lmcache(RDS, None, workers=workers)
    direct = effective.settings.direct
    assert (direct.engine, direct.failure_policy, direct.staging_size) == (
        "rds",
        "ignore",
        workers * 2048 << 20,
    )
    assert effective.sources["memory.size"] == "default"
    assert of(effective, "chunk_size") == 1024
    assert warned(effective) == ""
    assert "no pool is made" in said(effective)


def test_rds_is_recognised_by_its_class_under_any_name() -> None:
    extra = '{"storage_plugin.nvme.module_path": "anything", "storage_plugin.nvme.class_name": "RDSBackend"}'
    assert of(given(storage_plugins="nvme", extra_config=extra), "direct.engine") == "rds"


@pytest.mark.parametrize("name", EXTRA_MAPPED)
def test_null_in_the_extra_config_is_unset(name: str) -> None:
    for other in (
        {"storage_plugins": "RDSBackend"},
        {"remote_url": "s3://bucket"},
        {"local_disk": "/d"},
    ):
        without = given(**other, max_local_disk_size="1", max_local_cpu_size="1")
        null = given(
            **other,
            max_local_disk_size="1",
            max_local_cpu_size="1",
            extra_config=f'{{"{name}": null}}',
        )
        assert null.settings == without.settings
        assert warned(null) == warned(without)


def test_an_rds_failure_policy_that_is_unknown_is_refused() -> None:
    error = refused(storage_plugins="RDSBackend", extra_config='{"rds_failure_policy": "retry"}')
    assert "direct.failure_policy" in error
    assert "expected ignore or raise" in error


def test_other_storage_plugins_are_kvstow_plug_ins() -> None:
    extra = """{"storage_plugin.mine.module_path": "a.b", "storage_plugin.mine.class_name": "C",
        "storage_plugin.mine.path": "/x"}"""
    effective = given(storage_plugins="mine,other", extra_config=extra)
    assert of(effective, "plugins.stores") == ("mine=a.b:C", "other")
    assert of(effective, "plugins.options") == '{"mine": {"path": "/x"}}'
    assert warned(effective) == ""
    assert "needs storage_plugin.mine.module_path" in refused(
        storage_plugins="mine", extra_config='{"storage_plugin.mine.class_name": "C"}'
    )


@pytest.mark.parametrize("name", EXTRA_KEYS)
def test_o1_known_keys_of_extra_config_are_refused_or_ignored_with_a_line(name: str) -> None:
    extra = f'{{"{name}": "x"}}'
    if EXTRA_KEYS[name].fate is Fate.REFUSED:
        assert EXTRA_KEYS[name].why in refused(extra_config=extra)
    elif EXTRA_KEYS[name].fate is Fate.WARNED:
        text = f"{name} (from LMCACHE_EXTRA_CONFIG) has no effect: {EXTRA_KEYS[name].why}"
        assert text in warned(given(extra_config=extra))
    else:
        assert f"{name} in LMCACHE_EXTRA_CONFIG: ignored. " in said(given(extra_config=extra))


def test_o1_unknown_keys_of_extra_config_are_named_with_the_nearest() -> None:
    effective = given(extra_config='{"rds_bufer_size": 1, "redis_url": "redis://h"}')
    assert (
        "rds_bufer_size in LMCACHE_EXTRA_CONFIG is unknown and is ignored; did you mean rds_buffer_size?"
        in warned(effective)
    )
    assert (
        "redis_url in LMCACHE_EXTRA_CONFIG: ignored. No tier that it belongs to is asked for"
        in warned(effective)
    )


def test_secrets_are_in_no_note_and_no_error(tmp_path: Path) -> None:
    effective = given(remote_url="redis://u:hunter2@h", extra_config='{"odd_password": "hunter2"}')
    assert "hunter2" not in said(effective) + effective.one_line()
    for keys in ({"extra_config": '{"a": hunter2}'}, {"remote_url": "xyz://u:hunter2@h"}):
        assert "hunter2" not in refused(**keys)
    url = "redis://u:hunter2@h"
    for name in (*KEYS, url):
        for value in (url, {"password": "hunter2"}, [url]):
            try:
                effective = parse_lmcache({}, {f"lmcache.{name}": value}, workers=1)
                shown = said(effective) + effective.one_line()
            except SettingsError as error:
                shown = str(error)
            assert "hunter2" not in shown, (name, value)


# --- errors of the engine's own checks say where the number is from -----------------------------------------------


def test_a_settings_error_names_the_sources_of_the_settings_in_it() -> None:
    effective = given(chunk_size="256", max_local_cpu_size="1")
    with pytest.raises(SettingsError) as error, effective.named():
        raise SettingsError(
            "chunk_size 256 is not a multiple of vLLM's block size 48: set it to 240, or to auto"
        )
    assert str(error.value).endswith("or to auto (chunk_size is from LMCACHE_CHUNK_SIZE)")
    with pytest.raises(SettingsError, match=r"^disk\.size 1 is too little$"), effective.named():
        raise SettingsError("disk.size 1 is too little")


@pytest.mark.parametrize(
    "key", ["max_local_cpu_size", "max_local_disk_size", "blocking_timeout_secs"]
)
@pytest.mark.parametrize("value", [10**400, 1e308, "1e300", "nan", "inf", "-1", "2e9"])
def test_numbers_that_nothing_can_be_made_of_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=key):
        parse_lmcache({}, {f"lmcache.{key}": value, "lmcache.local_disk": "/mnt"}, workers=2)


@pytest.mark.parametrize(
    "value", ["redis:hunter2@h:6379", ":hunter2@h", ["redis://:hunter2@h"], "foo://:hunter2@h"]
)
def test_a_remote_url_that_is_none_is_refused_without_what_may_be_its_password(
    value: object,
) -> None:
    with pytest.raises(SettingsError, match="remote_url") as error:
        parse_lmcache({}, {"lmcache.remote_url": value}, workers=1)
    assert "hunter2" not in str(error.value)
