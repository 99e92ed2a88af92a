"""Parts of the object store tier that need no server: URLs, names, errors, settings."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest

from kvstow import build
from kvstow.backends.objects.bucket import Bucket, parse_url
from kvstow.backends.objects.open import check
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.errors import SettingsError, StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey, Namespace
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, parse
from kvstow.testing.manual import ManualClock
from tests.rigs.tiers import open_tier

SECRET = "hunter2"
LAYOUT = build.chunk_layout(Settings(), 16, [8192])


@pytest.mark.parametrize(
    ("url", "bucket"),
    [
        ("s3://bucket", Bucket("s3", "bucket")),
        ("s3://my.bucket-1/a/b=c/", Bucket("s3", "my.bucket-1", "a/b=c")),
        ("gs://bucket/x", Bucket("gcs", "bucket", "x")),
        ("az://container/x", Bucket("azure", "container", "x")),
        ("file:///mnt/nfs/kv%20stow", Bucket("file", "/mnt/nfs/kv stow")),
    ],
)
def test_k3_urls(url: str, bucket: Bucket) -> None:
    assert parse_url(url) == bucket


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("bucket/prefix", "expected s3://"),
        ("http://bucket", "expected s3://"),
        ("s3://", "name of a bucket"),
        ("s3:///prefix", "name of a bucket"),
        (f"s3://user:{SECRET}@bucket", "credentials come from"),
        (f"s3://bucket?secret={SECRET}", "credentials come from"),
        (f"s3://bucket#{SECRET}", "credentials come from"),
        ("s3://bucket/a b", "letters, digits"),
        ("s3://bucket/a/../b", "letters, digits"),
        ("s3://bucket/a//b", "letters, digits"),
        ("s3://buck[et", "no URL|name of a bucket"),
        ("file://host/dir", "absolute path"),
        ("file:///", "absolute path"),
        ("file:///a/../b", "absolute path"),
    ],
)
def test_k3_urls_that_are_refused_without_being_repeated(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_url(url)
    assert SECRET not in str(caught.value)


def test_b9_names_are_injective_and_made_of_digests() -> None:
    namespaces = [Namespace.from_fields({"n": str(i)}) for i in range(3)]
    keys = [
        ChunkKey.build(n, group, bytes([i]))
        for n in namespaces
        for group in (0, 1)
        for i in range(20)
    ]
    for prefix in ("", "a/b"):
        names = [Bucket("s3", "b", prefix).path_of(key) for key in keys]
        assert len(set(names)) == len(keys)
        assert all(set(name[len(prefix) :]) <= set("0123456789abcdef/.kv") for name in names)
        assert all(
            name.startswith(f"{prefix}/" if prefix else namespaces[0].hex()[:0]) for name in names
        )


@pytest.mark.parametrize(
    ("endpoint", "allowed", "http"),
    [
        (None, False, False),
        ("https://h", False, False),
        ("http://127.0.0.1:9000", False, True),
        ("http://localhost", False, True),
        ("http://[::1]:9", False, True),
        ("http://127.0.0.1.evil.example", False, False),
        ("http://h", True, True),
    ],
)
def test_plain_http_is_for_this_host_alone_unless_told(
    endpoint: str | None, allowed: bool, http: bool
) -> None:
    assert ObjectsSettings(url="s3://b", endpoint=endpoint, allow_http=allowed).allows_http is http


def options(**settings: Any) -> ObjectsSettings:
    values = {f"objects.{name}": value for name, value in {"url": "s3://b/p", **settings}.items()}
    section = parse(None, {}, values).settings.section(ObjectsSettings)
    check(section)
    return section


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "ftp://x"}, r"objects\.url: expected s3://"),
        ({"url": "memory:///"}, r"objects\.url: expected s3://"),
        ({"endpoint": "h:9000"}, r"objects\.endpoint: expected https://"),
        ({"endpoint": "https://"}, r"objects\.endpoint: expected https://"),
        ({"endpoint": f"https://u:{SECRET}@h"}, r"objects\.endpoint has no user"),
        ({"endpoint": "http://minio.internal:9000"}, r"objects\.allow_http to true"),
        ({"ca_file": "/nowhere/ca.pem"}, r"objects\.ca_file /nowhere/ca.pem can't be read"),
        ({"part_size": "1kB"}, r"objects\.part_size 1kB: set it to 1MiB"),
        ({"part_size": "2GiB"}, r"objects\.part_size 2GiB: set it"),
        (
            {"url": "gs://b", "profile": "x"},
            r"objects\.profile is set, and objects\.url isn't s3://",
        ),
        ({"account": "x"}, r"objects\.account is set, and objects\.url isn't az://"),
    ],
)
def test_o1_settings_that_cannot_be_used_are_named_with_the_fix(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        options(**settings)
    assert SECRET not in str(caught.value)


def tier(**settings: Any) -> Any:
    values = {f"objects.{name}": value for name, value in settings.items()}
    own = parse(None, {}, values).settings
    return open_tier(own, LAYOUT, clock=ManualClock(), metrics=Metrics())


def test_without_a_url_there_is_no_tier() -> None:
    assert tier() is None


def test_the_client_is_loaded_only_for_the_tier_and_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "kvstow.backends.objects.store", raising=False)
    monkeypatch.delitem(sys.modules, "kvstow.backends.objects.clients", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert tier() is None
    with pytest.raises(SettingsError, match=r"pip install 'kvstow\[objects\]'"):
        tier(url="s3://b")


def test_h7_a_store_that_cannot_be_reached_does_not_hold_up_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    built = tier(url="s3://b", endpoint="http://127.0.0.1:1", retries=0)
    assert built.close(5.0)
    assert "Object store s3://b can't be used now, kvstow goes on without it" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("url", "environment", "says"),
    [
        (
            "s3://b",
            {"AWS_ACCESS_KEY_ID": "id"},
            r"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, objects\.profile",
        ),
        (
            "s3://b",
            {"AWS_SECRET_ACCESS_KEY": SECRET},
            r"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        ("az://b", {}, r"set objects\.account"),
        (
            "gs://b",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/key.json"},
            "/nowhere/key.json: No such file",
        ),
    ],
)
def test_o1_half_of_the_credentials_is_refused_with_the_fix(
    bare: pytest.MonkeyPatch, url: str, environment: dict[str, str], says: str
) -> None:
    pytest.importorskip("obstore")
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(SettingsError, match=says) as caught:
        tier(url=url)
    assert SECRET not in str(caught.value)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes the clouds' variables from the environment."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1"])
@pytest.mark.parametrize("silent", [False, True])
def test_h7_without_credentials_the_start_goes_on_and_the_log_says_what_to_set(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: bool, endpoint: str | None
) -> None:
    """``silent``: the metadata service accepts connections and never answers."""
    pytest.importorskip("obstore")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if silent else 1
        bare.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}")
        settings = {"endpoint": endpoint} if endpoint else {}
        built = tier(url="s3://b", timeout_ms=200, connect_timeout_ms=200, **settings)
        assert built.close(5.0)
    assert "Object store s3://b can't be used now, kvstow goes on without it" in caplog.text
    assert (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, objects.profile, or objects.anonymous"
        in caplog.text
    )


def test_doctor_says_which_credentials_are_lacking(bare: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from kvstow.backends.objects.checks import check_objects

    bare.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    [result] = check_objects(ObjectsSettings(url="s3://b"), SystemClock())
    assert (result.check, str(result.status)) == ("objects", "failed")
    assert "no credentials in the environment" in result.found
    assert result.found.endswith("objects.profile, or objects.anonymous")


def test_a_profile_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(SettingsError, match=r"objects\.profile prod: ProfileNotFound"):
        tier(url="s3://b", profile="prod")
    (tmp_path / "credentials").write_text(
        f"[prod]\naws_access_key_id=id\naws_secret_access_key={SECRET}\n"
    )
    built = tier(url="s3://b", profile="prod", endpoint="http://127.0.0.1:1", retries=0)
    assert built.close(30.0)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            f"GET https://user:{SECRET}@h/b/k?sig={SECRET} status code: 403",
            StoreRefused,
            "Exception from h status 403",
        ),
        (
            f"PUT https://h/b?X-Amz-Signature={SECRET} status code: 500 <Code>Oops</Code>",
            StoreUnavailable,
            "500 Oops",
        ),
        ("status code: 409 Conflict", StoreUnavailable, "status 409"),
        ("kind: Timeout", StoreUnavailable, "timed out"),
        ("GET http://h/ BadScheme", StoreRefused, "objects.allow_http"),
        (
            "PUT http://169.254.169.254/latest/api/token kind: Timeout",
            StoreUnavailable,
            "169.254 timed out: no cred",
        ),
        (
            "PUT http://169.254.169.254/latest/api/token status code: 403",
            StoreRefused,
            "or objects.anonymous",
        ),
        (
            "GET http://h/latest/meta-data/iam/ status code: 404",
            StoreRefused,
            "AWS_SECRET_ACCESS_KEY, objects.profile",
        ),
        (
            "GET http://h/computeMetadata/v1/ status code: 403",
            StoreRefused,
            "set GOOGLE_APPLICATION_CREDENTIALS",
        ),
        (
            "GET http://h/metadata/identity/oauth2/ status code: 403",
            StoreRefused,
            "set AZURE_STORAGE_ACCOUNT_KEY",
        ),
    ],
)
def test_what_is_logged_of_a_fault(text: str, kind: Any, says: str) -> None:
    clients = pytest.importorskip("kvstow.backends.objects.clients", exc_type=ImportError)
    error = clients.as_store_error(Exception(text))
    assert type(error) is kind
    assert says in str(error)
    assert SECRET not in str(error)
