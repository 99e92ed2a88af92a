"""Sizes and offsets of extents, on which the engine and every worker agree.

Each distinct shard of the KV has a file or block device of its own. It begins with a superblock; in
the first file the table follows; then come the extents. Slot ``n`` is extent ``n`` in each of them:
a header page, then that shard's payload, padded to 4,096 bytes.
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
    """Number of slots, and for each shard the layout of its file.

    ``extent_bytes[i]`` is an extent of shard ``i``, header page included; ``offsets[i]`` is the
    byte offset of its first extent.
    """

    slots: int
    extent_bytes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def with_files(cls, layout: ChunkLayout, slots: int) -> Geometry:
        """Returns the geometry of files.

        Extents follow a superblock and, in the first file, the table.
        """
        sizes = extent_bytes(layout)
        table = align_up(slots * RECORD_BYTES)
        return cls(
            slots,
            sizes,
            tuple(SUPERBLOCK_BYTES + (table if i == 0 else 0) for i in range(len(sizes))),
        )

    @classmethod
    def without_files(cls, layout: ChunkLayout, slots: int) -> Geometry:
        """Returns the geometry of extents without superblock and table."""
        sizes = extent_bytes(layout)
        return cls(slots, sizes, (0,) * len(sizes))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all shards."""
        return sum(self.extent_bytes)

    def file_bytes(self, shard: int) -> int:
        """Bytes of a shard's file."""
        return self.offsets[shard] + self.slots * self.extent_bytes[shard]

    def place(self, slot: int, lengths: tuple[int, ...], tag: bytes) -> Place:
        """Returns the place of a slot: for each shard its extent's offset and its payload's length
        in bytes.

        A span begins at the header page, which must hold ``tag``.
        """
        offsets = (
            first + slot * size for first, size in zip(self.offsets, self.extent_bytes, strict=True)
        )
        return Place("direct", tuple(map(Span, offsets, lengths)), tag)


def extent_bytes(layout: ChunkLayout) -> tuple[int, ...]:
    """Returns the bytes of an extent of each shard, enough for a chunk of any group."""
    payloads = zip(*(group.payload_lengths for group in layout.groups), strict=True)
    return tuple(HEADER_BYTES + align_up(max(lengths)) for lengths in payloads)


def slots_in(sizes: Sequence[int], total_bytes: int) -> int:
    """Returns how many slots fit into ``total_bytes`` over all files, superblocks and table
    included.

    ``sizes`` are the bytes of an extent of each shard.
    """
    left = total_bytes - len(sizes) * SUPERBLOCK_BYTES - ALIGN
    return max(0, left // (sum(sizes) + RECORD_BYTES))


@dataclass(frozen=True, slots=True)
class DirectRef:
    """Plain data with which a worker reaches its extents.

    ``engine`` is ``file`` or ``rds``. ``paths`` and ``set_id``, which is in every file's
    superblock, are for ``file`` only. ``staging_bytes`` is of one rank.
    """

    engine: str
    geometry: Geometry
    staging_bytes: int
    threads: int
    failure_policy: str
    paths: tuple[str, ...] = ()
    set_id: bytes = b""

    def areas(self, shard: int) -> int:
        """Number of staging areas of the rank that holds ``shard``."""
        return max(1, min(MAX_AREAS, self.staging_bytes // self.geometry.extent_bytes[shard]))
