"""Chunks in Redis or Valkey (6.2 and later), shared by all engines that use the same server and prefix.

The server evicts: it says which of several chunks makes room, and a chunk may be gone at any time. What was there is
therefore never remembered here; a read that falls short is a miss, and takes what is left of the chunk away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from redis.exceptions import AskError, MovedError

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Missing, Outcome, Rejected
from kvstow.backends.redis.envelope import (
    ENVELOPE_BYTES,
    MAX_PARTS,
    WRITE_ID_BYTES,
    Envelope,
    chunk_name,
    cut,
    unpack,
)
from kvstow.backends.redis.options import RedisOptions
from kvstow.backends.redis.root import Root
from kvstow.backends.redis.servers import open_servers
from kvstow.backends.redis.session import (
    FAULTS,
    Command,
    Links,
    ServerFull,
    Session,
    answer,
    as_store_error,
)
from kvstow.backends.redis.wire import Passing, Wire
from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

R = TypeVar("R")

REDIRECTS: Final = 2
ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
UNFINISHED_MS: Final = 600_000  # parts whose envelope never comes go away by themselves
WINDOW_BYTES: Final = (
    64 << 20
)  # asked for at once: the server keeps what we haven't taken yet in its memory
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class SetOptions(NamedTuple):
    """What follows the value."""

    words: int  # of the whole command
    tail: bytes

    @classmethod
    def of(cls, *options: bytes) -> SetOptions:
        return cls(
            3 + len(options), b"".join(b"\r\n$%d\r\n%s" % (len(o), o) for o in options) + b"\r\n"
        )


UNFINISHED: Final = SetOptions.of(b"PX", b"%d" % UNFINISHED_MS)


class Fullness:
    """After the server had no room, nothing is sent for a while: 1 s, twice as long each time, at most 30 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = 0.0

    def pausing(self) -> bool:
        return self._until_s > 0 and self._clock.monotonic() < self._until_s

    def full(self) -> None:
        with self._lock:
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2) or FIRST_PAUSE_S
            self._until_s = self._clock.monotonic() + self._pause_s

    def took(self) -> None:
        if self._pause_s:
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
        self._lifetime: tuple[bytes, ...] = (
            (b"PX", b"%d" % (options.ttl_s * 1000)) if options.ttl_s else ()
        )
        self._if_new = SetOptions.of(b"NX", *self._lifetime)

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
            except FAULTS as error:
                fault = as_store_error(error)
                if isinstance(fault, StoreUnavailable) and not isinstance(fault, ServerFull):
                    self._doubt()
                raise fault from error
        if self._options.topology == "cluster":
            raise StoreUnavailable("the Cluster's nodes send us to each other")
        raise StoreUnavailable("the server is a node of a Cluster: set redis.topology to cluster")

    # --- existence --------------------------------------------------------------------------------------------------

    def _contains(self, session: Session, names: Sequence[bytes]) -> list[bool]:
        if self._root is not None:
            self._root.renew(session)
        heads = session.ask(names, [_head(name) for name in names])
        envelopes = [unpack(head) for head in heads]
        parts = [
            p
            for name, e in zip(names, envelopes, strict=True)
            if e is not None
            for p in e.names(name)
        ]
        there = dict(
            zip(parts, session.ask(parts, [("TOUCH", part) for part in parts]), strict=True)
        )
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
        found: dict[int, Outcome | Envelope | AskError] = {}
        for link, where in groups:
            for i in where:
                found[i] = _take_value(link.wire, items[i][1])
        outcomes: list[Outcome] = []
        for i, name in enumerate(names):
            got, buffer = found[i], items[i][1]
            if isinstance(got, AskError):
                there = _asked(session, got, name)
                got = MISSING if there is None else _take_value(there, buffer)
            if isinstance(got, Envelope):
                got = self._read_parts(session, name, got, buffer)
            outcomes.append(MISSING if isinstance(got, AskError) else got)
        return outcomes

    def _read_parts(
        self, session: Session, name: bytes, envelope: Envelope, buffer: Buffer
    ) -> Outcome:
        """All are asked for before the first is taken."""
        if envelope.length > len(buffer):
            return REJECTED
        wire = session.link(name).wire
        wire.get(envelope.names(name))
        at, whole, moving, passing = 0, True, False, Passing()
        for _ in range(envelope.parts):
            got = _take_part(wire, buffer[at : envelope.length], passing)
            if isinstance(got, AskError):
                got, moving = 0, True
            whole = whole and got > 0
            at += got
        if moving:
            return self._read_moving(session, name, envelope, buffer)
        if whole and at == envelope.length:
            return Done(at, passing.digest())
        self._delete(session, [name])
        return MISSING

    @staticmethod
    def _read_moving(session: Session, name: bytes, envelope: Envelope, buffer: Buffer) -> Outcome:
        """Some parts are at one node, some at another: one after the other. Nothing is taken away."""
        wire, at, passing = session.link(name).wire, 0, Passing()
        for part in envelope.names(name):
            wire.get([part])
            got = _take_part(wire, buffer[at : envelope.length], passing)
            if isinstance(got, AskError):
                there = _asked(session, got, part)
                got = (
                    0 if there is None else _take_part(there, buffer[at : envelope.length], passing)
                )
            if isinstance(got, AskError) or not got:
                return MISSING
            at += got
        return Done(at, passing.digest()) if at == envelope.length else MISSING

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, name: bytes, spans: Sequence[Buffer]) -> Outcome:
        length = sum(map(len, spans))
        if self._fullness.pausing():
            return REJECTED
        count = -(-length // self._options.part_bytes) if length > self._options.part_bytes else 0
        if count > MAX_PARTS:
            return REJECTED
        envelope = (
            Envelope(length, count, os.urandom(WRITE_ID_BYTES)) if count else Envelope(length)
        )
        write = self._write_parts if count else self._write_whole
        try:
            stored = self._call(partial(write, name, envelope, spans))
        except ServerFull:
            self._fullness.full()
            if count:
                parts = envelope.names(name)
                self._call(lambda session: session.ask(parts, [("UNLINK", part) for part in parts]))
            return REJECTED
        self._fullness.took()
        return Done(length) if stored else REJECTED

    def _write_whole(
        self, name: bytes, envelope: Envelope, spans: Sequence[Buffer], session: Session
    ) -> bool:
        return self._set(session, name, envelope.pack(), spans, self._if_new)

    def _write_parts(
        self, name: bytes, envelope: Envelope, spans: Sequence[Buffer], session: Session
    ) -> bool:
        """The envelope last. Until then the parts have a lifetime, so that those of a dead writer go away."""
        if session.ask([name], [("EXISTS", name)]) == [1]:
            return False
        names = envelope.names(name)
        for i, (part, length) in enumerate(
            zip(names, envelope.part_lengths(self._options.part_bytes), strict=True)
        ):
            pieces = cut(spans, i * self._options.part_bytes, length)
            self._set(session, part, b"", pieces, UNFINISHED)
        [stored] = session.ask([name], [("SET", name, envelope.pack(), "NX", *self._lifetime)])
        if not stored:
            session.ask(names, [("UNLINK", part) for part in names])
            return False
        ttl_s = self._options.ttl_s
        session.ask(
            names,
            [("PEXPIRE", part, ttl_s * 1000) if ttl_s else ("PERSIST", part) for part in names],
        )
        return True

    @staticmethod
    def _set(
        session: Session, name: bytes, begins: bytes, spans: Sequence[Buffer], options: SetOptions
    ) -> bool:
        """False: it is there already."""
        size = len(begins) + sum(map(len, spans))
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (
            options.words,
            len(name),
            name,
            size,
            begins,
        )
        wire = session.link(name).wire
        try:
            wire.begin()
            wire.send([head, *spans, options.tail])
            return wire.stored()
        except MovedError:
            raise
        except AskError as error:
            there = session.elsewhere(error)
            if there is None:
                return False
            wire = there.wire
        try:
            wire.begin()
            wire.send([ASKING, head, *spans, options.tail])
            return wire.stored() and wire.stored()
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
        envelopes = [unpack(head) for head in heads]
        remove: list[Command] = [
            ("GETDEL" if e is not None and e.parts else "UNLINK", name)
            for name, e in zip(names, envelopes, strict=True)
        ]
        taken = session.ask(names, remove)
        ends = [unpack(value) for value in taken]
        parts = [
            part
            for name, e in zip(names, ends, strict=True)
            if e is not None
            for part in e.names(name)
        ]
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


def _asked(session: Session, error: AskError, name: bytes) -> Wire | None:
    """A GET sent to the node that has the name while its slot is moving; None: nobody knows that node."""
    there = session.elsewhere(error)
    if there is None:
        return None
    there.wire.get([name], ASKING)
    there.wire.stored()
    return there.wire


def _take_value(wire: Wire, buffer: Buffer) -> Outcome | Envelope | AskError:
    """One reply of GET: into ``buffer``, or the envelope of a value in parts. What is no value of ours, or doesn't
    fit, is REJECTED."""
    length = _bulk(wire)
    if not isinstance(length, int):
        return length
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


def _take_part(wire: Wire, buffer: Buffer, passing: Passing) -> int | AskError:
    """One reply of GET into the beginning of ``buffer``: its length; 0 where it isn't there or doesn't fit."""
    length = _bulk(wire)
    if not isinstance(length, int):
        return length if isinstance(length, AskError) else 0
    fits = length <= len(buffer)
    if fits:
        wire.take(buffer[:length], passing)
    else:
        wire.skip(length)
    wire.end()
    return length if fits else 0


def _bulk(wire: Wire) -> int | Missing | Rejected | AskError:
    """Head of a reply of GET."""
    wire.begin()
    length = answer(wire.bulk, REJECTED)
    return MISSING if length is None else length
