"""Exact: exponents, less a reference for each channel, by Huffman codes; signs and mantissas as they are.

Mantissas are noise, 6.97 of 7 bits; exponents have 2.9 bits of entropy, 2.56 once the mean exponent of their (layer,
channel) is subtracted, and that is all there is to gain: 16 / (2.56 + 8) = 1.51 for bfloat16. Differences between
tokens, or transposing to channels first, gain nothing more.

Numbers of 16 bits are taken two at a time (``kvstow.codec.couples``); float16's first byte is 5 bits of exponent and 3
of the mantissa. float32 is a bfloat16 and two bytes more. Huffman coding's cost is by symbol, so two exponents make
one: less a base, 11 below the reference, all but some 15 of 100,000 fit 4 bits. A couple of which one does not is
listed. A segment in which more do not fit has a byte for each exponent. Even so it is half of decoding's time, and one
pair of six is left as it is: decoding is a tenth faster for 2 % in size.

One-byte numbers are turned left by one, so that the sign is last, and coded less the base. Where no axis has two
halves, larger numbers' bytes are coded as they are.

Streams: for each segment exponents, or the first bytes; then each other byte of the numbers (of couples, 16 bits of
what is left of both, then float32's other bytes from high to low), each entropy-coded where that pays; the couples that
are listed (uint32), all their first numbers and all their second. Last the bases and a byte a segment, 1 if it has
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstow.codec.base import (
    count_segments,
    require_lengths,
    require_room,
    segment_numbers,
    segments,
)
from kvstow.codec.container import Kind, Reader, Writer, overhead
from kvstow.codec.couples import Couples, couples, misfits
from kvstow.codec.entropy import Packer, unpack, worth_packing
from kvstow.codec.shape import Array, KVShape
from kvstow.errors import FrameError

_BELOW: Final = 11  # exponents of 4 bits begin as far below the reference; 4 above it are left
_LARGEST: Final = 15  # of 4 bits
_PLAIN: Final = 6  # one of as many pairs stays as it is: half of decoding's time is Huffman's
_STEP: Final = 192 << 10  # float32 put together at once
_SAMPLED_TOKENS: Final = (
    32  # a reference is the mean over as many or up to twice that; their sum fits 16 bits
)


class Lossless:
    """See the module. Every bit pattern comes back, NaN payloads and subnormals included."""

    name: Final = "lossless"
    kind: Final = Kind(1, 3)
    lossy: Final = False
    error: Final = "none: bit-exact"

    def check(self, shape: KVShape) -> None:
        """Every type is served."""

    def max_encoded_bytes(self, shape: KVShape) -> int:
        return overhead(_streams(shape)) + shape.nbytes + shape.layers * (shape.channels + 1)

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        layers = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer, packer = Writer(out, self.kind, shape, _streams(shape)), Packer()
        bases = np.zeros((shape.layers, *shape.over("khc")), np.uint8)
        paired = np.zeros(count_segments(shape), np.uint8)
        for at, segment in enumerate(segments(shape)):
            words, mine = layers[segment.start : segment.stop], bases[segment.start : segment.stop]
            coupled = couples(shape, len(segment))
            if coupled is None:
                planes, listed = _bytes(words, shape, mine), None
            else:
                planes, listed = _apart(words, coupled, shape, mine)
            paired[at] = listed is not None
            writer.add_packed(packer, planes[0], len(planes[0]) // _PLAIN if paired[at] else 0)
            for plane in planes[1:]:
                if worth_packing(plane):
                    writer.add_packed(packer, plane)
                else:
                    writer.add(plane)
            if coupled is None or listed is None:
                writer.add(b"")
                writer.add(b"")
            else:
                writer.add(listed.astype("<u4"))
                writer.add(words.reshape(-1)[coupled.places(listed)])
        writer.add(bases)
        writer.add(paired)
        return writer.end()

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        streams = [[reader.take() for _ in range(shape.item + 2)] for _ in segments(shape)]
        bases = reader.exactly(shape.layers * shape.channels).reshape(
            shape.layers, *shape.over("khc")
        )
        paired = reader.exactly(len(streams))
        layers = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        room = np.empty(segment_numbers(shape), np.uint8)
        for at, (segment, (first, *others, places, exact)) in enumerate(
            zip(segments(shape), streams, strict=True)
        ):
            words, mine = (
                layers[segment.start : segment.stop].reshape(-1),
                bases[segment.start : segment.stop],
            )
            coupled = couples(shape, len(segment))
            if paired[at] > (coupled is not None) or (not paired[at] and len(places) + len(exact)):
                raise FrameError("a segment has neither pairs nor none, or a list without pairs")
            if coupled is None:
                _whole(
                    words, [unpack(stream, len(words)) for stream in (first, *others)], shape, mine
                )
                continue
            exponents = room[: len(words)]
            given = _unpaired(first, exponents) if paired[at] else unpack(first, len(words))
            rows = coupled.rows(exponents)
            np.add(given.reshape(rows.shape), coupled.tile(mine), out=rows)
            rest, *lower = (unpack(stream, len(words)) for stream in others)
            upper = words if shape.item == 2 else np.empty(len(words), np.uint16)
            coupled.join(upper, exponents.view(np.uint16), rest.view(np.uint16))
            if lower:
                _widen(words, upper, lower)
            coupled.restore(words, places, exact)


def _streams(shape: KVShape) -> int:
    return count_segments(shape) * (shape.item + 2) + 2


def _base(words: Array, shape: KVShape, out: Array) -> None:
    """What exponents are counted from: less than the mean of each channel, of every few tokens. Into ``out``; both
    begin with the layers. All is modulo 256."""
    layers = words.reshape(len(words), shape.blocks, *shape.page)
    step = max(1, shape.blocks * shape.tokens // _SAMPLED_TOKENS)
    tokens = shape.axes("n")[0] + 1
    picked = layers[(slice(None),) * tokens + (slice(None, None, step),)][
        :, :: max(1, step // shape.tokens)
    ]
    first = _turned(picked) if shape.item == 1 else (picked >> (8 * shape.item - 9)) & 0xFF
    count = picked.shape[1] * picked.shape[tokens]
    total = np.add.reduce(first, axis=(1, tokens), dtype=np.uint16, keepdims=True)
    np.copyto(out, (total + count // 2) // count - _BELOW, casting="unsafe")


def _apart(
    words: Array, coupled: Couples, shape: KVShape, bases: Array
) -> tuple[list[Array], Array | None]:
    """Exponents, and then other bytes; which couples are listed. None: exponents are not two a byte."""
    _base(words, shape, bases)
    words = words.reshape(-1)
    upper, lower = words, []
    if shape.item == 4:
        upper = (words >> 16).astype(np.uint16)
        lower = [(words >> 8).astype(np.uint8), words.astype(np.uint8)]
    exponents, rest = np.empty((2, len(words) // 2), np.uint16)
    coupled.split(upper, exponents, rest)
    first = exponents.view(np.uint8)
    rows = coupled.rows(first)
    np.subtract(rows, coupled.tile(bases), out=rows)
    listed = misfits(exponents)
    if listed is not None:
        exponents[listed] = 0
        low, high = first.reshape(2, -1)
        first = np.multiply(
            high, 1 << 4, out=high
        )  # numpy's left_shift of bytes is ten times as slow
        np.bitwise_or(first, low, out=first)
    return [first, rest.view(np.uint8), *lower], listed


def _unpaired(packed: memoryview, out: Array) -> Array:
    """The reverse of putting two into a byte, into ``out``."""
    low, high = out.reshape(2, -1)
    plain = len(low) // _PLAIN
    end, coded = len(packed) - plain, len(low) - plain
    if end < 0:
        raise FrameError(f"{plain} pairs in {len(packed)} bytes")
    for at, pairs in (
        (0, unpack(packed[:end], coded)),
        (coded, np.frombuffer(packed[end:], np.uint8)),
    ):
        np.bitwise_and(pairs, _LARGEST, out=low[at : at + len(pairs)])
        np.right_shift(pairs, 4, out=high[at : at + len(pairs)])
    return out


def _widen(words: Array, upper: Array, lower: Sequence[Array]) -> None:
    """float32 of its upper 16 bits and its other bytes, from high to low."""
    scratch = np.empty(min(_STEP, len(words)), np.uint32)
    for at in range(0, len(words), _STEP):
        part, spare = words[at : at + _STEP], scratch[: len(words) - at]
        np.copyto(part, upper[at : at + _STEP])
        for plane in lower:
            np.multiply(
                part, 1 << 8, out=part
            )  # a shift by multiplication is a vector instruction at any width
            np.copyto(spare, plane[at : at + _STEP])
            np.bitwise_or(part, spare, out=part)


def _turned(words: Array) -> Array:
    """One-byte numbers turned left by one: their signs are last."""
    return (words << 1) | (words >> 7)


def _bytes(words: Array, shape: KVShape, bases: Array) -> list[Array]:
    """Of numbers that are not coupled, from high to low."""
    if shape.item > 1:
        octets = words.reshape(-1).view(np.uint8)
        return [
            np.ascontiguousarray(octets[at :: shape.item]) for at in reversed(range(shape.item))
        ]
    _base(words, shape, bases)
    turned = _turned(words)
    rows = turned.reshape(shape.rows(len(bases)))
    np.subtract(rows, shape.tiled(bases), out=rows)
    return [turned.reshape(-1)]


def _whole(words: Array, planes: list[Array], shape: KVShape, bases: Array) -> None:
    """The reverse of ``_bytes``, into ``words``."""
    if shape.item > 1:
        for at, plane in enumerate(reversed(planes)):
            words.view(np.uint8)[at :: shape.item] = plane
        return
    rows = words.reshape(shape.rows(len(bases)))
    np.add(planes[0].reshape(rows.shape), shape.tiled(bases), out=rows)
    np.copyto(words, (words >> 1) | (words << 7))
