"""A Store wrapper for plug-ins: it checks answers, and takes back the buffers that it has lent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from kvstow.backends.base import Buffer, Done, Missing, Outcome, Rejected, Store
from kvstow.errors import StoreError, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import run_within

T = TypeVar("T")

CLOSE_S: Final = 2.0


class CheckedStore:
    """Forwards to ``store``, which a plug-in brought.

    An answer that breaks the contract is raised as ``StoreUnavailable``, so that it counts as a
    fault of the store. Every exception of ``store`` passes. Parts are lent read-only; a buffer is
    released after the call that it was lent for, but views and arrays that the store made of it are
    not. ``close`` waits at most ``CLOSE_S``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return _checked_list(self._store.contains(keys), len(keys), bool)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        with _lent([buffer[:] for _, buffer in items]) as views:
            outcomes = self._store.read(
                [(key, view) for (key, _), view in zip(items, views, strict=True)]
            )
        _checked_list(outcomes, len(items), Done | Missing | Rejected)
        for (_, buffer), outcome in zip(items, outcomes, strict=True):
            _require(
                not isinstance(outcome, Done) or _is_length(outcome.length, 0, len(buffer)), outcome
            )
        return list(outcomes)

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        with _lent([part.toreadonly() for _, parts in items for part in parts]) as views:
            left = iter(views)
            outcomes = self._store.write(
                [(key, [next(left) for _ in parts]) for key, parts in items]
            )
        _checked_list(outcomes, len(items), Done | Missing | Rejected)
        for (_, parts), outcome in zip(items, outcomes, strict=True):
            size = sum(len(part) for part in parts)
            _require(
                not isinstance(outcome, Done) or _is_length(outcome.length, size, size), outcome
            )
        return list(outcomes)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._store.delete(keys)

    def close(self) -> None:
        with suppress(StoreError):
            within("close", self._store.close, CLOSE_S)


def within(name: str, work: Callable[[], T], timeout_s: float) -> T:
    """Run a plug-in's ``work`` on a thread of its own, named ``name``, and return its value.

    Raises ``StoreUnavailable`` for whatever it raises, and if it has not ended after ``timeout_s``
    seconds.
    """
    ended = run_within(name, work, timeout_s)
    if ended is None:
        raise StoreUnavailable(f"it did not end within {timeout_s:g} s")
    if ended[1] is not None:
        raise StoreUnavailable(f"{type(ended[1]).__name__}: {ended[1]}") from ended[1]
    return ended[0]


@contextmanager
def _lent(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Lend ``views`` for the block, and release them afterwards.

    A view that an array keeps, as one does that an exception holds, can't be released.
    """
    try:
        yield views
    finally:
        for view in views:
            with suppress(BufferError):
                view.release()


def _checked_list(answer: Any, length: int, kind: Any) -> list[Any]:
    """The answer as a list, if it is one of ``length`` items of ``kind``.

    Raises ``StoreUnavailable``.
    """
    good = (
        isinstance(answer, list)
        and len(answer) == length
        and all(isinstance(one, kind) for one in answer)
    )
    _require(good, answer)
    return list(answer)


def _is_length(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require(good: bool, answer: object) -> None:
    if not good:
        raise StoreUnavailable(f"its answer, a {type(answer).__name__}, isn't what a store answers")
