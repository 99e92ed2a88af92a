"""Chunks in Mooncake's distributed store: memory that processes on several hosts lend, over RDMA or TCP.

The client moves bytes straight between a slot and the lending process: the memory that a slot is part of is registered
with it when it is first seen, the host pool so once. Other memory, a codec's output, goes through the client's buffer.

Of the client's many ways to move bytes those by ranges are used: in ``get_into`` and ``put_from`` each thread waits in
a busy loop, which takes a core from the transfer that it waits for, and from vLLM.

A value may be evicted at any time, so nothing is remembered here. Mooncake hands out a value's memory again as soon as
it was deleted: deleting waits for this process's readers of the same key; a reader in another process may then find
bytes of another value, which the frame's checksum tells.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.mooncake.options import MooncakeOptions
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

NO_ROOM: Final = (-10, -200)  # in the client's buffer; in the memory that is lent
NOT_THERE: Final = (-703, -704, -707)  # being written; not known; taken away amid the read
ALREADY_THERE: Final = (-705,)
DOES_NOT_FIT: Final = (-600,)
UNFINISHED: Final = (-600,)  # this client's own earlier write, which could not be taken back then
FAILED: Final = -800  # the client's own code of a transfer that failed
NOT_IN_MEMORY: Final = (-702,)
ELSEWHERE: Final = -1
REFUSED: Final = (-400, -601)  # keys or clients that the master will never take
MAPPED: Final = (
    mmap.mmap,
    ctypes.Array,
)  # the kinds of memory that stay: the host pool is an array
PAUSE_S: Final = 1.0  # nothing is written for so long after the store had no room


class _Place(NamedTuple):
    """Of a registered buffer in this process."""

    address: int
    length: int


class MooncakeStore:
    """See the module. ``connect`` gives a connected client; it is called when the store is first asked, and again
    until it succeeds."""

    def __init__(
        self, options: MooncakeOptions, clock: Clock, connect: Callable[[], tuple[Any, Any]]
    ) -> None:
        self._options = options
        self._clock = clock
        self._connect = connect
        self._connecting = threading.Lock()
        self._config: Any = None
        self._client: Any = None  # set last: whoever sees it may use both
        self._registered = _Registered()
        self._use = _Use(2 * options.timeout_s)
        self._full_until_s = 0.0

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` when the store can't be used now."""
        if self._connected().health_check():
            raise StoreUnavailable(f"Mooncake's master {self._options.master} doesn't answer")

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        names = [self._options.name_of(key) for key in keys]
        return self._exist(names) if names else []

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        if not items:
            return []
        client = self._connected()
        names = [self._options.name_of(key) for key, _ in items]
        outcomes: list[Outcome] = [MISSING] * len(items)
        with self._use.reading(names):
            places = [self._registered.place(client, buffer) for _, buffer in items]
            rest = [i for i, place in enumerate(places) if place is None]
            rest += self._read_ranges(
                client, names, [(i, p) for i, p in enumerate(places) if p is not None], outcomes
            )
            if rest:
                self._read_rest(
                    client, names, [(i, items[i][1], places[i]) for i in rest], outcomes
                )
        return outcomes

    @staticmethod
    def _read_ranges(
        client: Any,
        names: Sequence[str],
        wanted: Sequence[tuple[int, _Place]],
        outcomes: list[Outcome],
    ) -> list[int]:
        """Fill whole places, and ask for a byte more, which a value that fits hasn't. Returns those that this can't
        tell: the value is shorter, or not in memory."""
        if not wanted:
            return []
        sizes = [place.length for _, place in wanted]
        to, of = [[[0, 0]]] * len(wanted), [[[0, size]] for size in sizes]
        at = [place.address for _, place in wanted]
        got = client.get_into_ranges(
            at, [[names[i]] for i, _ in wanted], to, of, [[[size, 1]] for size in sizes]
        )
        unsure = []
        for (i, _), [[code, beyond]] in zip(wanted, got, strict=True):
            if code in DOES_NOT_FIT + NOT_IN_MEMORY:
                unsure.append(i)
            else:
                outcomes[i] = REJECTED if beyond > 0 else _read(code)
        return unsure

    def _read_rest(
        self,
        client: Any,
        names: Sequence[str],
        wanted: Sequence[tuple[int, Buffer, _Place | None]],
        outcomes: list[Outcome],
    ) -> None:
        lengths = self._lengths(client, [names[i] for i, _, _ in wanted])
        exact = []
        for i, buffer, place in wanted:
            length = lengths.get(names[i])
            if length is None:
                continue
            if length > len(buffer):
                outcomes[i] = REJECTED
            elif place is None or not length:
                outcomes[i] = self._read_copy(client, names[i], buffer)
            elif length == ELSEWHERE:
                outcomes[i] = _read(client.get_into(names[i], place.address, place.length))
            else:
                exact.append((i, _Place(place.address, length)))
        self._read_ranges(
            client, names, exact, outcomes
        )  # what is written anew meanwhile, and shorter, is missed

    def _lengths(self, client: Any, names: Sequence[str]) -> dict[str, int]:
        """Of the values that are there; ``ELSEWHERE`` where memory doesn't have it."""
        lengths = {}
        for name, copies in client.batch_get_replica_desc(list(dict.fromkeys(names))).items():
            sizes = [
                one.get_memory_descriptor().buffer_descriptor.size
                for one in copies
                if one.is_memory_replica()
            ]
            lengths[name] = sizes[0] if sizes else ELSEWHERE
        if rest := [
            name for name in dict.fromkeys(names) if name not in lengths
        ]:  # or the question failed
            lengths |= {
                name: ELSEWHERE
                for name, there in zip(rest, self._exist(rest), strict=True)
                if there
            }
        return lengths

    def _read_copy(self, client: Any, name: str, buffer: Buffer) -> Outcome:
        length = client.get_size(name)
        if length < 0 or length > len(buffer):
            return _read(length) if length < 0 else REJECTED
        held = client.get_buffer(name)
        if held is None:
            raise StoreUnavailable(
                "Mooncake's client has no buffer for a value: is mooncake.buffer_size too small?"
            )
        if held.size() != length:
            return MISSING
        buffer[:length] = memoryview(held).cast("B")
        return Done(length)

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        if not items:
            return []
        client = self._connected()
        names = [self._options.name_of(key) for key, _ in items]
        outcomes: list[Outcome] = [REJECTED] * len(items)
        if self._clock.monotonic() < self._full_until_s:
            return outcomes
        with self._use.writing(names) as mine:  # the same key twice is written once
            direct = [
                (i, place)
                for i in mine
                if (place := self._whole_place(client, items[i][1])) is not None
            ]
            if direct:
                codes = self._put(
                    client, [names[i] for i, _ in direct], [place for _, place in direct]
                )
                for (i, place), code in zip(direct, codes, strict=True):
                    outcomes[i] = self._wrote(code, place.length)
            self._put_copies(
                client, items, names, sorted(set(mine) - {i for i, _ in direct}), outcomes
            )
        return outcomes

    def _put(self, client: Any, names: Sequence[str], places: Sequence[_Place]) -> list[int]:
        """A code for each: 0, it is there, whole. The first of the three steps tells a name that is taken, which a put
        in one calls a success."""
        codes: list[int] = client.batch_put_session_start(
            list(names), [place.length for place in places], config=self._config
        )
        if left := [i for i, code in enumerate(codes) if code in UNFINISHED]:
            client.batch_put_session_revoke([names[i] for i in left])
            again = [places[i].length for i in left]
            started = client.batch_put_session_start(
                [names[i] for i in left], again, config=self._config
            )
            for i, code in zip(left, started, strict=True):
                codes[i] = code
        begun = [i for i, code in enumerate(codes) if not code]
        for i in begun:
            codes[i] = FAILED
        try:
            self._put_begun(client, names, places, begun, codes)
        finally:
            if failed := [names[i] for i in begun if codes[i]]:
                client.batch_put_session_revoke(failed)
        return codes

    @staticmethod
    def _put_begun(
        client: Any,
        names: Sequence[str],
        places: Sequence[_Place],
        begun: Sequence[int],
        codes: list[int],
    ) -> None:
        if not begun:
            return
        at, sizes = [[places[i].address] for i in begun], [[places[i].length] for i in begun]
        moved = client.batch_put_from_multi_buffer_ranges(
            [names[i] for i in begun], at, sizes, [[0]] * len(begun)
        )
        whole = [i for i, length in zip(begun, moved, strict=True) if length == places[i].length]
        if whole:  # ending one that isn't would publish it
            for i, code in zip(
                whole, client.batch_put_session_end([names[i] for i in whole]), strict=True
            ):
                codes[i] = code

    def _put_copies(
        self,
        client: Any,
        items: Sequence[tuple[ChunkKey, Sequence[Buffer]]],
        names: Sequence[str],
        mine: Sequence[int],
        outcomes: list[Outcome],
    ) -> None:
        """Through the client's buffer. It calls a name that is taken a success, so it is asked first."""
        if not mine:
            return
        for i, there in zip(mine, self._exist([names[i] for i in mine]), strict=True):
            if not there:
                spans = items[i][1]
                code = client.put_parts(names[i], *spans, config=self._config)
                outcomes[i] = self._wrote(code, sum(len(span) for span in spans))

    def _whole_place(self, client: Any, spans: Sequence[Buffer]) -> _Place | None:
        return self._registered.place(client, spans[0]) if len(spans) == 1 else None

    def _wrote(self, code: int, length: int) -> Outcome:
        if code in NO_ROOM:
            self._full_until_s = self._clock.monotonic() + PAUSE_S
            return REJECTED
        if code in ALREADY_THERE:
            return REJECTED
        _check(code)
        return Done(length)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = list(dict.fromkeys(self._options.name_of(key) for key in keys))
        if not names:
            return
        client = self._connected()
        with self._use.deleting(names):
            for name in names:
                code = client.remove(name, True)  # by force: what was read is leased for a while
                if code not in NOT_THERE:
                    _check(code)

    def close(self) -> None:
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            self._registered.clear(client)
            client.close()

    def _exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._connected().batch_is_exist(list(names))
        for code in codes:
            _check(code)
        return [code == 1 for code in codes]

    def _connected(self) -> Any:
        """One thread connects; meanwhile the others' calls fail at once."""
        if self._client is None:
            if not self._connecting.acquire(blocking=False):
                raise StoreUnavailable("Mooncake's client is being started")
            try:
                if self._client is None:
                    client, self._config = self._connect()
                    self._client = client
            finally:
                self._connecting.release()
        return self._client


class _Registered:
    """Memory that the client may read and write: mappings, whole, each since the first buffer in it came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._whole: dict[int, memoryview] = {}  # by address; the view keeps the mapping

    def place(self, client: Any, buffer: Buffer) -> _Place | None:
        """None: it must be copied."""
        if buffer.readonly or not len(buffer) or not isinstance(buffer.obj, MAPPED):
            return None
        with self._lock:
            if not any(view.obj is buffer.obj for view in self._whole.values()):
                view = memoryview(buffer.obj)
                address = _address(view)
                if client.register_buffer(address, len(view)):
                    raise StoreUnavailable(
                        "Mooncake's client can't register the pool's memory (ulimit -l?)"
                    )
                self._whole[address] = view
        return _Place(_address(buffer), len(buffer))

    def clear(self, client: Any) -> None:
        with self._lock:
            for address, view in self._whole.items():
                client.unregister_buffer(address)
                view.release()
            self._whole.clear()


class _Use:
    """Who in this process does what with which name. A name that is being deleted is read by nobody."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._reading: dict[str, int] = {}
        self._writing: set[str] = set()
        self._deleting: set[str] = set()

    @contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._deleting & set(names))
            for name in names:
                self._reading[name] = self._reading.get(name, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                for name in names:
                    self._reading[name] -= 1
                    if not self._reading[name]:
                        del self._reading[name]
                self._changed.notify_all()

    @contextmanager
    def writing(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Positions of the names that nobody else writes now."""
        mine: list[int] = []
        with self._changed:
            for i, name in enumerate(names):
                if name not in self._writing:
                    self._writing.add(name)
                    mine.append(i)
        try:
            yield mine
        finally:
            with self._changed:
                self._writing -= {names[i] for i in mine}

    @contextmanager
    def deleting(self, names: Sequence[str]) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._deleting & set(names))
            self._deleting |= set(names)
        try:
            with self._changed:
                self._wait(lambda: not any(name in self._reading for name in names))
            yield
        finally:
            with self._changed:
                self._deleting -= set(names)
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, self._limit_s):
            raise StoreUnavailable(f"another call has used the chunk for {self._limit_s:g} s")


def _address(view: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _read(code: int) -> Outcome:
    """Of a read's result: a length, or what went wrong."""
    if code in NOT_THERE:
        return MISSING
    if code in DOES_NOT_FIT:
        return REJECTED
    _check(code)
    return Done(code)


def _check(code: int) -> None:
    if code in REFUSED:
        raise StoreRefused(f"Mooncake's master refuses (code {code})")
    if code < 0:
        raise StoreUnavailable(f"Mooncake's client failed (code {code})")
