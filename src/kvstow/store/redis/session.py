"""The connections of one call, and what their faults mean."""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import redis
from redis.connection import ConnectionPool
from redis.exceptions import AskError, MovedError, RedisError, ResponseError

from kvstow.errors import StoreError, StoreRefused, StoreUnavailable
from kvstow.runtime import Clock
from kvstow.store.redis.servers import Servers
from kvstow.store.redis.wire import Wire

Command = tuple[Any, ...]

BATCH: Final = 1000  # commands in flight: their replies fit into a socket's buffers, so that neither side blocks
TRANSIENT: Final = (
    redis.exceptions.ConnectionError,  # also: loading, wrong credentials, too many clients
    redis.exceptions.TimeoutError,
    redis.exceptions.RedisClusterException,
    redis.exceptions.ClusterError,
    redis.exceptions.AskError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
)
TRANSIENT_CODES: Final = ("MISCONF", "NOREPLICAS", "BUSY", "LOADING", "UNKILLABLE", "CLUSTERDOWN", "MASTERDOWN")


def as_store_error(error: RedisError | OSError) -> StoreError:
    """Every fault that asking again may heal is transient; what the server will always refuse is not."""
    text = f"{type(error).__name__}: {error}"
    if "invalid bulk length" in text:
        return StoreRefused(f"larger than the server's proto-max-bulk-len: set redis.part_size lower ({text})")
    transient = isinstance(error, TRANSIENT) or str(error).startswith(TRANSIENT_CODES)
    return StoreRefused(text) if isinstance(error, ResponseError) and not transient else StoreUnavailable(text)


class Link:
    """One of redis-py's connections, lent by ``pool`` to one thread at a time."""

    def __init__(self, pool: ConnectionPool, clock: Clock, timeout_s: float) -> None:
        self.pool = pool
        self._connection: Any = pool.get_connection()
        sock = self._connection._sock
        self.wire = Wire(sock, self._connection._parser.parse_error, clock, timeout_s)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    @property
    def quiet(self) -> bool:
        """Connected, and everything that came was asked for."""
        return self.wire.idle and not self._readable.poll(0)

    def post(self, commands: Sequence[Command]) -> None:
        """Send them; their replies are still to be read, from ``wire``."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Replies of small commands. None for a key whose slot is moving to another node: a miss, for as long."""
        replies: list[Any] = []
        for start in range(0, len(commands), BATCH):
            batch = commands[start : start + BATCH]
            self.post(batch)
            for _ in batch:
                try:
                    replies.append(self._connection.read_response())
                except MovedError:
                    raise
                except AskError:
                    replies.append(None)
        return replies

    def hang_up(self) -> None:
        """And give it back: it is connected again when it is lent next."""
        self._connection.disconnect()
        self.pool.release(self._connection)


class Links:
    """Those that nobody uses now. redis-py's pools are asked for new ones only: asking takes as long as 200 KiB do."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[ConnectionPool, list[Link]] = {}
        self._lent: set[Link] = set()  # that may be kept when they come back

    def take(self, pool: ConnectionPool) -> Link:
        while True:
            with self._lock:
                idle = self._idle.get(pool)
                link = idle.pop() if idle else None
                if link is not None and link.quiet:
                    self._lent.add(link)
                    return link
            if link is None:
                break
            link.hang_up()
        link = Link(pool, self._clock, self._timeout_s)
        with self._lock:
            self._lent.add(link)
        return link

    def give_back(self, link: Link, *, clean: bool) -> None:
        """Not clean: replies may be unread."""
        with self._lock:
            keep = clean and link.wire.idle and link in self._lent
            self._lent.discard(link)
            if keep:
                self._idle.setdefault(link.pool, []).append(link)
        if not keep:
            link.hang_up()

    def clear(self) -> None:
        """None of these is used again; those that are lent now neither, once they are back."""
        with self._lock:
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
            self._lent.clear()
        for link in idle:
            link.hang_up()


class Session:
    """One link for each server that is asked. Left by an exception, none of its connections is used again."""

    def __init__(self, servers: Servers, free: Links) -> None:
        self._servers = servers
        self._free = free
        self._links: dict[int, Link] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for link in self._links.values():
            self._free.give_back(link, clean=kind is None)

    def link(self, name: bytes) -> Link:
        """To the server that has ``name``."""
        pool = self._servers.pool(name)
        link = self._links.get(id(pool))
        if link is None:
            link = self._links[id(pool)] = self._free.take(pool)
        return link

    def by_link(self, names: Sequence[bytes]) -> list[tuple[Link, list[int]]]:
        """Positions of ``names``, by the server that has them."""
        groups: dict[int, tuple[Link, list[int]]] = {}
        for i, name in enumerate(names):
            link = self.link(name)
            groups.setdefault(id(link), (link, []))[1].append(i)
        return list(groups.values())

    def ask(self, names: Sequence[bytes], commands: Sequence[Command]) -> list[Any]:
        """Replies in order; ``names`` say where each command goes."""
        replies: list[Any] = [None] * len(names)
        for link, where in self.by_link(names):
            for i, reply in zip(where, link.ask([commands[i] for i in where]), strict=True):
                replies[i] = reply
        return replies
