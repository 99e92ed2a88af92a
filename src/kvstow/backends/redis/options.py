"""What a Redis store is given, and how its URL is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

Topology = Literal["single", "sentinel", "cluster"]

SCHEMES: Final = ("redis", "rediss", "unix")
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
DEFAULT_PART_BYTES: Final = 16 << 20
MIN_PART_BYTES: Final = 64 << 10
MAX_PART_BYTES: Final = 512_000_000  # a value, its envelope included, is below 512 MiB


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format. Without ``ca_file`` the system's authorities are trusted."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """Where to connect, and as whom. With ``path``, a Unix socket, there are no hosts."""

    hosts: tuple[tuple[str, int], ...]
    path: str | None
    tls: bool
    username: str | None
    password: str | None
    db: int

    def __repr__(self) -> str:
        """Without the password, so that no traceback or log shows it."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{'rediss' if self.tls else 'redis'} {where} db {self.db}"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    address: Address
    topology: Topology = "single"
    service: str = "mymaster"  # what the Sentinels call it
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls: Tls = Tls()
    prefix: str = "kvstow:"
    ttl_s: int | None = None
    part_bytes: int = DEFAULT_PART_BYTES
    timeout_s: float = 2.0
    connect_timeout_s: float = 1.0

    def __repr__(self) -> str:
        return f"RedisOptions({self.address!r}, {self.topology})"


def parse_address(url: str, topology: Topology = "single") -> Address:
    """``redis://[user[:password]@]host[:port][,host[:port]…][/db]``, ``rediss://…`` the same over TLS,
    ``unix://[user[:password]@]/path[?db=n]``. User and password percent-encoded.

    Raises ValueError, whose message never has a part of the URL that may be a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("it is no URL") from None
    if parts.scheme not in SCHEMES:
        raise ValueError("expected a URL that begins with redis://, rediss:// or unix://")
    if parts.fragment or "@" in parts.path + parts.query:
        raise ValueError(
            "user and password must be percent-encoded: / is %2F, ? is %3F, # is %23, @ is %40"
        )
    userinfo, at, hosts = parts.netloc.rpartition("@")
    if "@" in userinfo:
        raise ValueError("user and password must be percent-encoded: @ is %40")
    name, _, password = userinfo.partition(":") if at else ("", "", "")
    as_whom = (unquote(name) or None, unquote(password) or None)
    if parts.scheme == "unix":
        return _unix(parts, hosts, topology, *as_whom)
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
    places = tuple(_host(host, port) for host in hosts.split(","))
    if topology == "single" and len(places) > 1:
        raise ValueError("several hosts need topology sentinel or cluster")
    return Address(places, None, parts.scheme == "rediss", *as_whom, db)


def _unix(
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


def _host(text: str, default_port: int) -> tuple[str, int]:
    """``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port``."""
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
