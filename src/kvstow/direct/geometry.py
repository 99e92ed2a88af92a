"""Where an extent is: sizes and offsets that the engine and every worker agree on.

Each distinct shard of the KV has a file or block device of its own: a superblock, in the first one the table of what
each slot holds, then the extents. Slot ``n`` is extent ``n`` in each of them: a header page, then that shard's payload,
padded to 4,096.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstow.layout import ALIGN, HEADER_BYTES, ChunkLayout, Place, Span, align_up

RECORD_BYTES: Final = 128  # of the table; divides a page, so that no record lies in two
SUPERBLOCK_BYTES: Final = ALIGN
MAX_AREAS: Final = 256  # chunks of one rank on their way at a time; more would only wait in queues


@dataclass(frozen=True, slots=True)
class Geometry:
    """``extent_bytes[i]``: an extent of shard ``i``, header page included; ``offsets[i]``: where its first one is."""

    slots: int
    extent_bytes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of_files(cls, layout: ChunkLayout, slots: int) -> Geometry:
        """Extents behind a superblock and, in the first file, the table."""
        sizes = extent_bytes(layout)
        table = align_up(slots * RECORD_BYTES)
        return cls(
            slots,
            sizes,
            tuple(SUPERBLOCK_BYTES + (table if i == 0 else 0) for i in range(len(sizes))),
        )

    @classmethod
    def bare(cls, layout: ChunkLayout, slots: int) -> Geometry:
        """Extents alone."""
        sizes = extent_bytes(layout)
        return cls(slots, sizes, (0,) * len(sizes))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all shards."""
        return sum(self.extent_bytes)

    def file_bytes(self, shard: int) -> int:
        return self.offsets[shard] + self.slots * self.extent_bytes[shard]

    def place(self, slot: int, lengths: tuple[int, ...], tag: bytes) -> Place:
        """Of each shard the extent's offset and its payload's length: the header page, ``tag`` in it, comes first."""
        offsets = (
            first + slot * size for first, size in zip(self.offsets, self.extent_bytes, strict=True)
        )
        return Place("direct", tuple(map(Span, offsets, lengths)), tag)


def extent_bytes(layout: ChunkLayout) -> tuple[int, ...]:
    """An extent of each shard, large enough for a chunk of any group."""
    payloads = zip(*(group.payload_lengths for group in layout.groups), strict=True)
    return tuple(HEADER_BYTES + align_up(max(lengths)) for lengths in payloads)


def slots_in(sizes: Sequence[int], total_bytes: int) -> int:
    """How many slots fit into ``total_bytes`` over all files, superblocks and table included. ``sizes``: of extents."""
    left = total_bytes - len(sizes) * SUPERBLOCK_BYTES - ALIGN
    return max(0, left // (sum(sizes) + RECORD_BYTES))


@dataclass(frozen=True, slots=True)
class DirectRef:
    """What a worker needs to reach its extents. Plain data: send it in any way.

    ``paths`` and ``set_id``, which every file's superblock says: of the engine ``file``.
    """

    engine: str
    geometry: Geometry
    staging_bytes: int  # of one rank
    threads: int
    failure_policy: str
    paths: tuple[str, ...] = ()
    set_id: bytes = b""

    def areas(self, shard: int) -> int:
        """Staging areas of the rank that holds this shard."""
        return max(1, min(MAX_AREAS, self.staging_bytes // self.geometry.extent_bytes[shard]))
