"""Parts of the Redis tier that need no server: URLs, envelopes, what a tier is built from."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from kvstow import build
from kvstow.backends.redis.address import Address, parse_address
from kvstow.backends.redis.envelope import (
    ENVELOPE_BYTES,
    MAX_PARTS,
    Envelope,
    chunk_name,
    cut,
    unpack,
)
from kvstow.backends.redis.open import check
from kvstow.backends.redis.settings import RedisSettings
from kvstow.errors import SettingsError
from kvstow.fields.values import Secret
from kvstow.key import ChunkKey, Namespace
from kvstow.metrics import Metrics
from kvstow.settings import Settings, parse
from kvstow.testing.manual import ManualClock
from tests.rigs.tiers import open_tier

SECRET = "hunter2"
LAYOUT = build.chunk_layout(Settings(), 16, [8192])


def tcp(
    *hosts: tuple[str, int], tls: bool = False, who: tuple[Any, Any] = (None, None), db: int = 0
) -> Address:
    return Address(hosts, None, tls, *who, db)


@pytest.mark.parametrize(
    ("url", "topology", "address"),
    [
        ("redis://h", "single", tcp(("h", 6379))),
        ("redis://h:7/3", "single", tcp(("h", 7), db=3)),
        ("rediss://h/", "single", tcp(("h", 6379), tls=True)),
        ("redis://:pw@h", "single", tcp(("h", 6379), who=(None, "pw"))),
        ("redis://me@h", "single", tcp(("h", 6379), who=("me", None))),
        (
            "redis://m%40e:p%2Fw%3Ard%3F%23%25@h:1",
            "single",
            tcp(("h", 1), who=("m@e", "p/w:rd?#%")),
        ),
        ("redis://[::1]:7000/1", "single", tcp(("::1", 7000), db=1)),
        ("redis://[fe80::2]", "single", tcp(("fe80::2", 6379))),
        (
            "redis://u:p@a,b:5,[::1]:6",
            "sentinel",
            tcp(("a", 26379), ("b", 5), ("::1", 6), who=("u", "p")),
        ),
        ("rediss://a,b", "cluster", tcp(("a", 6379), ("b", 6379), tls=True)),
        ("unix:///run/redis.sock", "single", Address((), "/run/redis.sock", False, None, None, 0)),
        ("unix://u:p%40@/s%20k?db=2", "single", Address((), "/s k", False, "u", "p@", 2)),
    ],
)
def test_k3_urls(url: str, topology: Any, address: Address) -> None:
    assert parse_address(url, topology) == address


@pytest.mark.parametrize(
    ("url", "topology", "says"),
    [
        ("h:6379", "single", "begins with"),
        ("http://h", "single", "begins with"),
        ("redis://", "single", "host name"),
        ("redis://h:99999", "single", "port"),
        ("redis://::1", "single", "brackets"),
        ("redis://[::1", "single", "not a URL"),
        (f"redis://u:{SECRET}/x@h", "single", "percent-encoded"),
        (f"redis://u:{SECRET}#x@h", "single", "percent-encoded"),
        (f"redis://u:{SECRET}@x@h", "single", "percent-encoded"),
        (f"redis://u:{SECRET}?x@h", "single", "percent-encoded"),
        (f"redis://h?password={SECRET}", "single", "no parameters"),
        ("redis://h/zero", "single", "database number"),
        ("redis://h/1", "cluster", "only database 0"),
        ("redis://a,b", "single", "topology"),
        ("redis://a,,b", "cluster", "host name"),
        ("unix://s", "single", "unix:///path"),
        ("unix:///s", "cluster", "topology must be single"),
        ("unix:///s?timeout=1", "single", "no parameter but db"),
    ],
)
def test_k3_wrong_urls_are_refused_and_say_why_without_the_password(
    url: str, topology: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_address(url, topology)
    assert SECRET not in str(caught.value)


def test_k3_no_text_of_the_options_has_the_password() -> None:
    address = parse_address(f"redis://u:{SECRET}@h")
    assert (
        SECRET not in f"{address!r} {address} {RedisSettings(sentinel_password=Secret(SECRET))!r}"
    )


@pytest.mark.parametrize("envelope", [Envelope(0), Envelope(1 << 40), Envelope(5, 2, b"12345678")])
def test_an_envelope_is_read_as_it_was_written(envelope: Envelope) -> None:
    packed = envelope.pack()
    assert len(packed) == ENVELOPE_BYTES
    assert unpack(packed) == unpack(packed + b"more") == envelope


def test_what_is_no_envelope_is_none() -> None:
    good = Envelope(5, 2, b"12345678").pack()
    for bad in (
        b"",
        good[:-1],
        b"X" + good[1:],
        good[:8] + b"\0" + good[9:],
        Envelope(5, MAX_PARTS + 1).pack(),
    ):
        assert unpack(bad) is None
    assert unpack(bytes(32)) is None


def test_a_chunk_and_its_parts_share_the_slot_of_a_cluster() -> None:
    name = chunk_name(b"p:", ChunkKey.build(Namespace.from_fields({}), 0, b"x"))
    assert name.startswith(b"p:{")
    assert name.endswith(b"}")
    parts = Envelope(5, 2, b"\xff" * 8).part_names(name)
    assert parts == [name + b":ffffffffffffffff:0", name + b":ffffffffffffffff:1"]


def test_parts_are_cut_across_spans() -> None:
    data = bytes(range(60))
    spans = [memoryview(data)[a:b] for a, b in ((0, 10), (10, 10), (10, 11), (11, 40), (40, 60))]
    for start in range(61):
        for length in range(61 - start):
            assert b"".join(cut(spans, start, length)) == data[start : start + length]


# --- built from settings ---------------------------------------------------------------------------------------------


def settings(**values: Any) -> Settings:
    return parse(None, {}, {"redis": {"url": f"redis://u:{SECRET}@h", **values}}).settings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"url": f"redis://u:{SECRET}/@h"},
            r"redis\.url: user and password must be percent-encoded",
        ),
        ({"tls_ca": "/nowhere"}, r"redis\.tls_ca is set and redis\.url isn't rediss"),
        ({"url": "rediss://h", "tls_key": "/nowhere"}, r"redis\.tls_key /nowhere can't be read"),
        ({"prefix": "a{b"}, r"redis\.prefix"),
        ({"part_size": "1B"}, r"redis\.part_size 1B"),
        ({"part_size": "1GB"}, r"redis\.part_size 1GB"),
        ({"write_limit": 0}, r"redis\.write_limit is 0"),
    ],
)
def test_k6_wrong_settings_are_refused_at_start(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        check(settings(**wrong).section(RedisSettings))
    assert SECRET not in str(caught.value)


def built(given: Settings) -> Any:
    return open_tier(given, LAYOUT, clock=ManualClock(), metrics=Metrics())


def test_without_a_url_there_is_no_tier() -> None:
    assert built(Settings()) is None


def test_without_redis_py_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvstow.backends.redis.store", raising=False)
    monkeypatch.delitem(sys.modules, "kvstow.backends.redis.session", raising=False)
    monkeypatch.delitem(sys.modules, "kvstow.backends.redis.clients", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.exceptions", None)
    with pytest.raises(SettingsError, match=r"pip install 'kvstow\[redis\]'"):
        built(settings())


def test_a_server_that_is_down_at_start_is_logged_without_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("redis")
    with caplog.at_level(logging.WARNING, "kvstow"):
        tier = built(settings(url=f"unix://u:{SECRET}@/nowhere/sock"))
    assert "can't be used now" in caplog.text
    assert SECRET not in caplog.text
    assert tier.close(5.0)
