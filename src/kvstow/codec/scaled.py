"""Lossy codecs of one byte a number: ``int8`` and ``fp8`` (e4m3).

``int8`` has a scale for each token and head, ``fp8`` one for K and one for V. Both then code the
bytes by Huffman. A layer whose numbers or scales are not finite is kept as it is. Streams: for each
segment the symbols; then the scales (float32, bytes from high to low apart), a byte for each layer,
1 if it is kept, and the kept layers.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvstow.codec.base import (
    count_segments,
    require_lengths,
    require_room,
    segment_numbers,
    segments,
)
from kvstow.codec.container import Kind, Reader, Writer, overhead
from kvstow.codec.entropy import Packer, unpack
from kvstow.codec.numbers import narrow, require_floats, widen
from kvstow.codec.shape import Array, KVShape
from kvstow.errors import FrameError

E4M3_HIGHEST: Final = 448.0
_E4M3_HIGHEST_BITS: Final = 0x7E
_HIGHEST: Final = np.float32(2.0**127)  # larger numbers may be rounded to infinity
_REBIAS: Final = np.float32(2.0**-120)  # float32's exponent bias of 127 to e4m3's of 7


class Method(Protocol):
    """The conversion of scaled numbers to bytes and back."""

    @property
    def axes(self) -> str:
        """The axes along which scales differ."""
        ...

    def scales(self, largest: Array) -> Array:
        """Returns the divisors for these largest magnitudes."""
        ...

    def symbols(self, scaled: Array, out: Array) -> None:
        """Convert to bytes. ``scaled`` may be overwritten."""
        ...

    def values(self, symbols: Array, out: Array) -> None:
        """Convert bytes to scaled numbers."""
        ...


class _Int8:
    axes: Final = "kbhn"

    def scales(self, largest: Array) -> Array:
        scales: Array = largest / np.float32(127)
        bits = scales.view(np.uint32)
        # Up to the next bfloat16: no symbol is out of range, and the low bytes cost nothing.
        bits += 0xFFFF
        bits &= 0xFFFF0000
        return scales

    def symbols(self, scaled: Array, out: Array) -> None:
        np.rint(scaled, out=scaled)
        np.copyto(out.view(np.int8), scaled, casting="unsafe")

    def values(self, symbols: Array, out: Array) -> None:
        np.copyto(out, symbols.view(np.int8))


class _E4M3:
    axes: Final = "k"

    def scales(self, largest: Array) -> Array:
        """Powers of two: they move exponents and change no mantissa."""
        _, exponent = np.frexp(largest / np.float32(E4M3_HIGHEST))
        scales: Array = np.ldexp(np.float32(1), exponent)
        return scales

    def symbols(self, scaled: Array, out: Array) -> None:
        sign = (scaled.view(np.uint32) >> 24) & 0x80
        magnitude = np.abs(scaled, out=scaled)
        # Multiplied by 2**-120, a float32's upper bits are an e4m3's, subnormals included.
        np.multiply(magnitude, _REBIAS, out=magnitude)
        bits = magnitude.view(np.uint32)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        bits >>= 20
        np.minimum(bits, _E4M3_HIGHEST_BITS, out=bits)
        np.copyto(out, bits | sign, casting="unsafe")

    def values(self, symbols: Array, out: Array) -> None:
        np.take(_E4M3_VALUES, symbols, out=out)


def _e4m3_values() -> Array:
    codes = np.arange(256, dtype=np.uint32)
    magnitude = ((codes & 0x7F) << 20).view(np.float32) / _REBIAS
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3_VALUES: Final = _e4m3_values()


class Scaled:
    """A codec of one byte a number, by a ``Method``."""

    lossy: Final = True

    def __init__(self, name: str, kind: Kind, method: Method) -> None:
        self.name: Final = name
        self.kind: Final = kind
        self._method = method

    def check(self, shape: KVShape) -> None:
        require_floats(self.name, shape)

    def max_encoded_bytes(self, shape: KVShape) -> int:
        side = self._scales(shape) * 4 + 1
        return (
            overhead(_streams(shape)) + shape.layers * (shape.layer_numbers + side) + shape.nbytes
        )

    def _scales(self, shape: KVShape) -> int:
        """The number of a layer's scales."""
        return int(np.prod(shape.over(self._method.axes)))

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        words = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer = Writer(out, self.kind, shape, _streams(shape))
        packer = Packer()
        values = np.empty(shape.layer_numbers, np.float32)
        by_axis = shape.layer(values)
        room = np.empty(segment_numbers(shape), np.uint8)
        scales = np.ones((shape.layers, *shape.over(self._method.axes)), np.float32)
        kept = np.zeros(shape.layers, np.uint8)
        others = tuple(
            i
            for i, size in enumerate(scales.shape[1:])
            if f"b{shape.order}"[i] not in self._method.axes
        )
        for segment in segments(shape):
            symbols = room[: len(segment) * shape.layer_numbers].reshape(len(segment), -1)
            for at, layer in enumerate(segment):
                with np.errstate(all="ignore"):
                    widen(words[layer], shape.dtype, values)
                    largest = np.maximum(
                        np.maximum.reduce(by_axis, axis=others, keepdims=True),
                        -np.minimum.reduce(by_axis, axis=others, keepdims=True),
                    )
                    found = self._method.scales(largest)
                    found[largest == 0] = 1.0
                    kept[layer] = not ((largest < _HIGHEST).all() and np.isfinite(1 / found).all())
                    if kept[layer]:
                        symbols[at] = 0
                        continue
                    scales[layer] = found
                    np.multiply(by_axis, 1 / found, out=by_axis)
                    self._method.symbols(values, symbols[at])
            writer.add_packed(packer, symbols)
        for plane in scales.astype("<f4").reshape(-1).view(np.uint8).reshape(-1, 4).T[::-1]:
            writer.add_packed(packer, np.ascontiguousarray(plane))
        writer.add(kept)
        writer.add(words[kept == 1])
        return writer.end()

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        packed = [reader.take() for _ in segments(shape)]
        count = shape.layers * self._scales(shape)
        planes = np.stack([unpack(reader.take(), count) for _ in range(4)][::-1], axis=1)
        scales = (
            planes.reshape(-1).view("<f4").reshape(shape.layers, *shape.over(self._method.axes))
        )
        kept = reader.exactly(shape.layers)
        if kept.max() > 1:
            raise FrameError("a layer is neither coded nor kept")
        exact_bytes = reader.exactly(int(kept.sum()) * shape.layer_numbers * shape.item)
        exact = iter(exact_bytes.view(shape.word).reshape(-1, shape.layer_numbers))
        words = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        values = np.empty(shape.layer_numbers, np.float32)
        for segment, stream in zip(segments(shape), packed, strict=True):
            symbols = unpack(stream, len(segment) * shape.layer_numbers).reshape(len(segment), -1)
            for at, layer in enumerate(segment):
                if kept[layer]:
                    words[layer] = next(exact)
                    continue
                with np.errstate(all="ignore"):  # bytes of another origin may say anything
                    self._method.values(symbols[at], values)
                    by_axis = shape.layer(values)
                    np.multiply(by_axis, scales[layer], out=by_axis)
                    narrow(values, shape.dtype, words[layer])


def _streams(shape: KVShape) -> int:
    return count_segments(shape) + 6


def int8() -> Scaled:
    """An error of at most 1/254 of the largest magnitude of the token and head.

    The scale's rounding adds 1/128 of that.
    """
    return Scaled("int8", Kind(3, 2), _Int8())


def fp8() -> Scaled:
    """Three bits of mantissa, and steps of 2**-9 below 2**-6.

    The largest scaled number is 224 or more.
    """
    return Scaled("fp8", Kind(2, 2), _E4M3())
