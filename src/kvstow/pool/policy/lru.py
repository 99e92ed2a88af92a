"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from kvstow.key import ChunkKey
from kvstow.pool.policy.base import MAX_LEASED_SKIPS, Evictable


class LRU:
    """Evicts the key that has gone longest without ``insert`` or ``touch``."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()  # least recent first

    def insert(self, key: ChunkKey, size: int = 1) -> None:
        self._order[key] = None

    def touch(self, key: ChunkKey) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def touch_many(self, keys: Iterable[ChunkKey]) -> None:
        rest = iter(keys)
        while True:
            try:
                # A loop in C takes a third of a Python loop's time.
                deque(map(self._order.move_to_end, rest), maxlen=0)
                return
            except KeyError:
                continue  # a key that is not held: the iterator stands behind it

    def remove(self, key: ChunkKey) -> None:
        self._order.pop(key, None)

    def victim(self, evictable: Evictable) -> ChunkKey | None:
        for _ in range(min(len(self._order), MAX_LEASED_SKIPS)):
            key = next(iter(self._order))
            if evictable(key):
                del self._order[key]
                return key
            self._order.move_to_end(key)
        return None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
