"""Settings: sources and their precedence, what is refused and how, sizes, secrets, checks against the host."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.build import check_tiers as check_disk
from kvstow.errors import SettingsError
from kvstow.fields.kinds import OPTIONS, SECRET, SIZE
from kvstow.fields.values import Options
from kvstow.layout import MIN_CHUNKS
from kvstow.settings import (
    HostFacts,
    MemorySettings,
    Secret,
    Settings,
    check_host,
    check_pool,
    chunk_tokens,
    format_size,
    leaves,
    parse,
    parse_size,
    redact_url,
    sources,
)
from kvstow.settings.machine import Holder, tightest_memory
from kvstow.settings.machine import Memory as HostMemory
from kvstow.settings.schema import Leaf
from kvstow.settings.sections.fetch import FetchSettings
from kvstow.settings.sources import CONFIG_FILE, EXTRA_CONFIG, Effective, value_of
from kvstow.settings.yamlfile import parse_yaml

#: A value of each setting that isn't its default: (as text, as YAML and JSON have it, what it comes to).
SENTINELS: dict[str, tuple[str, Any, Any]] = {
    "chunk_size": ("4096", 4096, 4096),
    "save_decode": ("true", True, True),
    "priority_limit": ("-3", -3, -3),
    "integrity_key_file": ("/run/kv.key", "/run/kv.key", "/run/kv.key"),
    "fetch.deadline_ms": ("321", 321, 321),
    "fetch.min_tokens": ("0", 0, 0),
    "memory.size": ("7GiB", "7GiB", 7 << 30),
    "memory.policy": ("s3fifo", "s3fifo", "s3fifo"),
    "memory.pool_dir": ("/dev/shm", "/dev/shm", "/dev/shm"),
    "disk.paths": ("/nvme0/kv, /nvme1/kv", ["/nvme0/kv", "/nvme1/kv"], ("/nvme0/kv", "/nvme1/kv")),
    "disk.size": ("500GB", "500GB", 500 * 10**9),
    "disk.min_free": ("0", 0, 0),
    "disk.spread": ("device", "device", "device"),
    "disk.policy": ("s3fifo", "s3fifo", "s3fifo"),
    "disk.admission": ("second_sight", "second_sight", "second_sight"),
    "disk.scrub_rate": ("1MB", "1MB", 10**6),
    "disk.codec": ("quantized:low", "quantized:low", "quantized:low"),
    "disk.threads": ("2", 2, 2),
    "direct.engine": ("file", "file", "file"),
    "direct.path": ("/nvme0/a, /nvme1/b", ["/nvme0/a", "/nvme1/b"], ("/nvme0/a", "/nvme1/b")),
    "direct.size": ("200GB", "200GB", 200 * 10**9),
    "direct.staging_size": ("512MiB", "512MiB", 512 << 20),
    "direct.max_chunks": ("1000", 1000, 1000),
    "direct.policy": ("s3fifo", "s3fifo", "s3fifo"),
    "direct.failure_policy": ("raise", "raise", "raise"),
    "direct.format": ("true", True, True),
    "direct.threads": ("9", 9, 9),
    "redis.url": ("redis://u:pw@h/1", "redis://u:pw@h/1", Secret("redis://u:pw@h/1")),
    "redis.topology": ("cluster", "cluster", "cluster"),
    "redis.sentinel_service": ("kv", "kv", "kv"),
    "redis.sentinel_username": ("kv", "kv", "kv"),
    "redis.sentinel_password": ("pw", "pw", Secret("pw")),
    "redis.tls_ca": ("/ca.pem", "/ca.pem", "/ca.pem"),
    "redis.tls_cert": ("/c.pem", "/c.pem", "/c.pem"),
    "redis.tls_key": ("/c.key", "/c.key", "/c.key"),
    "redis.tls_check_hostname": ("false", False, False),
    "redis.prefix": ("prod-", "prod-", "prod-"),
    "redis.ttl": ("3600", 3600, 3600),
    "redis.part_size": ("1MiB", "1MiB", 1 << 20),
    "redis.write_limit": ("1GB", "1GB", 10**9),
    "redis.timeout_ms": ("5", 5, 5),
    "redis.connect_timeout_ms": ("6", 6, 6),
    "redis.codec": ("lossless", "lossless", "lossless"),
    "redis.threads": ("7", 7, 7),
    "objects.url": ("s3://b/p", "s3://b/p", "s3://b/p"),
    "objects.endpoint": ("https://h", "https://h", "https://h"),
    "objects.region": ("eu-west-1", "eu-west-1", "eu-west-1"),
    "objects.addressing": ("virtual", "virtual", "virtual"),
    "objects.profile": ("prod", "prod", "prod"),
    "objects.account": ("kv", "kv", "kv"),
    "objects.anonymous": ("true", True, True),
    "objects.allow_http": ("true", True, True),
    "objects.ca_file": ("/ca.pem", "/ca.pem", "/ca.pem"),
    "objects.part_size": ("4MiB", "4MiB", 4 << 20),
    "objects.parallel": ("8", 8, 8),
    "objects.timeout_ms": ("900", 900, 900),
    "objects.connect_timeout_ms": ("300", 300, 300),
    "objects.retries": ("0", 0, 0),
    "objects.codec": ("lossless", "lossless", "lossless"),
    "objects.threads": ("5", 5, 5),
    "mooncake.master": ("h:50051", "h:50051", "h:50051"),
    "mooncake.metadata": (
        "http://h:8080/metadata",
        "http://h:8080/metadata",
        "http://h:8080/metadata",
    ),
    "mooncake.protocol": ("rdma", "rdma", "rdma"),
    "mooncake.device": ("mlx5_0", "mlx5_0", "mlx5_0"),
    "mooncake.local_hostname": ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
    "mooncake.segment_size": ("1GiB", "1GiB", 1 << 30),
    "mooncake.buffer_size": ("128MiB", "128MiB", 128 << 20),
    "mooncake.prefix": ("prod/", "prod/", "prod/"),
    "mooncake.replicas": ("2", 2, 2),
    "mooncake.timeout_ms": ("500", 500, 500),
    "mooncake.connect_timeout_ms": ("5000", 5000, 5000),
    "mooncake.codec": ("lossless", "lossless", "lossless"),
    "mooncake.threads": ("2", 2, 2),
    "plugins.stores": ("a, b=c:d", ["a", "b=c:d"], ("a", "b=c:d")),
    "plugins.options": ('{"a": {"b": 1}}', {"a": {"b": 1}}, Options('{"a": {"b": 1}}')),
    "plugins.threads": ("3", 3, 3),
}
KNOWN = {leaf.key: leaf for leaf in leaves()}


@pytest.fixture
def yaml_file(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of settings by name, without a disk."""
    files: dict[str, str] = {}

    def read(path: str, named_by: str) -> Any:
        return parse_yaml(files[path].encode(), path) or {}

    monkeypatch.setattr(sources, "read_yaml", read)
    return files


def refused(
    file: str | None = None, env: dict[str, str] | None = None, extra: dict[str, Any] | None = None
) -> str:
    with pytest.raises(SettingsError) as error:
        parse(file, env or {}, extra)
    return str(error.value)


def of(effective: Effective, key: str) -> Any:
    return value_of(effective.settings, KNOWN[key])


# --- sources -------------------------------------------------------------------------------------------------------


def test_defaults_are_the_structs() -> None:
    effective = parse(None, {})
    assert effective.settings == Settings()
    assert set(effective.sources.values()) == {"default"}


@pytest.mark.parametrize("key", KNOWN)
def test_o2_every_setting_takes_effect_from_every_source(
    key: str, yaml_file: dict[str, str]
) -> None:
    text, raw, value = SENTINELS[key]
    leaf = KNOWN[key]
    assert value != leaf.default
    yaml_file["f"] = f"{key}: {text}"
    nested: dict[str, Any] = {leaf.section: {leaf.name: raw}} if leaf.section else {key: raw}
    for effective, source in (
        (parse("f", {}), "f"),
        (parse(None, {CONFIG_FILE: "f"}), "f"),
        (parse(None, {leaf.variable: text}), leaf.variable),
        (parse(None, {}, {key: raw}), EXTRA_CONFIG),
        (parse(None, {}, nested), EXTRA_CONFIG),
    ):
        assert of(effective, key) == value
        assert effective.sources[key] == source
        assert [k for k, s in effective.sources.items() if s != "default"] == [key]
        assert next(row for row in effective.describe() if row.key == key).source == source
        assert f"{key}={leaf.show(value)} ({source})" in effective.one_line()


def test_precedence_rises_from_file_to_environment_to_extra_config(
    yaml_file: dict[str, str],
) -> None:
    yaml_file["f"] = "chunk_size: 1\nfetch.deadline_ms: 1\nmemory:\n  size: 1GB\n  policy: s3fifo\n"
    env = {"KVSTOW_FETCH_DEADLINE_MS": "2", "KVSTOW_MEMORY_SIZE": "2GB"}
    effective = parse("f", env, {"memory": {"size": "3GB"}})
    memory = MemorySettings(size=3 * 10**9, policy="s3fifo")
    assert effective.settings == Settings(
        chunk_size=1, fetch=FetchSettings(deadline_ms=2), memory=memory
    )
    assert {
        k: s for k, s in effective.sources.items() if s != "default" or k.startswith("memory.")
    } == {
        "chunk_size": "f",
        "fetch.deadline_ms": "KVSTOW_FETCH_DEADLINE_MS",
        "memory.size": EXTRA_CONFIG,
        "memory.policy": "f",
        "memory.pool_dir": "default",
    }


def test_a_named_file_replaces_the_variables() -> None:
    with pytest.raises(SettingsError, match="/nonexistent/a"):
        parse("/nonexistent/a", {CONFIG_FILE: "/nonexistent/b"})


def test_a_stronger_source_can_set_null(yaml_file: dict[str, str]) -> None:
    yaml_file["f"] = "memory: {pool_dir: /tmp}"
    assert parse("f", {}).settings.memory.pool_dir == "/tmp"
    assert parse("f", {"KVSTOW_MEMORY_POOL_DIR": "null"}).settings.memory.pool_dir is None
    assert parse("f", {}, {"memory.pool_dir": None}).settings.memory.pool_dir is None


@pytest.mark.parametrize("content", ["", "# nothing\n", "memory:\n"])
def test_an_empty_file_or_section_sets_nothing(content: str, yaml_file: dict[str, str]) -> None:
    yaml_file["f"] = content
    assert parse("f", {}).settings == Settings()


def test_variables_of_kubernetes_services_are_left_alone() -> None:
    env = {
        "KVSTOW_SERVICE_HOST": "10.0.0.1",
        "KVSTOW_SERVICE_PORT": "80",
        "KVSTOW_SERVICE_PORT_HTTP": "80",
        "KVSTOW_PORT": "tcp://10.0.0.1:80",
        "KVSTOW_DEMO_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVSTOW_DEMO_PORT_80_TCP_ADDR": "10.0.0.1",
        "OTHER_MEMORY_SIZE": "1",
    }
    assert parse(None, env).settings == Settings()
    assert "KVSTOW_PORT" in refused(env={"KVSTOW_PORT": "80"})


def test_the_process_environment_is_read_by_load_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.os, "environ", {"KVSTOW_CHUNK_SIZE": "64", "PYTHONHASHSEED": "7"})
    assert sources.load({"save_decode": True}).settings == Settings(chunk_size=64, save_decode=True)
    assert sources.variable("PYTHONHASHSEED") == "7"
    assert sources.variable("KVSTOW_UNSET") is None


# --- refusals (O1) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("chunksize", "chunk_size"),
        ("chunk-size", "chunk_size"),
        ("memory.sizes", "memory.size"),
        ("memory_size", "memory.size"),
        ("Memory.Policy", "memory.policy"),
        ("save_decode_cache", "save_decode"),
    ],
)
def test_o1_unknown_keys_name_source_and_nearest(
    key: str, nearest: str, yaml_file: dict[str, str]
) -> None:
    yaml_file["/etc/kv.yaml"] = f"{key}: 1"
    for message, source in (
        (refused("/etc/kv.yaml"), "/etc/kv.yaml"),
        (refused(extra={key: 1}), EXTRA_CONFIG),
    ):
        assert f"unknown setting {key} in {source}" in message
        assert f"did you mean {nearest}?" in message


def test_o1_unknown_nested_key() -> None:
    assert "unknown setting memory.sise in" in refused(extra={"memory": {"sise": 1}})


def test_o1_unknown_variable_names_the_nearest() -> None:
    message = refused(env={"KVSTOW_MEMORY_SIZES": "1"})
    assert message == "unknown variable KVSTOW_MEMORY_SIZES; did you mean KVSTOW_MEMORY_SIZE?"
    assert "did you mean KVSTOW_CONFIG_FILE?" in refused(env={"KVSTOW_CONFIG": "f"})


def test_o1_where_nothing_is_near_the_list_is_named() -> None:
    said = "; nothing is named like it: `kvstow reference settings` lists all"
    assert refused(extra={"zzz": 1}) == f"unknown setting zzz in {EXTRA_CONFIG}{said}"
    assert refused(env={"KVSTOW_QQQQ": "1"}) == f"unknown variable KVSTOW_QQQQ{said}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("chunk_size", "256", "auto or integer from 1 to 1048576"),
        ("chunk_size", 0, "auto or integer"),
        ("chunk_size", True, "auto or integer"),
        ("chunk_size", 12.5, "auto or integer"),
        ("chunk_size", [16], "auto or integer"),
        ("chunk_size", {"a": 1}, "auto or integer"),
        ("save_decode", "true", "true or false"),
        ("save_decode", 1, "true or false"),
        ("save_decode", None, "true or false"),
        ("fetch.deadline_ms", -1, "auto or integer from 0 to 60000"),
        ("fetch.deadline_ms", 1 << 70, "auto or integer from 0 to 60000"),
        ("memory.size", "5 giraffes", "size"),
        ("memory.size", None, "size"),
        ("memory.size", True, "size"),
        ("memory.policy", "LRU", "lru or s3fifo"),
        ("memory.policy", "", "empty"),
        ("memory.pool_dir", 5, "text or null"),
        ("memory.pool_dir", "  ", "empty"),
    ],
)
def test_o1_wrong_values_name_key_value_source_and_what_is_accepted(
    key: str, value: Any, expected: str
) -> None:
    message = refused(extra={key: value})
    assert message.startswith(f"setting {key} = ")
    assert EXTRA_CONFIG in message
    assert expected in message


@pytest.mark.parametrize("name", [leaf.variable for leaf in leaves()] + [CONFIG_FILE])
@pytest.mark.parametrize("value", ["", " "])
def test_o1_a_variable_set_to_nothing_is_refused(name: str, value: str) -> None:
    assert refused(env={name: value}).startswith(f"{name} is set but empty")


def test_o1_text_of_the_environment_is_converted_but_checked() -> None:
    assert (
        parse(None, {"KVSTOW_CHUNK_SIZE": "128", "KVSTOW_SAVE_DECODE": "TRUE"}).settings.chunk_size
        == 128
    )
    assert "(from KVSTOW_CHUNK_SIZE)" in refused(env={"KVSTOW_CHUNK_SIZE": "many"})
    assert "(from KVSTOW_SAVE_DECODE)" in refused(env={"KVSTOW_SAVE_DECODE": "perhaps"})


def test_o1_a_section_given_as_a_value() -> None:
    assert "memory in kv_connector_extra_config is a section" in refused(extra={"memory": "5GB"})


def test_o1_a_key_given_twice(yaml_file: dict[str, str]) -> None:
    yaml_file["f"] = "chunk_size: 1\nchunk_size: 2\n"
    assert refused("f") == "setting chunk_size is given twice in f, line 2"
    yaml_file["f"] = "memory:\n  size: 1GB\n  size: 2GB\n"
    assert "size is given twice in f, line 3" in refused("f")
    yaml_file["f"] = "memory: {size: 1GB}\nmemory.size: 2GB\n"
    assert "memory.size is given twice in f" in refused("f")
    assert "memory.size is given twice" in refused(
        extra={"memory": {"size": "1GB"}, "memory.size": "2GB"}
    )


@pytest.mark.parametrize(
    "content",
    [
        "a: [1",
        "- 1",
        "text",
        "5",
        "a: !!python/object/apply:os.abort []",
        "d: 2024-99-99",
        "[" * 5000,
        "a: *b",
        "\x00",
    ],
)
def test_o1_what_is_not_a_mapping_of_yaml(content: str, tmp_path: Any) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(content)
    assert str(file) in refused(str(file))


def test_o1_an_unreadable_file_is_named_with_its_variable(tmp_path: Any) -> None:
    missing = str(tmp_path / "no.yaml")
    message = refused(env={CONFIG_FILE: missing})
    assert f"{missing} (named by {CONFIG_FILE})" in message
    assert CONFIG_FILE not in refused(missing)
    assert "No such file" in message
    assert "directory" in refused(str(tmp_path))
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * ((1 << 20) + 1))
    assert "larger than" in refused(str(huge))


@pytest.mark.parametrize(
    "content",
    [
        "url: redis://:hunter2@h: [",
        "redis.url: *hunter2",
        "redis.url: !hunter2 x",
        "a: !hunter2!x y",
        "%hunter2",
        'redis.url: "\\qhunter2"',
        "redis.url: !!int hunter2",
        "'redis://:hunter2@h': 1",
        "{redis: {':hunter2@h': 1}}",
        "redis://:hunter2@h: 1\nredis://:hunter2@h: 1",
    ],
)
def test_errors_of_a_file_do_not_quote_what_may_be_a_password(content: str, tmp_path: Any) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(f"{content}\n")
    assert "hunter2" not in refused(str(file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"memory: {size: \xe9}", "it is no text in UTF-8"),
        (b"[" * 9999, "it is nested too deeply"),
        (
            b"{\n\t'memory': {}}",
            ", line 2 isn't valid YAML: found character '\\t' that cannot start any token. Indent",
        ),
    ],
)
def test_o1_what_is_wrong_with_a_file_is_said(content: bytes, said: str, tmp_path: Any) -> None:
    file = tmp_path / "kv.yaml"
    file.write_bytes(content)
    assert said in refused(str(file))


def test_a_settings_file_that_is_a_pipe_is_not_waited_for(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert f"{tmp_path}/pipe is a pipe: give a file" in refused(str(tmp_path / "pipe"))
    assert parse("/dev/null", {}).settings == Settings()


def test_recursive_yaml_is_refused_not_followed() -> None:
    parsed = parse_yaml(b"memory: &a {x: *a}", "f")
    assert "unknown setting memory.x" in refused(extra=parsed)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        (5e9, 5_000_000_000),
        ("123", 123),
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("20 gb", 20 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("0.5KiB", 512),
        ("7G", 7 * 10**9),
        ("7Gi", 7 * 2**30),
        ("10B", 10),
        ("8191PiB", 8191 * 2**50),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *(
            -1,
            "-5GB",
            "",
            "GB",
            "5XB",
            "5iB",
            "1e3",
            "1,5GB",
            "5GB 3",
            "0x10",
            "nan",
            "inf",
            "9999PB",
            1 << 63,
            1e30,
        ),
        *(-0.5, 0.5, "0.0001kB", float("nan"), float("inf"), True, None, [5], b"5", "５GB"),
    ],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_size(text)


@given(st.integers(0, (1 << 63) - 1))
def test_a_shown_size_reads_back_to_within_its_digits(size: int) -> None:
    shown = parse_size(format_size(size))
    assert abs(shown - size) <= size * 0.0006
    if size % 10**6 == 0:
        assert shown == size


# --- secrets ---------------------------------------------------------------------------------------------------------


class Remote(msgspec.Struct, frozen=True):
    url: Annotated[str | None, msgspec.Meta(extra={"kind": SECRET}, description="Where.")] = None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://user@h", "redis://user@h"),
        ("redis://user:hunter2@h:1/0", "redis://user:****@h:1/0"),
        ("rediss://:hunter2@[::1]:1", "rediss://:****@[::1]:1"),
        ("redis://u:hunter@2@h", "redis://u:****@h"),
        ("redis://u:hunter/2@h", "redis://****"),
        ("redis://u:a@hunter/2@h:1", "redis://****"),
        ("redis://u:a@b?hunter2@h:1", "redis://****"),
        ("redis://u:a@b#hunter2@h:1", "redis://****"),
        ("redis://h?db=1&password=hunter2", "redis://h?db=1&password=****"),
        ("s3://b?secret_access_key=hunter2&region=x", "s3://b?secret_access_key=****&region=x"),
        ("unix:///run/redis.sock?token=hunter2", "unix:///run/redis.sock?token=****"),
        ("http://[hunter2", "****"),
        ("hunter2", "****"),
    ],
)
def test_secrets_are_masked(url: str, shown: str) -> None:
    secret = Secret(url)
    assert (str(secret), repr(secret), f"{secret}", f"{secret!r}") == (shown,) * 4
    assert secret.reveal() == url
    if "://" in url:
        assert redact_url(url) == shown


@pytest.mark.parametrize("key", [leaf.key for leaf in leaves() if leaf.kind != OPTIONS])
def test_a_password_in_the_wrong_place_does_not_show_either(key: str) -> None:
    url = "redis://u:hunter2@h:1/0"
    for value in (
        url,
        [url],
        {"password": "hunter2"},
        {url: 1},
        "u:hunter2@h",
        "x" * 50 + url,
        f'{{"a": "{url}"}}',
    ):
        try:
            effective = parse(None, {}, {key: value})
            shown = effective.one_line() + str(effective.describe())
        except SettingsError as error:
            shown = str(error)
        assert "hunter2" not in shown, value


def test_a_secret_setting_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf: Leaf = next(leaves(Remote, "remote"))
    assert leaf.parse("redis://:hunter2@h", from_text=True) == Secret("redis://:hunter2@h")
    assert leaf.show(leaf.parse("redis://:hunter2@h", from_text=True)) == "redis://:****@h"
    assert leaf.parse(None, from_text=False) is None
    with pytest.raises(SettingsError) as error:
        sources._checked(leaf, ["hunter2"], "f", from_text=False)
    assert "hunter2" not in str(error.value)
    assert "setting remote.url (from f)" in str(error.value)


# --- against engine and host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "block", "valid"),
    [
        (100, 16, "96 or 112"),
        (10, 16, "16"),
        (200, 128, "128 or 256"),
        (1500, 1024, "1024 or 2048"),
    ],
)
def test_o3_a_chunk_that_is_no_multiple_of_the_block(chunk: int, block: int, valid: str) -> None:
    with pytest.raises(SettingsError) as error:
        chunk_tokens(Settings(chunk_size=chunk), block, [1])
    expected = f"chunk_size {chunk} is not a multiple of vLLM's block size {block}: set it to {valid}, or to auto"
    assert str(error.value) == expected


def test_chunk_tokens_are_as_set_or_auto() -> None:
    assert chunk_tokens(Settings(chunk_size=48), 16, [1 << 30]) == 48
    assert chunk_tokens(Settings(), 16, [1 << 22]) == 16
    assert chunk_tokens(Settings(), 16, [1 << 10]) == 128


def test_o3_a_pool_below_a_few_chunks() -> None:
    frame = 7 << 20
    check_pool(Settings(memory=MemorySettings(size=MIN_CHUNKS * frame)), frame, 256)
    with pytest.raises(SettingsError) as error:
        check_pool(Settings(memory=MemorySettings(size=MIN_CHUNKS * frame - 1)), frame, 256)
    message = str(error.value)
    assert "memory.size 29.36MB holds 3 chunks" in message
    assert "7MiB" in message
    assert "chunk_size to less than 256" in message
    advised = re.search(r"at least (\d+MB)", message)
    assert advised is not None
    check_pool(Settings(memory=MemorySettings(size=parse_size(advised[1]))), frame, 256)


GB = 10**9
FACTS = HostFacts(HostMemory(16 * GB, 8 * GB, "this machine"))


def refused_host(size: int, facts: HostFacts, engines: int = 1, pool_dir: str | None = None) -> str:
    with pytest.raises(SettingsError) as error:
        check_host(Settings(memory=MemorySettings(size=size, pool_dir=pool_dir)), facts, engines)
    return str(error.value)


def test_h9_a_pool_above_memory_names_setting_number_and_fix() -> None:
    check_host(Settings(memory=MemorySettings(size=8 * GB)), FACTS)
    left = refused_host(8 * GB + 1, FACTS)
    assert "memory.size" in left
    assert "8GB of memory that this machine has left" in left
    assert "docker run --memory" in left
    assert "17GB is more than the 16GB of memory that this machine has." in refused_host(
        17 * GB, FACTS
    )


def test_h9_the_sum_over_engines_must_fit_the_machine() -> None:
    check_host(Settings(memory=MemorySettings(size=4 * GB)), FACTS, engines=4)
    assert "5GB for each of 4 engines on this host is more than the 16GB" in refused_host(
        5 * GB, FACTS, engines=4
    )


def test_h9_a_pool_directory_too_small_names_the_container_option() -> None:
    facts = replace(FACTS, pool_dir_free_bytes=64 << 20)
    message = refused_host(5 * GB, facts, pool_dir="/dev/shm")
    assert "memory.size 5GB is more than the 64MiB free in memory.pool_dir /dev/shm" in message
    assert "--shm-size" in message
    check_host(Settings(memory=MemorySettings(size=64 << 20, pool_dir="/dev/shm")), facts)


def test_a_pool_directory_that_is_none() -> None:
    message = refused_host(GB, replace(FACTS, pool_dir_problem="is not a directory"), pool_dir="/x")
    assert "memory.pool_dir /x is not a directory" in message


def test_memory_held_by_a_killed_server_is_named() -> None:
    message = refused_host(9 * GB, replace(FACTS, holders=(Holder(4242, 5 * GB),)))
    assert "Process 4242 holds a kvstow pool of 5GB" in message


def test_unknown_memory_is_not_a_reason_to_refuse() -> None:
    check_host(Settings(memory=MemorySettings(size=1 << 60)), HostFacts(None))


MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n"
)
MACHINE = HostMemory(16_000_000 << 10, 8_000_000 << 10, "this machine")
COMMITTED = MEMINFO + "CommitLimit:    9000000 kB\nCommitted_AS:   {} kB\n"
STRICT = "this machine (vm.overcommit_memory=2)"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"/proc/meminfo": MEMINFO}, MACHINE),
        ({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/\n"}, MACHINE),
        *(
            (
                {
                    "/proc/meminfo": COMMITTED.format(used),
                    "/proc/sys/vm/overcommit_memory": f"{mode}\n",
                },
                expected,
            )
            for used, mode, expected in (
                (
                    8_500_000,
                    2,
                    HostMemory(9_000_000 << 10, 500_000 << 10, STRICT),
                ),  # the kernel refuses more
                (9_500_000, 2, HostMemory(9_000_000 << 10, 0, STRICT)),
                (8_500_000, 0, MACHINE),
            )
        ),
        (  # v2 in a container: the path is the root
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "4000000000\n",
                "/sys/fs/cgroup/memory.current": "3000000000\n",
                "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 400000000\nactive_file 600000000\n",
            },
            HostMemory(4 * GB, 2 * GB, "the container (/sys/fs/cgroup/memory.max)"),
        ),
        (  # v2: an ancestor's limit is tighter than one's own; another has none
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/a/b/c\n",
                "/sys/fs/cgroup/a/memory.max": "2000000000",
                "/sys/fs/cgroup/a/memory.current": "1500000000",
                "/sys/fs/cgroup/a/b/memory.max": "max",
                "/sys/fs/cgroup/a/b/memory.current": "5",
                "/sys/fs/cgroup/a/b/c/memory.max": "3000000000",
                "/sys/fs/cgroup/a/b/c/memory.current": "100",
            },
            HostMemory(2 * GB, GB // 2, "the container (/sys/fs/cgroup/a/memory.max)"),
        ),
        (  # v1, the host's path not mounted in the container
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "3900000000",
                "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\ntotal_active_file 0\n",
            },
            HostMemory(
                4 * GB, GB // 5, "the container (/sys/fs/cgroup/memory/memory.limit_in_bytes)"
            ),
        ),
        (  # v1 without a limit, beside v2 without the controller
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "4:memory:/\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            },
            MACHINE,
        ),
        (  # over its limit: nothing is left, not less than nothing
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "10",
                "/sys/fs/cgroup/memory.current": "30",
            },
            HostMemory(10, 0, "the container (/sys/fs/cgroup/memory.max)"),
        ),
    ],
)
def test_the_tightest_memory_counts(files: dict[str, str], expected: HostMemory | None) -> None:
    assert tightest_memory(files.get) == expected


def test_every_setting_is_described() -> None:
    for leaf in leaves():
        assert leaf.description.endswith("."), leaf.key
        assert leaf.parse(leaf.show(leaf.default), from_text=True) == leaf.default
    variables = [leaf.variable for leaf in leaves()]
    assert len(set(variables)) == len(variables)


def test_i2_a_disk_tier_without_a_limit_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"disk\.paths is set and disk\.size is not"):
        check_disk(parse(None, {"KVSTOW_DISK_PATHS": "/a"}).settings, 4 << 20)
    check_disk(parse(None, {"KVSTOW_DISK_SIZE": "1B"}).settings, 4 << 20)


def test_a_disk_tier_holds_some_chunks_in_each_directory() -> None:
    frame = 4 << 20
    least = 2 * MIN_CHUNKS * frame
    check_disk(parse(None, {}, {"disk": {"paths": ["/a", "/b"], "size": least}}).settings, frame)
    with pytest.raises(SettingsError, match=r"over 2 paths is less than 4 chunks of 4MiB in each"):
        check_disk(
            parse(None, {}, {"disk": {"paths": ["/a", "/b"], "size": least - 1}}).settings, frame
        )


@pytest.mark.parametrize(
    "wrong", ["relative", "/a,", "/a,/a", "/a,/a/", "/a,/b/../a", ["/a", 3], 7, [""], "/a,./b"]
)
def test_wrong_paths_are_refused(wrong: object) -> None:
    with pytest.raises(SettingsError, match=r"disk\.paths"):
        parse(None, {}, {"disk.paths": wrong})


@pytest.mark.parametrize("key", [leaf.key for leaf in leaves() if leaf.kind == SIZE])
@pytest.mark.parametrize("plain", [20, "20", 0.5e3, "65535"])
def test_a_size_without_a_unit_that_cannot_be_meant_is_refused(key: str, plain: object) -> None:
    with pytest.raises(SettingsError, match=rf"{key}.*expected a unit.*{plain}GB\?"):
        parse(None, {}, {key: plain})
    for meant in ("20B", 65536, 0):
        parse(None, {}, {key: meant})
