"""16-bit numbers apart and together, two at a time, in few passes: each of numpy's costs as much as a copy.

A couple is a number ``a`` of the first half and ``b`` at the same place of the second: of a segment's layers, or else
of each layer's blocks, or else of each run of tokens. Their exponents are the low and the high byte of a word ``e``.
What is left of them is a word, too::

    rest = (a ^ e << 7) | swapped(b ^ e >> 1)
    a = (rest & 0x807F) ^ e << 7
    b = (swapped(rest) & 0x807F) ^ e >> 1

A shift lays an exponent over that of its number, bits 7 to 14, and clears it. Bits of the other exponent fall on a sign
or a mantissa; those are noise, and stay noise, so nothing is masked, and joining takes them off again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import numpy as np

from kvstow.codec.shape import Array, KVShape
from kvstow.errors import FrameError

_REST: Final = 0x807F  # bits of sign and mantissa
_STEP: Final = 768 << 10  # couples at once: those of a segment, unless one layer has more
_LISTED: Final = 128  # one of as many couples, at most, may not fit
_HIGH_HALVES: Final = 0xF0F0F0F0F0F0F0F0  # of bytes: what is more than 4 bits


class Couples(NamedTuple):
    """Of some layers' numbers."""

    shape: KVShape  # of either half
    layers: int  # of either half
    runs: int  # each has numbers of the first half, then as many of the second
    run: int  # couples of each
    axes: tuple[int, ...]  # of couples, in rows

    def rows(self, exponents: Array) -> Array:
        """A view of all couples' exponents (bytes) over which ``tile`` broadcasts."""
        return exponents.view(np.uint16).reshape(self.axes).view(np.uint8)

    def tile(self, bases: Array) -> Array:
        """The bases (bytes) of both halves' layers, which are the same layers unless those are what is halved."""
        both = np.empty((*bases[: self.layers].shape, 2), np.uint8)
        both[..., 0], both[..., 1] = bases[: self.layers], bases[-self.layers :]
        tiled = self.shape.tiled(both.view(np.uint16)[..., 0])
        if tiled.shape[-1] != self.axes[-1]:
            tiled = np.repeat(tiled, self.axes[-1], axis=-1)
        return tiled.view(np.uint8)

    def split(self, words: Array, exponents: Array, rest: Array) -> None:
        """``words`` (16 bits) into exponents and the rest, a word each for a couple."""
        for a, b, e, left, over in self._steps(words, exponents, rest):
            np.right_shift(a, 7, out=e)
            np.bitwise_and(e, 0xFF, out=e)
            np.multiply(b, 2, out=over)
            np.bitwise_and(over, 0xFF00, out=over)
            np.bitwise_or(e, over, out=e)
            np.right_shift(e, 1, out=over)
            np.bitwise_xor(over, b, out=over)
            np.copyto(left, over.view(">u2"))
            np.multiply(e, 1 << 7, out=over)
            np.bitwise_xor(over, a, out=over)
            np.bitwise_or(left, over, out=left)

    def join(self, words: Array, exponents: Array, rest: Array) -> None:
        """The reverse; ``exponents`` are overwritten."""
        for a, b, e, left, over in self._steps(words, exponents, rest):
            np.bitwise_and(left, _REST, out=a)
            np.copyto(b, left.view(">u2"))  # swapped
            np.bitwise_and(b, _REST, out=b)
            np.multiply(
                e, 1 << 7, out=over
            )  # a shift to the left by multiplication is the faster one
            np.bitwise_xor(a, over, out=a)
            np.right_shift(e, 1, out=e)
            np.bitwise_xor(b, e, out=b)

    def _steps(self, words: Array, exponents: Array, rest: Array) -> Iterator[tuple[Array, ...]]:
        both = words.reshape(self.runs, 2, -1)
        a, b = both[:, 0], both[:, 1]
        e, left = exponents.reshape(a.shape), rest.reshape(a.shape)
        runs, width = max(1, _STEP // a.shape[1]), min(_STEP, a.shape[1])
        scratch = np.empty(min(runs, len(a)) * width, np.uint16)
        for run in range(0, len(a), runs):
            for start in range(0, a.shape[1], width):
                part = np.s_[run : run + runs, start : start + width]
                yield (
                    a[part],
                    b[part],
                    e[part],
                    left[part],
                    scratch[: e[part].size].reshape(e[part].shape),
                )

    def places(self, couples: Array) -> Array:
        """Where the two numbers of these couples are: [2, couples]."""
        first = couples + couples // self.run * self.run
        return np.stack((first, first + self.run))

    def restore(self, words: Array, couples: memoryview, exact: memoryview) -> None:
        """Puts numbers that were listed where they were. Raises ``FrameError`` for a list that is none."""
        count, most = len(couples) // 4, len(words) // 2
        if len(couples) % 4 or count > most // _LISTED or len(exact) != 2 * count * words.itemsize:
            raise FrameError(f"{len(couples)} bytes of places, {len(exact)} of numbers")
        listed = np.frombuffer(couples, "<u4").astype(np.intp)
        if count and listed.max() >= most:
            raise FrameError("a place outside its segment")
        words[self.places(listed)] = np.frombuffer(exact, words.dtype).reshape(2, -1)


@lru_cache(maxsize=64)
def couples(shape: KVShape, layers: int) -> Couples | None:
    """How some layers' numbers are coupled. None: they are bytes, or no axis has two halves."""
    runs = layers * shape.blocks * prod(shape.page[: shape.order.index("n")])
    if shape.item == 1:
        return None
    if layers % 2 == 0:
        layers, runs = layers // 2, 1
    elif shape.blocks % 2 == 0:
        shape, runs = replace(shape, blocks=shape.blocks // 2), layers
    elif shape.tokens % 2 == 0:
        shape = replace(shape, tokens=shape.tokens // 2)
    else:
        return None
    return Couples(shape, layers, runs, layers * shape.layer_numbers // runs, shape.rows(layers))


def misfits(exponents: Array) -> Array | None:
    """Couples of which not both exponents have 4 bits. None: too many."""
    limit, whole = len(exponents) // _LISTED, len(exponents) // 4 * 4
    large = exponents[:whole].view(np.uint64) & np.uint64(_HIGH_HALVES) != 0
    if np.count_nonzero(large) > limit:
        return None
    fours = np.flatnonzero(large)  # numpy's search takes its time for each item
    row, at = np.nonzero(exponents[:whole].reshape(-1, 4)[fours] & (_HIGH_HALVES & 0xFFFF))
    places: Array = np.concatenate(
        [fours[row] * 4 + at, whole + np.flatnonzero(exponents[whole:] & (_HIGH_HALVES & 0xFFFF))]
    )
    return places if len(places) <= limit else None
