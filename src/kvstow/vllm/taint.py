"""Marks device blocks whose KV came back through a lossy codec, or was computed on such KV.

vLLM's prefix cache gives these blocks to later requests like all others. So a request computes
exact KV only if no block of its prefix is marked. Blocks are marked, not chunks, because a prefix
hit may end inside a chunk, and two blocks of one hash may differ. A block is marked or cleared
whenever a request gets it to fill. So there are at most as many marks as the device has blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstow.vllm.requests import NEVER, Rules, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Taint:
    """The set of marked blocks. It is not built if every tier is exact.

    Call ``loaded`` at each load, and ``step`` before each step's chunks are offered.
    """

    def __init__(self, rules: Rules) -> None:
        self._block_tokens = rules.block_tokens
        self._per_chunk = rules.blocks_per_chunk
        self._blocks: set[int] = set()

    def loaded(self, block_ids: Iterable[int], *, lossy: bool) -> None:
        """A chunk is restored into these blocks."""
        self._mark(block_ids, lossy)

    def _mark(self, block_ids: Iterable[int], tainted: bool) -> None:
        if tainted:
            self._blocks.update(block_ids)
        else:
            self._blocks.difference_update(block_ids)

    def step(self, output: SchedulerOutput, tracked: Mapping[str, Tracked]) -> None:
        """Mark or clear every block that was given out for this step.

        It also sets the number of exact chunks of each request that starts, or starts again. A
        request may get blocks that another one computes in this very step. So marks are spread
        until none is added.
        """
        cached = output.scheduled_cached_reqs
        begun: list[tuple[Tracked, Sequence[int], int]] = []
        for req_id, new, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = tracked.get(req_id)
            if new is None:
                continue
            if request is None:
                self._mark(new[0], True)  # it is unknown what these are computed on
            elif req_id in cached.resumed_req_ids:
                begun.append((request, new[0], computed))
            else:
                self._mark(new[0], request.exact_chunks != NEVER)
        for one in output.scheduled_new_reqs:
            request = tracked.get(one.req_id)
            if request is None:
                self._mark(one.block_ids[0], True)
            else:
                begun.append((request, one.block_ids[0], one.num_computed_tokens))
        for request, blocks, computed in begun:
            request.exact_chunks = NEVER
            self._mark(blocks[-(-computed // self._block_tokens) :], False)
        while any(self._spread(*each) for each in begun):
            pass

    def _spread(self, request: Tracked, blocks: Sequence[int], computed: int) -> bool:
        """Whether the request is found to compute on a marked block. Its own are then marked too."""
        got = blocks[: -(-computed // self._block_tokens)]
        if request.exact_chunks != NEVER or self._blocks.isdisjoint(got):
            return False
        first = next(i for i, block in enumerate(got) if block in self._blocks)
        request.exact_chunks = first // self._per_chunk
        self._mark(blocks[computed // self._block_tokens :], True)
        return True
