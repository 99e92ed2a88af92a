"""One simulated engine with kvstow in it, for tests that order every event."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvstow.vllm.metadata import StepMeta
from tests.engine_contract.stack import VOCAB, Shape, Stack, build_stack
from tests.rigs.sim_device import Fails
from tests.rigs.sim_requests import SimOutput, SimRequest
from tests.rigs.simulator import SimRules, Simulator

MOST_STEPS = 2000


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(tokens)]


class Sim:
    """``metas``: what each step's workers were told.

    Copies and background work end only when ``work`` says so,
    or in steps with ``work=True``."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        rules: dict[str, Any] | None = None,
        fails: Fails | None = None,
        **stack: Any,
    ) -> None:
        self.shape = shape or Shape()
        self.stack: Stack = build_stack(self.shape, fails=fails, **stack)
        of_shape = SimRules(
            block_tokens=self.shape.block,
            num_blocks=self.shape.num_blocks,
            chunk_tokens=self.shape.chunk,
            batched_tokens=self.shape.batched_tokens,
            max_seqs=self.shape.max_seqs,
            prefix_caching=self.shape.prefix_caching,
        )
        self.engine = Simulator(
            self.stack.connector,
            self.stack.workers,
            replace(of_shape, **(rules or {})),
            random.Random(1),
        )
        self.requests: dict[str, SimRequest] = {}
        self.metas: list[StepMeta] = []
        while self.engine.step():  # the pool is mapped
            pass

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self, req_id: str, tokens: Iterable[int], max_tokens: int = 1, **options: Any
    ) -> SimRequest:
        request = SimRequest(req_id, list(tokens), max_tokens, self.shape.block, **options)
        self.requests[req_id] = request
        return self.engine.add(request)

    def serve(
        self, req_id: str, tokens: Iterable[int], max_tokens: int = 1, **options: Any
    ) -> SimRequest:
        """Add a request and let everything happen until it has finished and the engine sleeps."""
        request = self.add(req_id, tokens, max_tokens, **options)
        self.settle()
        return request

    # --- time -------------------------------------------------------------------------------------

    def schedule(self) -> SimOutput:
        output = self.engine.schedule()
        self.metas.append(output.kv_connector_metadata)
        self._check_meta(output.kv_connector_metadata)
        return output

    def step(self, *, work: bool = False) -> StepMeta:
        """One step; returns what its workers were told."""
        output = self.schedule()
        results = self.engine.execute(output)
        if work:
            self.stack.work_all()
        self.engine.update(output, results)
        assert not self.stack.side._broken
        return self.metas[-1]

    def _check_meta(self, meta: StepMeta) -> None:
        """Every copy's blocks are as many as its tokens, and the request's own."""
        per_chunk, size = self.shape.blocks_per_chunk, self.shape.block
        for job in meta.stores:
            own = self.requests[job.req_id].blocks
            for copy in job.copies:
                at = own.index(copy.block_ids[0])
                assert at % per_chunk == 0
                assert copy.first_block == 0
                assert copy.block_ids == own[at : at + per_chunk]
        for job in meta.loads:
            request = self.requests[job.req_id]
            blocks = [block for copy in job.copies for block in copy.block_ids] + job.lost
            end = -(-request.num_computed_tokens // size)
            assert blocks == request.blocks[end - len(blocks) : end]

    def settle(self) -> None:
        """Step, everything ending at once, until the engine sleeps; nothing may be left then."""
        for _ in range(MOST_STEPS):
            self.stack.work_all()
            self.stack.clock.advance(0.002)
            if not self.engine.has_requests():
                break
            self.step(work=True)
        else:
            raise AssertionError(f"the engine never gets to sleep: {self.engine.requests}")
        self.engine.check_idle()
        self.stack.check_idle()
        for request in self.requests.values():
            self.check_output(request)

    # --- what to see ------------------------------------------------------------------------------

    def check_output(self, request: SimRequest) -> None:
        """The tokens are those of an engine without any cache."""
        worker, lora = self.stack.workers[0], request.lora_request
        adapter = worker.adapter_of(lora) if lora is not None else 0
        if worker.weights:
            return
        for index in range(request.num_output_tokens):
            known = request.all_token_ids[: request.num_prompt_tokens + index]
            assert worker.expected_token(known, adapter) == request.output_token_ids[index]

    def loads(self) -> int:
        return sum(len(meta.loads) for meta in self.metas)

    def stores(self) -> int:
        return sum(len(meta.stores) for meta in self.metas)

    def held(self, request: SimRequest) -> int:
        """Full chunks of a request that some tier holds."""
        keys = self.stack.keys(request)
        return len(keys) - len(self.stack.cache.missing(keys))

    def close(self) -> None:
        self.stack.close()
