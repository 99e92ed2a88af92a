"""The simulated engine's block pool: reference counts and a prefix cache."""

from __future__ import annotations

import random
from collections.abc import Sequence


class SimBlockPool:
    """Gives out often the block that was freed last, so that a copy that still uses it is found.

    vLLM's pool, least recently freed first, would hide such a fault for a while. Block 0 is the
    null block.
    """

    def __init__(self, num_blocks: int, rng: random.Random) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._rng = rng
        self._free = list(range(1, num_blocks))
        self._cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` blocks with one reference each, or None if too few are free."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            index = -1 if self._rng.random() < 0.6 else self._rng.randrange(len(self._free))
            block = self._free.pop(index)
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._cached[name]
            self.refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} freed twice"
            self.refs[block] -= 1
            if not self.refs[block]:
                self._free.append(block)

    def hit(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the cached blocks of the leading hashes, without a reference."""
        blocks: list[int] = []
        for name in hashes:
            block = self._cached.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reference(self, blocks: Sequence[int]) -> None:
        """Adds a reference to cached blocks."""
        for block in blocks:
            if not self.refs[block]:
                self._free.remove(block)
            self.refs[block] += 1

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Adds full blocks to the prefix cache; the first one of a hash wins."""
        for block, name in zip(blocks, hashes, strict=False):
            if name not in self._cached and block not in self._hash_of:
                self._cached[name] = block
                self._hash_of[block] = name

    def forget_cached(self) -> None:
        """Empties the prefix cache."""
        self._cached.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        """Asserts that every block is either free, once, or referenced."""
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert {block for block in range(1, self.num_blocks) if not self.refs[block]} == set(
            self._free
        )
