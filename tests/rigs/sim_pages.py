"""KV pages of simulated compute: every byte depends on all tokens before it.

No model runs. ``Prefix`` chains a 64-bit state over the tokens of a sequence, as attention's KV
depends on its whole prefix; ``Pages`` writes the state of each position into real tensors, each
layer's and rank's differently, and compares them with the expected states. The bytes of a page are
this module's own; only whole blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy
import torch

MASK: Final = (1 << 64) - 1
WORD_BYTES: Final = 8
HEAD_SIZE: Final = 2  # float32 K and V of one head and token: 16 bytes, two words
WORDS_PER_TOKEN: Final = 2


def mix(state: int, value: int) -> int:
    """Returns a cheap 64-bit hash of both: the splitmix64 finaliser."""
    x = (state ^ ((value + 1) * 0x9E3779B97F4A7C15)) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Prefix:
    """The state of each position of one sequence. ``seed`` stands for weights and adapter."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: list[int] = []

    def states(self, tokens: Sequence[int], start: int, end: int) -> Any:
        """Returns the uint64 states of positions ``start .. end``. ``tokens`` only grows."""
        state = self._states[-1] if self._states else mix(0, self._seed)
        for position in range(len(self._states), end):
            state = mix(state, tokens[position])
            self._states.append(state)
        return numpy.array(self._states[start:end], dtype=numpy.uint64)

    def truncate(self, count: int) -> None:
        """Forgets the tokens from ``count`` on: they were drafts that were rejected."""
        del self._states[count:]


def next_token(states: Any, vocab: int) -> int:
    """Samples greedily, as a model that attends to all positions: one wrong state changes it."""
    folded = int(numpy.bitwise_xor.reduce(states)) if len(states) else 0
    return mix(folded, len(states)) % vocab


class Pages:
    """One rank's KV tensors, in vLLM's packed form, float32, one head.

    Their axes are ``[blocks, heads, tokens, K and V]``.
    """

    def __init__(self, num_blocks: int, block_tokens: int, layers: int, rank: int) -> None:
        self.block_tokens = block_tokens
        self._factor = [(2 * (rank * layers + layer) + 3) & MASK for layer in range(layers)]
        shape = (num_blocks, 1, block_tokens, 2 * HEAD_SIZE)
        self.tensors = {
            f"layer.{layer}": torch.zeros(shape, dtype=torch.float32) for layer in range(layers)
        }
        flat = (num_blocks * block_tokens, WORDS_PER_TOKEN)
        self._words = [t.numpy().view(numpy.uint64).reshape(flat) for t in self.tensors.values()]

    def write(self, blocks: Sequence[int], start: int, states: Any) -> None:
        """Fills positions ``start ..`` of a sequence with this block table, as a forward pass does."""
        rows = self._rows(blocks, start, start + len(states))
        for words, factor in zip(self._words, self._factor, strict=True):
            words[rows] = _words_of(states, factor)

    def wrong(self, blocks: Sequence[int], states: Any) -> int | None:
        """Returns the first position of ``0 .. len(states)`` with unexpected bytes, or None."""
        rows = self._rows(blocks, 0, len(states))
        for words, factor in zip(self._words, self._factor, strict=True):
            equal = (words[rows] == _words_of(states, factor)).all(axis=1)
            if not equal.all():
                return int(equal.argmin())
        return None

    def scribble(self, blocks: Sequence[int]) -> None:
        """Writes garbage, as a copy leaves it that failed half-way."""
        for words in self._words:
            words[self._rows(blocks, 0, len(blocks) * self.block_tokens)] = 0xDEADBEEF

    def states(self, blocks: Sequence[int], count: int) -> Any:
        """Returns the states that positions ``0 .. count`` hold: the input of sampling."""
        rows = self._rows(blocks, 0, count)
        inverse = pow(self._factor[0], -1, MASK + 1)
        with numpy.errstate(over="ignore"):
            return self._words[0][rows, 0] * numpy.uint64(inverse)

    def _rows(self, blocks: Sequence[int], start: int, end: int) -> Any:
        positions = numpy.arange(start, end)
        return numpy.asarray(blocks, dtype=numpy.int64)[
            positions // self.block_tokens
        ] * self.block_tokens + (positions % self.block_tokens)


def _words_of(states: Any, factor: int) -> Any:
    """Returns two words a token, each a bijection of its state."""
    with numpy.errstate(over="ignore"):
        first = states * numpy.uint64(factor)
    return numpy.stack((first, ~first), axis=1)
