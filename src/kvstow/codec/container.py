"""An encoded span: a header that says what it holds, a table of stream lengths, the streams.

Little-endian. The frame around it has the checksums; here lengths and bounds are checked, so that no bytes whatever
make a decoder read or reserve more than the shape that it was given allows.

====== ====== ==========================================================
offset length field
====== ====== ==========================================================
0      4      magic ``KVC1``
4      2      codec id
6      1      version of the codec's format
7      1      dtype: 1 float32, 2 bfloat16, 3 float16, 4 one byte
8      4      order of a page's axes, letters of ``khnc``
12     24     layers, blocks, planes, heads, tokens of a block, size (4 each)
36     16     the codec's parameters, zero-padded
52     4      streams
56     8      raw length
64     4 each lengths of the streams, which follow back to back
====== ====== ==========================================================
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from kvstow.codec.entropy import Packer
from kvstow.codec.shape import DTYPES, Array, KVShape
from kvstow.errors import FrameError

MAX_PARAMETER_BYTES: Final = 16

_HEAD: Final = struct.Struct("<4sHBB4s6I16sIQ")
_MAGIC: Final = b"KVC1"
_LENGTH: Final = struct.Struct("<I")


class Kind(NamedTuple):
    """Which codec made a span, in which version and with which parameters."""

    codec_id: int
    version: int
    parameters: bytes = b""


def overhead(streams: int) -> int:
    """Bytes of header and table."""
    return _HEAD.size + streams * _LENGTH.size


def header(kind: Kind, shape: KVShape, streams: int) -> bytes:
    axes = (shape.layers, shape.blocks, shape.planes, shape.heads, shape.tokens, shape.size)
    return _HEAD.pack(
        _MAGIC, kind.codec_id, kind.version, DTYPES[shape.dtype], shape.order.encode(), *axes,
        kind.parameters, streams, shape.nbytes,
    )  # fmt: skip


class Writer:
    """Fills ``out`` from its start, stream by stream."""

    def __init__(self, out: memoryview, kind: Kind, shape: KVShape, streams: int) -> None:
        self._out = out
        self._at = overhead(streams)
        self._next = _HEAD.size
        self._table_end = self._at
        out[: _HEAD.size] = header(kind, shape, streams)

    def room(self, length: int) -> Array:
        """The next stream's bytes, for the caller to fill."""
        if self._next == self._table_end:
            raise ValueError("more streams than announced")
        _LENGTH.pack_into(self._out, self._next, length)
        self._next += _LENGTH.size
        self._at += length
        return np.frombuffer(self._out[self._at - length : self._at], np.uint8)

    def add(self, stream: bytes | Array) -> None:
        data = np.frombuffer(stream, np.uint8) if isinstance(stream, bytes) else stream.reshape(-1).view(np.uint8)
        self.room(len(data))[:] = data

    def add_packed(self, packer: Packer, symbols: Array) -> None:
        """Entropy-coded where that is shorter."""
        packed = packer.pack(symbols)
        self.add(symbols if packed is None else packed)

    def end(self) -> int:
        """Bytes written."""
        if self._next != self._table_end:
            raise ValueError("fewer streams than announced")
        return self._at


class Reader:
    """The streams of an encoded span, in order. Raises ``FrameError`` unless it is one of ``kind`` and ``shape``."""

    def __init__(self, encoded: memoryview, kind: Kind, shape: KVShape, streams: int) -> None:
        at = overhead(streams)
        if len(encoded) < at or encoded[: _HEAD.size] != header(kind, shape, streams):
            raise FrameError("not a span of this codec, its version and parameters, or this KV")
        lengths = struct.unpack_from(f"<{streams}I", encoded, _HEAD.size)
        if at + sum(lengths) != len(encoded):
            raise FrameError(f"streams of {sum(lengths)} bytes in a span of {len(encoded)}")
        self._streams: list[memoryview] = []
        for length in lengths:
            self._streams.append(encoded[at : at + length])
            at += length
        self._streams.reverse()

    def take(self) -> memoryview:
        return self._streams.pop()

    def exactly(self, length: int) -> Array:
        """The next stream, which must have ``length`` bytes."""
        stream = self.take()
        if len(stream) != length:
            raise FrameError(f"a stream of {len(stream)} bytes, not {length}")
        return np.frombuffer(stream, np.uint8)
