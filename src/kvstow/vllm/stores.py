"""The chunks that a step stores: every full one of a scheduled request that no tier holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstow.cache import Cache
from kvstow.pool.slots import Lease
from kvstow.vllm.jobs import Jobs
from kvstow.vllm.metadata import Copy, Job
from kvstow.vllm.requests import Rules, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NULL_BLOCK = 0  # vLLM's placeholder in a block table where a block's KV is gone


class StoreOffers:
    """Follows requests' block tables and reserves places for the chunks that a step completes."""

    def __init__(self, cache: Cache, rules: Rules, jobs: Jobs) -> None:
        self._cache = cache
        self._rules = rules
        self._jobs = jobs

    def step(
        self, output: SchedulerOutput, requests: Mapping[str, Tracked], *, reserve: bool
    ) -> list[Job]:
        """Updates each scheduled request's blocks and returns the step's store jobs.

        Args:
            output: The step that vLLM has scheduled.
            requests: The requests that kvstow follows, by id.
            reserve: False while no place can be filled. Blocks are followed all the same.
        """
        jobs: list[Job] = []
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = requests.get(new.req_id)
            if tracked is None:
                continue
            tracked.blocks = list(new.block_ids[0])
            # A session that continues, or resumes after a preemption, starts anew.
            tracked.advance(0)
            if reserve:
                jobs += self.offer(tracked, new.num_computed_tokens + scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for req_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = requests.get(req_id)
            if tracked is None:
                continue
            if new_blocks is not None:
                if req_id in resumed:
                    tracked.blocks = list(new_blocks[0])
                    tracked.advance(0)
                else:
                    tracked.blocks += new_blocks[0]
            if reserve and computed + scheduled[req_id] >= tracked.next_end:
                jobs += self.offer(tracked, computed + scheduled[req_id])
        return jobs

    def offer(self, tracked: Tracked, computed_tokens: int) -> list[Job]:
        """Reserves a place for each chunk of one request that no tier holds.

        Args:
            tracked: The request.
            computed_tokens: Tokens of it that are computed once the step has run.

        Returns:
            One job with the reserved copies, or nothing. The cache counts the chunks that it
            refuses.
        """
        if not tracked.store:
            return []
        first = tracked.offered
        last = tracked.complete_chunks(computed_tokens)
        if last <= first:
            return []
        tracked.advance(last)
        all_keys = tracked.keys()
        keys = all_keys[first : min(last, tracked.exact_chunks)]
        per_chunk = self._rules.blocks_per_chunk
        copies: list[Copy] = []
        leases: list[Lease] = []
        for offset in self._cache.missing(keys):
            chunk = first + offset
            blocks = tracked.blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
            if len(blocks) < per_chunk or NULL_BLOCK in blocks:
                continue
            parent_hash = all_keys[chunk - 1].prefix_hash if chunk else b""
            lease = self._cache.reserve(keys[offset], parent_hash, self._rules.chunk_tokens)
            if lease is not None:
                copies.append(Copy(lease.place, blocks))
                leases.append(lease)
        if not copies:
            return []
        tokens = len(copies) * self._rules.chunk_tokens
        job = self._jobs.new(tracked, copies, leases, load=False, required=tokens, moved=tokens)
        tracked.stores.add(job.job)
        return [job]
