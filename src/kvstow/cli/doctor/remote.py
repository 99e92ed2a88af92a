"""Tiers across the network: do they answer, and are they set up as a cache."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvstow.cli.doctor.result import MAX_FOUND, Result, failed, ok, unknown, warning
from kvstow.errors import SettingsError, StoreError
from kvstow.runtime import Clock
from kvstow.settings import format_size

if TYPE_CHECKING:
    from kvstow.backends.objects import ObjectsOptions
    from kvstow.backends.redis import RedisOptions
    from kvstow.backends.redis.about import About

CONNECT_S: Final = 5.0
REACH: Final = "see that it runs, and that this host may connect"


def check_redis(options: RedisOptions, clock: Clock) -> Iterator[Result]:
    """The server at ``redis.url``. No password is ever shown."""
    try:
        from kvstow.backends.redis.about import about
    except ModuleNotFoundError:
        yield failed(
            "redis", "redis.url is set, and redis-py isn't installed", "pip install 'kvstow[redis]'"
        )
        return
    try:
        server = about(options, clock)
    except StoreError as error:
        yield failed(
            "redis",
            f"{options.address!r}: {error}",
            f"{REACH}; user and password are those in redis.url",
        )
        return
    yield ok(
        "redis", f"{server.product} {server.version}, answers in {server.round_trip_s * 1e3:.1f} ms"
    )
    yield from _memory(server, expires=options.ttl_s is not None)


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


def check_objects(url: str, options: ObjectsOptions, clock: Clock) -> Iterator[Result]:
    """One small read of the bucket, with the credentials that the tier would find."""
    try:
        from kvstow.backends.objects.store import ObjectsStore
    except ModuleNotFoundError:
        yield failed(
            "objects",
            "objects.url is set, and obstore isn't installed",
            "pip install 'kvstow[objects]'",
        )
        return
    told: list[str] = []
    began = clock.monotonic()
    try:
        store = ObjectsStore(options, clock, warn=told.append)
        store.ping()
        store.close()
    except (StoreError, OSError) as error:
        yield failed(
            "objects",
            f"{url}: {error}"[:MAX_FOUND],
            "see the bucket's name, the credentials, the endpoint",
        )
        return
    yield ok(
        "objects",
        f"{url}, answers in {(clock.monotonic() - began) * 1e3:.0f} ms, connecting included",
    )
    for what in told:
        yield warning("objects", what, "see docs/how-to/object-store.md")


def check_mooncake(master: str) -> Iterator[Result]:
    """Whether the client is installed, and the master's port is open. The client itself is not
    started: it would lend memory, and a library that it lacks may end the process."""
    if importlib.util.find_spec("mooncake") is None:
        found = "mooncake.master is set, and its client isn't installed"
        yield failed("mooncake", found, "pip install 'kvstow[mooncake]'")
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError("mooncake.master: expected host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        yield failed("mooncake", f"{master}: {error}", REACH)
    else:
        yield ok("mooncake", f"{master} accepts connections")
