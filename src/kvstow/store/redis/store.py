"""Chunks in Redis or Valkey (6.2 and later), shared by all engines that use the same server and prefix.

The server evicts: it says which of several chunks makes room, and a chunk may be gone at any time. What was there is
therefore never remembered here; a read that falls short is a miss, and takes what is left of the chunk away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from redis.exceptions import AskError, MovedError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock
from kvstow.store.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.store.redis.envelope import (
    ENVELOPE_BYTES,
    MAX_PARTS,
    WRITE_ID_BYTES,
    Envelope,
    chunk_name,
    cut,
    unpack,
)
from kvstow.store.redis.options import RedisOptions
from kvstow.store.redis.root import Root
from kvstow.store.redis.servers import open_servers
from kvstow.store.redis.session import Command, Link, Links, Session, as_store_error
from kvstow.store.redis.wire import Passing, Wire

R = TypeVar("R")

REDIRECTS: Final = 2
UNFINISHED_MS: Final = 600_000  # parts whose envelope never comes go away by themselves
WINDOW_BYTES: Final = 64 << 20  # asked for at once: the server keeps what we haven't taken yet in its memory
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Fullness:
    """After the server had no room, nothing is sent for a while: 1 s, twice as long each time, at most 30 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = 0.0

    def pausing(self) -> bool:
        with self._lock:
            return self._clock.monotonic() < self._until_s

    def full(self) -> None:
        with self._lock:
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2) or FIRST_PAUSE_S
            self._until_s = self._clock.monotonic() + self._pause_s

    def took(self) -> None:
        with self._lock:
            self._pause_s = 0.0


class RedisStore:
    """See the module. It connects when it is first asked, and again whenever a connection was lost."""

    def __init__(self, options: RedisOptions, clock: Clock, root: Root | None = None) -> None:
        self._options = options
        self._root = root
        self._clock = clock
        self._prefix = options.prefix.encode()
        self._servers = open_servers(options)
        self._links = Links(clock, options.timeout_s)
        self._fullness = Fullness(clock)
        self._lifetime: tuple[bytes, ...] = (b"PX", b"%d" % (options.ttl_s * 1000)) if options.ttl_s else ()

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` or ``StoreRefused`` when the server can't be used now."""
        self._call(self._ping)

    def _ping(self, session: Session) -> None:
        session.ask([self._prefix], [("GETRANGE", self._prefix, 0, 0)])
        if self._root is not None:
            self._root.renew(session)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One round trip, and one more where chunks are in parts. It counts as a use: the server evicts others."""
        names = [chunk_name(self._prefix, key) for key in keys]
        return self._call(lambda session: self._contains(session, names)) if names else []

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for window in _windows(items):
            outcomes += self._call(partial(self._read, window))
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return [self._write(chunk_name(self._prefix, key), parts) for key, parts in items]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = [chunk_name(self._prefix, key) for key in keys]
        if names:
            self._call(lambda session: self._delete(session, names))

    def close(self) -> None:
        self._links.clear()
        self._servers.close()

    def _doubt(self) -> None:
        """Connections that are open may lead to a server that is no longer the right one."""
        self._servers.doubt()
        self._links.clear()

    def _call(self, work: Callable[[Session], R]) -> R:
        """``work`` with connections; again where a Cluster's slots have moved. It must bear being repeated."""
        for _ in range(REDIRECTS + 1):
            try:
                with Session(self._servers, self._links) as session:
                    return work(session)
            except MovedError:
                self._doubt()
            except OutOfMemoryError:
                raise  # the writer's
            except (RedisError, OSError) as error:
                if isinstance(error, ReadOnlyError) or not isinstance(error, ResponseError):
                    self._doubt()
                raise as_store_error(error) from error
        raise StoreUnavailable("the Cluster's nodes send us to each other")

    # --- existence --------------------------------------------------------------------------------------------------

    def _contains(self, session: Session, names: Sequence[bytes]) -> list[bool]:
        if self._root is not None:
            self._root.renew(session)
        heads = session.ask(names, [_head(name) for name in names])
        envelopes = [unpack(head) if head else None for head in heads]
        parts = [p for name, e in zip(names, envelopes, strict=True) if e is not None for p in e.names(name)]
        there = dict(zip(parts, session.ask(parts, [("TOUCH", part) for part in parts]), strict=True))
        return [
            e is not None and all(there[part] for part in e.names(name))
            for name, e in zip(names, envelopes, strict=True)
        ]

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self, items: Sequence[tuple[ChunkKey, Buffer]], session: Session) -> list[Outcome]:
        """Every server is asked before the first answer is taken."""
        names = [chunk_name(self._prefix, key) for key, _ in items]
        groups = session.by_link(names)
        for link, where in groups:
            link.wire.get([names[i] for i in where])
        found: dict[int, Outcome | Envelope] = {}
        for link, where in groups:
            for i in where:
                found[i] = _take_value(link.wire, items[i][1])
        outcomes: list[Outcome] = []
        for i, name in enumerate(names):
            got = found[i]
            outcomes.append(self._read_parts(session, name, got, items[i][1]) if isinstance(got, Envelope) else got)
        return outcomes

    def _read_parts(self, session: Session, name: bytes, envelope: Envelope, buffer: Buffer) -> Outcome:
        if envelope.length > len(buffer):
            return REJECTED
        link = session.link(name)
        link.wire.get(envelope.names(name))
        at, whole, moving, passing = 0, True, False, Passing()
        for _ in range(envelope.parts):
            try:
                got = _take_part(link.wire, buffer[at : envelope.length], passing)
            except MovedError:
                raise
            except AskError:
                got, moving = 0, True
            whole = whole and got > 0
            at += got
        if whole and at == envelope.length:
            return Done(at, passing.digest())
        if not moving:
            self._delete(session, [name])
        return MISSING

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, name: bytes, spans: Sequence[Buffer]) -> Outcome:
        length = sum(len(span) for span in spans)
        if self._fullness.pausing():
            return REJECTED
        if length <= self._options.part_bytes:
            envelope = Envelope(length)
            work: Callable[[Session], bool] = lambda session: self._set(  # noqa: E731
                session.link(name), name, [envelope.pack(), *spans], (b"NX", *self._lifetime)
            )
        else:
            count = -(-length // self._options.part_bytes)
            if count > MAX_PARTS:
                return REJECTED
            envelope = Envelope(length, count, os.urandom(WRITE_ID_BYTES))
            work = lambda session: self._write_parts(session, name, envelope, spans)  # noqa: E731
        try:
            stored = self._call(work)
        except OutOfMemoryError:
            self._fullness.full()
            if envelope.parts:
                self._call(lambda session: session.link(name).ask([("UNLINK", p) for p in envelope.names(name)]))
            return REJECTED
        self._fullness.took()
        return Done(length) if stored else REJECTED

    def _write_parts(self, session: Session, name: bytes, envelope: Envelope, spans: Sequence[Buffer]) -> bool:
        """The envelope last. Until then the parts have a lifetime, so that those of a dead writer go away."""
        link = session.link(name)
        if link.ask([("EXISTS", name)]) == [1]:
            return False
        names = envelope.names(name)
        for i, (part, length) in enumerate(zip(names, envelope.part_lengths(self._options.part_bytes), strict=True)):
            pieces = cut(spans, i * self._options.part_bytes, length)
            self._set(link, part, pieces, (b"PX", b"%d" % UNFINISHED_MS))
        [stored] = link.ask([("SET", name, envelope.pack(), "NX", *self._lifetime)])
        if not stored:
            link.ask([("UNLINK", part) for part in names])
            return False
        ttl_s = self._options.ttl_s
        link.ask([("PEXPIRE", part, ttl_s * 1000) if ttl_s else ("PERSIST", part) for part in names])
        return True

    @staticmethod
    def _set(link: Link, name: bytes, value: Sequence[Buffer | bytes], options: Sequence[bytes]) -> bool:
        """False: it is there already, or its slot is moving."""
        head = [b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options)), b"$%d\r\n%s\r\n" % (len(name), name)]
        head.append(b"$%d\r\n" % sum(len(piece) for piece in value))
        tail = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in options) + b"\r\n"
        if value and isinstance(value[0], bytes):
            head.append(value[0])
            value = value[1:]
        link.wire.begin()
        link.wire.send([b"".join(head), *value, tail])
        try:
            return link.wire.stored()
        except MovedError:
            raise
        except AskError:
            return False

    # --- deleting ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _delete(session: Session, names: Sequence[bytes]) -> None:
        """Whose envelope says that it is in parts is taken away in one step with the names of these parts, so that
        a chunk written in between loses none of its own."""
        heads = session.ask(names, [_head(name) for name in names])
        envelopes = [unpack(head) if head else None for head in heads]
        remove: list[Command] = [
            ("GETDEL" if e is not None and e.parts else "UNLINK", name)
            for name, e in zip(names, envelopes, strict=True)
        ]
        taken = session.ask(names, remove)
        ends = [unpack(value) if isinstance(value, bytes) else None for value in taken]
        parts = [part for name, e in zip(names, ends, strict=True) if e is not None for part in e.names(name)]
        session.ask(parts, [("UNLINK", part) for part in parts])


def _head(name: bytes) -> Command:
    return ("GETRANGE", name, 0, ENVELOPE_BYTES - 1)


def _windows(items: Sequence[tuple[ChunkKey, Buffer]]) -> Iterator[list[tuple[ChunkKey, Buffer]]]:
    window: list[tuple[ChunkKey, Buffer]] = []
    size = 0
    for key, buffer in items:
        if window and size + len(buffer) > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append((key, buffer))
        size += len(buffer)
    if window:
        yield window


def _take_value(wire: Wire, buffer: Buffer) -> Outcome | Envelope:
    """One reply of GET: into ``buffer``, or the envelope of a value in parts. What is no value of ours, or doesn't
    fit, is REJECTED."""
    wire.begin()
    try:
        length = wire.bulk()
    except MovedError:
        raise
    except AskError:
        return MISSING
    if length is None:
        return MISSING
    head = memoryview(bytearray(min(length, ENVELOPE_BYTES)))
    wire.take(head)
    length -= len(head)
    envelope = unpack(head)
    fits = envelope is not None and not envelope.parts and envelope.length == length <= len(buffer)
    passing = Passing()
    if fits:
        wire.take(buffer[:length], passing)
    else:
        wire.skip(length)
    wire.end()
    if envelope is not None and envelope.parts and not length:
        return envelope
    return Done(length, passing.digest()) if fits else REJECTED


def _take_part(wire: Wire, buffer: Buffer, passing: Passing) -> int:
    """One reply of GET into the beginning of ``buffer``: its length; 0 where it isn't there or doesn't fit."""
    wire.begin()
    length = wire.bulk()
    if length is None:
        return 0
    fits = length <= len(buffer)
    if fits:
        wire.take(buffer[:length], passing)
    else:
        wire.skip(length)
    wire.end()
    return length if fits else 0
