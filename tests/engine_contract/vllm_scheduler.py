"""Drives vLLM's own Scheduler and KVCacheManager over the real connector, with simulated compute.

``Driver.step`` is one turn of vLLM's engine core loop. After each step no copy may be using a block
that the scheduler has given back, and kvstow must not have switched itself off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstow.vllm.connector import KVStowConnector
from tests.engine_contract.stack import (
    Shape,
    Stack,
    build_stack,
    kv_cache_config,
    make_request,
    sent,
    vllm_config,
)
from tests.rigs.sim_device import Fails
from tests.rigs.sim_worker import RankOutput

IDLE_STEPS = 3000


def kvstow_of(scheduler: Scheduler) -> KVStowConnector:
    """The scheduler's connector, or the one of kvstow's inside a MultiConnector."""
    connector = scheduler.connector
    for each in (connector, *getattr(connector, "sub_connectors", ())):
        if isinstance(each, KVStowConnector):
            return each
    raise AssertionError("no connector of kvstow's")


class Driver:
    """One engine core. ``outputs`` are the tokens that a client got, by request."""

    def __init__(
        self,
        shape: Shape,
        seed: int = 0,
        *,
        fails: Fails | None = None,
        depth: int | None = None,
        configure: Callable[[VllmConfig], None] = lambda config: None,
        **stack: Any,
    ) -> None:
        """``depth``: steps that are under way at once.

        ``configure`` changes vLLM's configuration.
        """
        config = vllm_config(shape)
        configure(config)
        self._depth = depth or (2 if shape.async_scheduling else 1)
        self.scheduler: Scheduler = (AsyncScheduler if shape.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache_config(shape),
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block,
            hash_block_size=shape.block,
            log_stats=True,
        )
        assert self.scheduler.recompute_kv_load_failures, (
            "the connector must set the load failure policy"
        )
        self.shape = shape
        self.stack: Stack = build_stack(
            shape, seed, connector=kvstow_of(self.scheduler), config=config, fails=fails, **stack
        )
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.steps = 0
        self.may_break = False
        self._aggregator = KVOutputAggregator(shape.tp)
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self, req_id: str, prompt: Sequence[int] | None, max_tokens: int = 1, **kwargs: Any
    ) -> Request:
        request = make_request(self.shape, req_id, prompt, max_tokens, **kwargs)
        self.requests[req_id] = request
        self.outputs[req_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, req_id: str) -> None:
        self.aborted.add(req_id)
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def finished(self, req_id: str) -> bool:
        return self.requests[req_id].is_finished()

    @property
    def unfinished(self) -> list[str]:
        return [req_id for req_id, request in self.requests.items() if not request.is_finished()]

    # --- the loop ---------------------------------------------------------------------------------

    def step(self, between: Any = None) -> bool:
        """One turn; ``between`` runs while the model executes. False: the engine sleeps."""
        scheduler = self.scheduler
        self.steps += 1
        if scheduler.has_requests():
            output = scheduler.schedule()
            self._queue.append((output, self._execute(output)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self._depth and (executed or scheduler.has_requests()):
                return True
        elif not self._queue:
            return False
        if between is not None:
            between()
        output, result = self._queue.popleft()
        updates = scheduler.update_from_output(output, result)
        self._note(updates)
        self._executed(output)
        self._check()
        return True

    def _executed(self, output: Any) -> None:
        """A step's results have been taken."""

    def _execute(self, output: Any) -> ModelRunnerOutput:
        results = []
        for index, worker in enumerate(self.stack.workers):
            received = output
            if index:
                received = sent(output)
            results.append(self._runner_output(worker.step(received)))
        merged = self._aggregator.aggregate(results)
        assert merged is not None
        return merged

    @staticmethod
    def _runner_output(result: RankOutput) -> ModelRunnerOutput:
        req_ids = list(result.sampled)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[result.sampled[req_id] for req_id in req_ids],
            kv_connector_output=KVConnectorOutput(
                finished_sending=result.finished_sending or None,
                finished_recving=result.finished_recving or None,
                failed_recving=result.failed_recving,
                invalid_block_ids=result.invalid_block_ids,
                kv_connector_worker_meta=result.worker_meta,
            ),
        )

    def _note(self, updates: dict[int, Any]) -> None:
        for update in updates.values():
            for output in update.outputs:
                if output.request_id not in self.aborted:
                    self._note_tokens(output.request_id, output.new_token_ids)
            stats = update.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                data = stats.kv_connector_stats
                self.stack.note_stats(data.get("data", data))

    def _note_tokens(self, req_id: str, tokens: Sequence[int]) -> None:
        worker, request, got = self.stack.workers[0], self.requests[req_id], self.outputs[req_id]
        adapter = worker.adapter_of(request.lora_request) if request.lora_request is not None else 0
        for token in tokens:
            expected = worker.expected_token([*request.prompt_token_ids, *got], adapter)
            assert token == expected, (
                f"{req_id}: output {len(got)} is {token}, without a cache it is {expected}"
            )
            got.append(token)

    def _check(self) -> None:
        side = self.stack.side
        assert self.may_break or not side._broken, "kvstow switched itself off"
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for worker in self.stack.workers:
            freed = [
                block for block in worker.device.in_flight_blocks() if blocks[block].ref_cnt == 0
            ]
            assert not freed, f"blocks {freed} were given back while a copy uses them"

    # --- ends -------------------------------------------------------------------------------------

    def run(self, *req_ids: str, chance: float = 1.0) -> None:
        """Step until these requests (all, by default) have finished."""
        for _ in range(IDLE_STEPS):
            if not [r for r in (req_ids or self.requests) if not self.finished(r)]:
                return
            self.stack.work(chance)
            self.step()
        raise AssertionError(f"not finished after {IDLE_STEPS} steps: {self.unfinished}")

    def settle(self, chance: float = 1.0) -> None:
        """All requests have finished; step until the engine sleeps, as vLLM's loop would."""
        for _ in range(IDLE_STEPS):
            self.stack.work(chance)
            if not self.step():
                break
        else:
            raise AssertionError("the engine never gets to sleep")
        self.check_idle()

    def check_idle(self) -> None:
        manager = self.scheduler.kv_cache_manager
        assert not self.scheduler.requests
        assert manager.block_pool.get_num_free_blocks() == self.shape.num_blocks - 1, (
            "the engine leaks blocks"
        )
        self.stack.check_idle()

    def reset(self, *, running: bool) -> bool:
        """``reset_prefix_cache`` with the connector's.

        The weights change if the engine says that it worked.
        """
        try:
            done = self.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=True
            )
        except RuntimeError as error:
            if "waiting for remote KV" not in str(error):
                raise
            return False  # vLLM has not asked the connector then
        if done:
            for worker in self.stack.workers:
                worker.weights += 1
        return done

    def close(self) -> None:
        self.stack.close()
