"""The format of an encoded span: a header, a table of stream lengths, the streams.

Little-endian. The frame around it has the checksums. Here lengths and bounds are checked, so that
no bytes make a decoder read or allocate more than its shape allows.

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
64     4 each lengths of the streams, which follow
====== ====== ==========================================================

Each stream begins at a multiple of 8 behind what is before it, so that numpy reads words in place;
zeros fill the gaps.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from kvstow.codec.entropy import Packer
from kvstow.codec.shape import DTYPES, Array, KVShape
from kvstow.errors import FrameError

_HEAD: Final = struct.Struct("<4sHBB4s6I16sIQ")
_MAGIC: Final = b"KVC1"
_LENGTH: Final = struct.Struct("<I")
_ALIGN: Final = 8  # bytes


class Kind(NamedTuple):
    """A codec, its version and its parameters."""

    codec_id: int
    version: int
    parameters: bytes = b""


def overhead(streams: int) -> int:
    """The most bytes that header, table and gaps take."""
    return _HEAD.size + streams * (_LENGTH.size + _ALIGN - 1)


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def header(kind: Kind, shape: KVShape, streams: int) -> bytes:
    """The header of a span."""
    axes = (shape.layers, shape.blocks, shape.planes, shape.heads, shape.tokens, shape.size)
    return _HEAD.pack(
        _MAGIC,
        kind.codec_id,
        kind.version,
        DTYPES[shape.dtype],
        shape.order.encode(),
        *axes,
        kind.parameters,
        streams,
        shape.nbytes,
    )


class Writer:
    """Writes a span into ``out``, stream by stream."""

    def __init__(self, out: memoryview, kind: Kind, shape: KVShape, streams: int) -> None:
        self._out = out
        self._next = _HEAD.size
        self._at = self._table_end = _HEAD.size + streams * _LENGTH.size
        out[: _HEAD.size] = header(kind, shape, streams)

    def room(self, length: int) -> Array:
        """Returns the next stream's bytes, which the caller fills."""
        if self._next == self._table_end:
            raise ValueError("more streams than announced")
        _LENGTH.pack_into(self._out, self._next, length)
        self._next += _LENGTH.size
        begin = _aligned(self._at)
        self._out[self._at : begin] = bytes(begin - self._at)
        self._at = begin + length
        return np.frombuffer(self._out[begin : self._at], np.uint8)

    def add(self, stream: bytes | Array) -> None:
        """Write the next stream."""
        data = (
            np.frombuffer(stream, np.uint8)
            if isinstance(stream, bytes)
            else stream.reshape(-1).view(np.uint8)
        )
        self.room(len(data))[:] = data

    def add_packed(self, packer: Packer, symbols: Array, uncoded: int = 0) -> None:
        """Write the next stream, entropy-coded if that is shorter, all but the last ``uncoded``
        symbols.
        """
        packed = packer.pack(symbols[: len(symbols) - uncoded] if uncoded else symbols)
        if packed is None or not uncoded:
            self.add(symbols if packed is None else packed)
            return
        room = self.room(len(packed) + uncoded)
        room[: len(packed)] = np.frombuffer(packed, np.uint8)
        room[len(packed) :] = symbols[-uncoded:]

    def end(self) -> int:
        """Returns the bytes written."""
        if self._next != self._table_end:
            raise ValueError("fewer streams than announced")
        return self._at


class Reader:
    """Reads the streams of a span in order.

    Raises ``FrameError`` unless the span is of ``kind`` and ``shape``.
    """

    def __init__(self, encoded: memoryview, kind: Kind, shape: KVShape, streams: int) -> None:
        at = _HEAD.size + streams * _LENGTH.size
        if len(encoded) < at or encoded[: _HEAD.size] != header(kind, shape, streams):
            raise FrameError("not a span of this codec, its version and parameters, or this KV")
        lengths = struct.unpack_from(f"<{streams}I", encoded, _HEAD.size)
        self._streams: list[memoryview] = []
        for length in lengths:
            begin = _aligned(at)
            at = begin + length
            self._streams.append(encoded[begin:at])
        if at != len(encoded):
            raise FrameError(f"streams of {sum(lengths)} bytes in a span of {len(encoded)}")
        self._streams.reverse()

    def take(self) -> memoryview:
        """Returns the next stream."""
        return self._streams.pop()

    def exactly(self, length: int) -> Array:
        """Returns the next stream, which must have ``length`` bytes."""
        stream = self.take()
        if len(stream) != length:
            raise FrameError(f"a stream of {len(stream)} bytes, not {length}")
        return np.frombuffer(stream, np.uint8)
