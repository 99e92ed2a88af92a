"""The connector under the shipped scheduler simulator: orders that vLLM's scheduler rarely makes, 1,000 seeds."""

from __future__ import annotations

import random

import pytest

from tests.engine_contract.direct import opener
from tests.engine_contract.scenario import Traffic, random_failures, random_shape
from tests.engine_contract.seeds import seeds
from tests.engine_contract.stack import Stack, build_stack
from tests.rigs.sim_requests import SimRequest
from tests.rigs.simulator import SimRules, Simulator

REQUESTS = 9


def run_seed(seed: int, *, direct: pytest.MonkeyPatch | None = None) -> tuple[Stack, Simulator]:
    rng = random.Random(seed)
    drafts = rng.choice((0, 0, 0, 3))
    fixed = {"direct_areas": rng.choice((2, 3, 8)), "lower_tier": False} if direct else {}
    shape = random_shape(rng, async_scheduling=False, block=16, defer_save=drafts > 0, **fixed)
    chance = rng.choice((0.0, 0.0, 0.15))
    fetch = (
        {"fetch_min_tokens": None, "fetch_deadline_s": None} if seed % 3 == 0 else {}
    )  # as learned
    stack = build_stack(shape, seed, fails=random_failures(rng, chance), **fetch)
    if direct:
        disk_fails = rng.choice((0.0, 0.02, 0.2))
        open_direct = opener(stack.clock, stack.background, [], random.Random(seed), disk_fails)
        direct.setattr("kvstow.vllm.worker.open_direct", open_direct)
    rules = SimRules(
        block_tokens=shape.block,
        num_blocks=shape.num_blocks,
        chunk_tokens=shape.chunk,
        drafts=drafts,
        batched_tokens=shape.batched_tokens,
        max_seqs=shape.max_seqs,
        prefix_caching=shape.prefix_caching,
        queries=rng.choice((1, 2, 50)),
        refuse_allocation=rng.choice((0.0, 0.3)),
        ignore_hit=rng.choice((0.0, 0.2)),
        preempt=rng.choice((0.0, 0.05)),
    )
    simulator = Simulator(stack.connector, stack.workers, rules, rng)
    traffic = Traffic(rng, shape, min(120, (shape.num_blocks - 2) * shape.block - 24))
    aborts, resets = rng.choice((0.0, 0.05)), rng.choice((0.0, 0.0, 0.03))
    speed = rng.choice((0.2, 0.5, 1.0))
    added, steps, live, everyone = 0, 0, [], []
    while added < REQUESTS or live:
        if added < REQUESTS and rng.random() < 0.4:
            prompt = traffic.prompt([r.all_token_ids for r in everyone if r.is_finished()])
            options = {f"kvstow.{name}": value for name, value in traffic.options().items()}
            request = SimRequest(
                f"r{added}",
                prompt,
                rng.randint(1, 20),
                shape.block,
                kv_transfer_params=options,
                skip_reading_prefix_cache=rng.random() < 0.05,
            )
            everyone.append(simulator.add(request))
            added += 1
        live = [request for request in everyone if not request.is_finished()]
        if live and rng.random() < aborts:
            simulator.abort(rng.choice(live).request_id)
        if rng.random() < resets:
            simulator.reset()
        stack.work(speed)
        if simulator.has_requests():
            output = simulator.schedule()
            results = simulator.execute(output)
            if live and rng.random() < aborts:
                simulator.abort(rng.choice(live).request_id)
            simulator.update(output, results)
        assert not stack.side._broken
        steps += 1
        assert steps < 4000, f"no end in sight: {live}"
    for _ in range(3000):
        stack.work(speed)
        if not simulator.step():
            break
    else:
        raise AssertionError("the engine never gets to sleep")
    simulator.check_idle()
    stack.check_idle()
    if not any(worker.weights for worker in stack.workers):
        for request in everyone:
            check_output(stack, request)
    return stack, simulator


def check_output(stack: Stack, request: SimRequest) -> None:
    """The tokens are those of an engine without any cache."""
    for index, token in enumerate(request.output_token_ids):
        known = request.all_token_ids[: request.num_prompt_tokens + index]
        assert token == stack.workers[0].expected_token(known), (
            f"{request.request_id}: output {index}"
        )


BATCH = 20


@pytest.mark.parametrize("batch", seeds(200 // BATCH))
def test_random_over_direct_storage(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few staging areas, and a disk that fails, falls short or flips bits: every byte that is read is right."""
    loaded = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            stack, simulator = run_seed(seed, direct=monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loaded += simulator.loaded_tokens
        stack.close()
    assert loaded > 0


@pytest.mark.parametrize("batch", seeds(1000 // BATCH))
def test_random(batch: int) -> None:
    loaded = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            stack, simulator = run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loaded += simulator.loaded_tokens
        stack.close()
    assert loaded > 0
