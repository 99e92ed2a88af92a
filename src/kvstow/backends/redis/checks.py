"""Checks of ``kvstow doctor`` for the Redis tier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstow.backends.redis.open import check
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.result import PlannedCheck, Result, failed, ok, unknown, warning
from kvstow.errors import StoreError
from kvstow.fields.values import format_size
from kvstow.runtime import Clock

if TYPE_CHECKING:
    from kvstow.backends.redis.about import About

LIMIT_S: Final = 20.0


def checks(section: RedisSettings, clock: Clock, _hash_seed: str | None) -> Iterator[PlannedCheck]:
    yield PlannedCheck("redis", LIMIT_S, partial(check_redis, section, clock))


def check_redis(section: RedisSettings, clock: Clock) -> Iterator[Result]:
    """Checks the server at ``redis.url``. Results never show a password."""
    check(section)
    try:
        from kvstow.backends.redis.about import about
    except ModuleNotFoundError:
        yield failed(
            "redis", "redis.url is set, and redis-py isn't installed", "pip install 'kvstow[redis]'"
        )
        return
    try:
        server = about(section, clock)
    except StoreError as error:
        yield failed(
            "redis",
            f"{section.address!r}: {error}",
            "see that it runs, and that this host may connect; user and password are those in redis.url",
        )
        return
    yield ok(
        "redis", f"{server.product} {server.version}, answers in {server.round_trip_s * 1e3:.1f} ms"
    )
    yield from _memory(server, expires=section.ttl is not None)


def _memory(server: About, *, expires: bool) -> Iterator[Result]:
    if server.limit_bytes is None or server.policy is None:
        yield unknown("redis memory", "the server does not tell this user (INFO)")
        return
    used = format_size(server.used_bytes or 0)
    if not server.limit_bytes:
        yield warning(
            "redis memory",
            f"{used} used, and no limit: it grows until the system stops it",
            "set the server's maxmemory, and maxmemory-policy allkeys-lru",
        )
        return
    shown = f"{used} used of {format_size(server.limit_bytes)}, {server.policy}"
    evicts = server.policy.startswith("allkeys") or (
        expires and server.policy.startswith("volatile")
    )
    if evicts:
        yield ok("redis memory", shown)
    else:
        found = f"{shown}: when it is full new chunks are refused"
        yield warning("redis memory", found, "set the server's maxmemory-policy to allkeys-lru")
