"""A small scheduler that calls a KV connector's hooks in orders that vLLM's rarely makes.

Use it to test a connector, or a change to kvstow's, without a model: hit answered and allocation
refused, hundreds of queries, a hit ignored, preemption with the blocks given to another request in
the same step, resume with other blocks, aborts at any point, failed loads, rejected drafts.
``SimWorker`` checks every byte that a forward pass would read.

    simulator = Simulator(scheduler_connector, [SimWorker(worker_connector, pages, device,
    RunnerRules())], rules, rng) simulator.add(SimRequest("a", tokens, max_tokens=4,
    block_tokens=16)) while simulator.step():
        ...
    simulator.check_idle()

The connector's hooks and the order of calls are vLLM's (0.30 to 0.33); nothing of vLLM is imported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.sim_blocks import SimBlockPool
from tests.rigs.sim_requests import (
    SimBlocks,
    SimConnectorOutput,
    SimNew,
    SimOutput,
    SimRequest,
    SimStatus,
)
from tests.rigs.sim_worker import RankOutput, SimWorker


@dataclass(slots=True)
class SimRules:
    """The engine's configuration, and the chances of rare events, per request and step."""

    block_tokens: int = 16
    num_blocks: int = 32
    chunk_tokens: int = 16
    batched_tokens: int = 64
    max_seqs: int = 4
    prefix_caching: bool = True
    drafts: int = 0
    queries: int = 1
    refuse_allocation: float = 0.0
    ignore_hit: float = 0.0
    preempt: float = 0.0
    resume_last: bool = False  # a preempted request is admitted after all others


@dataclass(slots=True)
class _Loads:
    """Requests by the state of their asynchronous load."""

    under_way: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Simulator:
    """One engine: the scheduler's ``connector``, a worker for each rank, and every live request."""

    def __init__(
        self, connector: Any, workers: Sequence[SimWorker], rules: SimRules, rng: random.Random
    ) -> None:
        self.connector = connector
        self.workers = list(workers)
        self.rules = rules
        self.rng = rng
        self.pool = SimBlockPool(rules.num_blocks, rng)
        self.requests: dict[str, SimRequest] = {}
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.loaded_tokens = 0
        self.preempt_now: set[str] = set()  # requests to be preempted in the next step
        self._loads = _Loads()
        # Finished requests; their blocks wait for the workers' finished_sending.
        self._delayed: set[str] = set()
        self._new: set[str] = set()
        self._finished: set[str] = set()
        self._ends: dict[tuple[str, str], int] = {}

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: SimRequest) -> SimRequest:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._new.add(request.request_id)
        return request

    def abort(self, req_id: str) -> None:
        request = self.requests.get(req_id)
        if request is None or request.is_finished():
            return
        (self.running if request in self.running else self.waiting).remove(request)
        self._finish(request, SimStatus.FINISHED_ABORTED)

    def is_loading(self, req_id: str) -> bool:
        """Returns whether vLLM would keep its blocks for an asynchronous load."""
        return req_id in self._loads.under_way

    def _finish(self, request: SimRequest, status: SimStatus) -> None:
        req_id = request.request_id
        loading = req_id in self._loads.under_way
        self._loads.ended.discard(req_id)
        self._loads.failed.discard(req_id)
        request.status = status
        computed = request.blocks[: -(-request.num_computed_tokens // self.rules.block_tokens)]
        delay, _ = self.connector.request_finished(request, list(computed))
        self._finished.add(req_id)
        self._new.discard(req_id)
        if delay:
            self._delayed.add(req_id)
        if not delay and not loading:
            self._give_back(request)

    def _give_back(self, request: SimRequest) -> None:
        self.pool.release(request.blocks[::-1])
        request.blocks = []
        if request.is_finished():
            del self.requests[request.request_id]

    def reset(self) -> bool:
        """Empties all caches and changes the weights; running requests start again.

        Returns False while a load is under way.
        """
        for request in list(self.running):
            self._preempt(request)
            self.preempt_now.add(request.request_id)
        in_use = any(self.pool.refs)
        if not in_use:
            self.pool.forget_cached()
        done = self.connector.reset_cache() is not False and not in_use
        if done:
            for worker in self.workers:
                worker.weights += 1
        return done

    # --- a step -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedules, executes and updates one step. Returns False when the engine sleeps."""
        if not self.has_requests():
            return False
        output = self.schedule()
        self.update(output, self.execute(output))
        return True

    def has_requests(self) -> bool:
        return bool(self.requests or self._finished or self.connector.has_pending_push_work())

    def schedule(self) -> SimOutput:
        output = SimOutput()
        budget = self.rules.batched_tokens
        for request in list(self.running):
            if request.request_id in self.preempt_now or self.rng.random() < self.rules.preempt:
                self._preempt(request)
                self.preempt_now.add(request.request_id)
        output.preempted_req_ids = self.preempt_now
        self.preempt_now = set()
        for request in list(self.running):
            if request in self.running:  # not preempted by one before it
                budget -= self._continue(request, budget, output)
        # Requests that hold blocks go first.
        for request in sorted(self.waiting, key=lambda waiting: not waiting.blocks):
            if budget <= 0 or len(self.running) >= self.rules.max_seqs:
                break
            tokens = self._admit(request, budget, output)
            if tokens is None:
                break
            budget -= tokens
        output.finished_req_ids = self._finished
        self._finished = set()
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        for req_id, count in output.num_scheduled_tokens.items():
            self.requests[req_id].num_computed_tokens += count
        return output

    def _continue(self, request: SimRequest, budget: int, output: SimOutput) -> int:
        """Schedules a running request and returns its tokens."""
        drafts = (
            request.spec_token_ids if request.num_tokens - request.num_computed_tokens == 1 else []
        )
        count = min(budget, request.num_tokens + len(drafts) - request.num_computed_tokens)
        drafts = drafts[: max(0, request.num_computed_tokens + count - request.num_tokens)]
        if count <= 0:
            return 0
        needed = self._blocks(request.num_computed_tokens + count) - len(request.blocks)
        while (new := self.pool.allocate(max(0, needed))) is None:
            victim = self.running[-1]
            if victim.request_id in output.num_scheduled_tokens:
                return 0
            self._preempt(victim)
            output.preempted_req_ids.add(victim.request_id)
            if victim is request:
                return 0
        request.blocks += new
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append((list(new),) if new else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if drafts:
            output.scheduled_spec_decode_tokens[request.request_id] = list(drafts)
        self._schedule(request, count, output)
        return count

    def _preempt(self, request: SimRequest) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks[::-1])
        request.blocks = []
        request.status = SimStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.waiting.insert(len(self.waiting) if self.rules.resume_last else 0, request)

    def _admit(self, request: SimRequest, budget: int, output: SimOutput) -> int | None:
        """Schedules a waiting request or starts its load.

        Returns its tokens, or None when no more requests are admitted.
        """
        if request.status is SimStatus.WAITING_FOR_REMOTE_KVS and not self._promote(request):
            return 0
        local: list[int] = []
        external = 0
        is_async = False
        if request.num_computed_tokens == 0:
            local = self._local_hit(request)
            answer = self._ask(request, len(local) * self.rules.block_tokens)
            if answer is None:
                return 0
            external, is_async = answer
            if request.skip_reading_prefix_cache or self.rng.random() < self.rules.ignore_hit:
                external = 0
                is_async = False
        computed = request.num_computed_tokens or len(local) * self.rules.block_tokens + external
        count = 0 if is_async else min(budget, request.num_tokens - computed)
        if self.rng.random() < self.rules.refuse_allocation:
            return None
        if is_async and not self._fits(request, len(local)):
            return None
        self.pool.reference(local)
        new = self.pool.allocate(self._blocks(computed + count) - len(local) - len(request.blocks))
        if new is None:
            self.pool.release(local)
            return None
        request.blocks = [*request.blocks, *local, *new]
        self.connector.update_state_after_alloc(request, SimBlocks(request.blocks), external)
        request.num_computed_tokens = computed
        self.loaded_tokens += external
        if is_async:
            request.status = SimStatus.WAITING_FOR_REMOTE_KVS
            self._loads.under_way.add(request.request_id)
            return 0
        output.has_sync_kv_loads |= external > 0
        self.waiting.remove(request)
        self.running.append(request)
        self._appear(request, output)
        self._schedule(request, count, output)
        return count

    def _fits(self, request: SimRequest, local: int) -> bool:
        """Returns whether all of it fits beside the needs of other loading requests.

        They can't be preempted.
        """
        others = [self.requests[req_id] for req_id in self._loads.under_way | self._loads.ended]
        reserved = sum(self._blocks(other.num_tokens + 1) - len(other.blocks) for other in others)
        return self._blocks(request.num_tokens + 1) - local + max(0, reserved) <= self.pool.free

    def _appear(self, request: SimRequest, output: SimOutput) -> None:
        req_id = request.request_id
        if req_id in self._new:
            self._new.discard(req_id)
            output.scheduled_new_reqs.append(
                SimNew(
                    req_id,
                    request.prompt_token_ids,
                    (list(request.blocks),),
                    request.num_computed_tokens,
                    request.lora_request,
                )
            )
            return
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(req_id)
        cached.resumed_req_ids.add(req_id)
        cached.all_token_ids[req_id] = list(request.all_token_ids)
        cached.new_block_ids.append((list(request.blocks),))
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _schedule(self, request: SimRequest, count: int, output: SimOutput) -> None:
        request.status = SimStatus.RUNNING
        output.num_scheduled_tokens[request.request_id] = count
        self._cache(request, request.num_computed_tokens + count)

    def _cache(self, request: SimRequest, computed: int) -> None:
        if self.rules.prefix_caching:
            full = min(computed, request.num_tokens) // self.rules.block_tokens
            self.pool.cache(request.blocks[:full], request.block_hashes[:full])

    def _local_hit(self, request: SimRequest) -> list[int]:
        if not self.rules.prefix_caching or request.skip_reading_prefix_cache:
            return []
        return self.pool.hit(
            request.block_hashes[: (request.num_tokens - 1) // self.rules.block_tokens]
        )

    def _ask(self, request: SimRequest, local: int) -> tuple[int, bool] | None:
        """Returns the connector's answer, after several equal ones that vLLM could accept."""
        answers = {
            self.connector.get_num_new_matched_tokens(request, local)
            for _ in range(self.rules.queries)
        }
        assert len(answers) == 1, f"one question, several answers: {answers}"
        ((external, is_async),) = answers
        if external is None:
            return None
        assert external >= 0
        assert is_async or not external or local + external < request.num_tokens, (
            "nothing left to compute"
        )
        assert local + external <= request.num_tokens, "more tokens than the request has"
        assert not external or (local + external) % self.rules.chunk_tokens == 0
        return external, is_async

    def _promote(self, request: SimRequest) -> bool:
        """Lets a request run whose asynchronous load has ended. Returns False if it has not."""
        req_id = request.request_id
        if req_id not in self._loads.ended:
            return False
        self._loads.ended.discard(req_id)
        request.status = SimStatus.PREEMPTED if request.num_preemptions else SimStatus.WAITING
        if req_id in self._loads.failed and not request.num_computed_tokens:
            self._give_back(request)
        else:
            self._cache(request, request.num_computed_tokens)
        self._loads.failed.discard(req_id)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        return True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.rules.block_tokens)

    # --- execution and results --------------------------------------------------------------------

    def execute(self, output: SimOutput) -> list[RankOutput]:
        """Returns every rank's result. The first rank's sampled tokens count."""
        return [worker.step(output) for worker in self.workers]

    def update(self, output: SimOutput, results: Sequence[RankOutput]) -> None:
        merged = self._merge(results)
        self._note_invalid(merged.invalid_block_ids)
        for req_id, tokens in results[0].sampled.items():
            request = self.requests.get(req_id)
            if request is not None and request in self.running and tokens:
                self._note_tokens(
                    request, tokens, len(output.scheduled_spec_decode_tokens.get(req_id, ()))
                )
        self.connector.update_connector_output(merged)
        for req_id in merged.finished_recving or ():
            assert req_id in self._loads.under_way, (
                f"finished_recving of {req_id}, which loads nothing"
            )
            self._loads.under_way.discard(req_id)
            request = self.requests[req_id]
            if request.is_finished():
                self._give_back(request)
            else:
                self._loads.ended.add(req_id)
        for req_id in merged.finished_sending or ():
            assert req_id in self._delayed, (
                f"finished_sending of {req_id}, whose blocks are not kept"
            )
            self._delayed.discard(req_id)
            self._give_back(self.requests[req_id])
        self._check_copies()

    def _merge(self, results: Sequence[RankOutput]) -> SimConnectorOutput:
        """Aggregates as vLLM does: a request has ended once every rank has reported it."""
        merged = SimConnectorOutput(finished_sending=set(), finished_recving=set())
        for result in results:
            merged.invalid_block_ids |= result.invalid_block_ids
            if merged.kv_connector_worker_meta is None:
                merged.kv_connector_worker_meta = result.worker_meta
            elif result.worker_meta is not None:
                merged.kv_connector_worker_meta = merged.kv_connector_worker_meta.aggregate(
                    result.worker_meta
                )
            for kind, req_ids in (
                ("sending", result.finished_sending),
                ("recving", result.finished_recving),
            ):
                for req_id in req_ids:
                    self._ends[kind, req_id] = self._ends.get((kind, req_id), 0) + 1
        for (kind, req_id), count in list(self._ends.items()):
            if count == len(self.workers):
                del self._ends[kind, req_id]
                ended = merged.finished_sending if kind == "sending" else merged.finished_recving
                assert ended is not None
                ended.add(req_id)
        return merged

    def _note_invalid(self, invalid: set[int]) -> None:
        """Shortens requests whose load failed to the tokens before their first lost block."""
        if not invalid:
            return
        assert not any(invalid.intersection(request.blocks) for request in self.running), (
            "a running request's block"
        )
        for req_id in self._loads.under_way:
            request = self.requests[req_id]
            lost = [index for index, block in enumerate(request.blocks) if block in invalid]
            if lost and not request.is_finished():
                request.num_computed_tokens = min(
                    request.num_computed_tokens, lost[0] * self.rules.block_tokens
                )
                self._loads.failed.add(req_id)

    def _note_tokens(self, request: SimRequest, tokens: list[int], drafts: int) -> None:
        request.num_computed_tokens -= drafts + 1 - len(tokens)
        room = request.max_tokens - request.num_output_tokens
        request.append(tokens[:room])
        if request.num_output_tokens >= request.max_tokens:
            self.running.remove(request)
            self._finish(request, SimStatus.FINISHED_LENGTH_CAPPED)
        elif self.rules.drafts:
            request.spec_token_ids = self.workers[0].propose(
                request.request_id, self.rules.drafts, self.rng
            )

    def _check_copies(self) -> None:
        for worker in self.workers:
            freed = [
                block for block in worker.device.in_flight_blocks() if not self.pool.refs[block]
            ]
            assert not freed, f"blocks {freed} were given back while a copy uses them"

    def check_idle(self) -> None:
        """Asserts, when the engine sleeps, that no block and no request is left behind."""
        assert not self.requests, f"still here: {sorted(self.requests)}"
        self.pool.check_integrity()
        assert self.pool.free == self.rules.num_blocks - 1, "blocks are leaked"
