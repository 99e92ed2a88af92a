"""A Store wrapper that bounds the bytes written each second."""

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
    """Forwards to ``store``; rejects writes beyond ``bytes_s`` bytes a second.

    Every engine writes a computed prompt all at once, on the network that others wait for a read
    on. A rejected chunk is offered again when its prompt returns. The wrapper never waits: the
    waiting threads would be those that read.

    ``burst_s`` seconds of unused rate may be made up for. One write, however large, is taken when
    none was for as long.
    """

    def __init__(
        self, store: Store, clock: Clock, *, bytes_s: float, burst_s: float = BURST_S
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._bytes_s = bytes_s
        self._burst_bytes = bytes_s * burst_s
        self._available_bytes = self._burst_bytes
        self._updated_s = clock.monotonic()
        self._lock = threading.Lock()

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        admitted = [self._admit(sum(map(len, parts))) for _, parts in items]
        outcomes = iter(
            self._store.write([item for item, ok in zip(items, admitted, strict=True) if ok])
        )
        return [next(outcomes) if ok else REJECTED for ok in admitted]

    def _admit(self, size: int) -> bool:
        """Whether ``size`` bytes may be written now; then they are."""
        with self._lock:
            now_s = self._clock.monotonic()
            gained_bytes = (now_s - self._updated_s) * self._bytes_s
            self._available_bytes = min(self._burst_bytes, self._available_bytes + gained_bytes)
            self._updated_s = now_s
            full = self._available_bytes == self._burst_bytes
            if size > self._available_bytes and not full:
                return False
            self._available_bytes -= size
            return True
