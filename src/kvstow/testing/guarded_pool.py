"""A host pool with guard bytes, and block contents, for tests of devices."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from kvstow.layout import ALIGN, Place, Span, align_up
from kvstow.testing.kv_layouts import Built, block_bytes

GUARD = 0xA5


class Host:
    """A pool of ``slots`` places, each with a span for every shard. All other bytes are guards."""

    def __init__(self, span_bytes: int, slots: int, shards: int = 1) -> None:
        self.span_bytes = span_bytes
        self.shards = shards
        self._pitch = ALIGN + shards * (align_up(span_bytes) + ALIGN)
        self._map = mmap.mmap(-1, align_up(slots * self._pitch + ALIGN))
        self.memory = memoryview(self._map)
        ctypes.memset(
            ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), GUARD, len(self.memory)
        )

    def place(self, slot: int) -> Place:
        """The place of a slot."""
        at = slot * self._pitch + ALIGN
        step = align_up(self.span_bytes) + ALIGN
        return Place(
            "pool", tuple(Span(at + i * step, self.span_bytes) for i in range(self.shards))
        )

    def payload(self, slot: int, shard: int = 0) -> bytes:
        """The bytes of a shard's span."""
        span = self.place(slot).spans[shard]
        return bytes(self.memory[span.offset : span.offset + span.length])

    def outside(self, used: Sequence[tuple[int, int]]) -> bytes:
        """All bytes, with guards in place of the spans of these (slot, shard)."""
        data = bytearray(self.memory)
        for slot, shard in used:
            span = self.place(slot).spans[shard]
            data[span.offset : span.offset + span.length] = bytes([GUARD]) * span.length
        return bytes(data)

    def untouched(self, used: Sequence[tuple[int, int]]) -> bool:
        """Whether all bytes but the spans of these (slot, shard) are guards still."""
        return self.outside(used).count(GUARD) == len(self.memory)


def everything(built: Built) -> dict[tuple[str, int], bytes]:
    """The bytes of every block, by layer and block."""
    return {
        (name, block): block_bytes(built, name, block)
        for name, spec in built.specs.items()
        for block in range(spec.num_blocks)
    }
