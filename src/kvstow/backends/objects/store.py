"""Chunks in an object store that all engines with the same bucket and prefix share.

An object's value is the frame. A write is conditional on there being no object, so the first
published copy stays. The bucket's lifecycle may delete an object at any time, so the store
remembers no object. It never lists the bucket.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.objects.clients import (
    as_store_error,
    is_missing_bucket,
    open_client,
    status_of,
)
from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock

R = TypeVar("R")
T = TypeVar("T")

# Received bytes are copied into the slot in pieces of this size, while they are in the processor's
# cache. Smaller pieces cost more calls. The client first gathers larger ones in a buffer.
PIECE_BYTES: Final = 256 << 10
RANGE_NOT_SATISFIABLE: Final = 416
NOT_IMPLEMENTED: Final = 501


class ObjectsStore:
    """A ``Store`` over a bucket or a directory.

    Args:
        options: Where the bucket is, and limits.
        clock: Measures how long a call has taken.
        warn: Is called once, with a sentence for the log, when the store turns out to lack
            conditional writes.

    Raises:
        StoreRefused: obstore can't use ``options``.
    """

    def __init__(
        self,
        options: ObjectsSettings,
        clock: Clock,
        *,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._bucket = options.bucket
        self._clock = clock
        self._warn = warn
        self._client = open_client(options)
        # obstore streams a file in pieces of 8 KiB: taking the bytes at once is five times as fast.
        self._streams = self._bucket.kind != "file"
        self._lock = threading.Lock()
        self._conditional_writes = True
        self._call_limit_s = 2 * options.timeout_s

    def ping(self) -> None:
        """Raises ``StoreUnavailable`` or ``StoreRefused`` when the store can't be used now."""
        prefix = self._bucket.prefix
        path = f"{prefix}/kvstow" if prefix else "kvstow"
        with _translated_errors():
            try:
                obstore.get(self._client, path, options={"range": (0, 1)})
            except FileNotFoundError as error:
                _raise_if_bucket_is_missing(error)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Sends one HEAD request for each key, at most ``parallel`` at the same time."""
        paths = [self._bucket.path_of(key) for key in keys]
        with _translated_errors():
            return self._run(self._concurrently(self._exists_async, paths))

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        path_of = self._bucket.path_of
        return [self._read(path_of(key), buffer) for key, buffer in self._within_limit(items)]

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        path_of = self._bucket.path_of
        return [self._write(path_of(key), parts) for key, parts in self._within_limit(items)]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in self._within_limit(keys):
            with _translated_errors(), suppress(FileNotFoundError):
                obstore.delete(self._client, self._bucket.path_of(key))

    def close(self) -> None:
        """Does nothing: obstore closes its connections when the client is garbage collected."""

    # --- limits -------------------------------------------------------------------------------

    def _within_limit(self, items: Iterable[T]) -> Iterator[T]:
        """Yields ``items``. Raises ``StoreUnavailable`` when the call's limit is over."""
        deadline_s = self._clock.monotonic() + self._call_limit_s
        for item in items:
            if self._clock.monotonic() >= deadline_s:
                raise StoreUnavailable(f"the call has taken twice {self._options.timeout_s:g} s")
            yield item

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs ``work`` in this thread. Raises ``TimeoutError`` when the call's limit is over."""

        async def limited() -> R:
            async with asyncio.timeout(self._call_limit_s):
                return await work

        return asyncio.run(limited())  # cancels what an error or the timeout left unfinished

    async def _concurrently(
        self, call: Callable[[T], Awaitable[R]], arguments: Iterable[T]
    ) -> list[R]:
        """Calls ``call`` for each argument, at most ``parallel`` at a time. Keeps the order."""
        slots = asyncio.Semaphore(self._options.parallel)

        async def limited(argument: T) -> R:
            async with slots:
                return await call(argument)

        return list(await asyncio.gather(*map(limited, arguments)))

    # --- existence ----------------------------------------------------------------------------

    async def _exists_async(self, path: str) -> bool:
        try:
            await obstore.head_async(self._client, path)
        except FileNotFoundError as error:
            _raise_if_bucket_is_missing(error)
            return False
        return True

    def _exists(self, path: str) -> bool:
        try:
            obstore.head(self._client, path)
        except FileNotFoundError as error:
            _raise_if_bucket_is_missing(error)
            return False
        return True

    # --- reading ------------------------------------------------------------------------------

    def _read(self, path: str, buffer: Buffer) -> Outcome:
        try:
            with _translated_errors():
                if len(buffer) > self._options.part_size:
                    return self._run(self._read_parts(path, buffer))
                return self._read_whole(path, buffer)
        except StoreRefused as error:
            # No range of an empty object can be satisfied.
            if status_of(error.__cause__ or error) == RANGE_NOT_SATISFIABLE:
                return REJECTED
            raise
        except FileNotFoundError as error:
            _raise_if_bucket_is_missing(error)
            return MISSING
        except PreconditionError:  # another object has taken its place between two parts
            return MISSING

    def _read_whole(self, path: str, buffer: Buffer) -> Outcome:
        """Reads an object by one request. The length is known before any byte is taken."""
        got = obstore.get(self._client, path, options={"range": (0, max(1, len(buffer)))})
        length = int(got.meta["size"])
        if length > len(buffer):
            return REJECTED
        target = buffer[:length]
        filled = 0
        if self._streams:
            for piece in got.stream(min_chunk_size=PIECE_BYTES):
                filled = _put(target, filled, piece)
        else:
            filled = _put(target, filled, got.bytes())
        _check_whole(filled, target)
        return Done(length)

    async def _read_parts(self, path: str, buffer: Buffer) -> Outcome:
        """Reads an object by concurrent requests for parts of ``part_bytes``.

        All parts are of the same version of the object.
        """
        part_bytes = self._options.part_size
        first = await obstore.get_async(self._client, path, options={"range": (0, part_bytes)})
        length = int(first.meta["size"])
        if length > len(buffer):
            return REJECTED
        tag = first.meta["e_tag"]

        async def read_part(start: int) -> None:
            target = buffer[start : min(start + part_bytes, length)]
            got = first
            if start:
                options: Any = {"range": (start, start + len(target))}
                if tag:
                    options["if_match"] = tag
                got = await obstore.get_async(self._client, path, options=options)
            filled = 0
            if self._streams:
                async for piece in got.stream(min_chunk_size=PIECE_BYTES):
                    filled = _put(target, filled, piece)
            else:
                filled = _put(target, filled, await got.bytes_async())
            _check_whole(filled, target)

        await self._concurrently(read_part, range(0, length, part_bytes))
        return Done(length)

    # --- writing ------------------------------------------------------------------------------

    def _write(self, path: str, parts: Sequence[Buffer]) -> Outcome:
        value = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        try:
            with _translated_errors():
                return self._put_if_absent(path, value)
        except FileNotFoundError as error:  # of a write it can only be the bucket
            raise StoreRefused(str(as_store_error(error))) from error

    def _put_if_absent(self, path: str, value: Buffer) -> Outcome:
        if self._conditional_writes:
            try:
                obstore.put(self._client, path, value, mode="create", use_multipart=False)
                return Done(len(value))
            except (AlreadyExistsError, PreconditionError):
                return REJECTED
            except BaseError as error:
                if not isinstance(error, NotSupportedError) and status_of(error) != NOT_IMPLEMENTED:
                    raise
                self._give_up_conditional_writes()
        if self._exists(path):
            return REJECTED
        obstore.put(self._client, path, value, use_multipart=False)
        return Done(len(value))

    def _give_up_conditional_writes(self) -> None:
        with self._lock:
            already = not self._conditional_writes
            self._conditional_writes = False
        if not already:
            self._warn(
                "the store has no conditional writes: when two engines write a chunk at the same "
                "time, the later copy replaces the first"
            )


def _put(target: Buffer, start: int, piece: Any) -> int:
    """Copies ``piece`` to ``start`` and returns where the next piece goes."""
    end = start + len(piece)
    if end > len(target):
        raise StoreUnavailable("more bytes came than the store had said")
    target[start:end] = memoryview(piece)
    return end


def _check_whole(filled: int, target: Buffer) -> None:
    if filled < len(target):
        raise StoreUnavailable("fewer bytes came than the store had said")


def _raise_if_bucket_is_missing(error: FileNotFoundError) -> None:
    """A missing bucket is a wrong setting, not a miss."""
    error.with_traceback(None)  # see ``_translated_errors``
    if is_missing_bucket(error):
        raise as_store_error(error) from error


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raises obstore's errors as ``StoreError``.

    Lets errors pass that mean a missing or a replaced object.
    """
    try:
        yield
    except (FileNotFoundError, PreconditionError):
        raise
    except TimeoutError as error:
        raise StoreUnavailable("no answer in time") from error
    except (BaseError, OSError) as error:
        # obstore keeps an error for a while, and its traceback would keep the caller's buffers.
        raise as_store_error(error) from error.with_traceback(None)
