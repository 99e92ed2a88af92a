"""Chunks in an object store, shared by all engines that use the same bucket and prefix. The value is the frame.

The first published copy wins: writes are conditional on there being no object. A chunk may be deleted at any time, by
the bucket's lifecycle above all, so nothing is remembered here. The bucket is never listed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.objects.clients import (
    NO_SUCH_PLACE,
    as_store_error,
    code_of,
    open_client,
    status_of,
)
from kvstow.backends.objects.line import AskClient
from kvstow.backends.objects.options import ObjectsOptions
from kvstow.backends.objects.plain import Plain, goes_plain
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

R = TypeVar("R")

# What comes from the network is put into the slot as it comes, while it is in the cache. Smaller pieces cost more
# calls, larger ones are gathered in a buffer first.
PIECE_BYTES: Final = 256 << 10
NOT_IMPLEMENTED: Final = 501
BEYOND_END: Final = 416


class ObjectsStore:
    """See the module. ``say`` hears, once each, that the store has no conditional writes, or takes no signed URLs."""

    def __init__(
        self, options: ObjectsOptions, clock: Clock, *, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._options = options
        self._clock = clock
        self._say = say
        self._client = open_client(options)
        self._plain = Plain(self._client, options, clock) if goes_plain(options) else None
        self._streams = options.bucket.kind not in (
            "file",
            "memory",
        )  # a file's stream is of 8 KiB pieces
        self._loops = _Loops()
        self._lock = threading.Lock()
        self._conditional = True

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` or ``StoreRefused`` when the store can't be used now."""
        prefix = self._options.bucket.prefix
        with _faults(), suppress(FileNotFoundError):
            try:
                obstore.get(
                    self._client,
                    f"{prefix}/kvstow" if prefix else "kvstow",
                    options={"range": (0, 1)},
                )
            except FileNotFoundError as error:
                _still_there(error)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One HEAD a key, all at once."""
        paths = [self._options.bucket.path_of(key) for key in keys]
        with _faults():
            if len(paths) < 2:
                return [self._exists(path) for path in paths]
            return self._together([self._exists_async(path) for path in paths])

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline_s = self._deadline_s()
        for key, buffer in items:
            self._check(deadline_s)
            outcomes.append(self._read(self._options.bucket.path_of(key), buffer))
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline_s = self._deadline_s()
        for key, parts in items:
            self._check(deadline_s)
            outcomes.append(self._write(self._options.bucket.path_of(key), parts))
        return outcomes

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        deadline_s = self._deadline_s()
        for key in keys:
            self._check(deadline_s)
            with _faults(), suppress(FileNotFoundError):
                obstore.delete(self._client, self._options.bucket.path_of(key))

    def close(self) -> None:
        self._loops.close()
        if (plain := self._plain) is not None:
            plain.close()

    def _deadline_s(self) -> float:
        return self._clock.monotonic() + 2 * self._options.timeout_s

    def _check(self, deadline_s: float) -> None:
        if self._clock.monotonic() >= deadline_s:
            raise StoreUnavailable(f"the call has taken twice {self._options.timeout_s:g} s")

    # --- existence ------------------------------------------------------------------------------------------------

    def _exists(self, path: str) -> bool:
        try:
            obstore.head(self._client, path)
        except FileNotFoundError as error:
            _still_there(error)
            return False
        return True

    async def _exists_async(self, path: str) -> bool:
        try:
            await obstore.head_async(self._client, path)
        except FileNotFoundError as error:
            _still_there(error)
            return False
        return True

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self, path: str, buffer: Buffer) -> Outcome:
        deadline_s, plain = self._deadline_s(), self._plain
        if plain is None:
            return self._by_client(path, buffer)
        try:
            with _faults():
                return plain.read(path, buffer, deadline_s)
        except AskClient as error:
            why = str(error) if error.always else ""
        outcome = self._by_client(path, buffer, deadline_s - self._clock.monotonic())
        if why and isinstance(outcome, Done):
            self._without_plain(why)
        return outcome

    def _without_plain(self, why: str) -> None:
        with self._lock:
            plain, self._plain = self._plain, None
        if plain is not None:
            plain.close()
            self._say(
                f"signed URLs don't serve ({why}): reading is slower, by the client with signed requests"
            )

    def _by_client(self, path: str, buffer: Buffer, limit_s: float | None = None) -> Outcome:
        """The first part's answer says how long the object is, before any of its bytes is taken."""
        try:
            with _faults():
                first: Any = {"range": (0, max(1, min(self._options.part_bytes, len(buffer))))}
                if limit_s is not None or len(buffer) > self._options.part_bytes:
                    [outcome] = self._together([self._read_parts(path, buffer, first)], limit_s)
                    return outcome
                got = obstore.get(self._client, path, options=first)
                length = int(got.meta["size"])
                if length > len(buffer):
                    return REJECTED
                self._take(got, buffer[:length])
                return Done(length)
        except StoreRefused as error:
            if status_of(error.__cause__ or error) == BEYOND_END:  # an empty object
                return REJECTED
            raise
        except FileNotFoundError as error:
            _still_there(error)
            return MISSING
        except PreconditionError:  # deleted and written anew meanwhile
            return MISSING

    def _take(self, got: Any, target: Buffer) -> None:
        if not self._streams:
            _put(target, 0, got.bytes())
            return
        at = 0
        for piece in got.stream(min_chunk_size=PIECE_BYTES):
            at = _put(target, at, piece)
        _whole(at, target)

    async def _read_parts(self, path: str, buffer: Buffer, first: Any) -> Outcome:
        got = await obstore.get_async(self._client, path, options=first)
        length, size = int(got.meta["size"]), self._options.part_bytes
        if length > len(buffer):
            return REJECTED
        same = {"if_match": got.meta["e_tag"]} if got.meta["e_tag"] else {}
        room = asyncio.Semaphore(self._options.parallel)

        async def take(at: int) -> None:
            async with room:
                target = buffer[at : min(at + size, length)]
                options: Any = {"range": (at, at + len(target)), **same}
                part = (
                    got if not at else await obstore.get_async(self._client, path, options=options)
                )
                if self._streams:
                    filled = 0
                    async for piece in part.stream(min_chunk_size=PIECE_BYTES):
                        filled = _put(target, filled, piece)
                    _whole(filled, target)
                else:
                    _put(target, 0, await part.bytes_async())

        await _all([take(at) for at in range(0, length, size)])
        return Done(length)

    # --- writing --------------------------------------------------------------------------------------------------

    def _write(self, path: str, parts: Sequence[Buffer]) -> Outcome:
        """A write that finds nothing to write to is refused: the bucket isn't there."""
        value = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        try:
            return self._put(path, value)
        except FileNotFoundError as error:
            raise StoreRefused(str(as_store_error(error))) from error

    def _put(self, path: str, value: Buffer) -> Outcome:
        with _faults():
            if self._conditional:
                try:
                    obstore.put(self._client, path, value, mode="create", use_multipart=False)
                    return Done(len(value))
                except (AlreadyExistsError, PreconditionError):
                    return REJECTED
                except BaseError as error:
                    if (
                        not isinstance(error, NotSupportedError)
                        and status_of(error) != NOT_IMPLEMENTED
                    ):
                        raise
                    self._without_conditions()
            if self._exists(path):
                return REJECTED
            obstore.put(self._client, path, value, use_multipart=False)
            return Done(len(value))

    def _without_conditions(self) -> None:
        with self._lock:
            first, self._conditional = self._conditional, False
        if first:
            self._say(
                "the store has no conditional writes: of two engines that write a chunk at once the later wins"
            )

    # --- many requests at once ------------------------------------------------------------------------------------

    def _together(
        self, works: Sequence[Coroutine[Any, Any, R]], limit_s: float | None = None
    ) -> list[R]:
        """In the calling thread, at most ``parallel`` under way, all within ``limit_s``, or the call's limit."""
        room = asyncio.Semaphore(self._options.parallel)

        async def one(work: Coroutine[Any, Any, R]) -> R:
            async with room:
                return await work

        async def every() -> list[R]:
            async with asyncio.timeout(2 * self._options.timeout_s if limit_s is None else limit_s):
                return await _all([one(work) for work in works])

        with self._loops.one() as loop:
            try:
                return loop.run_until_complete(every())
            finally:
                for work in works:
                    work.close()


class _Loops:
    """Event loops, one for each thread that needs one at the time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[asyncio.AbstractEventLoop] = []

    @contextmanager
    def one(self) -> Iterator[asyncio.AbstractEventLoop]:
        with self._lock:
            loop = self._idle.pop() if self._idle else asyncio.new_event_loop()
        try:
            yield loop
        finally:
            with self._lock:
                self._idle.append(loop)

    def close(self) -> None:
        with self._lock:
            loops, self._idle = self._idle, []
        for loop in loops:
            loop.close()


async def _all(works: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Their results in order; the first fault ends the others before it is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _put(target: Buffer, at: int, piece: Any) -> int:
    """Returns where the next piece goes. More than was promised would end beyond the slot: refused."""
    end = at + len(piece)
    if end > len(target):
        raise StoreUnavailable("more bytes came than the store had said")
    target[at:end] = memoryview(piece)
    return end


def _whole(came: int, target: Buffer) -> None:
    if came < len(target):
        raise StoreUnavailable("fewer bytes came than the store had said")


def _still_there(error: FileNotFoundError) -> None:
    """Not an object but the bucket is missing: no miss, a wrong setting."""
    error.with_traceback(None)  # as in ``_faults``
    if code_of(error) in NO_SUCH_PLACE:
        raise as_store_error(error) from error


@contextmanager
def _faults() -> Iterator[None]:
    """What is no answer is a StoreError. A missing or changed object is for the caller."""
    try:
        yield
    except (FileNotFoundError, PreconditionError):
        raise
    except TimeoutError as error:
        raise StoreUnavailable("no answer in time") from error
    except (BaseError, OSError) as error:
        raise as_store_error(error) from error.with_traceback(
            None
        )  # obstore keeps it a while, and with it the buffers
