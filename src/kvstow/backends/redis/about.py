"""What a server reports about itself, for an operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from kvstow.backends.redis.session import FAULTS, Clients, Session, as_store_error
from kvstow.backends.redis.settings import RedisSettings
from kvstow.runtime import Clock


class About(NamedTuple):
    """A server's product, version, speed and memory. A field is None where the server does not tell this user.
    ``limit_bytes`` is 0 where there is no limit."""

    product: str
    version: str
    round_trip_s: float
    used_bytes: int | None
    limit_bytes: int | None
    policy: str | None


def about(options: RedisSettings, clock: Clock) -> About:
    """Asks the server, or one node of a Cluster. Raises ``StoreUnavailable`` or ``StoreRefused``."""
    clients = Clients(options, clock)
    name = options.prefix.encode()
    try:
        with clients.session() as session:
            session.get_start([name], [1])  # connects; every user of the tier may do this
            began_s = clock.monotonic()
            session.get_start([name], [1])
            round_trip_s = clock.monotonic() - began_s
            info = _info(session)
    except FAULTS as error:
        raise as_store_error(error) from error
    finally:
        clients.close()
    product = next((name for name in ("valkey", "redis") if f"{name}_version" in info), "")
    return About(
        product or "a server",
        str(info.get(f"{product}_version", "of unknown version")),
        round_trip_s,
        _number(info, "used_memory"),
        _number(info, "maxmemory"),
        _text(info, "maxmemory_policy"),
    )


def _info(session: Session) -> dict[str, Any]:
    """The fields of INFO. Empty where the user has no right to it."""
    try:
        sections = [session.run("INFO", section) for section in ("server", "memory")]
    except ResponseError:
        return {}
    fields: dict[str, Any] = {}
    for section in sections:
        if isinstance(section, dict):
            fields |= section
    return fields


def _number(info: dict[str, Any], field: str) -> int | None:
    value = info.get(field)
    return value if isinstance(value, int) and value >= 0 else None


def _text(info: dict[str, Any], field: str) -> str | None:
    value = info.get(field)
    return value if isinstance(value, str) else None
