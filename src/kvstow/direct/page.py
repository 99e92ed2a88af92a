"""An extent's header page, which identifies the payload behind it.

====== ====== =====================================================================================
offset length field (little-endian; all other bytes are zero)
====== ====== =====================================================================================
0      8      magic ``KVSTOWX1``
8      4      flags: 1, the payload's checksum is there
12     4      shard
16     8      generation: number of this filling among all fillings of the engine's slots
24     8      payload length
32     2      length of the key
34     98     key: namespace, group, prefix hash
4048   16     XXH3-128 of the payload
4080   16     XXH3-128 of bytes 0 to 4,080 of this page
====== ====== =====================================================================================
"""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_128_digest

from kvstow.errors import FrameError
from kvstow.key import ChunkKey
from kvstow.layout import HEADER_BYTES

MAGIC: Final = b"KVSTOWX1"
MAX_KEY_BYTES: Final = 98
_CHECKSUM: Final = 1
_HEAD: Final = struct.Struct("<8sIIQQH98s")
_CHECKSUM_AT: Final = 4048
_CHECKSUM_BYTES: Final = 16
_HEADER_CHECKSUM_AT: Final = HEADER_BYTES - _CHECKSUM_BYTES
_GENERATION_BYTES: Final = 8


def tag_of(key: ChunkKey, generation: int) -> bytes:
    """Returns the identity of one filling: its generation and key."""
    return generation.to_bytes(_GENERATION_BYTES, "little") + key


def seal_page(tag: bytes, shard: int, length: int, checksum: bytes | None) -> bytes:
    """Returns a header page.

    ``checksum`` is the payload's XXH3-128, or None where the payload did not pass the host.
    """
    key = tag[_GENERATION_BYTES:]
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise FrameError(f"a key of {len(key)} bytes")
    page = bytearray(HEADER_BYTES)
    generation = int.from_bytes(tag[:_GENERATION_BYTES], "little")
    _HEAD.pack_into(
        page, 0, MAGIC, _CHECKSUM * (checksum is not None), shard, generation, length, len(key), key
    )
    if checksum is not None:
        page[_CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_BYTES] = checksum
    page[_HEADER_CHECKSUM_AT:] = xxh3_128_digest(memoryview(page)[:_HEADER_CHECKSUM_AT])
    return bytes(page)


def check_page(page: bytes | memoryview, tag: bytes, shard: int, length: int) -> bytes | None:
    """Returns the payload's checksum, or None where the page has none.

    Raises ``FrameError`` unless the page is intact and belongs to this filling, shard and length.
    """
    if (
        len(page) != HEADER_BYTES
        or xxh3_128_digest(page[:_HEADER_CHECKSUM_AT]) != page[_HEADER_CHECKSUM_AT:]
    ):
        raise FrameError("its header page is damaged, or was never written")
    magic, flags, of_shard, generation, of_length, key_length, key = _HEAD.unpack_from(page)
    if magic != MAGIC or flags & ~_CHECKSUM or not 1 <= key_length <= MAX_KEY_BYTES:
        raise FrameError("not an extent of this format")
    if of_shard != shard:
        raise FrameError(f"the extent of shard {of_shard}, not of {shard}")
    if tag_of(key[:key_length], generation) != tag:
        raise FrameError("another chunk's, or an earlier filling's")
    if of_length != length:
        raise FrameError(f"a payload of {of_length} bytes, not of {length}")
    return bytes(page[_CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_BYTES]) if flags & _CHECKSUM else None
