"""16-bit numbers split into exponents and the rest, and joined again, two at a time.

A pair is a number ``a`` of the first half and the number ``b`` at the same place of the second
half. The halves are those of a segment's layers, or else of each layer's blocks, or else of each
run of tokens. The two exponents are the low and the high byte of a word ``e``. What is left of the
two numbers is a word, too::

    rest = (a ^ e << 7) | swapped(b ^ e >> 1)
    a = (rest & 0x807F) ^ e << 7
    b = (swapped(rest) & 0x807F) ^ e >> 1

A shift lays an exponent over that of its number, bits 7 to 14, and clears it. Bits of the other
exponent fall on a sign or a mantissa. Those are noise and stay noise, so nothing is masked, and
joining removes them again. Few passes are made, because each of numpy's costs as much as a copy.
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
_STEP_PAIRS: Final = 768 << 10  # handled at once: a segment's, unless one layer has more
_MISFIT_SHARE: Final = 128  # at most one pair of as many may not fit
_HIGH_NIBBLES: Final = 0xF0F0F0F0F0F0F0F0  # bits of bytes that are larger than 15


class Pairing(NamedTuple):
    """How the numbers of some layers form pairs.

    Attributes:
        shape: The shape of either half.
        layers: Layers of either half.
        runs: Runs of numbers, each with those of the first half and then as many of the second.
        run_pairs: Pairs of a run.
        axes: The axes of all pairs, as ``KVShape.rows`` cuts them.
    """

    shape: KVShape
    layers: int
    runs: int
    run_pairs: int
    axes: tuple[int, ...]

    def rows(self, exponents: Array) -> Array:
        """A view of all pairs' exponents (bytes) over which ``tile`` broadcasts."""
        return exponents.view(np.uint16).reshape(self.axes).view(np.uint8)

    def tile(self, bases: Array) -> Array:
        """The bases (bytes) of both numbers of each pair.

        The two are of the same layer unless the layers are what is halved.
        """
        both = np.empty((*bases[: self.layers].shape, 2), np.uint8)
        both[..., 0] = bases[: self.layers]
        both[..., 1] = bases[-self.layers :]
        tiled = self.shape.tiled(both.view(np.uint16)[..., 0])
        if tiled.shape[-1] != self.axes[-1]:
            tiled = np.repeat(tiled, self.axes[-1], axis=-1)
        return tiled.view(np.uint8)

    def split(self, words: Array, exponents: Array, rest: Array) -> None:
        """Split ``words`` (16 bits) into exponents and the rest, a word of each for a pair."""
        for a, b, e, left, scratch in self._steps(words, exponents, rest):
            np.right_shift(a, 7, out=e)
            np.bitwise_and(e, 0xFF, out=e)
            np.multiply(b, 2, out=scratch)
            np.bitwise_and(scratch, 0xFF00, out=scratch)
            np.bitwise_or(e, scratch, out=e)
            np.right_shift(e, 1, out=scratch)
            np.bitwise_xor(scratch, b, out=scratch)
            np.copyto(left, scratch.view(">u2"))
            np.multiply(e, 1 << 7, out=scratch)
            np.bitwise_xor(scratch, a, out=scratch)
            np.bitwise_or(left, scratch, out=left)

    def join(self, words: Array, exponents: Array, rest: Array) -> None:
        """Reverse ``split``. The exponents are overwritten."""
        for a, b, e, left, scratch in self._steps(words, exponents, rest):
            np.bitwise_and(left, _REST, out=a)
            np.copyto(b, left.view(">u2"))  # swapped
            np.bitwise_and(b, _REST, out=b)
            np.multiply(e, 1 << 7, out=scratch)  # faster than a shift to the left
            np.bitwise_xor(a, scratch, out=a)
            np.right_shift(e, 1, out=e)
            np.bitwise_xor(b, e, out=b)

    def _steps(self, words: Array, exponents: Array, rest: Array) -> Iterator[tuple[Array, ...]]:
        """Views of at most ``_STEP_PAIRS``: both numbers, exponents, rest, and scratch memory."""
        both = words.reshape(self.runs, 2, -1)
        a = both[:, 0]
        b = both[:, 1]
        e = exponents.reshape(a.shape)
        left = rest.reshape(a.shape)
        runs = max(1, _STEP_PAIRS // a.shape[1])
        width = min(_STEP_PAIRS, a.shape[1])
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

    def places(self, pairs: Array) -> Array:
        """The places of both numbers of each of ``pairs``: [2, pairs]."""
        first = pairs + pairs // self.run_pairs * self.run_pairs
        return np.stack((first, first + self.run_pairs))

    def restore(self, words: Array, pairs: memoryview, exact: memoryview) -> None:
        """Write listed numbers to their places.

        ``pairs`` holds uint32 indices, ``exact`` all first numbers and then all second ones. Raises
        ``FrameError`` for lists that do not match.
        """
        count = len(pairs) // 4
        most = len(words) // 2
        wrong_lengths = len(pairs) % 4 or len(exact) != 2 * count * words.itemsize
        if wrong_lengths or count > most // _MISFIT_SHARE:
            raise FrameError(f"{len(pairs)} bytes of places, {len(exact)} of numbers")
        listed = np.frombuffer(pairs, "<u4").astype(np.intp)
        if count and listed.max() >= most:
            raise FrameError("a place outside its segment")
        words[self.places(listed)] = np.frombuffer(exact, words.dtype).reshape(2, -1)


@lru_cache(maxsize=64)
def pairing(shape: KVShape, layers: int) -> Pairing | None:
    """The pairing of some layers' numbers, or None if they are bytes or no axis has two halves."""
    if shape.item == 1:
        return None
    if layers % 2 == 0:
        layers //= 2
        runs = 1
    elif shape.blocks % 2 == 0:
        shape = replace(shape, blocks=shape.blocks // 2)
        runs = layers
    elif shape.tokens % 2 == 0:
        runs = layers * shape.blocks * prod(shape.page[: shape.order.index("n")])
        shape = replace(shape, tokens=shape.tokens // 2)
    else:
        return None
    return Pairing(shape, layers, runs, layers * shape.layer_numbers // runs, shape.rows(layers))


def find_misfits(exponents: Array) -> Array | None:
    """The pairs of which an exponent is larger than 4 bits, or None if they are too many."""
    limit = len(exponents) // _MISFIT_SHARE
    whole = len(exponents) // 4 * 4
    large = exponents[:whole].view(np.uint64) & np.uint64(_HIGH_NIBBLES) != 0
    if np.count_nonzero(large) > limit:
        return None
    fours = np.flatnonzero(large)  # numpy's search takes its time for each item
    row, at = np.nonzero(exponents[:whole].reshape(-1, 4)[fours] & (_HIGH_NIBBLES & 0xFFFF))
    tail = np.flatnonzero(exponents[whole:] & (_HIGH_NIBBLES & 0xFFFF))
    misfits: Array = np.concatenate([fours[row] * 4 + at, whole + tail])
    return misfits if len(misfits) <= limit else None
