"""Slots of direct storage, the second kind of place.

Workers move the bytes; this module assigns the slots.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar, Final

from kvstow.direct.geometry import Geometry
from kvstow.direct.page import tag_of
from kvstow.direct.table import Table
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout, Place
from kvstow.pool.slots import Lease, Slots, SlotState
from kvstow.runtime import Clock

RETRY_S: Final = 10.0  # pause after a failed filling: NVMe may be full until a chunk is evicted


class Extents(Slots):
    """Slots whose bytes workers write to and read from NVMe themselves.

    A slot that could not be filled or read is not reserved again for ``RETRY_S``, and neither is
    any slot that was never filled: where NVMe is full, an eviction must make room. ``preallocated``
    means that every slot has its space. ``table`` keeps committed chunks across restarts; None
    keeps none. ``fds`` lock the files against other engines and are closed with this object; the
    table is in the first.
    """

    tier: ClassVar[str] = "direct"
    gauges: ClassVar[str] = "direct"

    def __init__(
        self,
        geometry: Geometry,
        layout: ChunkLayout,
        clock: Clock,
        *,
        preallocated: bool,
        table: Table | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        super().__init__(geometry.slots, geometry.slot_bytes)
        self._geometry = geometry
        self._lengths = [group.payload_lengths for group in layout.groups]
        self._clock = clock
        self._table = table
        self._fds = list(fds)
        self._has_space = bytearray([preallocated]) * self.slots
        self._generations = [0] * self.slots
        self._latest = 0
        self._grow_after_s = clock.monotonic()
        self._retry_after_s: dict[int, float] = {}
        self._found = self._adopt(len(layout.groups)) if table is not None else []

    def _adopt(self, groups: int) -> list[tuple[ChunkKey, int]]:
        assert self._table is not None
        found: list[tuple[ChunkKey, int]] = []
        for generation, slot, key in self._table.read():
            self._latest = max(self._latest, generation)
            if key.group < groups:
                self._state[slot] = SlotState.COMMITTED
                self._group[slot] = key.group
                self._generations[slot] = generation
                found.append((key, slot))
        self._free = [slot for slot in self._free if self._state[slot] is SlotState.FREE]
        return found

    def found(self) -> Sequence[tuple[ChunkKey, int]]:
        found, self._found = self._found, []
        return found

    def reserve(self, group: int = 0) -> Lease | None:
        if not self._free:
            return None
        slot, now_s = self._free[-1], self._clock.monotonic()
        if now_s < self._retry_after_s.get(slot, 0.0) or (
            now_s < self._grow_after_s and not self._has_space[slot]
        ):
            return None
        lease = super().reserve(group)
        self._latest += 1
        self._generations[slot] = self._latest
        return lease

    def mark_failed(self, slot: int) -> None:
        self._retry_after_s[slot] = self._grow_after_s = self._clock.monotonic() + RETRY_S

    def free_slot(self, slot: int) -> None:
        super().free_slot(slot)
        if self._table is not None:
            self._table.clear(slot)

    def poll(self) -> None:
        if self._table is not None:
            self._table.poll()

    def busy(self) -> bool:
        return self._table is not None and self._table.busy()

    def close(self, timeout_s: float = 0.0) -> None:
        table, self._table = self._table, None
        if table is not None and not table.close(timeout_s):
            # The hung thread may write yet: a closed descriptor's number could be another file's
            # then.
            del self._fds[:1]
        while self._fds:
            os.close(self._fds.pop())

    def _place(self, lease: Lease) -> Place:
        assert lease.key is not None, "the index names what a slot is for"
        tag = tag_of(lease.key, self._generations[lease.slot])
        return self._geometry.place(lease.slot, self._lengths[lease.group], tag)

    def _commit(self, lease: Lease) -> None:
        super()._commit(lease)
        self._has_space[lease.slot] = 1
        self._retry_after_s.pop(lease.slot, None)
        if self._table is not None:
            assert lease.key is not None
            self._table.put(lease.slot, lease.key, self._generations[lease.slot])

    def _give_back(self, slot: int) -> None:
        super()._give_back(slot)
        if slot in self._retry_after_s:
            self._free.insert(0, self._free.pop())
