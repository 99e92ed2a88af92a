"""A lossy codec with a choice of rates: means are subtracted, the rest is quantised and
entropy-coded.

It takes the place of CacheGen, by another method: docs/reference/codecs.md compares them.

For each layer the mean of each channel over the chunk's tokens is subtracted, and what is left is
rounded to multiples of one step for K and one for V, a fixed part of σ, the root mean square of the
residuals. One step for all channels spends bits where the variance is: at a given rate that is the
least mean square error.

Tokens that stand out would be ruined by a step made for the others, and the model with them.
Attention sinks, a prompt's first token above all, are known by their norms: K and V far *smaller*
than the median token's, because attention uses them as a place that says nothing; noise of an
ordinary token's size says a lot there. Those tokens, tokens of far more than the median energy, and
any number that a symbol cannot express or that is not finite are left out of the mean and kept
exactly, K and V, in the layers where they stand out: 0.2 to 0.7 % of the numbers.

Streams: for each segment the symbols; then steps (float32), high bytes and low bytes of the means
(int16, in eighths of a step), a bit for each (layer, token) that is kept, and the kept numbers.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

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

RATES: Final = {"high": 0.35, "middle": 0.5, "low": 0.7}  # a step, in σ
# A token with less energy of K, of V (or of MLA's latent), relative to the median token, is a sink.
SINK: Final = (0.15, 0.1)
OUTLIER: Final = 6.0  # a token with more residual energy, relative to the median, is kept exactly
MEAN_PARTS: Final = 8  # of a step, in which means are stored
_MAX_SYMBOL: Final = 127.0
_ROUNDING: Final = np.float32(3 << 22)  # added to a float32, it leaves the integer in the low bits
_MAX_MEAN: Final = 32767.0  # in parts of a step


class _Side(NamedTuple):
    """What is stored of a segment's layers beside the symbols."""

    steps: Array  # [layers, planes]
    means: Array  # [layers, channels], int16
    kept: Array  # [layers, blocks, tokens], bool


class Quantized:
    """The codec ``quantized``. ``rate`` is the quality: ``high``, ``middle`` or ``low``.

    A decoded number is off by at most 0.5625 steps, a step being ``RATES[rate]`` of σ of its
    layer's K or V, and by rounding.
    """

    name: Final = "quantized"
    lossy: Final = True

    def __init__(self, rate: str = "middle") -> None:
        self._step = np.float32(RATES[rate])
        self.kind: Final = Kind(4, 2, struct.pack("<f", self._step))

    def check(self, shape: KVShape) -> None:
        require_floats(self.name, shape)

    def max_encoded_bytes(self, shape: KVShape) -> int:
        side = shape.planes * 4 + shape.channels * 2 + _flag_bytes(shape)
        return (
            overhead(_streams(shape)) + shape.layers * (shape.layer_numbers + side) + shape.nbytes
        )

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        words = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer = Writer(out, self.kind, shape, _streams(shape))
        packer = Packer()
        values = np.empty(segment_numbers(shape), np.float32)
        room = np.empty(segment_numbers(shape), np.int8)
        sides: list[_Side] = []
        for segment in segments(shape):
            mine = words[segment.start : segment.stop].reshape(-1)
            symbols = room[: len(mine)]
            with np.errstate(all="ignore"):  # what is not finite, or too large to square, is kept
                widen(mine, shape.dtype, values[: len(mine)])
                sides.append(self._quantise(values[: len(mine)], shape, symbols))
            writer.add_packed(packer, symbols.view(np.uint8))
        steps, means, kept = (np.concatenate(parts) for parts in zip(*sides, strict=True))
        writer.add(steps.astype("<f4"))
        by_byte = means.astype("<i2").reshape(-1).view(np.uint8)
        for byte in (1, 0):
            writer.add_packed(packer, np.ascontiguousarray(by_byte[byte::2]))
        writer.add(np.packbits(kept.reshape(shape.layers, -1), axis=1))
        exact = _tokens(words.reshape(shape.layers, shape.blocks, *shape.page), shape)[kept]
        writer.add(exact.reshape(-1))
        return writer.end()

    def _quantise(self, values: Array, shape: KVShape, symbols: Array) -> _Side:
        """Quantise some layers into ``symbols``. ``values`` is overwritten."""
        layers = len(values) // shape.layer_numbers
        by_axis = values.reshape(layers, shape.blocks, *shape.page)
        rows = values.reshape(shape.rows(layers))
        tokens = _tokens(by_axis, shape)
        kept = _stand_out(_energies(by_axis, shape))
        if kept.any():
            tokens[kept] = 0.0
        counts = np.maximum(1, np.count_nonzero(~kept, axis=(1, 2))).astype(np.float32)
        mean = shape.sum_tokens(rows) / counts.reshape(-1, 1, 1, 1, 1, 1)
        np.subtract(rows, shape.tiled(mean), out=rows)
        energies = _energies(by_axis, shape)
        np.copyto(energies, 0.0, where=kept[:, None])
        kept |= ~(energies <= OUTLIER * _median(energies)).all(axis=1)
        np.copyto(energies, 0.0, where=kept[:, None])
        numbers = np.maximum(1, np.count_nonzero(~kept, axis=(1, 2))) * np.float32(
            shape.heads * shape.size
        )
        steps = self._step * np.sqrt(
            energies.sum(axis=(2, 3)) / numbers[:, None].astype(np.float32)
        )
        per_step = 1 / steps.reshape(layers, *shape.over("k"))
        means = np.rint(mean * (per_step * MEAN_PARTS)).reshape(layers, -1)
        np.multiply(rows, shape.tiled(per_step, "k"), out=rows)
        if kept.any():
            tokens[kept] = 0.0
        usable = np.isfinite(steps) & np.isfinite(per_step.reshape(layers, -1))
        good = usable.all(axis=1) & (np.abs(means).max(axis=1) <= _MAX_MEAN)
        if not good.all():  # layers of equal numbers, or of numbers far too large or small
            by_axis[~good] = 0.0
            steps[~good] = 0.0
            means[~good] = 0.0
            kept[~good] = True
        # Only a token of so much energy can have a number that no symbol expresses.
        highest = energies.max(axis=(2, 3)) > np.square(_MAX_SYMBOL * steps)
        if highest.any() and (values.max() > _MAX_SYMBOL or values.min() < -_MAX_SYMBOL):
            kept |= (np.abs(tokens) > _MAX_SYMBOL).any(axis=tuple(range(3, tokens.ndim)))
            tokens[kept] = 0.0
        np.add(values, _ROUNDING, out=values)
        np.copyto(symbols.view(np.uint8), values.view(np.uint32), casting="unsafe")
        return _Side(steps, means.astype(np.int16), kept)

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        packed = [reader.take() for _ in segments(shape)]
        steps = (
            reader.exactly(shape.layers * shape.planes * 4)
            .view("<f4")
            .reshape(shape.layers, *shape.over("k"))
        )
        means = np.empty((shape.layers * shape.channels, 2), np.uint8)
        for byte in (1, 0):
            means[:, byte] = unpack(reader.take(), len(means))
        flags = reader.exactly(shape.layers * _flag_bytes(shape)).reshape(shape.layers, -1)
        count = shape.blocks * shape.tokens
        kept = (
            np.unpackbits(flags, axis=1, count=count)
            .astype(bool)
            .reshape(shape.layers, shape.blocks, shape.tokens)
        )
        exact = reader.exactly(int(kept.sum()) * shape.channels * shape.item).view(shape.word)
        words = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        values = np.empty(segment_numbers(shape), np.float32)
        with np.errstate(all="ignore"):  # bytes of another origin may say anything
            mean = means.view("<i2").reshape(shape.layers, *shape.over("khc")) * (
                steps / np.float32(MEAN_PARTS)
            )
            for segment, stream in zip(segments(shape), packed, strict=True):
                mine = words[segment.start : segment.stop].reshape(-1)
                near = values[: len(mine)]
                np.copyto(near, unpack(stream, len(mine)).view(np.int8))
                rows = near.reshape(shape.rows(len(segment)))
                np.multiply(rows, shape.tiled(steps[segment.start : segment.stop], "k"), out=rows)
                np.add(rows, shape.tiled(mean[segment.start : segment.stop]), out=rows)
                narrow(near, shape.dtype, mine)
        tokens = _tokens(words.reshape(shape.layers, shape.blocks, *shape.page), shape)
        tokens[kept] = exact.reshape(-1, *tokens.shape[3:])


def _streams(shape: KVShape) -> int:
    return count_segments(shape) + 5


def _flag_bytes(shape: KVShape) -> int:
    return -(-shape.blocks * shape.tokens // 8)


def _tokens(layers: Array, shape: KVShape) -> Array:
    """A view of some layers as [layers, blocks, tokens, …]."""
    return np.moveaxis(layers, [axis + 1 for axis in shape.axes("bn")], (1, 2))


def _energies(layers: Array, shape: KVShape) -> Array:
    """The sum of squares of each token in each plane: [layers, planes, blocks, tokens]."""
    axes = f"lb{shape.order}"
    if axes[-1] == "c":  # one sum at a time is faster
        energies: Array = np.einsum(
            f"{axes[:-1]}->lkbn", np.einsum("...c,...c->...", layers, layers)
        )
    else:
        energies = np.einsum(f"{axes},{axes}->lkbn", layers, layers)
    return energies


def _median(energies: Array) -> Array:
    """The median of each plane over its tokens. NaN counts as the largest."""
    flat = energies.reshape(*energies.shape[:2], -1)
    middle = flat.shape[2] // 2
    return np.partition(flat, middle, axis=2)[..., middle].reshape(*energies.shape[:2], 1, 1)


def _stand_out(energies: Array) -> Array:
    """Whether tokens are sinks, or not finite: [layers, blocks, tokens]."""
    sink = np.array(SINK[-energies.shape[1] :], np.float32).reshape(-1, 1, 1) * _median(energies)
    usual: Array = ((energies >= sink) & np.isfinite(energies)).all(axis=1)
    return ~usual
