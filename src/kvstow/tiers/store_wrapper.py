"""The base class of Store wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstow.backends.base import Buffer, MaintainedStore, Outcome, Store, StoreReport
from kvstow.key import ChunkKey

A = TypeVar("A")
R = TypeVar("R")


class StoreWrapper:
    """A Store that forwards every operation to ``store``.

    A subclass overrides ``_call`` for what it does to all operations but ``close``. ``close`` is
    always forwarded, because no wrapper may leak what the store holds. Every wrapper is a
    ``MaintainedStore``: where the store has no ``set_aside``, corrupt values are deleted, and where
    it has no ``report``, the report is empty.
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

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        if isinstance(self._store, MaintainedStore):
            self._store.set_aside(keys)
        else:
            self.delete(keys)

    def report(self) -> StoreReport:
        return self._store.report() if isinstance(self._store, MaintainedStore) else StoreReport()

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        return method(argument)
