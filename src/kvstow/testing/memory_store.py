"""A Store in this process's memory, the reference implementation of the contract."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.key import ChunkKey


class MemoryStore:
    """A dict of immutable ``bytes`` under one lock, for tests and as the oracle of other stores.

    It evicts nothing: a write beyond ``capacity_bytes`` is ``REJECTED``. None means no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._values: dict[ChunkKey, bytes] = {}
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            return [key in self._values for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        with self._lock:
            values = [self._values.get(key) for key, _ in items]
        return [self._fill(buffer, value) for (_, buffer), value in zip(items, values, strict=True)]

    @staticmethod
    def _fill(buffer: Buffer, value: bytes | None) -> Outcome:
        if value is None:
            return MISSING
        if len(value) > len(buffer):
            return REJECTED
        buffer[: len(value)] = value
        return Done(len(value))

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return [self._put(key, b"".join(parts)) for key, parts in items]

    def _put(self, key: ChunkKey, value: bytes) -> Outcome:
        with self._lock:
            room = (
                self._capacity_bytes is None
                or self._used_bytes + len(value) <= self._capacity_bytes
            )
            if key in self._values or not room:
                return REJECTED
            self._values[key] = value
            self._used_bytes += len(value)
            return Done(len(value))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._used_bytes -= len(self._values.pop(key, b""))

    def close(self) -> None:
        with self._lock:
            self._values.clear()
            self._used_bytes = 0
