"""LMCache configurations as they are published, each reduced to what matters here.

They are LMCache's own examples and documentation, the RBLN documentation, and other people's guides. All but one
become settings of kvstow's; the one that is refused asks for peer-to-peer transfer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstow.errors import SettingsError
from kvstow.settings import leaves, parse_lmcache
from kvstow.settings.lmcache_values import GIB
from kvstow.settings.sources import value_of

WORKERS = 2
LEAVES = {leaf.key: leaf for leaf in leaves()}

#: Of each configuration its text, the settings it becomes, and a part of each warning.
PUBLIC: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "LMCache, examples/sgl_integration": (
        "chunk_size: 256\nlocal_cpu: true\nuse_layerwise: true\nmax_local_cpu_size: 20\n"
        "save_unfull_chunk: false",
        {"chunk_size": 256, "memory.size": 40 * GIB},
        [],
    ),
    "LMCache, documentation of host memory": (
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0",
        {"memory.size": 10 * GIB},
        [],
    ),
    "LMCache, continuous integration of the disk": (
        'chunk_size: 256\nlocal_cpu: False\nlocal_disk: "file:///local/end-to-end-tests/local/"\n'
        "max_local_disk_size: 5",
        {"disk.paths": ("/local/end-to-end-tests/local",), "disk.size": 10 * GIB},
        [],
    ),
    "a guide to a disk for each GPU": (
        'local_cpu: True\nmax_local_cpu_size: 1600\nlocal_disk: "file:///mnt/nvme0/lm,file:///mnt/nvme1/lm"\n'
        "max_local_disk_size: 4000\nlocal_disk_path_sharding: by_gpu",
        {"disk.paths": ("/mnt/nvme0/lm", "/mnt/nvme1/lm"), "disk.spread": "device"},
        [],
    ),
    "LMCache, documentation of sharing by Redis": (
        'chunk_size: 256\nlocal_cpu: true\nremote_url: "redis://localhost:6379"\nremote_serde: "cachegen"',
        {"redis.url": "redis://localhost:6379", "redis.codec": "quantized"},
        [],
    ),
    "LMCache, examples/kv_cache_reuse/remote_backends/resp": (
        'chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 20.0\nremote_url: "resp://localhost:6379"\n'
        'async_loading: false\nremote_serde: "naive"\nblocking_timeout_secs: 120\n'
        "extra_config:\n  resp_num_threads: 8\n  save_chunk_meta: False\n"
        '  username: "default"\n  password: "secret"',
        {"redis.url": "redis://default:secret@localhost:6379", "redis.timeout_ms": 60_000},
        ["async_loading in", "kvstow waits 60 s at most"],
    ),
    "LMCache, documentation of Valkey": (
        'chunk_size: 256\nremote_url: "valkey://a:6379, b:6379"\nremote_serde: "naive"\n'
        'extra_config:\n  valkey_mode: "cluster"\n  valkey_username: "u"\n  valkey_password: "p"',
        {"redis.url": "redis://u:p@a:6379,b:6379", "redis.topology": "cluster"},
        [],
    ),
    "a guide to a managed Valkey with TLS": (
        'remote_url: "valkeys://default:p@cache.example:6379"\nremote_serde: "naive"',
        {"redis.url": "rediss://default:p@cache.example:6379"},
        [],
    ),
    "LMCache, documentation of S3": (
        'chunk_size: 256\nlocal_cpu: False\nsave_unfull_chunk: False\nremote_url: "s3://your-bucket-name"\n'
        'remote_serde: "naive"\nblocking_timeout_secs: 100\n'
        'extra_config:\n  s3_region: "us-east-1"\n  s3_max_io_concurrency: 64\n  s3_max_inflight_reqs: 64',
        {"objects.url": "s3://your-bucket-name", "objects.region": "us-east-1"},
        ["kvstow waits 60 s at most"],
    ),
    "LMCache, documentation of CoreWeave": (
        "chunk_size: 256\nlocal_cpu: False\nmax_local_cpu_size: 50\nenable_async_loading: True\n"
        'remote_url: "s3://test-127.cwlota.com"\nextra_config:\n  s3_prefer_http2: False\n'
        '  s3_region: "US-WEST-04A"\n  s3_enable_s3express: False\n  save_chunk_meta: False\n'
        '  s3_file_prefix: "test-2"',
        {"objects.url": "s3://test-127/test-2", "objects.endpoint": "https://cwlota.com"},
        [],
    ),
    "LMCache, examples/kv_cache_reuse/remote_backends/tigris": (
        'local_cpu: False\nmax_local_cpu_size: 10\nremote_url: "s3://bucket.t3.storage.dev"\n'
        'extra_config:\n  s3_num_io_threads: 64\n  s3_region: "auto"\n  aws_access_key_id: "a"\n'
        '  aws_secret_access_key: "b"',
        {"objects.url": "s3://bucket", "objects.endpoint": "https://t3.storage.dev"},
        ["aws_access_key_id (from", "aws_secret_access_key (from"],
    ),
    "a test of a local S3 server": (
        'local_cpu: False\nremote_url: "s3://localhost:8080/bench"\nremote_serde: "naive"\n'
        'extra_config:\n  s3_region: "US-WEST-04A"\n  disable_tls: True',
        {"objects.url": "s3://bench", "objects.endpoint": "http://localhost:8080"},
        [],
    ),
    "LMCache, documentation of Mooncake": (
        'chunk_size: 256\nremote_url: "mooncakestore://127.0.0.1:50051/"\nremote_serde: "naive"\n'
        "local_cpu: False\nmax_local_cpu_size: 5\nextra_config:\n"
        '  local_hostname: "localhost"\n  metadata_server: "http://127.0.0.1:8080/metadata"\n'
        '  protocol: "tcp"\n  master_server_address: "localhost:50051"\n'
        "  global_segment_size: 3355443200\n  local_buffer_size: 1073741824\n  transfer_timeout: 1",
        {"mooncake.master": "127.0.0.1:50051", "mooncake.segment_size": 2 * 3_355_443_200},
        [],
    ),
    "LMCache, examples/cache_controller": (
        "chunk_size: 256\nlocal_cpu: True\nmax_local_cpu_size: 5\nenable_controller: True\n"
        'lmcache_instance_id: "lmcache_default_instance"\ncontroller_url: "localhost:9001"\n'
        "lmcache_worker_port: 8001",
        {"memory.size": 10 * GIB},
        ["enable_controller"],
    ),
    "a benchmark of the disk alone": (
        "local_cpu: True\nmax_local_cpu_size: 8\nstore_location: LocalDiskBackend\n"
        "retrieve_locations: [LocalDiskBackend]\nlocal_disk: /mnt/kv\nmax_local_disk_size: 1000",
        {"disk.paths": ("/mnt/kv",)},
        ["store_location", "retrieve_locations"],
    ),
    "RBLN, documentation of RDS": (
        "local_cpu: False\nmax_local_cpu_size: 0\nchunk_size: 1024\nuse_layerwise: False\n"
        "storage_plugins: RDSBackend\nextra_config:\n"
        "  storage_plugin.RDSBackend.module_path: lmcache_rbln.storage_plugin.rds_backend\n"
        "  storage_plugin.RDSBackend.class_name: RDSBackend\n"
        "  rds_buffer_size: 2048\n  rds_failure_policy: ignore",
        {"direct.engine": "rds", "direct.staging_size": 4 * GIB},
        [],
    ),
    "no host memory beside a disk at home": (
        "local_cpu: False\nmax_local_cpu_size: 0\nlocal_disk: ~/lmcache\nmax_local_disk_size: 100 GB",
        {
            "memory.size": 2 * GIB,
            "disk.paths": ("/home/kim/lmcache",),
            "disk.size": 200 * GIB,
        },
        ["max_local_cpu_size is 0"],
    ),
    "a blog's size with a unit": (
        'chunk_size: 256\nmax_local_cpu_size: "10GB"',
        {"memory.size": 20 * GIB},
        [],
    ),
    "a guide that switches the disk on": (
        "local_disk: true\nmax_local_disk_size: 100",
        {"disk.paths": None, "memory.size": 10 * GIB},
        ["local_disk is true and names no directory"],
    ),
}

PEER_TO_PEER = (
    "chunk_size: 256\nlocal_cpu: True\nmax_local_cpu_size: 5\nenable_async_loading: True\n"
    'enable_p2p: True\np2p_host: "localhost"\np2p_init_ports: 8200\np2p_lookup_ports: 8201\n'
    'transfer_channel: "nixl"\nenable_controller: True\nlmcache_instance_id: "lmcache_instance_1"'
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/kim")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_configuration_converts(name: str, tmp_path: Path) -> None:
    text, comes_to, warnings = PUBLIC[name]
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    effective = parse_lmcache({"LMCACHE_CONFIG_FILE": str(file)}, None, workers=WORKERS)
    for key, wanted in comes_to.items():
        value = value_of(effective.settings, LEAVES[key])
        assert (value.reveal() if hasattr(value, "reveal") else value) == wanted, key
    warned = [note.text for note in effective.notes if note.warns]
    assert len(warned) == len(warnings)
    assert all(any(part in line for line in warned) for part in warnings)


@pytest.mark.parametrize("name", [name for name in PUBLIC if "extra_config" not in PUBLIC[name][0]])
def test_variables_say_the_same_as_the_file(name: str, tmp_path: Path) -> None:
    text, _, _ = PUBLIC[name]
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    variables = {
        f"LMCACHE_{key.upper()}": ",".join(value) if isinstance(value, list) else str(value)
        for key, value in yaml.safe_load(text).items()
    }
    by_file = parse_lmcache({"LMCACHE_CONFIG_FILE": str(file)}, None, workers=WORKERS)
    assert parse_lmcache(variables, None, workers=WORKERS).settings == by_file.settings


def test_peer_to_peer_transfer_is_refused_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(PEER_TO_PEER)
    with pytest.raises(SettingsError, match=r"enable_p2p.*no peer-to-peer transfer") as error:
        parse_lmcache({"LMCACHE_CONFIG_FILE": str(file)}, None, workers=WORKERS)
    assert "let the engines share a remote tier" in str(error.value)
