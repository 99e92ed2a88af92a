"""All scheduler hooks of one step of 256 decoding requests of which 16 finish a chunk, with
``save_decode``.

A step is ``build_connector_meta``, ``update_connector_output`` of the workers' answer to it (16
commits), ``has_pending_push_work`` and ``get_kv_connector_stats``, on vLLM's own output objects.
The pool is full, so each store evicts.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from bench.side import connector_around, scheduler_side
from kvstow.vllm.metadata import JobReport, StepMeta, WorkerMeta
from tests.rigs.sim_requests import SimNew, SimRequest

REQUESTS = 256
BLOCK_TOKENS = 16  # one block a chunk: 16 of 256 requests finish one in every step
POOL_SLOTS = 2048
WARM_UP_STEPS = 160  # until the pool is full
STEPS = 100
ROUNDS = 9


class Decoding:
    """The requests, and vLLM's outputs for them, one token each a step."""

    def __init__(self) -> None:
        self.requests = [
            SimRequest(
                f"request-{i}", [i] * (BLOCK_TOKENS + i % BLOCK_TOKENS), 1 << 30, BLOCK_TOKENS
            )
            for i in range(REQUESTS)
        ]
        self._computed = [0] * REQUESTS
        self._blocks = 0

    def _block(self) -> tuple[list[int]]:
        self._blocks += 1
        return ([self._blocks],)

    def _output(
        self, new: list[Any], cached: CachedRequestData, scheduled: dict[str, int]
    ) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            **_older_fields(),
        )

    def prefill(self) -> SchedulerOutput:
        """The first step of all requests."""
        new = [
            SimNew(r.request_id, r.prompt_token_ids, (self._block()[0] + self._block()[0],), 0)
            for r in self.requests
        ]
        scheduled = {r.request_id: r.num_tokens for r in self.requests}
        self._computed = [r.num_tokens for r in self.requests]
        self.sampled()
        return self._output(new, CachedRequestData.make_empty(), scheduled)

    def step(self) -> SchedulerOutput:
        """One more token of each."""
        cached = CachedRequestData(
            req_ids=[r.request_id for r in self.requests],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[
                self._block() if c % BLOCK_TOKENS == 0 else None for c in self._computed
            ],
            num_computed_tokens=list(self._computed),
            num_output_tokens=[r.num_output_tokens for r in self.requests],
        )
        self._computed = [c + 1 for c in self._computed]
        return self._output([], cached, dict.fromkeys(cached.req_ids, 1))

    def sampled(self) -> None:
        for request in self.requests:
            request.append([7])


def _older_fields() -> dict[str, Any]:
    """vLLM 0.30 and 0.31 want this field, later versions have none."""
    name = "num_common_prefix_blocks"
    return {name: [0]} if name in SchedulerOutput.__dataclass_fields__ else {}


def _answer(meta: StepMeta) -> KVConnectorOutput:
    """Every copy of the step has been made."""
    jobs = {job.job: JobReport(1, set(), 4096 * len(job.copies), 0.001) for job in meta.stores}
    return KVConnectorOutput(kv_connector_worker_meta=WorkerMeta(jobs=jobs))


def _log_as_vllm_does() -> logging.Handler:
    """At INFO, formatted and written, if to nowhere."""
    handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s")
    )
    ours = logging.getLogger("kvstow")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    return handler


def run(rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, Any]:
    """``{"hooks": {"us_per_step_256_requests": ...}}``, medians over rounds of steps."""
    handler = _log_as_vllm_does()
    side = scheduler_side(POOL_SLOTS, BLOCK_TOKENS, 1, save_decode=True)
    connector = connector_around(side)
    decoding = Decoding()
    for request in decoding.requests:
        connector.get_num_new_matched_tokens(request, 0)

    def step(output: SchedulerOutput) -> tuple[float, int]:
        began = time.perf_counter()
        meta = connector.build_connector_meta(output)
        built = time.perf_counter()
        assert isinstance(meta, StepMeta)
        answer = _answer(meta)
        resumed = time.perf_counter()
        connector.update_connector_output(answer)
        connector.has_pending_push_work()
        connector.get_kv_connector_stats()
        return built - began + time.perf_counter() - resumed, len(meta.stores)

    step(decoding.prefill())
    medians: list[float] = []
    for number in range(rounds + 1):
        took: list[float] = []
        for _ in range(steps if number else WARM_UP_STEPS):
            seconds, stores = step(decoding.step())
            decoding.sampled()
            took.append(seconds)
            assert stores == REQUESTS // BLOCK_TOKENS
        medians.append(statistics.median(took))
    assert side._cache._pool.free == 0, "each store evicts"
    side.close()
    logging.getLogger("kvstow").removeHandler(handler)
    return {
        "hooks": {
            "us_per_step_256_requests": statistics.median(medians[1:]) * 1e6,
            "rounds": rounds,
            "steps_per_round": steps,
        }
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
