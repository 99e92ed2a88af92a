"""Names and values in Redis.

A chunk's name is ``<prefix>{<digest>}``. The braces put it and its parts into one slot of a Cluster. Its value begins
with an envelope of 32 bytes, little-endian::

    0  magic      8  KVSTOWR1
    8  kind       4  0: the frame follows; 1: the frame is in parts
    12 part count 4  0 for kind 0
    16 length     8  of the frame
    24 write id   8  random; 0 for kind 0

Part ``i`` is named ``<name>:<write id>:<i>`` and holds bytes of the frame only. All parts but the last have one size.
The write id keeps the parts of two writers apart. The first envelope wins, and names the parts of its own writer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstow.backends.base import Buffer
from kvstow.key import ChunkKey

ENVELOPE: Final = struct.Struct("<8sIIQ8s")
ENVELOPE_BYTES: Final = ENVELOPE.size
MAGIC: Final = b"KVSTOWR1"
WHOLE: Final = 0
PARTS: Final = 1
WRITE_ID_BYTES: Final = 8
MAX_PARTS: Final = 4096


class Envelope(NamedTuple):
    """What a chunk's value begins with. ``parts`` is 0 where the frame follows the envelope."""

    length: int
    parts: int = 0
    write_id: bytes = bytes(WRITE_ID_BYTES)

    def pack(self) -> bytes:
        return ENVELOPE.pack(
            MAGIC, PARTS if self.parts else WHOLE, self.parts, self.length, self.write_id
        )

    def part_names(self, name: bytes) -> list[bytes]:
        """The names of the parts of the chunk called ``name``."""
        return [b"%s:%s:%d" % (name, self.write_id.hex().encode(), i) for i in range(self.parts)]

    def part_lengths(self, part_bytes: int) -> list[int]:
        """The parts' lengths, for a writer that cuts after each ``part_bytes``."""
        return [min(part_bytes, self.length - i * part_bytes) for i in range(self.parts)]


def unpack(data: object) -> Envelope | None:
    """Reads the envelope at the beginning of a value. None if the value does not begin with one."""
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) < ENVELOPE_BYTES:
        return None
    magic, kind, parts, length, write_id = ENVELOPE.unpack_from(data)
    if magic != MAGIC or kind != (PARTS if parts else WHOLE) or parts > MAX_PARTS:
        return None
    return Envelope(length, parts, write_id)


def chunk_name(prefix: bytes, key: ChunkKey) -> bytes:
    """The name of a chunk's value."""
    return b"%s{%s}" % (prefix, key.digest().hex().encode())


def cut(spans: Sequence[Buffer], start: int, length: int) -> list[Buffer]:
    """Returns bytes ``start`` to ``start + length`` of the concatenation of ``spans``, without copying."""
    pieces: list[Buffer] = []
    for span in spans:
        if start < len(span) and length:
            piece = span[start : start + length]
            pieces.append(piece)
            length -= len(piece)
        start = max(0, start - len(span))
    return pieces
