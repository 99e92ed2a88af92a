"""Which connections lead to a name, by redis-py: one server, the master that Sentinels name, or a Cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from kvstow.backends.redis.options import RedisOptions

NONSENSE: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


@contextlib.contextmanager
def sensible(who: str) -> Iterator[None]:
    """redis-py believes that replies have the form that they should have, and trips over others."""
    try:
        yield
    except NONSENSE as error:
        raise redis.exceptions.ConnectionError(
            f"{who} said what is no answer ({type(error).__name__})"
        ) from error


class Servers(Protocol):
    """redis-py's pools of connections."""

    def pool(self, name: bytes) -> ConnectionPool:
        """Of the server that has ``name``."""
        ...

    def node(self, host: str, port: int) -> ConnectionPool | None:
        """Of a Cluster's node that was named by another one; None: nobody told of it."""
        ...

    def doubt(self) -> None:
        """A server didn't answer, or said that it isn't the right one: look again who is."""
        ...

    def close(self) -> None: ...


def open_servers(options: RedisOptions) -> Servers:
    """Connects to nothing yet."""
    if options.topology == "cluster":
        return _Cluster(options)
    if options.topology == "sentinel":
        return _Pool(_sentinel_pool(options))
    address, arguments = options.address, _connection_arguments(options)
    if address.path is not None:
        return _Pool(
            ConnectionPool(
                connection_class=UnixDomainSocketConnection,
                path=address.path,
                db=address.db,
                **arguments,
            )
        )
    [(host, port)] = address.hosts
    kind = SSLConnection if address.tls else Connection
    arguments |= _tls_arguments(options)
    return _Pool(
        ConnectionPool(connection_class=kind, host=host, port=port, db=address.db, **arguments)
    )


def _connection_arguments(options: RedisOptions) -> dict[str, Any]:
    return {
        "username": options.address.username,
        "password": options.address.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),  # the breaker decides when to ask again
        "protocol": 2,  # without push messages between replies
    }


def _tls_arguments(options: RedisOptions) -> dict[str, Any]:
    tls = options.tls
    if not options.address.tls:
        return {}
    return {
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_check_hostname": tls.check_hostname,
    }


def _sentinel_pool(options: RedisOptions) -> ConnectionPool:
    address = options.address
    tls = {"ssl": True, **_tls_arguments(options)} if address.tls else {}
    data = {**_connection_arguments(options), **tls, "db": address.db}
    own = {"username": options.sentinel_username, "password": options.sentinel_password}
    sentinel = _Sentinels(
        list(address.hosts),
        sentinel_kwargs={**_connection_arguments(options), **tls, **own},
        **data,
    )
    return SentinelConnectionPool(
        options.service, sentinel, is_master=True, **sentinel.connection_kwargs
    )


class _Sentinels(Sentinel):  # type: ignore[misc, unused-ignore]
    def discover_master(self, service_name: str) -> Any:
        """redis-py's message prints each client, in some versions with its password."""
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError:
            raise MasterNotFoundError(
                f"no Sentinel that answers names a master {service_name!r}"
            ) from None


class _Pool:
    """One server at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def pool(self, name: bytes) -> ConnectionPool:
        return self._pool

    def node(self, host: str, port: int) -> ConnectionPool | None:
        return None

    def doubt(self) -> None:
        """Connections that are open may lead to a server that is no longer the master."""
        self._pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self._pool.disconnect()


class _Cluster:
    """Asks the given nodes who has what; asks again after ``doubt``, then also those that it was told of."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._doubted = False
        self._failures = 0

    def pool(self, name: bytes) -> ConnectionPool:
        with self._asking() as cluster:
            return cluster.get_redis_connection(cluster.get_node_from_key(name)).connection_pool

    def node(self, host: str, port: int) -> ConnectionPool | None:
        with self._asking() as cluster:
            node = cluster.get_node(host, port)
            self._doubted = self._doubted or node is None
            return None if node is None else cluster.get_redis_connection(node).connection_pool

    @contextlib.contextmanager
    def _asking(self) -> Iterator[RedisCluster]:
        """Who waited while another thread found that no node answers has its answer too."""
        failures = self._failures
        with self._lock, sensible("the Cluster's nodes"):
            if failures != self._failures:
                raise redis.exceptions.ConnectionError("no node of the Cluster has answered")
            yield self._known()

    def _known(self) -> RedisCluster:
        known = False
        try:
            if self._cluster is None:
                self._cluster = self._ask()
            elif self._doubted:
                self._cluster.nodes_manager.initialize()
            self._doubted, known = False, True
            return self._cluster
        finally:
            if not known:
                self._failures += 1
                self._forget()  # the nodes that it was told of are all gone: begin with the given ones

    def _ask(self) -> RedisCluster:
        options = self._options
        arguments = {**_connection_arguments(options), **_tls_arguments(options)}
        if options.address.tls:
            arguments["ssl"] = True
        nodes = [ClusterNode(host, port) for host, port in options.address.hosts]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **arguments)

    def doubt(self) -> None:
        with self._lock:
            self._doubted = True

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()
