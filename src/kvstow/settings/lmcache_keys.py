"""Every key of LMCache's configuration, as of its 0.5, and what kvstow does with it.

``kvstow.settings.lmcache`` collects the keys that are set; ``lmcache_translate`` does what this
table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple


class Fate(StrEnum):
    """What kvstow does with a key.

    MAPPED: it becomes a setting. REFUSED: it asks for something whose lack would change what the
    user gets, so the start stops. WARNED: kvstow goes on without it and logs a warning. IGNORED: it
    has no effect here, and a line in the log says why. A refused or warned key whose value is off
    does no harm.
    """

    MAPPED = "mapped"
    REFUSED = "refused"
    WARNED = "warned"
    IGNORED = "ignored"


class Key(NamedTuple):
    """A key of LMCache's. ``why`` gives the reason; of a mapped key it gives the setting."""

    name: str
    fate: Fate
    why: str


class SourcedValue(NamedTuple):
    """A value of one of LMCache's keys, and where it is from, for messages."""

    value: Any
    source: str


class Entry(NamedTuple):
    """A value of one of kvstow's settings, and where LMCache's configuration has it."""

    key: str
    source: str
    value: object


_MAPPED: Final = {
    "chunk_size": "`chunk_size`; where it isn't set, kvstow's `auto`",
    "local_cpu": "host memory. With `false` the pool stays, as the way to the lower tiers; "
    "refused without one",
    "max_local_cpu_size": "`memory.size`: GiB of a worker, or text such as `20 GB`, times the "
    "workers. Not set: 5, as in LMCache; 0: 1, as the way to the lower tiers, refused without one",
    "local_disk": "`disk.paths`, where `max_local_disk_size` is above 0; `~` is vLLM's user's home",
    "max_local_disk_size": "`disk.size`: GiB of a worker, or text such as `100 GB`, times the "
    "workers. 0 or not set: no disk tier, as in LMCache",
    "local_disk_path_sharding": "`by_gpu`: `disk.spread: device`; anything else is refused",
    "remote_url": "`redis.url`, `objects.url` or `mooncake.master`, by its scheme; other schemes "
    "are refused",
    "remote_storage_plugins": "the remote tiers that kvstow has, by their type; others are refused",
    "remote_serde": "the remote tier's `codec`: `naive` is `raw`, `cachegen` is `quantized`; "
    "anything else is refused",
    "blocking_timeout_secs": "the remote tier's `timeout_ms`",
    "save_decode_cache": "`save_decode`",
    "min_retrieve_tokens": "`fetch.min_tokens`, of the lower tiers: what is in host memory is "
    "always restored",
    "priority_limit": "`priority_limit`",
    "cache_policy": "`memory.policy` and `disk.policy`: `LRU` and `FIFO`: `lru`; `LFU`: `s3fifo`; "
    "`MRU` is refused",
    "storage_plugins": "`RDSBackend`: `direct.engine: rds`; others: `plugins.stores`",
    "extra_config": "key by key: see below",
}

_REFUSED: Final = {
    "enable_blending": "kvstow restores KV of exact prefixes only, not CacheBlend's approximation",
    "enable_p2p": "there is no peer-to-peer transfer: let the engines share a remote tier "
    "(remote_url)",
    "enable_pd": "there is no disaggregated prefill: use one of vLLM's own connectors",
    "gds_path": "there is no GPUDirect Storage: set local_disk and max_local_disk_size",
    "maru_path": "there is no Maru tier: set local_disk or remote_url",
    "runtime_plugin_locations": "kvstow starts no scripts: start them beside vLLM",
    "hit_miss_ratio": "hits can't be turned into misses: use the request parameter "
    "kvstow.skip_load in tests",
    "remote_config_url": "settings are not fetched: put them into a file",
    "enable_hidden_state_cache": "hidden states are not kept, only KV",
}

_WARNED: Final = {
    "enable_controller": "there is no controller to report to",
    "retrieve_locations": "every tier that is set is read",
    "store_location": "every tier that is set is written",
}

_IGNORED: Final = {
    "loads always run beside other requests' steps": "use_layerwise enable_async_loading",
    "only whole chunks are kept": "save_unfull_chunk",
    "keys are vLLM's own block hashes": "pre_caching_hash_algorithm",
    "set memory.pool_dir to a hugetlbfs mount": "local_cpu_use_hugepages",
    "memory.size is all that is allocated": "reserve_local_cpu_size",
    "bind vLLM with numactl": "numa_mode",
    "part of enable_blending": (
        "blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens "
        "blend_special_str"
    ),
    "part of enable_p2p": "p2p_host p2p_init_ports p2p_lookup_ports",
    "part of enable_p2p, enable_pd or NIXL storage": (
        "transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device"
    ),
    "part of enable_pd": (
        "pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port "
        "pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec "
        "pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode "
        "pd_skip_proxy_notification pd_bidirectional"
    ),
    "part of LMCache's own server": "mp_host mp_port",
    "part of enable_controller": (
        "lmcache_instance_id controller_pull_url controller_reply_url lmcache_worker_ports "
        "lmcache_worker_ids lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time"
    ),
    "part of gds_path": "gds_path_sharding gds_buffer_size use_gds gds_backend",
    "part of maru_path": "maru_pool_size",
    "part of an audit:// remote_url": "audit_actual_remote_url",
    "kvstow opens no port and runs no scripts": (
        "internal_api_server_enabled internal_api_server_host internal_api_server_port_start "
        "internal_api_server_include_index_list internal_api_server_socket_path_prefix "
        "script_allowed_imports run_script_api_enabled"
    ),
    "lookups run in the scheduler's process; fetch.deadline_ms bounds a request's wait": (
        "external_lookup_client lookup_timeout_ms lookup_server_worker_ids "
        "enable_scheduler_bypass_lookup"
    ),
    "Python's garbage collector is left alone": "py_enable_gc",
    "a load's pins end with the load": "pin_timeout_sec pin_check_interval_sec",
    "the pool's memory is allocated piece by piece": (
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio "
        "lazy_memory_step_ratio lazy_memory_safe_size"
    ),
    "metrics always count chunks": (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics "
        "chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks "
        "chunk_statistics_strategy"
    ),
    "kvstow publishes no KV events": "enable_kv_events",
    "kvstow chooses how to copy": "use_gpu_connector_v3",
    "part of remote_config_url": "app_id",
    "part of enable_hidden_state_cache": (
        "max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode"
    ),
}


def _one_by_one(fate: Fate, reasons: Mapping[str, str]) -> dict[str, Key]:
    return {name: Key(name, fate, why) for name, why in reasons.items()}


def _by_reason(names_by_reason: Mapping[str, str]) -> dict[str, Key]:
    return {
        name: Key(name, Fate.IGNORED, why)
        for why, names in names_by_reason.items()
        for name in names.split()
    }


KEYS: Final[Mapping[str, Key]] = {
    **_one_by_one(Fate.MAPPED, _MAPPED),
    **_one_by_one(Fate.REFUSED, _REFUSED),
    **_one_by_one(Fate.WARNED, _WARNED),
    **_by_reason(_IGNORED),
}

ALIASES: Final[Mapping[str, str]] = {
    "enable_xpyd": "enable_pd",
    "nixl_role": "pd_role",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
"""Older names of LMCache's keys, and the names they have now."""

EXTRA_MAPPED: Final = {
    "storage_plugin.NAME.module_path": "with `storage_plugin.NAME.class_name`: `plugins.stores`, "
    "`NAME=module:class`",
    "storage_plugin.NAME.…": "`plugins.options`, which the plug-in gets",
    "rds_buffer_size": "`direct.staging_size`: MiB of a worker, times the workers",
    "rds_max_chunks": "`direct.max_chunks`",
    "rds_failure_policy": "`direct.failure_policy`: `ignore`; `raise` is kvstow's own; others are "
    "refused",
    "redis_url": "`redis.url`, with `remote_storage_plugins: redis`",
    "remote_storage_plugin.redis.redis_url": "`redis.url`, with `remote_storage_plugins: redis`",
    "username": "the user in `redis.url`",
    "password": "the password in `redis.url`",
    "valkey_username": "the user in `redis.url`",
    "valkey_password": "the password in `redis.url`",
    "valkey_database": "the database in `redis.url`",
    "valkey_mode": "`redis.topology`, if it is `cluster`",
    "tls_enable": "`rediss://` in `redis.url`",
    "disk_io_threads": "`disk.threads`",
    "s3_region": "`objects.region`",
    "s3_file_prefix": "the end of `objects.url`",
    "disable_tls": "with `s3://`: `objects.allow_http`, and an endpoint of `http://`",
    "master_server_address": "`mooncake.master`; also with `mooncake_` before it, as the next five",
    "metadata_server": "`mooncake.metadata`",
    "protocol": "`mooncake.protocol`",
    "device_name": "`mooncake.device`",
    "local_hostname": "`mooncake.local_hostname`",
    "global_segment_size": "`mooncake.segment_size`: bytes of a worker, times the workers; not "
    "set, 3.36 GB",
}
"""Keys of ``extra_config`` that become settings, and which, for the reference page."""

_EXTRA_REFUSED: Final = {
    "enable_nixl_storage": "there is no NIXL storage: set local_disk or remote_url",
    "s3_enable_s3express": "S3 Express isn't served: use an ordinary bucket",
}
_CREDENTIALS: Final = "credentials are read where AWS's tools read them"
_EXTRA_WARNED: Final = {
    "aws_access_key_id": f"{_CREDENTIALS}: set AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": f"{_CREDENTIALS}: set AWS_SECRET_ACCESS_KEY",
}
_EXTRA_IGNORED: Final = {
    "every frame holds its own metadata": "save_chunk_meta",
    "direct I/O is used wherever the filesystem takes it": "use_odirect use_direct_io",
    "ranks that hold the same bytes store them once": "save_only_first_rank "
    "first_rank_max_local_cpu_size",
    "set redis.ttl": "valkey_enable_ttl valkey_ttl_sec",
    "set objects.threads": "s3_num_io_threads s3_max_io_concurrency s3_max_inflight_reqs",
    "the client chooses": "s3_prefer_http2 transfer_timeout storage_root_dir "
    "mooncake_prefer_local_alloc",
    "set mooncake.buffer_size": "local_buffer_size mooncake_local_buffer_size",
    "set redis.threads": "valkey_sync_num_workers resp_num_threads",
    "part of enable_nixl_storage": (
        "nixl_backend nixl_pool_size nixl_path nixl_path_sharding nixl_presence_cache "
        "nixl_presence_cache_only nixl_use_hugepages nixl_backend_params nixl_enable_prog_thread "
        "nixl_sync_mode nixl_async_put nixl_endpoint_list"
    ),
    "part of a tier that kvstow refuses": (
        "fs_base_path fs_connector_use_odirect fs_connector_relative_tmp_dir "
        "fs_connector_read_ahead_size hf3fs_mount_point hf3fs_base_path audit_actual_remote_url "
        "audit_calc_checksum audit_verify_checksum audit_exclude_cmds azure_account_url "
        "azure_account_key azure_sas_token azure_connection_string sagemaker_hyperpod_bucket "
        "sagemaker_hyperpod_use_https dax.device_path dax.max_dax_size rust_raw_block.device_path"
    ),
    "it tunes LMCache's inside": (
        "lookup_backoff_time force_store_wait gpu_to_numa_mapping local_cpu.pinned_align_bytes "
        "heartbeat_url kv_msg_batch_size kv_msg_batch_timeout full_sync_batch_size "
        "p2p_max_retry_count lmcache_rpc_port log_level access_log runtime_plugin_extra_config"
    ),
}
EXTRA_KEYS: Final[Mapping[str, Key]] = {
    **_one_by_one(Fate.REFUSED, _EXTRA_REFUSED),
    **_one_by_one(Fate.WARNED, _EXTRA_WARNED),
    **_by_reason(_EXTRA_IGNORED),
}
"""Keys of ``extra_config`` that do not become settings."""

CONNECTOR_KEYS: Final[Mapping[str, str]] = {
    "discard_partial_chunks": "only whole chunks are kept",
    "lmcache_rpc_port": "kvstow's processes talk through vLLM",
    "skip_last_n_tokens": "the last token is always computed",
    "lmcache.max_tokens_per_load": "vLLM has allocated a load's blocks before it begins",
}
"""Keys of LMCache's in ``kv_connector_extra_config`` that have no effect, and why."""

OTHER_VARIABLES: Final[Mapping[str, str]] = {
    "LMCACHE_LOG_LEVEL": "kvstow logs as vLLM does: VLLM_LOGGING_LEVEL",
    "LMCACHE_USE_EXPERIMENTAL": "it chose between versions of LMCache",
    "LMCACHE_TRACK_USAGE": "kvstow sends no usage reports",
    "LMCACHE_USAGE_TRACK_URL": "kvstow sends no usage reports",
    "LMCACHE_USAGE_TRACK_INTERVAL": "kvstow sends no usage reports",
    "LMCACHE_DISABLE_BANNER": "kvstow has no banner",
}
"""``LMCACHE_*`` variables that are no keys, and why they have no effect."""
