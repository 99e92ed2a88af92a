"""Exact: exponents less a base for each channel, Huffman-coded; signs and mantissas as they are.

Mantissas are noise, 6.97 of 7 bits; exponents have 2.9 bits of entropy, 2.56 once the mean exponent
of their (layer, channel) is subtracted, and that is all there is to gain: 16 / (2.56 + 8) = 1.51
for bfloat16. Differences between tokens, or transposing to channels first, gain nothing more.

Numbers of 16 bits are taken two at a time (``kvstow.codec.pairing``); float16's first byte is 5
bits of exponent and 3 of the mantissa. float32 is a bfloat16 and two bytes more. Huffman coding's
cost is by symbol, so the two exponents of a pair make one symbol of two nibbles: less the base, all
but some 15 of 100,000 fit 4 bits. A pair of which one does not is listed. A segment in which more
do not fit has a byte for each exponent. Even so Huffman coding is half of decoding's time, and one
symbol of six is not coded: decoding is a tenth faster for 2 % in size.

One-byte numbers are rotated left by one, so that the sign is last, and coded less the base. Where
no axis has two halves, larger numbers' bytes are coded as they are.

Streams: for each segment exponents, or the first bytes; then each other byte of the numbers (of
pairs, 16 bits of what is left of both, then float32's other bytes from high to low), each
entropy-coded where that pays; the pairs that are listed (uint32), all their first numbers and all
their second. Last the bases, and a byte a segment: 1 if its exponents are nibbles.
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
from kvstow.codec.entropy import Packer, unpack, worth_packing
from kvstow.codec.pairing import Pairing, find_misfits, pairing
from kvstow.codec.shape import Array, KVShape
from kvstow.errors import FrameError

_BASE_BELOW_MEAN: Final = 11  # of the 16 values of 4 bits, 4 are left above the mean
_NIBBLE_MAX: Final = 15
_UNCODED_SHARE: Final = 6  # one symbol of as many is not coded: Huffman is half of decoding's time
_STEP_NUMBERS: Final = 192 << 10  # float32 joined at once
_SAMPLED_TOKENS: Final = 32  # a base is of as many, or up to twice that; their sum fits 16 bits


class Lossless:
    """The lossless codec. Every bit pattern comes back, NaN payloads and subnormals included."""

    name: Final = "lossless"
    kind: Final = Kind(1, 3)
    lossy: Final = False

    def check(self, shape: KVShape) -> None:
        """Accept every type."""

    def max_encoded_bytes(self, shape: KVShape) -> int:
        return overhead(_streams(shape)) + shape.nbytes + shape.layers * (shape.channels + 1)

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        layers = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer = Writer(out, self.kind, shape, _streams(shape))
        packer = Packer()
        bases = np.zeros((shape.layers, *shape.over("khc")), np.uint8)
        has_nibbles = np.zeros(count_segments(shape), np.uint8)
        for at, segment in enumerate(segments(shape)):
            words = layers[segment.start : segment.stop]
            segment_bases = bases[segment.start : segment.stop]
            pairs = pairing(shape, len(segment))
            listed = None
            if pairs is None:
                planes = _split_bytes(words, shape, segment_bases)
            else:
                planes, listed = _split_pairs(words, pairs, shape, segment_bases)
            has_nibbles[at] = listed is not None
            uncoded = len(planes[0]) // _UNCODED_SHARE if has_nibbles[at] else 0
            writer.add_packed(packer, planes[0], uncoded)
            for plane in planes[1:]:
                if worth_packing(plane):
                    writer.add_packed(packer, plane)
                else:
                    writer.add(plane)
            if pairs is None or listed is None:
                writer.add(b"")
                writer.add(b"")
            else:
                writer.add(listed.astype("<u4"))
                writer.add(words.reshape(-1)[pairs.places(listed)])
        writer.add(bases)
        writer.add(has_nibbles)
        return writer.end()

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        streams = [[reader.take() for _ in range(shape.item + 2)] for _ in segments(shape)]
        bases = reader.exactly(shape.layers * shape.channels)
        bases = bases.reshape(shape.layers, *shape.over("khc"))
        has_nibbles = reader.exactly(len(streams))
        layers = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        scratch = np.empty(segment_numbers(shape), np.uint8)
        for at, segment in enumerate(segments(shape)):
            words = layers[segment.start : segment.stop].reshape(-1)
            segment_bases = bases[segment.start : segment.stop]
            pairs = pairing(shape, len(segment))
            first, *others, places, exact = streams[at]
            if has_nibbles[at] > (pairs is not None):
                raise FrameError("a segment says that it has nibbles, and can't have them")
            if not has_nibbles[at] and len(places) + len(exact):
                raise FrameError("a segment without nibbles lists pairs")
            if pairs is None:
                planes = [unpack(stream, len(words)) for stream in (first, *others)]
                _join_bytes(words, planes, shape, segment_bases)
                continue
            exponents = scratch[: len(words)]
            if has_nibbles[at]:
                offsets = _unpack_nibbles(first, exponents)
            else:
                offsets = unpack(first, len(words))
            rows = pairs.rows(exponents)
            np.add(offsets.reshape(rows.shape), pairs.tile(segment_bases), out=rows)
            rest, *lower = (unpack(stream, len(words)) for stream in others)
            upper = words if shape.item == 2 else np.empty(len(words), np.uint16)
            pairs.join(upper, exponents.view(np.uint16), rest.view(np.uint16))
            if lower:
                _join_float32(words, upper, lower)
            pairs.restore(words, places, exact)


def _streams(shape: KVShape) -> int:
    return count_segments(shape) * (shape.item + 2) + 2


def _find_bases(words: Array, shape: KVShape, out: Array) -> None:
    """Write each channel's base into ``out``: the mean exponent of a few tokens, less an offset.

    Both arrays begin with the layers. The arithmetic is modulo 256.
    """
    layers = words.reshape(len(words), shape.blocks, *shape.page)
    step = max(1, shape.blocks * shape.tokens // _SAMPLED_TOKENS)
    tokens = shape.axes("n")[0] + 1
    every_token = (slice(None),) * tokens + (slice(None, None, step),)
    sample = layers[every_token][:, :: max(1, step // shape.tokens)]
    if shape.item == 1:
        exponents = _rotate_left(sample)
    else:
        exponents = (sample >> (8 * shape.item - 9)) & 0xFF
    count = sample.shape[1] * sample.shape[tokens]
    total = np.add.reduce(exponents, axis=(1, tokens), dtype=np.uint16, keepdims=True)
    np.copyto(out, (total + count // 2) // count - _BASE_BELOW_MEAN, casting="unsafe")


def _split_pairs(
    words: Array, pairs: Pairing, shape: KVShape, bases: Array
) -> tuple[list[Array], Array | None]:
    """Returns the planes of bytes, exponents first, and the listed pairs.

    The second is None if the exponents are bytes, not nibbles.
    """
    _find_bases(words, shape, bases)
    words = words.reshape(-1)
    upper = words
    lower = []
    if shape.item == 4:
        upper = (words >> 16).astype(np.uint16)
        lower = [(words >> 8).astype(np.uint8), words.astype(np.uint8)]
    exponents, rest = np.empty((2, len(words) // 2), np.uint16)
    pairs.split(upper, exponents, rest)
    first = exponents.view(np.uint8)
    rows = pairs.rows(first)
    np.subtract(rows, pairs.tile(bases), out=rows)
    listed = find_misfits(exponents)
    if listed is not None:
        exponents[listed] = 0
        low, high = first.reshape(2, -1)
        # numpy's left_shift of bytes is ten times as slow as a multiplication.
        first = np.multiply(high, 1 << 4, out=high)
        np.bitwise_or(first, low, out=first)
    return [first, rest.view(np.uint8), *lower], listed


def _unpack_nibbles(packed: memoryview, out: Array) -> Array:
    """Write the exponents of symbols of two nibbles into ``out``, and return it."""
    low, high = out.reshape(2, -1)
    uncoded = len(low) // _UNCODED_SHARE
    end = len(packed) - uncoded
    coded = len(low) - uncoded
    if end < 0:
        raise FrameError(f"{uncoded} symbols in {len(packed)} bytes")
    parts = ((0, unpack(packed[:end], coded)), (coded, np.frombuffer(packed[end:], np.uint8)))
    for at, symbols in parts:
        np.bitwise_and(symbols, _NIBBLE_MAX, out=low[at : at + len(symbols)])
        np.right_shift(symbols, 4, out=high[at : at + len(symbols)])
    return out


def _join_float32(words: Array, upper: Array, lower: Sequence[Array]) -> None:
    """Join float32 numbers from their upper 16 bits and their other bytes, from high to low."""
    scratch = np.empty(min(_STEP_NUMBERS, len(words)), np.uint32)
    for at in range(0, len(words), _STEP_NUMBERS):
        part = words[at : at + _STEP_NUMBERS]
        spare = scratch[: len(words) - at]
        np.copyto(part, upper[at : at + _STEP_NUMBERS])
        for plane in lower:
            np.multiply(part, 1 << 8, out=part)  # a vector instruction, unlike a shift
            np.copyto(spare, plane[at : at + _STEP_NUMBERS])
            np.bitwise_or(part, spare, out=part)


def _rotate_left(words: Array) -> Array:
    """One-byte numbers rotated left by one: their signs are last."""
    return (words << 1) | (words >> 7)


def _split_bytes(words: Array, shape: KVShape, bases: Array) -> list[Array]:
    """Returns the planes of bytes, from high to low, of numbers that form no pairs."""
    if shape.item > 1:
        octets = words.reshape(-1).view(np.uint8)
        return [
            np.ascontiguousarray(octets[at :: shape.item]) for at in reversed(range(shape.item))
        ]
    _find_bases(words, shape, bases)
    rotated = _rotate_left(words)
    rows = rotated.reshape(shape.rows(len(bases)))
    np.subtract(rows, shape.tiled(bases), out=rows)
    return [rotated.reshape(-1)]


def _join_bytes(words: Array, planes: list[Array], shape: KVShape, bases: Array) -> None:
    """Reverse ``_split_bytes``, into ``words``."""
    if shape.item > 1:
        for at, plane in enumerate(reversed(planes)):
            words.view(np.uint8)[at :: shape.item] = plane
        return
    rows = words.reshape(shape.rows(len(bases)))
    np.add(planes[0].reshape(rows.shape), shape.tiled(bases), out=rows)
    np.copyto(words, (words >> 1) | (words << 7))
