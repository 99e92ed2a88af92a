"""Lossy, at a chosen rate: what the CacheGen serde is elsewhere, by another method. See docs/reference/codecs.md.

For each layer the mean of each channel over the chunk's tokens is subtracted, and what is left is rounded to multiples
of one step for K and one for V, a fixed part of σ, the root mean square of the residuals. One step for all channels
spends bits where the variance is: at a given rate that is the least mean square error.

Tokens that stand out would be ruined by a step made for the others, and the model with them. Attention sinks, a
prompt's first token above all, are known by their norms: K and V far *smaller* than the median token's, because
attention uses them as a place that says nothing; noise of an ordinary token's size says a lot there. Those tokens,
tokens of far more than the median energy, and any number that a symbol cannot express or that is not finite are left
out of the mean and kept exactly, K and V, in the layers where they stand out: 0.2 to 0.7 % of the numbers.

Streams: for each segment the symbols; then steps (float32), high bytes and low bytes of the means (int16, in eighths
of a step), a bit for each (layer, token) that is kept, and the kept numbers.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from kvstow.codec.base import count_segments, require_lengths, require_room, segment_numbers, segments
from kvstow.codec.container import Kind, Reader, Writer, overhead
from kvstow.codec.entropy import Packer, unpack
from kvstow.codec.numbers import narrow, require_floats, widen
from kvstow.codec.shape import Array, KVShape

RATES: Final = {"high": 0.35, "middle": 0.5, "low": 0.7}  # a step, in σ
SINK: Final = (0.15, 0.1)  # energy of K, of V (or MLA's latent), over the median token's: less is a sink
OUTLIER: Final = 6.0  # residual energy over the median: more is kept
MEAN_PARTS: Final = 8
_LARGEST: Final = 127.0  # symbol
_LARGEST_MEAN: Final = 32767.0  # in parts of a step


class _Layer(NamedTuple):
    """What a layer's numbers become, besides symbols."""

    steps: Array  # [planes]
    means: Array  # [channels], int16
    kept: Array  # [blocks, tokens], bool


class CacheGen:
    """See the module. ``rate`` is the quality: ``high``, ``middle`` or ``low``."""

    name: Final = "cachegen"
    lossy: Final = True

    def __init__(self, rate: str = "middle") -> None:
        self._step = np.float32(RATES[rate])
        self.kind: Final = Kind(4, 1, struct.pack("<f", self._step))
        self.error: Final = f"{RATES[rate] * (1 + 1 / MEAN_PARTS) / 2:.2f} σ of the layer's K or V, and rounding"

    def check(self, shape: KVShape) -> None:
        require_floats(self.name, shape)

    def max_encoded_bytes(self, shape: KVShape) -> int:
        side = shape.planes * 4 + shape.channels * 2 + _flag_bytes(shape)
        return overhead(_streams(shape)) + shape.layers * (shape.layer_numbers + side) + shape.nbytes

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, self.max_encoded_bytes(shape))
        words = np.frombuffer(payload, shape.word).reshape(shape.layers, -1)
        writer, packer = Writer(out, self.kind, shape, _streams(shape)), Packer()
        values = np.empty(shape.layer_numbers, np.float32)
        room = np.empty(segment_numbers(shape), np.int8)
        sides: list[_Layer] = []
        for segment in segments(shape):
            symbols = room[: len(segment) * shape.layer_numbers].reshape(len(segment), -1)
            for at, layer in enumerate(segment):
                with np.errstate(all="ignore"):  # what is not finite, or too large to square, is kept
                    widen(words[layer], shape.dtype, values)
                    sides.append(self._quantise(shape.layer(values), shape, shape.layer(symbols[at])))
            writer.add_packed(packer, symbols.view(np.uint8))
        writer.add(np.array([side.steps for side in sides], "<f4"))
        means = np.array([side.means for side in sides], "<i2").reshape(-1).view(np.uint8)
        for byte in (1, 0):
            writer.add_packed(packer, np.ascontiguousarray(means[byte::2]))
        writer.add(np.packbits([side.kept.reshape(-1) for side in sides], axis=1))
        kept = [_tokens(shape.layer(words[i]), shape)[side.kept].reshape(-1) for i, side in enumerate(sides)]
        writer.add(np.concatenate(kept))
        return writer.end()

    def _quantise(self, values: Array, shape: KVShape, symbols: Array) -> _Layer:
        """One layer; ``values`` are overwritten."""
        tokens = _tokens(values, shape)
        kept = _stand_out(_energies(values, shape))
        if kept.any():
            tokens[kept] = 0.0
        count = int((~kept).sum())
        mean = np.add.reduce(values, axis=shape.axes("bn"), keepdims=True) / np.float32(max(1, count))
        np.subtract(values, mean, out=values)
        energies = _energies(values, shape)
        energies[:, kept] = 0.0
        kept |= ~(energies <= OUTLIER * _median(energies)).all(axis=0)
        energies[:, kept] = 0.0
        numbers = max(1, int((~kept).sum())) * shape.heads * shape.size
        steps = self._step * np.sqrt(energies.sum(axis=(1, 2)) / np.float32(numbers))
        per_step = 1 / steps.reshape(shape.over("k"))
        means = np.rint(mean * (per_step * MEAN_PARTS))
        np.multiply(values, per_step, out=values)
        np.rint(values, out=values)
        if kept.any():
            tokens[kept] = 0.0
        if not (steps.all() and np.isfinite(per_step).all() and np.abs(means).max() <= _LARGEST_MEAN):
            values[...] = 0.0  # numbers with no scale of their own: all alike, or far too large or small
            kept[...] = True
            steps, means = np.zeros_like(steps), np.zeros_like(means)
        if values.max() > _LARGEST or values.min() < -_LARGEST:
            kept |= (np.abs(tokens) > _LARGEST).any(axis=tuple(range(2, tokens.ndim)))
            tokens[kept] = 0.0
        np.copyto(symbols, values, casting="unsafe")
        return _Layer(steps, means.astype(np.int16).reshape(-1), kept)

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        reader = Reader(encoded, self.kind, shape, _streams(shape))
        packed = [reader.take() for _ in segments(shape)]
        steps = reader.exactly(shape.layers * shape.planes * 4).view("<f4").reshape(shape.layers, *shape.over("k"))
        means = np.empty((shape.layers * shape.channels, 2), np.uint8)
        for byte in (1, 0):
            means[:, byte] = unpack(reader.take(), len(means))
        mean = means.view("<i2").reshape(shape.layers, *shape.over("khc"))
        flags = reader.exactly(shape.layers * _flag_bytes(shape)).reshape(shape.layers, -1)
        count = shape.blocks * shape.tokens
        kept = np.unpackbits(flags, axis=1, count=count).astype(bool).reshape(shape.layers, shape.blocks, shape.tokens)
        exact = reader.exactly(int(kept.sum()) * shape.channels * shape.item).view(shape.word)
        words = np.frombuffer(out, shape.word).reshape(shape.layers, -1)
        values = np.empty(shape.layer_numbers, np.float32)
        for segment, stream in zip(segments(shape), packed, strict=True):
            symbols = unpack(stream, len(segment) * shape.layer_numbers).view(np.int8).reshape(len(segment), -1)
            for at, layer in enumerate(segment):
                with np.errstate(all="ignore"):  # bytes of another origin may say anything
                    np.copyto(values, symbols[at])
                    by_axis = shape.layer(values)
                    np.multiply(by_axis, steps[layer], out=by_axis)
                    np.add(by_axis, mean[layer] * (steps[layer] / np.float32(MEAN_PARTS)), out=by_axis)
                    narrow(values, shape.dtype, words[layer])
                if kept[layer].any():
                    tokens = _tokens(shape.layer(words[layer]), shape)
                    mine, exact = np.split(exact, [int(kept[layer].sum()) * shape.channels])
                    tokens[kept[layer]] = mine.reshape(-1, *tokens.shape[2:])


def _streams(shape: KVShape) -> int:
    return count_segments(shape) + 5


def _flag_bytes(shape: KVShape) -> int:
    return -(-shape.blocks * shape.tokens // 8)


def _tokens(layer: Array, shape: KVShape) -> Array:
    """A view of a layer with blocks and tokens first."""
    return np.moveaxis(layer, shape.axes("bn"), (0, 1))


def _energies(layer: Array, shape: KVShape) -> Array:
    """Sum of squares of each token in each plane: [planes, blocks, tokens]."""
    axes = f"b{shape.order}"
    energies: Array = np.einsum(f"{axes},{axes}->kbn", layer, layer)
    return energies


def _median(energies: Array) -> Array:
    """Of each plane, over its tokens; what is not a number is sorted as the largest."""
    flat = energies.reshape(len(energies), -1)
    middle = flat.shape[1] // 2
    return np.partition(flat, middle, axis=1)[:, middle].reshape(-1, 1, 1)


def _stand_out(energies: Array) -> Array:
    """Which tokens are sinks, or are not finite."""
    sink = np.array(SINK[-len(energies) :], np.float32).reshape(-1, 1, 1) * _median(energies)
    usual: Array = ((energies >= sink) & np.isfinite(energies)).all(axis=0)
    return ~usual
