"""The address in a Redis URL, and its parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

Topology = Literal["single", "sentinel", "cluster"]

SCHEMES: Final = ("redis", "rediss", "unix")
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
MIN_PART_BYTES: Final = 64 << 10
MAX_PART_BYTES: Final = 512_000_000  # a value, its envelope included, is below 512 MiB


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """Servers and credentials. ``path`` is a Unix socket, and then there are no hosts."""

    hosts: tuple[tuple[str, int], ...]
    path: str | None
    tls: bool
    username: str | None
    password: str | None
    db: int

    def __repr__(self) -> str:
        """Leaves the password out, so that no traceback or log shows it."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{'rediss' if self.tls else 'redis'} {where} db {self.db}"


def parse_address(url: str, topology: Topology = "single") -> Address:
    """Reads ``redis://[user[:password]@]host[:port][,host[:port]…][/db]``, ``rediss://…`` for the same over TLS, or
    ``unix://[user[:password]@]/path[?db=n]``. User and password are percent-encoded.

    Raises ValueError. Its message never shows a part of the URL that may be a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("it is not a URL") from None
    if parts.scheme not in SCHEMES:
        raise ValueError("expected a URL that begins with redis://, rediss:// or unix://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise ValueError(
            "user and password must be percent-encoded: / is %2F, ? is %3F, # is %23, @ is %40"
        )
    userinfo, _, hosts = parts.netloc.rpartition("@")
    if "@" in userinfo:
        raise ValueError("user and password must be percent-encoded: @ is %40")
    encoded_name, _, encoded_password = userinfo.partition(":")
    username = unquote(encoded_name) or None
    password = unquote(encoded_password) or None
    if parts.scheme == "unix":
        return _parse_unix(parts, hosts, topology, username, password)
    if parts.query:
        raise ValueError(
            "a redis:// URL has no parameters after ?: there are settings for what they would say"
        )
    number = parts.path.strip("/")
    if number and not number.isdecimal():
        raise ValueError("expected a database number after the host")
    db = int(number or 0)
    if topology == "cluster" and db:
        raise ValueError("a Cluster has only database 0")
    port = SENTINEL_PORT if topology == "sentinel" else REDIS_PORT
    servers = tuple(_parse_host(host, port) for host in hosts.split(","))
    if topology == "single" and len(servers) > 1:
        raise ValueError("several hosts need topology sentinel or cluster")
    return Address(servers, None, parts.scheme == "rediss", username, password, db)


def _parse_unix(
    parts: SplitResult, host: str, topology: Topology, username: str | None, password: str | None
) -> Address:
    if topology != "single":
        raise ValueError("a Unix socket is one server: topology must be single")
    if host or len(parts.path) < 2:
        raise ValueError("expected unix:///path/of/the/socket")
    key, _, number = parts.query.partition("=")
    if parts.query and (key != "db" or not number.isdecimal()):
        raise ValueError("a unix:// URL has no parameter but db, a number")
    return Address((), unquote(parts.path), False, username, password, int(number or 0))


def _parse_host(text: str, default_port: int) -> tuple[str, int]:
    """Reads ``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port``."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or (":" in host and not text.startswith("[")):
        raise ValueError(
            "expected a host name, an IPv4 address or an IPv6 address in brackets, and a port up to 65535"
        )
    return host, default_port if port is None else port
