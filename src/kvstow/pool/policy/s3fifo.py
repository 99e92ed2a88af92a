"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1).

A small queue takes new keys. A key that is used once passes through this queue, a tenth of the room, and is
evicted. A key that is used more than once on the way moves to the main queue. A key evicted from the small
queue is remembered in a ghost queue, and enters the main queue when it returns. Compared with the paper:

- the small queue's share is that of the held keys, not of a capacity: ``victim`` is called when the
  tier is full;
- a leased key that would be evicted moves to the head of its queue instead;
- after ``MAX_STEPS`` keys in one search frequency no longer protects, which bounds the search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvstow.key import ChunkKey
from kvstow.pool.policy.base import MAX_LEASED_SKIPS, Evictable

SMALL_SHARE: Final = 0.1
MAX_FREQUENCY: Final = 3
PROMOTE_ABOVE: Final = 1
# A search takes 1 ms at worst, at 1 µs a step. Amortised, each step is paid for by one touch.
MAX_STEPS: Final = 1024

_Queue = OrderedDict[ChunkKey, int]  # key to size, oldest first


class S3FIFO:
    """Resists scans: keys used once never displace those used again."""

    def __init__(self) -> None:
        self._frequency: dict[ChunkKey, int] = {}
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._ghost: OrderedDict[ChunkKey, None] = OrderedDict()
        self._small_size = 0
        self._total_size = 0

    def insert(self, key: ChunkKey, size: int = 1) -> None:
        self._frequency[key] = 0
        self._total_size += size
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_size += size

    def touch(self, key: ChunkKey) -> None:
        self.touch_many((key,))

    def touch_many(self, keys: Iterable[ChunkKey]) -> None:
        frequency = self._frequency
        for key in keys:
            uses = frequency.get(key, MAX_FREQUENCY)
            if uses < MAX_FREQUENCY:
                frequency[key] = uses + 1

    def remove(self, key: ChunkKey) -> None:
        self._ghost.pop(key, None)
        if key in self._frequency:
            self._drop(key)

    def victim(self, evictable: Evictable) -> ChunkKey | None:
        skipped_small = skipped_main = 0
        steps = 0
        while True:
            steps += 1
            small_left = skipped_small < len(self._small)
            # A key of the main queue is visited until its frequency is 0.
            main_left = skipped_main < (MAX_FREQUENCY + 1) * len(self._main)
            if skipped_small + skipped_main >= MAX_LEASED_SKIPS or not (small_left or main_left):
                return None
            from_small = small_left and (
                self._small_size > SMALL_SHARE * self._total_size or not main_left
            )
            queue = self._small if from_small else self._main
            key = next(iter(queue))
            if steps <= MAX_STEPS and self._spare(key, from_small):
                continue
            if evictable(key):
                self._drop(key)
                if from_small:
                    self._remember(key)
                return key
            queue.move_to_end(key)
            if from_small:
                skipped_small += 1
            else:
                skipped_main += 1

    def _spare(self, key: ChunkKey, from_small: bool) -> bool:
        """Keeps ``key`` for a further round if it was used enough. False: it was not."""
        uses = self._frequency[key]
        if from_small:
            if uses > PROMOTE_ABOVE:
                self._promote(key)
                return True
            return False
        if uses > 0:
            self._frequency[key] = uses - 1
            self._main.move_to_end(key)
            return True
        return False

    def _promote(self, key: ChunkKey) -> None:
        size = self._small.pop(key)
        self._small_size -= size
        self._main[key] = size
        self._frequency[key] = 0

    def _drop(self, key: ChunkKey) -> None:
        del self._frequency[key]
        size = self._main.pop(key, None)
        if size is None:
            size = self._small.pop(key)
            self._small_size -= size
        self._total_size -= size

    def _remember(self, key: ChunkKey) -> None:
        self._ghost[key] = None
        while len(self._ghost) > max(1, len(self._frequency)):
            self._ghost.popitem(last=False)

    def __len__(self) -> int:
        return len(self._frequency)

    def __contains__(self, key: object) -> bool:
        return key in self._frequency
