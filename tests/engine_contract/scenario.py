"""Random traffic, the same for every driver: shared prefixes, repeats, second turns, opt-outs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine_contract.stack import VOCAB, Shape
from tests.rigs.sim_device import Fails


@dataclass
class Traffic:
    """Prompts of one seed. ``most`` bounds a prompt's tokens."""

    rng: random.Random
    shape: Shape
    most: int
    heads: list[list[int]] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        longest = max(1, self.most * 2 // 3)
        self.heads = [[], *(self.tokens(self.rng.randint(1, longest)) for _ in range(2))]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def prompt(self, outputs: Sequence[Sequence[int]] = ()) -> list[int]:
        """A new prompt: a shared head and a tail, a repeat, a repeat cut at or near a chunk's end, or a next turn."""
        rng = self.rng
        kind = rng.random()
        if self.seen and kind < 0.35:
            prompt = list(rng.choice(self.seen))
            if rng.random() < 0.4:
                chunk = self.shape.chunk
                prompt = prompt[: max(1, len(prompt) // chunk * chunk + rng.choice((-1, 0, 1)))]
        elif outputs and kind < 0.5:
            prompt = [*rng.choice(list(outputs)), *self.tokens(rng.randint(1, 20))]
        else:
            prompt = [*rng.choice(self.heads), *self.tokens(rng.randint(1, self.most // 3))]
        prompt = prompt[: self.most] or [1]
        self.seen.append(prompt)
        return prompt

    def options(self) -> dict[str, Any]:
        rng = self.rng
        return {"skip_load": rng.random() < 0.07, "skip_store": rng.random() < 0.07}


def random_shape(rng: random.Random, **fixed: Any) -> Shape:
    per_chunk = rng.choice((1, 1, 2, 4))
    block = rng.choice((16, 16, 32))
    max_seqs = rng.randint(2, 6)
    num_blocks = rng.randint(12, 30)
    values: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block": block,
        "blocks_per_chunk": per_chunk,
        "batched_tokens": rng.choice((17, 24, 33, 48, 64, 100, 256)),
        "max_seqs": max_seqs,
        "prefix_caching": rng.random() < 0.5,
        "async_scheduling": rng.random() < 0.4,
        "long_prefill": rng.choice((0, 0, 20, 40)),
        "reserve_full": rng.random() < 0.6,
        "tp": rng.choice((1, 1, 1, 2)),
        "same_bytes": rng.random() < 0.3,
        "save_decode": rng.random() < 0.4,
        "pool_slots": rng.choice((3, 8, 16, 24, 64)),
        "lower_tier": rng.random() < 0.4,
    }
    return Shape(**{**values, **fixed})


def random_failures(rng: random.Random, chance: float) -> Fails | None:
    if not chance:
        return None
    return lambda load, transfers: [i for i in range(len(transfers)) if rng.random() < chance]
