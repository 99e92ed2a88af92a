"""What a server says about itself, for an operator."""

from __future__ import annotations

from typing import NamedTuple

from redis.exceptions import ResponseError

from kvstow.backends.redis.options import RedisOptions
from kvstow.backends.redis.servers import Servers, open_servers
from kvstow.backends.redis.session import FAULTS, Links, Session, as_store_error
from kvstow.runtime import Clock


class About(NamedTuple):
    """None where the server does not tell this user. ``limit_bytes`` 0: no limit."""

    product: str
    version: str
    round_trip_s: float
    used_bytes: int | None
    limit_bytes: int | None
    policy: str | None


def about(options: RedisOptions, clock: Clock) -> About:
    """Ask the server, of a Cluster one node. Raises ``StoreUnavailable`` or ``StoreRefused``."""
    servers, name = open_servers(options), options.prefix.encode()
    links = Links(clock, options.timeout_s)
    try:
        with Session(servers, links) as session:
            probe = ("GETRANGE", name, 0, 0)  # what every user of the tier may do
            session.ask([name], [probe])  # connects
            began = clock.monotonic()
            session.ask([name], [probe])
            round_trip_s = clock.monotonic() - began
        told = _told(servers, name, links)
    except FAULTS as error:
        raise as_store_error(error) from error
    finally:
        links.clear()
        servers.close()
    product = next((name for name in ("valkey", "redis") if f"{name}_version" in told), "")
    return About(
        product or "a server",
        told.get(f"{product}_version", "of unknown version"),
        round_trip_s,
        _number(told, "used_memory"),
        _number(told, "maxmemory"),
        told.get("maxmemory_policy"),
    )


def _told(servers: Servers, name: bytes, links: Links) -> dict[str, str]:
    """INFO; empty where the user may not ask."""
    try:
        with Session(servers, links) as session:
            replies = session.ask([name], [("INFO", "server")]) + session.ask(
                [name], [("INFO", "memory")]
            )
    except ResponseError:
        return {}
    text = b"\n".join(reply for reply in replies if isinstance(reply, bytes)).decode(
        errors="replace"
    )
    pairs = (line.strip().partition(":") for line in text.splitlines())
    return {field: value for field, colon, value in pairs if colon}


def _number(told: dict[str, str], field: str) -> int | None:
    value = told.get(field, "")
    return int(value) if value.isdecimal() else None
