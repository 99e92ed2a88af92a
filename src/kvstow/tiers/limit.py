"""A Store wrapper that takes no more than so many bytes a second."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvstow.backends.base import REJECTED, Buffer, Outcome, Store
from kvstow.key import ChunkKey
from kvstow.runtime import Clock
from kvstow.tiers.store_wrapper import StoreWrapper

BURST_S: Final = 2.0  # a prompt's chunks come all at once


class WriteLimit(StoreWrapper):
    """Forwards to ``store``; writes are ``REJECTED`` while those of the last seconds were more than ``bytes_s``.

    A computed prompt is written all at once, by every engine, on the network that others wait for a read on. What is
    rejected is offered again when its prompt returns. It doesn't wait: the threads that would are those that read.
    ``burst_s`` seconds without a write may be made up for, and one write is always taken when none was for as long.
    """

    def __init__(
        self, store: Store, clock: Clock, *, bytes_s: float, burst_s: float = BURST_S
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._bytes_s = bytes_s
        self._most = bytes_s * burst_s
        self._lock = threading.Lock()
        self._left = self._most
        self._at_s = clock.monotonic()

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        takes = [self._take(sum(map(len, parts))) for _, parts in items]
        wrote = iter(
            self._store.write([item for item, take in zip(items, takes, strict=True) if take])
        )
        return [next(wrote) if take else REJECTED for take in takes]

    def _take(self, size: int) -> bool:
        with self._lock:
            now = self._clock.monotonic()
            self._left = min(self._most, self._left + (now - self._at_s) * self._bytes_s)
            self._at_s = now
            if size > self._left < self._most:
                return False
            self._left -= size
            return True
