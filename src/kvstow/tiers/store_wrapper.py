"""The base class of Store wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstow.backends.base import Buffer, Outcome, Store
from kvstow.key import ChunkKey

A = TypeVar("A")
R = TypeVar("R")


class StoreWrapper:
    """A Store that forwards every operation to ``store``.

    A subclass overrides ``_call`` for what it does to all operations but ``close``. ``close`` is
    always forwarded, because no wrapper may leak what the store holds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._call(self._store.contains, keys)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        return self._call(self._store.read, items)

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return self._call(self._store.write, items)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        return self._call(self._store.delete, keys)

    def close(self) -> None:
        self._store.close()

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        return method(argument)
