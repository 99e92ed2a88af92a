"""Borrowed clients, their commands, and the meaning of their errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from kvstow.backends.redis.clients import MALFORMED_REPLY, Client, open_client
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.redis.watchdog import Watchdog
from kvstow.errors import StoreError, StoreRefused, StoreUnavailable
from kvstow.runtime import Clock

Command = tuple[Any, ...]

# AUTH, SELECT and CLIENT SETINFO; of a Cluster CLUSTER SLOTS and COMMAND
HANDSHAKE_REPLIES: Final = 5
COMMANDS_IN_FLIGHT: Final = 1000  # their replies fit into socket buffers, so neither side blocks
FAULTS: Final = (RedisError, RedisClusterException, OSError)  # what redis-py and a socket raise
TRANSIENT: Final = (
    ClusterError,
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
    """The server has no room and evicts nothing."""


class ConnectionLost(StoreUnavailable):
    """The connection could not be opened, or broke."""


def as_store_error(error: Exception) -> StoreError:
    """Translates one of ``FAULTS``. An error that may go away by itself is ``StoreUnavailable``; an error that the
    server will always give is ``StoreRefused``."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OutOfMemoryError):
        return ServerFull(text)
    if isinstance(error, MovedError | AskError):
        return StoreUnavailable(
            f"the server is a node of a Cluster: set redis.topology to cluster ({text})"
        )
    if "TTL exhausted" in text:
        return StoreUnavailable(f"the Cluster's nodes redirect to each other ({text})")
    if "invalid bulk length" in text:
        return StoreRefused(too_large(text))
    if type(error) is redis.exceptions.ConnectionError:
        return ConnectionLost(text)
    transient = isinstance(error, TRANSIENT) or str(error).startswith(TRANSIENT_CODES)
    if isinstance(error, ResponseError) and not transient:
        return StoreRefused(text)
    return StoreUnavailable(text)


def too_large(text: str) -> str:
    """The message for a value that the server does not take."""
    return f"larger than the server's proto-max-bulk-len: set redis.part_size lower ({text})"


class Session:
    """A client that one call has borrowed. Every round trip ends within ``timeout_s`` of ``options``."""

    def __init__(self, client: Client, watchdog: Watchdog, options: RedisSettings) -> None:
        self._client = client
        self._watchdog = watchdog
        self._options = options

    def connect(self) -> None:
        """Connects the client unless it is connected. Each server that may have to be asked has the time of a
        handshake."""
        if self._client.connected:
            return
        handshake_s = self._options.connect_timeout_s + HANDSHAKE_REPLIES * self._options.timeout_s
        servers = len(self._options.address.hosts) + 1
        with self._limited(servers * handshake_s):
            self._client.connect()

    def run(self, *command: Any) -> Any:
        """Runs one command. See ``run_all``."""
        [reply] = self.run_all([command])
        return reply

    def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands without waiting in between, and returns their replies in order.

        A reply is None where the name holds a value of another type, such as a list: not one of ours. Raises the
        first of any other errors, after all replies have been read.
        """
        return [
            None if isinstance(reply, ResponseError) else reply for reply in self._replies(commands)
        ]

    def get_start(self, names: Sequence[bytes], sizes: Sequence[int]) -> list[bytes | None]:
        """Returns the first ``sizes`` bytes of each value. A missing value is empty; None as in ``run_all``.

        The server sends no more than that, however long the value is.
        """
        commands = [
            ("GETRANGE", name, 0, size - 1) for name, size in zip(names, sizes, strict=True)
        ]
        values: list[bytes | None] = []
        for reply in self._replies(commands):
            if isinstance(reply, ResponseError):
                values.append(None)
            elif isinstance(reply, bytes):
                values.append(reply)
            else:
                raise malformed(reply)
        return values

    def _replies(self, commands: Sequence[Command]) -> list[Any]:
        """Returns the replies in order. One may be the error WRONGTYPE; any other error is raised."""
        replies: list[Any] = []
        for start in range(0, len(commands), COMMANDS_IN_FLIGHT):
            replies += self._round_trip(commands[start : start + COMMANDS_IN_FLIGHT])
        return replies

    def _round_trip(self, commands: Sequence[Command]) -> list[Any]:
        with self._limited(self._options.timeout_s):
            pipeline = self._client.connect().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
                raise reply
        return replies

    @contextmanager
    def _limited(self, timeout_s: float) -> Iterator[None]:
        with self._watchdog.limit(timeout_s, self._client.disconnect):
            try:
                yield
            except MALFORMED_REPLY as error:
                raise malformed(error) from error


def malformed(found: object) -> redis.exceptions.InvalidResponse:
    """The error for a reply that does not answer its command."""
    return redis.exceptions.InvalidResponse(
        f"the server's reply does not answer the command ({type(found).__name__})"
    )


class Clients:
    """Lends clients to calls, each to one call at a time. There are as many as calls ran at once."""

    def __init__(self, options: RedisSettings, clock: Clock) -> None:
        self._options = options
        self._watchdog = Watchdog(clock, harmless=(*FAULTS, *MALFORMED_REPLY))
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._generation = 0

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Lends a client. If the block raises, the client is closed, because replies may be unread."""
        with self._lock:
            generation = self._generation
            client = self._idle.pop() if self._idle else open_client(self._options)
        completed = False
        try:
            session = Session(client, self._watchdog, self._options)
            session.connect()
            yield session
            completed = True
        finally:
            self._return(client, reusable=completed, generation=generation)

    def _return(self, client: Client, *, reusable: bool, generation: int) -> None:
        with self._lock:
            if reusable and generation == self._generation:
                self._idle.append(client)
                return
        client.disconnect()

    def discard(self) -> None:
        """Closes idle clients at once, and borrowed ones when they are returned. Their connections may lead to a
        server that is no longer the right one."""
        with self._lock:
            idle = self._idle
            self._idle = []
            self._generation += 1
        for client in idle:
            client.disconnect()

    def close(self) -> None:
        """Closes all clients."""
        self.discard()
        self._watchdog.close()
