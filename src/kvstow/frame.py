"""The frame: a header page that identifies and checks the payload behind it.

A frame is a header page of 4,096 bytes, then the payload. The payload has one span for each distinct
shard, zero-padded to a multiple of 4,096 bytes. The header is little-endian. Bytes that this table
does not name are zero:

====== ====== =====================================================================================================
offset length field
====== ====== =====================================================================================================
0      8      magic ``KVSTOW1\\0``
8      4      header length: 4,096
12     4      flags: 1 lossy, 2 keyed
16     32     key: namespace
48     2      key: group
50     2      key: length of the prefix hash, 1 to 64
52     64     key: prefix hash
116    2      length of the parent's prefix hash, 0 to 64; 0: the prompt's first chunk
120    64     the parent's prefix hash
184    4      tokens in the chunk
188    2      codec, 0: raw
190    2      length of the codec's parameters, 0 to 256
192    256    the codec's parameters
448    8      raw length: payload bytes before the codec
456    8      payload length: bytes of all spans, without padding
464    8      created, microseconds since the epoch
472    4      spans, 1 to 64
480    1,536  span table, 24 bytes each: offset in the frame (8), length (8), shard (4), zero (4)
2016   16     XXH3-128 of the payload (canonical, big-endian): spans in order of the table, without padding
2032   32     keyed frames: MAC, see below
4080   16     XXH3-128 of bytes 0 to 4,080 of this page
====== ====== =====================================================================================================

The MAC of a keyed frame is a keyed BLAKE3 over bytes 0 to 2,032 and the payload's own keyed BLAKE3.
The two keys are derived from the integrity key, with different contexts.

Digests do not depend on how the bytes were cut into pieces. Bytes that pass through a buffer are
hashed a buffer at a time, while they are in cache. A span in memory is hashed in one call: both
libraries release the GIL in it (xxhash above 64 KiB), and each return waits for the GIL. Beside a
busy Python thread a keyed frame of 4 MiB took 124 ms in pieces of 256 KiB and 11 ms in one.
"""

from __future__ import annotations

import hmac
import struct
from functools import lru_cache
from itertools import starmap
from typing import Final, NamedTuple

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from kvstow.errors import FrameError
from kvstow.key import MAX_PREFIX_HASH_BYTES, ChunkKey, Namespace
from kvstow.layout import ALIGN, HEADER_BYTES, GroupLayout, align_up

MAGIC: Final = b"KVSTOW1\0"
RAW: Final = 0
MAX_SPANS: Final = 64
MAX_CODEC_PARAMETER_BYTES: Final = 256

_LOSSY: Final = 1
_KEYED: Final = 2
_HEAD: Final = struct.Struct("<8sII32sHH64sHxx64sIHH256sQQQIxxxx")
_SPAN: Final = struct.Struct("<QQIxxxx")
_SPANS_AT: Final = _HEAD.size
_CHECKSUM_AT: Final = _SPANS_AT + MAX_SPANS * _SPAN.size
_CHECKSUM_BYTES: Final = 16
_MAC_AT: Final = _CHECKSUM_AT + _CHECKSUM_BYTES
_MAC_BYTES: Final = 32
_HEADER_CHECKSUM_AT: Final = HEADER_BYTES - _CHECKSUM_BYTES
_MICROSECONDS: Final = 1_000_000
_MAX_BYTES: Final = 1 << 62
_ZEROS: Final = bytes(ALIGN)
_HEADER_CONTEXT: Final = "kvstow v1 MAC of a frame header"
_PAYLOAD_CONTEXT: Final = "kvstow v1 MAC of a frame payload"


class FrameSpan(NamedTuple):
    """``length`` payload bytes of ``shard`` at byte ``offset`` of the frame."""

    offset: int
    length: int
    shard: int


class FrameHeader(NamedTuple):
    """The fields of a header page.

    ``parse_header`` guarantees all bounds of the table in this module's docstring.
    """

    key: ChunkKey
    parent: bytes
    tokens: int
    raw_length: int
    spans: tuple[FrameSpan, ...]
    checksum: bytes
    created: float  # seconds since the epoch
    lossy: bool = False
    codec_id: int = RAW
    codec_parameters: bytes = b""
    mac: bytes | None = None  # None: not keyed

    @property
    def payload_length(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def frame_length(self) -> int:
        """Bytes of the whole frame, padding included."""
        return self.spans[-1].offset + align_up(self.spans[-1].length)


class PayloadChecksum:
    """Digests of a payload whose bytes pass in order, in pieces of any size."""

    def __init__(self, integrity_key: bytes | None = None) -> None:
        self._checksum = xxh3_128()
        self._mac = (
            None if integrity_key is None else blake3(key=_derive(integrity_key, _PAYLOAD_CONTEXT))
        )

    def update(self, piece: bytes | memoryview) -> None:
        self._checksum.update(piece)
        if self._mac is not None:
            self._mac.update(piece)

    @property
    def checksum(self) -> bytes:
        return self._checksum.digest()

    @property
    def mac(self) -> bytes | None:
        return None if self._mac is None else self._mac.digest()


@lru_cache(maxsize=256)
def frame_spans(lengths: tuple[int, ...]) -> tuple[FrameSpan, ...]:
    """The span table for payload spans of these lengths, one a shard, behind the header page."""
    spans: list[FrameSpan] = []
    at = HEADER_BYTES
    for shard, length in enumerate(lengths):
        spans.append(FrameSpan(at, length, shard))
        at += align_up(length)
    return tuple(spans)


def write_header(
    page: memoryview, header: FrameHeader, payload: PayloadChecksum, integrity_key: bytes | None
) -> None:
    """Fill the first 4,096 bytes of ``page`` with ``header`` and the digests of ``payload``.

    The digests in ``header`` are ignored. ``seal`` calls it, and a tier whose codec builds a frame
    of its own.
    """
    parts = bytearray(HEADER_BYTES)
    key, parent, parameters = header.key, header.parent, header.codec_parameters
    if len(parent) > MAX_PREFIX_HASH_BYTES or len(parameters) > MAX_CODEC_PARAMETER_BYTES:
        raise ValueError(
            f"parent hash of {len(parent)} bytes, codec parameters of {len(parameters)} bytes: too "
            "long"
        )
    if not 1 <= len(header.spans) <= MAX_SPANS:
        raise ValueError(f"{len(header.spans)} spans: a frame holds 1 to {MAX_SPANS}")
    flags = _LOSSY if header.lossy else 0
    if integrity_key is not None:
        flags |= _KEYED
    _HEAD.pack_into(
        parts,
        0,
        MAGIC,
        HEADER_BYTES,
        flags,
        key.namespace,
        key.group,
        len(key.prefix_hash),
        key.prefix_hash,
        len(parent),
        parent,
        header.tokens,
        header.codec_id,
        len(parameters),
        parameters,
        header.raw_length,
        header.payload_length,
        round(header.created * _MICROSECONDS),
        len(header.spans),
    )
    for index, span in enumerate(header.spans):
        _SPAN.pack_into(parts, _SPANS_AT + index * _SPAN.size, *span)
    parts[_CHECKSUM_AT:_MAC_AT] = payload.checksum
    if integrity_key is not None:
        parts[_MAC_AT : _MAC_AT + _MAC_BYTES] = _mac(memoryview(parts), payload, integrity_key)
    parts[_HEADER_CHECKSUM_AT:] = xxh3_128_digest(memoryview(parts)[:_HEADER_CHECKSUM_AT])
    page[:HEADER_BYTES] = parts


def seal(
    frame: memoryview,
    key: ChunkKey,
    layout_group: GroupLayout,
    tokens: int,
    parent: bytes,
    created: float,
    *,
    lossy: bool = False,
    integrity_key: bytes | None = None,
) -> None:
    """Turn a slot that holds a payload into a frame: zero the padding and write the header.

    Payload bytes do not change. Precondition: no other thread or process writes the slot meanwhile.
    ``parent`` is the prefix hash of the chunk before, empty for a prompt's first. ``created`` is in
    seconds since the epoch.
    """
    spans = frame_spans(layout_group.payload_lengths)
    payload = PayloadChecksum(integrity_key)
    for span in spans:
        end = span.offset + span.length
        payload.update(frame[span.offset : end])
        if padding := -end % ALIGN:
            frame[end : end + padding] = _ZEROS[:padding]
    raw_length = sum(layout_group.payload_lengths)
    header = FrameHeader(key, parent, tokens, raw_length, spans, b"", created, lossy=lossy)
    write_header(frame, header, payload, integrity_key)


def check(
    frame: memoryview,
    length: int,
    key: ChunkKey,
    layout_group: GroupLayout,
    *,
    integrity_key: bytes | None = None,
    coded: bool = False,
) -> FrameHeader:
    """Verify that the first ``length`` bytes of ``frame`` are the whole raw frame of ``key``.

    With ``coded`` a frame of any codec passes too; it is never longer than the raw one.

    Raises FrameError for any other frame: short, long, damaged, of another key or layout, or forged
    if there is an ``integrity_key``. It ignores padding, which is never read, and the content of a
    coded payload.
    """
    most = layout_group.frame_bytes
    if len(frame) < length or not (HEADER_BYTES if coded else most) <= length <= most:
        raise FrameError(f"{length} bytes of {len(frame)}, a frame of this group has {most}")
    header = parse_header(frame[:HEADER_BYTES])
    if header.key != key:
        raise FrameError(f"the frame of {header.key!r}, not of {key!r}")
    lengths = layout_group.payload_lengths
    shards = len(lengths)
    raw_length = sum(lengths)
    if header.codec_id != RAW:
        if not coded:
            raise FrameError(f"codec {header.codec_id}, not raw")
        lengths = tuple(span.length for span in header.spans)
    if (
        header.spans != frame_spans(lengths)
        or len(lengths) != shards
        or header.frame_length != length
    ):
        raise FrameError(f"spans {header.spans} in {length} bytes do not fit the group's layout")
    if header.raw_length != raw_length or header.tokens > layout_group.chunk_tokens:
        raise FrameError(
            f"{header.raw_length} bytes of {header.tokens} tokens do not fit the group's layout"
        )
    payload = PayloadChecksum(integrity_key)
    for span in header.spans:
        payload.update(frame[span.offset : span.offset + span.length])
    verify(frame[:HEADER_BYTES], header, payload, integrity_key=integrity_key)
    return header


def parse_header(page: memoryview | bytes) -> FrameHeader:
    """Read a header page of 4,096 bytes. Raises FrameError unless it is whole and within all bounds.

    It checks neither the payload nor a MAC. ``verify`` does, once the payload has passed.
    """
    if len(page) != HEADER_BYTES:
        raise FrameError(f"header page of {len(page)} bytes")
    if xxh3_128_digest(page[:_HEADER_CHECKSUM_AT]) != page[_HEADER_CHECKSUM_AT:]:
        raise FrameError("header checksum does not match")
    (
        magic,
        header_length,
        flags,
        namespace,
        group,
        hash_length,
        prefix_hash,
        parent_length,
        parent,
        tokens,
        codec_id,
        parameters_length,
        parameters,
        raw_length,
        payload_length,
        created,
        count,
    ) = _HEAD.unpack_from(page)
    _require(magic == MAGIC and header_length == HEADER_BYTES, "not a frame of this format")
    _require(flags & ~(_LOSSY | _KEYED) == 0, "unknown flags")
    _require(
        1 <= hash_length <= MAX_PREFIX_HASH_BYTES and parent_length <= MAX_PREFIX_HASH_BYTES,
        "hash lengths",
    )
    _require(
        tokens >= 1 and parameters_length <= MAX_CODEC_PARAMETER_BYTES, "token or parameter count"
    )
    _require(1 <= count <= MAX_SPANS and raw_length <= _MAX_BYTES, "span count or raw length")
    spans = tuple(
        starmap(FrameSpan, _SPAN.iter_unpack(page[_SPANS_AT : _SPANS_AT + count * _SPAN.size]))
    )
    _require_spans(spans, payload_length)
    key = ChunkKey.build(Namespace(namespace), group, prefix_hash[:hash_length])
    return FrameHeader(
        key,
        parent[:parent_length],
        tokens,
        raw_length,
        spans,
        bytes(page[_CHECKSUM_AT:_MAC_AT]),
        created / _MICROSECONDS,
        bool(flags & _LOSSY),
        codec_id,
        parameters[:parameters_length],
        bytes(page[_MAC_AT : _MAC_AT + _MAC_BYTES]) if flags & _KEYED else None,
    )


def verify(
    page: memoryview | bytes,
    header: FrameHeader,
    payload: PayloadChecksum,
    *,
    integrity_key: bytes | None = None,
) -> None:
    """Compare a payload that has passed through ``payload`` with its header, which is ``page`` parsed.

    ``payload`` was made with the same ``integrity_key``. With a key, a frame that is not keyed is
    refused. Without one, a keyed frame is refused. Raises FrameError.
    """
    _require(payload.checksum == header.checksum, "payload checksum does not match")
    if integrity_key is None:
        _require(header.mac is None, "keyed, and no integrity_key is set")
        return
    if header.mac is None:
        raise FrameError("not keyed, and integrity_key is set")
    _require(
        hmac.compare_digest(_mac(page, payload, integrity_key), header.mac), "MAC does not match"
    )


def _mac(page: memoryview | bytes, payload: PayloadChecksum, integrity_key: bytes) -> bytes:
    if payload.mac is None:
        raise ValueError("the payload passed through a PayloadChecksum without the integrity key")
    return (
        blake3(key=_derive(integrity_key, _HEADER_CONTEXT))
        .update(page[:_MAC_AT])
        .update(payload.mac)
        .digest()
    )


def _derive(integrity_key: bytes, context: str) -> bytes:
    return blake3(integrity_key, derive_key_context=context).digest()


def _require_spans(spans: tuple[FrameSpan, ...], payload_length: int) -> None:
    end = HEADER_BYTES
    total = 0
    for offset, length, _ in spans:
        if offset < end or offset % ALIGN or not 1 <= length <= _MAX_BYTES or offset > _MAX_BYTES:
            raise FrameError(f"span at {offset}, of {length} bytes")
        end = offset + align_up(length)
        total += length
    _require(total == payload_length, "payload length")


def _require(true: bool, what: str) -> None:
    if not true:
        raise FrameError(what)
