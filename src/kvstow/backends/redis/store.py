"""Chunks in Redis or Valkey (6.2 and later), shared by all engines that use the same server and prefix.

The server evicts, and decides which of several chunks makes room. A chunk may be gone at any time. So the store never
remembers which chunks exist. A read that finds only a part of a chunk is a miss, and removes the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.redis.address import MIN_PART_BYTES
from kvstow.backends.redis.envelope import (
    ENVELOPE_BYTES,
    MAX_PARTS,
    WRITE_ID_BYTES,
    Envelope,
    chunk_name,
    cut,
    unpack,
)
from kvstow.backends.redis.session import (
    FAULTS,
    Clients,
    Command,
    ConnectionLost,
    ServerFull,
    Session,
    as_store_error,
    too_large,
)
from kvstow.backends.redis.settings import RedisSettings
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

R = TypeVar("R")

UNFINISHED_MS: Final = 600_000  # parts whose envelope is never written expire by themselves
WINDOW_BYTES: Final = 4 << 20  # read in one round trip; redis-py holds it in memory twice
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Fullness:
    """Pauses writes after the server had no room: 1 s, then twice as long each time, at most 30 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = 0.0

    def pausing(self) -> bool:
        """Whether writes are refused now."""
        return self._until_s > 0 and self._clock.monotonic() < self._until_s

    def server_was_full(self) -> None:
        """Begins a pause."""
        with self._lock:
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2) or FIRST_PAUSE_S
            self._until_s = self._clock.monotonic() + self._pause_s

    def server_had_room(self) -> None:
        """Makes the next pause a short one."""
        if self._pause_s:
            with self._lock:
                self._pause_s = 0.0


class RedisStore:
    """The store of the redis tier. It connects when it is first used, and again whenever a connection was lost."""

    def __init__(self, options: RedisSettings, clock: Clock) -> None:
        self._options = options
        self._prefix = options.prefix.encode()
        self._clients = Clients(options, clock)
        self._fullness = Fullness(clock)
        self._lifetime: Command = ("PX", options.ttl * 1000) if options.ttl else ()

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` or ``StoreRefused`` when the server can't be used now."""
        self._call(self._ping)

    def _ping(self, session: Session) -> None:
        session.get_start([self._prefix], [1])

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Takes one round trip, and one more if chunks are in parts. The server counts it as a use of the chunks, and
        evicts others first."""
        names = [chunk_name(self._prefix, key) for key in keys]
        return self._call(partial(self._contains, names)) if names else []

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for window in _windows(items):
            outcomes += self._call(partial(self._read, window))
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return [self._write(chunk_name(self._prefix, key), spans) for key, spans in items]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = [chunk_name(self._prefix, key) for key in keys]
        if names:
            self._call(partial(self._delete, names))

    def close(self) -> None:
        self._clients.close()

    def _call(self, work: Callable[[Session], R]) -> R:
        """Runs ``work`` with a borrowed client, and raises its errors as a ``StoreError``."""
        try:
            with self._clients.session() as session:
                return work(session)
        except FAULTS as error:
            fault = as_store_error(error)
            if isinstance(fault, StoreUnavailable) and not isinstance(fault, ServerFull):
                self._clients.discard()
            raise fault from error

    # --- existence ----------------------------------------------------------------------------

    def _contains(self, names: Sequence[bytes], session: Session) -> list[bool]:
        envelopes = _envelopes(session, names)
        parts = _part_names(names, envelopes)
        touched = session.run_all([("TOUCH", part) for part in parts])
        present = dict(zip(parts, touched, strict=True))
        return [
            envelope is not None and all(present[part] for part in envelope.part_names(name))
            for name, envelope in zip(names, envelopes, strict=True)
        ]

    # --- reading ------------------------------------------------------------------------------

    def _read(self, items: Sequence[tuple[ChunkKey, Buffer]], session: Session) -> list[Outcome]:
        names = [chunk_name(self._prefix, key) for key, _ in items]
        sizes = [ENVELOPE_BYTES + len(buffer) + 1 for _, buffer in items]  # + 1: longer ones show
        values = session.get_start(names, sizes)
        return [
            self._receive(session, name, value, buffer)
            for name, value, (_, buffer) in zip(names, values, items, strict=True)
        ]

    def _receive(
        self, session: Session, name: bytes, value: bytes | None, buffer: Buffer
    ) -> Outcome:
        """Copies a value into ``buffer``. A value that is not one of ours, or does not fit, is REJECTED."""
        if value == b"":
            return MISSING
        envelope = unpack(value)
        if value is None or envelope is None:
            return REJECTED
        frame = memoryview(value)[ENVELOPE_BYTES:]
        if envelope.parts and not frame:
            return self._read_parts(session, name, envelope, buffer)
        if envelope.parts or envelope.length != len(frame) or len(frame) > len(buffer):
            return REJECTED
        buffer[: len(frame)] = frame
        return Done(len(frame))

    def _read_parts(
        self, session: Session, name: bytes, envelope: Envelope, buffer: Buffer
    ) -> Outcome:
        if envelope.length > len(buffer):
            return REJECTED
        if self._fill(session, envelope.part_names(name), buffer[: envelope.length]):
            return Done(envelope.length)
        self._delete([name], session)
        return MISSING

    @staticmethod
    def _fill(session: Session, names: Sequence[bytes], buffer: Buffer) -> bool:
        """Copies the values of ``names`` into ``buffer``. False if one is missing, or they do not fill it exactly."""
        filled = 0
        at_once = max(1, WINDOW_BYTES * len(names) // max(1, len(buffer)))
        for first in range(0, len(names), at_once):
            group = names[first : first + at_once]
            for value in session.get_start(group, [len(buffer) - filled + 1] * len(group)):
                if not value or len(value) > len(buffer) - filled:
                    return False
                buffer[filled : filled + len(value)] = value
                filled += len(value)
        return filled == len(buffer)

    # --- writing ------------------------------------------------------------------------------

    def _write(self, name: bytes, spans: Sequence[Buffer]) -> Outcome:
        length = sum(map(len, spans))
        if self._fullness.pausing():
            return REJECTED
        envelope = self._envelope(length)
        if envelope.parts > MAX_PARTS:
            return REJECTED
        write = self._write_parts if envelope.parts else self._write_whole
        try:
            stored = self._call(partial(write, name, envelope, spans))
        except ServerFull:
            self._fullness.server_was_full()
            if envelope.parts:
                self._call(partial(_unlink, envelope.part_names(name)))
            return REJECTED
        except ConnectionLost as error:
            if length >= MIN_PART_BYTES and self._answers(name):
                raise StoreRefused(too_large(str(error))) from error
            raise
        self._fullness.server_had_room()
        return Done(length) if stored else REJECTED

    def _envelope(self, length: int) -> Envelope:
        part_bytes = self._options.part_size
        if length <= part_bytes:
            return Envelope(length)
        return Envelope(length, -(-length // part_bytes), os.urandom(WRITE_ID_BYTES))

    def _answers(self, name: bytes) -> bool:
        """Whether the server of ``name`` answers. A server hangs up on a value above its limit, often before its
        error can be read; one that answers other commands right after that is not down."""
        try:
            self._call(lambda session: session.get_start([name], [1]))
        except StoreUnavailable:
            return False
        return True

    def _write_whole(
        self, name: bytes, envelope: Envelope, spans: Sequence[Buffer], session: Session
    ) -> bool:
        return self._set(session, name, [envelope.pack(), *spans], "NX", *self._lifetime)

    def _write_parts(
        self, name: bytes, envelope: Envelope, spans: Sequence[Buffer], session: Session
    ) -> bool:
        """Writes the envelope last. Until then the parts have a lifetime, so those of a dead writer go away."""
        if session.run("EXISTS", name) == 1:
            return False
        names = envelope.part_names(name)
        lengths = envelope.part_lengths(self._options.part_size)
        start = 0
        for part, length in zip(names, lengths, strict=True):
            self._set(session, part, cut(spans, start, length), "PX", UNFINISHED_MS)
            start += length
        if not self._set(session, name, [envelope.pack()], "NX", *self._lifetime):
            _unlink(names, session)
            return False
        if self._options.ttl:
            lifetimes: list[Command] = [
                ("PEXPIRE", part, self._options.ttl * 1000) for part in names
            ]
        else:
            lifetimes = [("PERSIST", part) for part in names]
        session.run_all(lifetimes)
        return True

    @staticmethod
    def _set(session: Session, name: bytes, spans: Sequence[Buffer | bytes], *options: Any) -> bool:
        """Stores the concatenation of ``spans``. False if NX forbade it."""
        return bool(session.run("SET", name, b"".join(spans), *options))

    # --- deleting -----------------------------------------------------------------------------

    @staticmethod
    def _delete(names: Sequence[bytes], session: Session) -> None:
        """Removes an envelope and reads it in one step, then removes the parts that it names. So a chunk that is
        written in between loses none of its parts."""
        removals: list[Command] = []
        for name, envelope in zip(names, _envelopes(session, names), strict=True):
            in_parts = envelope is not None and envelope.parts
            removals.append(("GETDEL" if in_parts else "UNLINK", name))
        removed = [unpack(value) for value in session.run_all(removals)]
        _unlink(_part_names(names, removed), session)


def _envelopes(session: Session, names: Sequence[bytes]) -> list[Envelope | None]:
    return [unpack(value) for value in session.get_start(names, [ENVELOPE_BYTES] * len(names))]


def _part_names(names: Sequence[bytes], envelopes: Sequence[Envelope | None]) -> list[bytes]:
    parts: list[bytes] = []
    for name, envelope in zip(names, envelopes, strict=True):
        if envelope is not None:
            parts += envelope.part_names(name)
    return parts


def _unlink(names: Sequence[bytes], session: Session) -> None:
    session.run_all([("UNLINK", name) for name in names])


def _windows(items: Sequence[tuple[ChunkKey, Buffer]]) -> Iterator[list[tuple[ChunkKey, Buffer]]]:
    """Splits ``items`` into lists of at most ``WINDOW_BYTES``, or of one item."""
    window: list[tuple[ChunkKey, Buffer]] = []
    size = 0
    for key, buffer in items:
        if window and size + len(buffer) > WINDOW_BYTES:
            yield window
            window = []
            size = 0
        window.append((key, buffer))
        size += len(buffer)
    if window:
        yield window
