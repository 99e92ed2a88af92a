"""Chunks in Mooncake's distributed store.

Processes on several hosts lend its memory, over RDMA or TCP. The client moves bytes directly
between a slot and the lending process. For that, the mapping that a slot is part of is registered
with the client when it is first seen: the host pool once. Other memory, such as a codec's output,
goes through the client's own buffer.

The client has several ways to move bytes; this store uses those by ranges. In ``get_into`` and
``put_from`` each thread waits in a busy loop, which takes a core from the transfer that it waits
for, and from vLLM.

The master may evict a value at any time, so the store remembers no value. Mooncake reuses a value's
memory as soon as it is deleted, so a delete waits for this process's readers of the same key. A
reader in another process may then find bytes of another value, which the frame's checksum detects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.mooncake.memory import Place, RegisteredMemory
from kvstow.backends.mooncake.names import NamesInUse
from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

# Codes of Mooncake's client.
NO_SPACE: Final = (-10, -200)  # in the client's buffer; in the memory that is lent
ABSENT: Final = (-703, -704, -707)  # is being written; is not known; was removed during the read
ALREADY_THERE: Final = (-705,)
# Of a read: the value is shorter than the range, or longer than the room.
WRONG_LENGTH: Final = (-600,)
# Of a write: an earlier one of this client could not be revoked then.
UNFINISHED_PUT: Final = (-600,)
TRANSFER_FAILED: Final = -800
NOT_IN_MEMORY: Final = (-702,)
REFUSED: Final = (-400, -601)  # keys or clients that the master will never accept

LENGTH_UNKNOWN: Final = -1  # of a value that is there, but not in memory
FULL_PAUSE_S: Final = 1.0  # how long nothing is written after the store had no space


class _Read(NamedTuple):
    """A value to read. ``place`` is None if the bytes must go through the client's buffer."""

    position: int
    name: str
    buffer: Buffer
    place: Place | None


class MooncakeStore:
    """A ``Store`` over Mooncake.

    Args:
        options: Names, limits.
        clock: Measures the pause after the store had no space.
        connect: Returns a connected client and its configuration of replicas. It is called by the
            first call, and again by later ones until it succeeds.
    """

    def __init__(
        self, options: MooncakeSettings, clock: Clock, connect: Callable[[], tuple[Any, Any]]
    ) -> None:
        self._options = options
        self._clock = clock
        self._connect = connect
        self._connecting = threading.Lock()
        self._replicas: Any = None
        self._client: Any = None  # is set after ``_replicas``: who sees it may use both
        self._memory = RegisteredMemory()
        self._names = NamesInUse(2 * options.timeout_s)
        self._full_until_s = 0.0

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` when the store can't be used now."""
        if self._connected().health_check():
            raise StoreUnavailable(f"Mooncake's master {self._options.master} doesn't answer")

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        names = [self._options.name_of(key) for key in keys]
        return self._exist(self._connected(), names) if names else []

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = list(dict.fromkeys(self._options.name_of(key) for key in keys))
        if not names:
            return
        client = self._connected()
        with self._names.deleting(names):
            for name in names:
                # By force: the master refuses otherwise while a value that was read is leased.
                code = client.remove(name, True)
                if code not in ABSENT:
                    _raise_fault(code)

    def close(self) -> None:
        with self._connecting:
            client = self._client
            self._client = None
        if client is not None:
            self._memory.clear(client)
            client.close()

    def _connected(self) -> Any:
        """Returns the client. One thread connects; the calls of others fail at once meanwhile."""
        if self._client is None:
            if not self._connecting.acquire(blocking=False):
                raise StoreUnavailable("Mooncake's client is being started")
            try:
                if self._client is None:
                    client, self._replicas = self._connect()
                    self._client = client
            finally:
                self._connecting.release()
        return self._client

    @staticmethod
    def _exist(client: Any, names: Sequence[str]) -> list[bool]:
        codes = client.batch_is_exist(list(names))
        for code in codes:
            _raise_fault(code)
        return [code == 1 for code in codes]

    # --- reading ------------------------------------------------------------------------------

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        if not items:
            return []
        client = self._connected()
        names = [self._options.name_of(key) for key, _ in items]
        outcomes: list[Outcome] = [MISSING] * len(items)
        with self._names.reading(names):
            reads = [
                _Read(i, names[i], buffer, self._memory.place_of(client, buffer))
                for i, (_, buffer) in enumerate(items)
            ]
            undecided = self._read_ranges(client, reads, outcomes)
            if undecided:
                self._read_by_length(client, undecided, outcomes)
        return outcomes

    @staticmethod
    def _read_ranges(client: Any, reads: Sequence[_Read], outcomes: list[Outcome]) -> list[_Read]:
        """Fills whole places, and returns the reads whose outcome this can't tell.

        Each read also asks for one byte behind its place: it fails for a value that fits. The
        outcome is undecided if there is no place, or the value is shorter or not in memory.
        """
        undecided = [read for read in reads if read.place is None]
        direct = [(read, read.place) for read in reads if read.place is not None]
        if not direct:
            return undecided
        results = client.get_into_ranges(
            [place.address for _, place in direct],
            [[read.name] for read, _ in direct],
            [[[0, 0]] for _ in direct],  # where in the place each range goes
            [[[0, place.length]] for _, place in direct],  # where in the value each range begins
            [[[place.length, 1]] for _, place in direct],
        )
        for (read, _), [[code, code_beyond]] in zip(direct, results, strict=True):
            if code in WRONG_LENGTH + NOT_IN_MEMORY:
                undecided.append(read)
            elif code_beyond > 0:
                outcomes[read.position] = REJECTED
            else:
                outcomes[read.position] = _read_outcome(code)
        return undecided

    def _read_by_length(self, client: Any, reads: Sequence[_Read], outcomes: list[Outcome]) -> None:
        """Asks for the values' lengths first. Absent values keep their outcome ``MISSING``."""
        lengths = self._lengths(client, [read.name for read in reads])
        exact = []
        for read in reads:
            length = lengths.get(read.name)
            if length is None:
                continue
            if length > len(read.buffer):
                outcomes[read.position] = REJECTED
            elif read.place is None or length == 0:
                outcomes[read.position] = self._read_copy(client, read)
            elif length == LENGTH_UNKNOWN:
                code = client.get_into(read.name, read.place.address, read.place.length)
                outcomes[read.position] = _read_outcome(code)
            else:
                exact.append(read._replace(place=Place(read.place.address, length)))
        # A value that is replaced by a shorter one meanwhile stays undecided: missing.
        self._read_ranges(client, exact, outcomes)

    def _lengths(self, client: Any, names: Sequence[str]) -> dict[str, int]:
        """Returns the lengths of the values that are there; ``LENGTH_UNKNOWN`` if not in memory."""
        lengths = {}
        names = list(dict.fromkeys(names))
        for name, copies in client.batch_get_replica_desc(names).items():
            lengths[name] = LENGTH_UNKNOWN
            for copy in copies:
                if copy.is_memory_replica():
                    lengths[name] = copy.get_memory_descriptor().buffer_descriptor.size
                    break
        # The client leaves names out that are absent, and all of them when the question failed.
        unanswered = [name for name in names if name not in lengths]
        if unanswered:
            for name, exists in zip(unanswered, self._exist(client, unanswered), strict=True):
                if exists:
                    lengths[name] = LENGTH_UNKNOWN
        return lengths

    @staticmethod
    def _read_copy(client: Any, read: _Read) -> Outcome:
        """Reads through the client's buffer."""
        length = client.get_size(read.name)
        if length < 0:
            return _read_outcome(length)
        if length > len(read.buffer):
            return REJECTED
        value = client.get_buffer(read.name)
        if value is None:
            raise StoreUnavailable(
                "Mooncake's client has no buffer for a value: is mooncake.buffer_size too small?"
            )
        if value.size() != length:  # another value has taken its place
            return MISSING
        read.buffer[:length] = memoryview(value).cast("B")
        return Done(length)

    # --- writing ------------------------------------------------------------------------------

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        if not items:
            return []
        client = self._connected()
        names = [self._options.name_of(key) for key, _ in items]
        outcomes: list[Outcome] = [REJECTED] * len(items)
        if self._clock.monotonic() < self._full_until_s:
            return outcomes
        with self._names.writing(names) as mine:  # a key that comes twice is written once
            places: dict[str, Place] = {}
            copies: dict[str, Sequence[Buffer]] = {}
            for i in mine:
                parts = items[i][1]
                place = self._memory.place_of(client, parts[0]) if len(parts) == 1 else None
                if place is None:
                    copies[names[i]] = parts
                else:
                    places[names[i]] = place
            codes = self._put_directly(client, places)
            codes |= self._put_copies(client, copies)
            for i in mine:
                outcomes[i] = self._write_outcome(codes[names[i]], sum(map(len, items[i][1])))
        return outcomes

    def _put_directly(self, client: Any, places: Mapping[str, Place]) -> dict[str, int]:
        """Moves values from registered memory. Returns each name's code; 0: the value is published.

        A put has three steps: start, transfer, end. Only the start tells that a name is taken; the
        client's put in one step calls that a success.
        """
        if not places:
            return {}
        codes = self._start_puts(client, places)
        unfinished = {n: places[n] for n, code in codes.items() if code in UNFINISHED_PUT}
        if unfinished:
            client.batch_put_session_revoke(list(unfinished))
            codes |= self._start_puts(client, unfinished)
        started = {name: places[name] for name, code in codes.items() if code == 0}
        codes |= dict.fromkeys(started, TRANSFER_FAILED)
        try:
            codes |= self._transfer(client, started)
        finally:
            failed = [name for name in started if codes[name]]
            if failed:
                client.batch_put_session_revoke(failed)
        return codes

    def _start_puts(self, client: Any, places: Mapping[str, Place]) -> dict[str, int]:
        lengths = [place.length for place in places.values()]
        codes = client.batch_put_session_start(list(places), lengths, config=self._replicas)
        return dict(zip(places, codes, strict=True))

    @staticmethod
    def _transfer(client: Any, places: Mapping[str, Place]) -> dict[str, int]:
        """Moves the bytes and ends the puts whose bytes moved whole.

        Returns the codes of those ends by name.
        """
        if not places:
            return {}
        moved = client.batch_put_from_multi_buffer_ranges(
            list(places),
            [[place.address] for place in places.values()],
            [[place.length] for place in places.values()],
            [[0]] * len(places),
        )
        # Ending a put publishes its value, whether it is whole or not.
        whole = [
            name
            for (name, place), length in zip(places.items(), moved, strict=True)
            if length == place.length
        ]
        if not whole:
            return {}
        return dict(zip(whole, client.batch_put_session_end(whole), strict=True))

    def _put_copies(self, client: Any, values: Mapping[str, Sequence[Buffer]]) -> dict[str, int]:
        """Puts values through the client's buffer.

        That put calls a name that is taken a success, so the names are looked up first.
        """
        if not values:
            return {}
        codes = {}
        existing = self._exist(client, list(values))
        for (name, parts), exists in zip(values.items(), existing, strict=True):
            if exists:
                codes[name] = ALREADY_THERE[0]
            else:
                codes[name] = client.put_parts(name, *parts, config=self._replicas)
        return codes

    def _write_outcome(self, code: int, length: int) -> Outcome:
        if code in NO_SPACE:
            self._full_until_s = self._clock.monotonic() + FULL_PAUSE_S
            return REJECTED
        if code in ALREADY_THERE:
            return REJECTED
        _raise_fault(code)
        return Done(length)


def _read_outcome(code: int) -> Outcome:
    """Returns the outcome of a read whose result is ``code``: a length, or an error code."""
    if code in ABSENT:
        return MISSING
    if code in WRONG_LENGTH:
        return REJECTED
    _raise_fault(code)
    return Done(code)


def _raise_fault(code: int) -> None:
    if code in REFUSED:
        raise StoreRefused(f"Mooncake's master refuses (code {code})")
    if code < 0:
        raise StoreUnavailable(f"Mooncake's client failed (code {code})")
