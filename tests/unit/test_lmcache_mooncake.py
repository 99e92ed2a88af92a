"""Mooncake's own configuration file, which LMCache reads too: nothing in it is dropped in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.errors import SettingsError
from kvstow.settings import Effective, convert_lmcache, parse_lmcache

FILE = {
    "local_hostname": "10.0.0.7",
    "metadata_server": "etcd://10.0.0.1:2379",
    "master_server_address": "10.0.0.1:50051",
    "protocol": "rdma",
    "device_name": "mlx5_0",
    "global_segment_size": 1 << 30,
    "local_buffer_size": 1 << 30,
}


def write(folder: Path, content: Any) -> str:
    path = folder / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def effective(
    path: str, url: str = "mooncakestore://10.0.0.9:50051/", extra: Any = None
) -> Effective:
    env = {"LMCACHE_REMOTE_URL": url, "MOONCAKE_CONFIG_PATH": path}
    if extra is not None:
        env["LMCACHE_EXTRA_CONFIG"] = json.dumps(extra)
    return parse_lmcache(env, None, workers=2)


def notes(found: Effective) -> str:
    return "\n".join(note.text for note in found.notes)


def refused(path: str, **given: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        effective(path, **given)
    return str(caught.value)


def test_every_key_of_the_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    found = effective(path, url="mooncakestore://")
    mooncake = found.settings.section(MooncakeSettings)
    assert mooncake.master == "10.0.0.1:50051"
    assert mooncake.metadata == "etcd://10.0.0.1:2379"
    assert (mooncake.protocol, mooncake.device) == ("rdma", "mlx5_0")
    assert mooncake.local_hostname == "10.0.0.7"
    assert mooncake.segment_size == 2 << 30, "of each of two workers"
    source = found.sources["mooncake.protocol"]
    assert source == f"protocol in {path} (named by MOONCAKE_CONFIG_PATH)"
    assert f"local_buffer_size in {path}" in notes(found)
    assert "mooncake.buffer_size" in notes(found)


def test_the_address_and_device_in_the_url_win_over_the_file(tmp_path: Path) -> None:
    found = effective(write(tmp_path, FILE), url="mooncakestore://h:1/?device=mlx5_1")
    assert found.settings.section(MooncakeSettings).master == "h:1"
    assert found.settings.section(MooncakeSettings).device == "mlx5_1"
    assert found.settings.section(MooncakeSettings).metadata == "etcd://10.0.0.1:2379"


def test_the_file_replaces_what_extra_config_says_of_mooncake(tmp_path: Path) -> None:
    extra = {"protocol": "tcp", "mooncake_local_hostname": "n1", "global_segment_size": 7}
    path = write(tmp_path, {"protocol": "RDMA"})
    found = effective(path, extra=extra)
    assert found.settings.section(MooncakeSettings).protocol == "rdma"
    assert found.settings.section(MooncakeSettings).local_hostname == "127.0.0.1"
    assert found.settings.section(MooncakeSettings).segment_size == 2 * 3_355_443_200
    for name in extra:
        assert name in notes(found), "what is not used is named"
    assert path in notes(found)


@pytest.mark.parametrize(
    ("size", "comes_to"),
    [
        ("4GB", 4 << 30),
        ("1.5 gb", 3 << 29),
        ("512m", 512 << 20),
        ("16777216", 16 << 20),
        (0, 0),
        (None, None),
    ],
)
def test_sizes_are_read_as_mooncake_reads_them(tmp_path: Path, size: Any, comes_to: Any) -> None:
    found = effective(write(tmp_path, {"global_segment_size": size}))
    each = 3_355_443_200 if comes_to is None else comes_to
    assert found.settings.section(MooncakeSettings).segment_size == 2 * each


def test_a_device_without_rdma_has_no_effect_and_is_named(tmp_path: Path) -> None:
    found = effective(write(tmp_path, {"protocol": "tcp", "device_name": "eth0"}))
    assert found.settings.section(MooncakeSettings).device is None
    assert "device_name" in notes(found)


def test_keys_that_kvstow_does_not_know_are_named(tmp_path: Path) -> None:
    found = effective(write(tmp_path, {"storage_root_dir": "/x", "tenant_id": "a"}))
    assert "storage_root_dir" in notes(found)
    assert "tenant_id" in notes(found)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "isn't valid JSON: line 1"),
        ("[]", "must hold a JSON object"),
        ('{"a":' * 200_000, "isn't valid JSON"),
        (" " * (1 << 20) + "{}", "is larger than 1048576 bytes"),
        ('{"protocol": "tcp", "protocol": "rdma"}', "protocol is given twice"),
        ({"protocol": 3}, "expected text, not 3"),
        ({"protocol": "ascend"}, "mooncake.protocol = 'ascend'"),
        ({"local_hostname": ["a"]}, "local_hostname"),
        ({"global_segment_size": "much"}, "global_segment_size in "),
        ({"global_segment_size": -1}, "global_segment_size in "),
        ({"global_segment_size": True}, "global_segment_size in "),
        ({"global_segment_size": 1e400}, "global_segment_size in "),
        ({"global_segment_size": "9" * 5000}, "global_segment_size in "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_and_key(
    tmp_path: Path, content: Any, says: str
) -> None:
    path = write(tmp_path, content)
    error = refused(path)
    assert says in error
    assert path in error
    assert "MOONCAKE_CONFIG_PATH" in error


def test_a_file_that_is_not_there_or_never_ends_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(str(tmp_path / "none.json"))
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refused(str(tmp_path / "pipe"))


def test_a_file_without_a_master_and_a_url_without_one_are_refused(tmp_path: Path) -> None:
    assert "names no master" in refused(write(tmp_path, {}), url="mooncakestore://")


def test_without_a_mooncake_url_the_file_is_not_read(tmp_path: Path) -> None:
    found = effective(str(tmp_path / "none.json"), url="redis://h")
    assert found.settings.section(MooncakeSettings).master is None


def test_converting_a_file_reads_what_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(tmp_path, FILE))
    lmcache = tmp_path / "lmcache.yaml"
    lmcache.write_text("remote_url: mooncakestore://h:1\n")
    entries = {entry.key: entry.value for entry in convert_lmcache(str(lmcache), workers=1).entries}
    assert entries["mooncake.protocol"] == "rdma"
    assert entries["mooncake.master"] == "h:1"
