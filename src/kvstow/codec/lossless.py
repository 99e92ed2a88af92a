"""Exact: exponents, less a reference for each channel, by Huffman codes; signs and mantissas as they are.

A number's bits are turned left by one, so that its sign is last and its first byte is the exponent (bfloat16, float32)
or begins with it (float16: 5 bits and 3 of the mantissa; one-byte numbers: all of it). Mantissas are noise, 6.97 of 7
bits; exponents have 2.9 bits of entropy, 2.56 once the mean exponent of their (layer, channel) is subtracted, and that
is all there is to gain: 16 / (2.56 + 8) = 1.51 for bfloat16. Differences between tokens, or transposing to channels
first, gain nothing more.

Streams: for each segment the first bytes, then each other byte of the numbers from high to low, each entropy-coded
where that pays; last the references.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstow.codec.base import count_segments, require_lengths, require_room, segment_numbers, segments
from kvstow.codec.container import Kind, Reader, Writer, overhead
from kvstow.codec.entropy import Packer, unpack, worth_packing
from kvstow.codec.shape import Array, KVShape

_SAMPLED_TOKENS: Final = 32  # a reference is the mean over as many or up to twice that; their sum fits 16 bits


class Lossless:
    """See the module. Every bit pattern comes back, NaN payloads and subnormals included."""

    name: Final = "lossless"
    kind: Final = Kind(1, 1)
    lossy: Final = False
    error: Final = "none: bit-exact"

    def check(self, shape: KVShape) -> None:
        """Every type is served."""

    def max_encoded_bytes(self, shape: KVShape) -> int:
        return overhead(_streams(shape)) + shape.nbytes + shape.layers * shape.channels

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        layers = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer, packer = Writer(out, self.kind, shape, _streams(shape)), Packer()
        references = np.empty((shape.layers, *shape.over("khc")), np.uint8)
        scratch = np.empty((2, segment_numbers(shape)), shape.word)
        room = np.empty(shape.item * segment_numbers(shape), np.uint8)
        for segment in segments(shape):
            words = layers[segment.start : segment.stop].reshape(-1)
            planes = room[: shape.item * len(words)].reshape(shape.item, -1)
            split(words, planes, scratch[:, : len(words)])
            mine = references[segment.start : segment.stop]
            _reference(planes[0].reshape(len(segment), shape.blocks, *shape.page), shape, mine)
            tiled = shape.tiled(mine)
            rows = planes[0].reshape(shape.rows(len(segment)))
            np.subtract(rows, tiled, out=rows)
            for index, plane in enumerate(planes):
                if index == 0 or worth_packing(plane):
                    writer.add_packed(packer, plane)
                else:
                    writer.add(plane)
        writer.add_packed(packer, references)
        return writer.end()

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        streams = [[reader.take() for _ in range(shape.item)] for _ in segments(shape)]
        references = unpack(reader.take(), shape.layers * shape.channels).reshape(shape.layers, *shape.over("khc"))
        layers = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        scratch = np.empty(segment_numbers(shape), shape.word)
        first = np.empty(segment_numbers(shape), np.uint8)
        for segment, packed in zip(segments(shape), streams, strict=True):
            words = layers[segment.start : segment.stop].reshape(-1)
            planes = [unpack(stream, len(words)) for stream in packed]
            mine, rows = first[: len(words)], shape.rows(len(segment))
            tiled = shape.tiled(references[segment.start : segment.stop])
            np.add(planes[0].reshape(rows), tiled, out=mine.reshape(rows))
            join([mine, *planes[1:]], words, scratch[: len(words)])


def _streams(shape: KVShape) -> int:
    return count_segments(shape) * shape.item + 1


def _reference(first: Array, shape: KVShape, out: Array) -> None:
    """The mean first byte of each channel, of every few tokens, into ``out``; both begin with the layers."""
    step = max(1, shape.blocks * shape.tokens // _SAMPLED_TOKENS)
    tokens = shape.axes("n")[0] + 1
    if shape.tokens >= step:
        picked = first[(slice(None),) * tokens + (slice(None, None, step),)]
    else:
        picked = first[:, :: max(1, step // shape.tokens)]
    count = picked.shape[1] * picked.shape[tokens]
    total = np.add.reduce(picked, axis=(1, tokens), dtype=np.uint16, keepdims=True)
    np.copyto(out, (total + count // 2) // count, casting="unsafe")


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
    """The reverse of ``split``."""
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
