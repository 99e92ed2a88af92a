"""redis-py's clients: of one server, of the master that Sentinels name, or of a Cluster."""

from __future__ import annotations

from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from kvstow.backends.redis.settings import RedisSettings

# redis-py trusts the form of replies. These are what it raises when a reply has another form.
MALFORMED_REPLY: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


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
        self._arguments = _common_arguments(options) | _tls_arguments(options)
        self._first_nodes = [
            ClusterNode(host, port, redis_connection=redis.Redis(host, port, **self._arguments))
            for host, port in options.address.hosts
        ]
        self._cluster: RedisCluster | None = None

    @property
    def connected(self) -> bool:
        return self._cluster is not None

    def connect(self) -> Any:
        """Asks the configured nodes for all others, once, and returns the ``RedisCluster``."""
        if self._cluster is None:
            self._cluster = RedisCluster(
                startup_nodes=self._first_nodes, require_full_coverage=False, **self._arguments
            )
        return self._cluster

    def disconnect(self) -> None:
        """Closes all connections, also those that another thread is waiting on."""
        nodes = list(self._first_nodes)
        if self._cluster is not None:
            nodes += self._cluster.get_nodes()
        for node in nodes:
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()


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
        "retry": Retry(
            NoBackoff(), 0
        ),  # the tier retries, and its breaker decides when to ask again
        "protocol": 2,  # without push messages between replies
    }


def _tls_arguments(options: RedisSettings) -> dict[str, Any]:
    if not options.address.tls:
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": options.tls_ca,
        "ssl_certfile": options.tls_cert,
        "ssl_keyfile": options.tls_key,
        "ssl_check_hostname": options.tls_check_hostname,
    }


def _open_server(options: RedisSettings) -> redis.Redis:
    address = options.address
    common = _common_arguments(options)
    if address.path is not None:
        return redis.Redis(unix_socket_path=address.path, db=address.db, **common)
    [(host, port)] = address.hosts
    return redis.Redis(host, port, db=address.db, **common, **_tls_arguments(options))


def _open_sentinels(options: RedisSettings) -> Sentinel:
    common = _common_arguments(options) | _tls_arguments(options)
    password = options.sentinel_password
    credentials = {
        "username": options.sentinel_username,
        "password": password.reveal() if password else None,
    }
    return _Sentinels(
        list(options.address.hosts),
        sentinel_kwargs=common | credentials,
        db=options.address.db,
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
