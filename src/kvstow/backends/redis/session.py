"""The connections of one call, and what their faults mean."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, TypeVar

import redis
from redis.connection import ConnectionPool
from redis.exceptions import (
    AskError,
    MovedError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from kvstow.backends.redis.servers import Servers, sensible
from kvstow.backends.redis.wire import Reply, Wire
from kvstow.errors import StoreError, StoreRefused, StoreUnavailable
from kvstow.runtime import Clock

Command = tuple[Any, ...]
R = TypeVar("R")
W = TypeVar("W")

ASKING: Final = ("ASKING",)
BATCH: Final = 1000  # commands in flight: their replies fit into a socket's buffers, so that neither side blocks
FAULTS: Final = (RedisError, RedisClusterException, OSError)  # what redis-py and a socket raise
TRANSIENT: Final = (
    redis.exceptions.ClusterError,
    AskError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
)
TRANSIENT_CODES: Final = (
    "MISCONF",
    "NOREPLICAS",
    "BUSY",
    "LOADING",
    "UNKILLABLE",
    "CLUSTERDOWN",
    "MASTERDOWN",
)


class ServerFull(StoreUnavailable):
    """It has no room, and evicts nothing."""


def as_store_error(error: Exception) -> StoreError:
    """Of one of ``FAULTS``. Every fault that asking again may heal is transient; what the server will always refuse is
    not."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OutOfMemoryError):
        return ServerFull(text)
    if "invalid bulk length" in text:
        return StoreRefused(
            f"larger than the server's proto-max-bulk-len: set redis.part_size lower ({text})"
        )
    transient = isinstance(error, TRANSIENT) or str(error).startswith(TRANSIENT_CODES)
    return (
        StoreRefused(text)
        if isinstance(error, ResponseError) and not transient
        else StoreUnavailable(text)
    )


def answer(take: Callable[[], R], wrong_type: W) -> R | W | AskError:
    """What ``take`` takes of the wire, as far as it is of its own name: an ``AskError`` says where else to ask, and
    what is no string is ``wrong_type``. Raises other error replies."""
    try:
        return take()
    except MovedError:
        raise
    except AskError as error:
        return error
    except ResponseError as error:
        if str(error).startswith(
            "WRONGTYPE"
        ):  # a name of ours is a list, a set, …: somebody else's
            return wrong_type
        raise


class Link:
    """One of redis-py's connections, lent by ``pool`` to one thread at a time."""

    def __init__(self, pool: ConnectionPool, clock: Clock, timeout_s: float) -> None:
        self.pool = pool
        self.era = 0  # of ``Links``
        with sensible("the server"):
            self._connection: Any = pool.get_connection()
            with ExitStack() as failed:
                failed.callback(self.hang_up)  # else the pool has one less for good
                sock = self._connection._sock
                self.wire = Wire(sock, self._connection._parser.parse_error, clock, timeout_s)
                self._readable = select.poll()
                self._readable.register(sock, select.POLLIN)
                failed.pop_all()

    @property
    def quiet(self) -> bool:
        """Connected, and everything that came was asked for."""
        return self.wire.idle and not self._readable.poll(0)

    def ask(self, commands: Sequence[Command]) -> list[Reply | AskError]:
        """Replies of small commands. An ``AskError`` says which node to ask instead, while a slot moves there. None
        also where a name has what is no value of ours."""
        replies: list[Reply | AskError] = []
        for start in range(0, len(commands), BATCH):
            batch = commands[start : start + BATCH]
            self.wire.begin()
            self.wire.send([b"".join(self._connection.pack_commands(batch))])
            replies += [answer(self.wire.reply, None) for _ in batch]
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
        self._era = 0  # another begins when what is open may no longer be used

    def take(self, pool: ConnectionPool) -> Link:
        while True:
            with self._lock:
                era, idle = self._era, self._idle.get(pool)
                link = idle.pop() if idle else None
            if link is None:
                break
            if link.quiet:  # asked without the lock: it gives the interpreter's away
                return link
            link.hang_up()
        link = Link(pool, self._clock, self._timeout_s)
        link.era = era
        return link

    def give_back(self, link: Link, *, clean: bool) -> None:
        """Not clean: replies may be unread."""
        if clean and link.wire.idle:
            with self._lock:
                if link.era == self._era:
                    self._idle.setdefault(link.pool, []).append(link)
                    return
        link.hang_up()

    def clear(self) -> None:
        """None of these is used again; those that are lent now neither, once they are back."""
        with self._lock:
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
            self._era += 1
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for link in self._links.values():
            self._free.give_back(link, clean=kind is None)

    def link(self, name: bytes) -> Link:
        """To the server that has ``name``."""
        return self._link(self._servers.pool(name))

    def elsewhere(self, error: AskError) -> Link | None:
        """To the node that is asked instead, where a slot is moving; None: no node that the others know of. It must
        be told that it is asked, by ``ASKING`` before the command."""
        pool = self._servers.node(str(error.host), int(error.port))
        return None if pool is None else self._link(pool)

    def _link(self, pool: ConnectionPool) -> Link:
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

    def ask(self, names: Sequence[bytes], commands: Sequence[Command]) -> list[Reply]:
        """Replies in order; ``names`` say where each command goes. Where a slot is moving they are those of the node
        that it moves to; None where that doesn't have it either."""
        replies: list[Reply] = [None] * len(names)
        asked: dict[tuple[str, int], list[tuple[int, AskError]]] = {}
        for link, where in self.by_link(names):
            for i, reply in zip(where, link.ask([commands[i] for i in where]), strict=True):
                if isinstance(reply, AskError):
                    asked.setdefault((reply.host, reply.port), []).append((i, reply))
                else:
                    replies[i] = reply
        for group in asked.values():
            there = self.elsewhere(group[0][1])
            if there is not None:
                both = [command for i, _ in group for command in (ASKING, commands[i])]
                for (i, _), reply in zip(group, there.ask(both)[1::2], strict=True):
                    replies[i] = None if isinstance(reply, AskError) else reply
        return replies
