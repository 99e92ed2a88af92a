"""redis-py's clients: of one server, of the master that Sentinels name, or of a Cluster."""

from __future__ import annotations

import weakref
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import (
    Connection,
    ConnectionPool,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from kvstow.backends.redis.settings import RedisSettings

# redis-py trusts the form of replies. These are what it raises when a reply has another form.
MALFORMED_REPLY: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)

# redis-py takes hiredis, where it is installed, both to parse replies and to pack commands. Its
# parser is several times faster than redis-py's own. Its packer copies each value, and
# redis-py's own does not, so commands are always packed by redis-py.
COPIED_BELOW_BYTES: Final = 6000  # redis-py's own number: larger values are sent without a copy
PACKER: Final = PythonRespSerializer(COPIED_BELOW_BYTES, ConnectionPool().get_encoder().encode)


class ServerClient:
    """A client of one server, or of the master that Sentinels name."""

    def __init__(self, options: RedisSettings) -> None:
        self._connected = False
        self._sentinels: list[redis.Redis] = []
        if options.topology == "sentinel":
            sentinel = _open_sentinels(options)
            self._sentinels = sentinel.sentinels
            self._redis = sentinel.master_for(options.sentinel_service)
        else:
            self._redis = _open_server(options)

    @property
    def connected(self) -> bool:
        return self._connected

    def connect(self) -> Any:
        """Connects unless it is connected, and returns the ``redis.Redis``."""
        if not self._connected:
            pool = self._redis.connection_pool
            pool.release(pool.get_connection())
            self._connected = True
        return self._redis

    def disconnect(self) -> None:
        """Closes all connections, also one that another thread is waiting on."""
        self._connected = False
        for server in (self._redis, *self._sentinels):
            server.connection_pool.disconnect()


class ClusterClient:
    """A client of a Cluster."""

    def __init__(self, options: RedisSettings) -> None:
        self._options = options
        self._pools: list[weakref.ref[ConnectionPool]] = []
        self._cluster: RedisCluster | None = None

    @property
    def connected(self) -> bool:
        return self._cluster is not None

    def connect(self) -> Any:
        """Asks the configured nodes for all others, once, and returns the ``RedisCluster``."""
        if self._cluster is None:
            *nodes, (host, port) = self._options.address.hosts
            # RedisCluster makes pools of a class of ours only if one of its nodes is a URL.
            bracketed = f"[{host}]" if ":" in host else host
            self._cluster = RedisCluster(
                url=f"redis://{bracketed}:{port}",
                startup_nodes=[ClusterNode(*node) for node in nodes],
                connection_pool_class=self._open_pool,
                require_full_coverage=False,
                **_common_arguments(self._options),
            )
        return self._cluster

    def _open_pool(self, **arguments: Any) -> ConnectionPool:
        """Makes the pool of one node. It is closed by ``disconnect`` for as long as it is used."""
        pool = _open_pool(self._options, **arguments)
        used = [known for known in self._pools if known() is not None]
        self._pools = [*used, weakref.ref(pool)]
        return pool

    def disconnect(self) -> None:
        """Closes all connections, also those that another thread is waiting on."""
        for known in self._pools:
            pool = known()
            if pool is not None:
                pool.disconnect()


Client = ServerClient | ClusterClient


def open_client(options: RedisSettings) -> Client:
    """Makes a client for one thread at a time. It connects to nothing yet."""
    return ClusterClient(options) if options.topology == "cluster" else ServerClient(options)


def _common_arguments(options: RedisSettings) -> dict[str, Any]:
    return {
        "username": options.address.username,
        "password": options.address.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        # the tier retries, and its breaker decides when to ask again
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # without push messages between replies
    }


def _tls_arguments(options: RedisSettings) -> dict[str, Any]:
    if not options.address.tls:
        return {}
    return {
        "ssl_ca_certs": options.tls_ca,
        "ssl_certfile": options.tls_cert,
        "ssl_keyfile": options.tls_key,
        "ssl_check_hostname": options.tls_check_hostname,
    }


def _open_server(options: RedisSettings) -> redis.Redis:
    address = options.address
    common = _common_arguments(options)
    if address.path is None:
        [(host, port)] = address.hosts
        pool = _open_pool(options, host=host, port=port, db=address.db, **common)
    else:
        pool = ConnectionPool(
            connection_class=UnixDomainSocketConnection,
            command_packer=PACKER,
            path=address.path,
            db=address.db,
            **common,
        )
    return redis.Redis(connection_pool=pool)


def _open_pool(options: RedisSettings, **arguments: Any) -> ConnectionPool:
    """Makes a pool of TCP or TLS connections."""
    return ConnectionPool(
        connection_class=SSLConnection if options.address.tls else Connection,
        command_packer=PACKER,
        **_tls_arguments(options),
        **arguments,
    )


def _open_sentinels(options: RedisSettings) -> Sentinel:
    common = _common_arguments(options) | _tls_arguments(options) | {"ssl": options.address.tls}
    password = options.sentinel_password
    credentials = {
        "username": options.sentinel_username,
        "password": password.reveal() if password else None,
    }
    return _Sentinels(
        list(options.address.hosts),
        sentinel_kwargs=common | credentials,
        db=options.address.db,
        command_packer=PACKER,
        **common,
    )


class _Sentinels(Sentinel):  # type: ignore[misc, unused-ignore]
    def discover_master(self, service_name: str) -> Any:
        """Replaces redis-py's message, which prints each client, in some versions with its password."""
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError:
            raise MasterNotFoundError(
                f"no Sentinel that answers names a master {service_name!r}"
            ) from None
