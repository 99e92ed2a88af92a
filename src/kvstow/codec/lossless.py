"""Exact: exponents, less a reference for each channel, by Huffman codes; signs and mantissas as they are.

A number's bits are turned left by one, so that its sign is last and its first byte is the exponent (bfloat16, float32)
or begins with it (float16: 5 bits and 3 of the mantissa; one-byte numbers: all of it). Mantissas are noise, 6.97 of 7
bits; exponents have 2.9 bits of entropy, 2.56 once the mean exponent of their (layer, channel) is subtracted, and that
is all there is to gain: 16 / (2.56 + 8) = 1.51 for bfloat16. Differences between tokens, or transposing to channels
first, gain nothing more.

Huffman coding's cost is by symbol, so two exponents make one. Less a base, 11 below the reference, all but some 15 of
100,000 fit 4 bits. Number i of a segment's first half and number i of its second are the low and high half of a byte;
numbers that do not fit are listed with their places. A segment in which more do not fit has a byte a number instead.

Streams: for each segment the first bytes or pairs of them, then each other byte of the numbers from high to low, each
entropy-coded where that pays; places (uint32) and words of the numbers that do not fit; last the bases and a byte a
segment, 1 if it has pairs.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstow.codec.base import count_segments, require_lengths, require_room, segment_numbers, segments
from kvstow.codec.container import Kind, Reader, Writer, overhead
from kvstow.codec.entropy import Packer, unpack, worth_packing
from kvstow.codec.shape import Array, KVShape
from kvstow.errors import FrameError

_BELOW: Final = 11  # exponents of 4 bits begin as far below the reference; 4 above it are left
_LARGEST: Final = 15  # of 4 bits
_LISTED: Final = 256  # one of as many numbers, at most, may not fit
_STEP: Final = 192 << 10  # numbers put together at once: they and what they are made of fit a core's cache
_SAMPLED_TOKENS: Final = 32  # a reference is the mean over as many or up to twice that; their sum fits 16 bits


class Lossless:
    """See the module. Every bit pattern comes back, NaN payloads and subnormals included."""

    name: Final = "lossless"
    kind: Final = Kind(1, 2)
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
        bases = np.empty((shape.layers, *shape.over("khc")), np.uint8)
        paired = np.zeros(count_segments(shape), np.uint8)
        scratch = np.empty((2, segment_numbers(shape)), shape.word)
        room = np.empty(shape.item * segment_numbers(shape), np.uint8)
        for at, segment in enumerate(segments(shape)):
            words = layers[segment.start : segment.stop].reshape(-1)
            planes = room[: shape.item * len(words)].reshape(shape.item, -1)
            split(words, planes, scratch[:, : len(words)])
            mine = bases[segment.start : segment.stop]
            _base(planes[0].reshape(len(segment), shape.blocks, *shape.page), shape, mine)
            rows = planes[0].reshape(shape.rows(len(segment)))
            np.subtract(rows, shape.tiled(mine), out=rows)
            places = _outside(planes[0])
            paired[at] = places is not None
            writer.add_packed(packer, planes[0] if places is None else _pairs(planes[0], scratch))
            for plane in planes[1:]:
                if worth_packing(plane):
                    writer.add_packed(packer, plane)
                else:
                    writer.add(plane)
            listed = np.empty(0, np.uint32) if places is None else places
            writer.add(listed.astype("<u4"))
            writer.add(words[listed])
        writer.add_packed(packer, bases)
        writer.add(paired)
        return writer.end()

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        streams = [[reader.take() for _ in range(shape.item + 2)] for _ in segments(shape)]
        bases = unpack(reader.take(), shape.layers * shape.channels).reshape(shape.layers, *shape.over("khc"))
        paired = reader.exactly(len(streams))
        layers = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        scratch = np.empty(min(_STEP, segment_numbers(shape)), shape.word)
        first = np.empty(segment_numbers(shape), np.uint8)
        for at, (segment, (packed, *others, places, exact)) in enumerate(zip(segments(shape), streams, strict=True)):
            words = layers[segment.start : segment.stop].reshape(-1)
            mine, rows = first[: len(words)], shape.rows(len(segment))
            if paired[at] > 1 or (paired[at] == 0 and len(places)):
                raise FrameError("a segment has neither pairs nor none, or a list without pairs")
            symbols = _unpaired(packed, mine) if paired[at] else unpack(packed, len(words))
            np.add(symbols.reshape(rows), shape.tiled(bases[segment.start : segment.stop]), out=mine.reshape(rows))
            planes = [unpack(stream, len(words)) for stream in others]
            join([mine, *planes], words, scratch)
            _restore(words, places, exact)


def _streams(shape: KVShape) -> int:
    return count_segments(shape) * (shape.item + 2) + 2


def _outside(first: Array) -> Array | None:
    """Places of the numbers that 4 bits do not hold. None: too many, or there are no pairs."""
    large = first > _LARGEST
    if len(first) % 2 or np.count_nonzero(large) > len(first) // _LISTED:
        return None
    whole = len(first) // 8 * 8
    eights = np.flatnonzero(large[:whole].view(np.uint64) != 0)  # numpy's search takes its time for each item
    row, place = np.nonzero(large[:whole].reshape(-1, 8)[eights])
    places: Array = np.concatenate([eights[row] * 8 + place, whole + np.flatnonzero(large[whole:])])
    return places


def _pairs(first: Array, scratch: Array) -> Array:
    """Four bits of each number, in half as many bytes of ``scratch``."""
    low, high = first.reshape(2, -1)
    pairs: Array = scratch.reshape(-1).view(np.uint8)[: len(low)]
    np.multiply(high, 1 << 4, out=pairs)  # numpy's left_shift of bytes is ten times as slow
    np.bitwise_and(low, _LARGEST, out=low)
    np.bitwise_or(pairs, low, out=pairs)
    return pairs


def _unpaired(packed: memoryview, out: Array) -> Array:
    """The reverse, into ``out``."""
    if len(out) % 2:
        raise FrameError(f"pairs of {len(out)} numbers")
    pairs, (low, high) = unpack(packed, len(out) // 2), out.reshape(2, -1)
    np.bitwise_and(pairs, _LARGEST, out=low)
    np.right_shift(pairs, 4, out=high)
    return out


def _restore(words: Array, places: memoryview, exact: memoryview) -> None:
    """What was listed."""
    count = len(places) // 4
    if len(places) % 4 or count > len(words) // _LISTED or len(exact) != count * words.itemsize:
        raise FrameError(f"{len(places)} bytes of places, {len(exact)} of numbers")
    at = np.frombuffer(places, "<u4")
    if count and at.max() >= len(words):
        raise FrameError("a place outside its segment")
    words[at] = np.frombuffer(exact, words.dtype)


def _base(first: Array, shape: KVShape, out: Array) -> None:
    """What first bytes are counted from: less than the mean of each channel, of every few tokens. Into ``out``; both
    begin with the layers. All is modulo 256."""
    step = max(1, shape.blocks * shape.tokens // _SAMPLED_TOKENS)
    tokens = shape.axes("n")[0] + 1
    if shape.tokens >= step:
        picked = first[(slice(None),) * tokens + (slice(None, None, step),)]
    else:
        picked = first[:, :: max(1, step // shape.tokens)]
    count = picked.shape[1] * picked.shape[tokens]
    total = np.add.reduce(picked, axis=(1, tokens), dtype=np.uint16, keepdims=True)
    np.copyto(out, (total + count // 2) // count - _BELOW, casting="unsafe")


def split(words: Array, planes: Array, scratch: Array) -> None:
    """``words`` turned left by one, their bytes from high to low into the rows of ``planes``."""
    bits = words.itemsize * 8
    left, right = scratch
    if bits == 16:
        np.right_shift(words, 7, out=left)
        np.copyto(planes[0], left, casting="unsafe")
        np.bitwise_and(words, 0x807F, out=left)
        np.right_shift(left, 8, out=right)
        np.bitwise_or(left, right, out=left)
        np.copyto(planes[1], left, casting="unsafe")
        return
    if bits == 8:
        np.left_shift(words, 1, out=left)
        np.right_shift(words, 7, out=right)
        np.bitwise_or(left, right, out=planes[0])
        return
    for plane, shift in ((planes[0], 23), (planes[2], 8), (planes[3], 0)):
        np.right_shift(words, shift, out=left)
        np.copyto(plane, left, casting="unsafe")
    np.right_shift(words, 16, out=left)
    np.bitwise_and(left, 0x7F, out=left)
    np.right_shift(words, 24, out=right)
    np.bitwise_and(right, 0x80, out=right)
    np.bitwise_or(left, right, out=left)
    np.copyto(planes[1], left, casting="unsafe")


def join(planes: list[Array], words: Array, scratch: Array) -> None:
    """The reverse of ``split``, in steps of ``scratch``."""
    for at in range(0, len(words), len(scratch)):
        part = words[at : at + len(scratch)]
        _join([plane[at : at + len(part)] for plane in planes], part, scratch[: len(part)])


def _join(planes: list[Array], words: Array, scratch: Array) -> None:
    bits = words.itemsize * 8
    if bits == 8:
        np.right_shift(planes[0], 1, out=words)
        np.left_shift(planes[0], 7, out=scratch)
        np.bitwise_or(words, scratch, out=words)
        return
    np.copyto(words.view(f"i{words.itemsize}"), planes[1].view(np.int8))  # the sign goes up, its copies are masked
    if bits == 16:
        np.bitwise_and(words, 0x807F, out=words)
    else:
        np.multiply(words, 1 << 16, out=words)  # a shift by multiplication is a vector instruction at any width
        np.bitwise_and(words, 0x807F0000, out=words)  # bit 31 is the sign's copy
        np.copyto(scratch, planes[2])
        np.multiply(scratch, 1 << 8, out=scratch)
        np.bitwise_or(words, scratch, out=words)
        np.copyto(scratch, planes[3])
        np.bitwise_or(words, scratch, out=words)
    np.copyto(scratch, planes[0])
    np.multiply(scratch, 1 << (bits - 9), out=scratch)
    np.bitwise_or(words, scratch, out=words)
