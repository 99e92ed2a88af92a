"""The connector under vLLM's own scheduler, random traffic and faults.

Every byte that is read is checked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvstow.testing.faults import unavailable
from kvstow.vllm.jobs import JOB_DEADLINE_S
from kvstow.vllm.metadata import WorkerMeta
from tests.engine_contract.scenario import Traffic, random_failures, random_shape
from tests.engine_contract.seeds import seeds
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import Shape
from tests.engine_contract.vllm_scheduler import Driver
from tests.rigs.sim_requests import SimOutput

REQUESTS = 22


def run_seed(seed: int, **fixed: Any) -> Driver:
    """One engine's life: traffic with faults until all requests have ended, then idle."""
    rng = random.Random(seed)
    shape = random_shape(rng, **fixed)
    chance = rng.choice((0.0, 0.0, 0.1))
    driver = Driver(shape, seed, fails=random_failures(rng, chance))
    most = min(220, (shape.num_blocks - 2) * shape.block - 32)
    traffic = Traffic(rng, shape, most)
    aborts, resets = rng.choice((0.0, 0.03)), rng.choice((0.0, 0.0, 0.02))
    pace, speed = rng.choice((0.1, 0.4, 1.0)), rng.choice((0.2, 0.5, 1.0))
    added = 0

    def disturb() -> None:
        live = driver.unfinished
        if live and rng.random() < aborts:
            driver.abort(rng.choice(live))

    while added < REQUESTS or driver.unfinished:
        if added < REQUESTS and rng.random() < pace and len(driver.unfinished) < 8:
            finished = [
                [*driver.requests[r].prompt_token_ids, *driver.outputs[r]] for r in driver.outputs
            ]
            driver.add(
                f"r{added}", traffic.prompt(finished), rng.randint(1, 24), **traffic.options()
            )
            added += 1
        disturb()
        if rng.random() < resets:
            driver.reset(running=rng.random() < 0.7)
        driver.stack.work(speed)
        driver.step(disturb)
        assert driver.steps < 6000, f"no end in sight: {driver.unfinished}"
    driver.settle(speed)
    check_everything_is_accounted_for(driver, quiet=not (chance or aborts or resets))
    return driver


def check_everything_is_accounted_for(driver: Driver, *, quiet: bool) -> None:
    """Every full prompt chunk of a finished request is held by a tier, or was evicted, refused or failed: counted."""
    stack = driver.stack
    if not stack.shape.stores:
        return
    wanted = set()
    for req_id, request in driver.requests.items():
        params = request.kv_transfer_params or {}
        if req_id not in driver.aborted and not params.get("kvstow.skip_store"):
            wanted.update(stack.keys(request)[: request.num_prompt_tokens // stack.shape.chunk])
    absent = stack.cache.missing(sorted(wanted))
    if quiet:
        lost = sum(
            stack.counter(name) for name in ("evicted_chunks", "refused_chunks", "failed_chunks")
        )
        assert len(absent) <= lost, f"{len(absent)} chunks are nowhere, {lost} were counted as lost"


@pytest.mark.parametrize("seed", seeds(180))
def test_random(seed: int) -> None:
    run_seed(seed).close()


def test_repeats_are_loaded() -> None:
    """The random tests would pass with a connector that does nothing: this one does not."""
    loads = stores = 0
    for seed in range(8):
        driver = run_seed(seed, loads=True, stores=True, prefix_caching=False, pool_slots=64)
        loads += driver.stack.workers[0].device.loads
        stores += driver.stack.workers[0].device.stores
        assert driver.stack.workers[0].device.stores
        driver.close()
    assert loads > 40, (loads, stores)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_roles(role: str) -> None:
    """A producer loads nothing, a consumer stores nothing."""
    driver = run_seed(3, loads=role == "consumer", stores=role == "producer")
    device = driver.stack.workers[0].device
    assert (device.loads, device.stores > 0) == (0, role == "producer")
    driver.close()


def stored(driver: Driver, prompts: Sequence[Sequence[int]], *lower: int) -> None:
    """All of ``prompts`` are stored; those numbered ``lower`` are in the lower tier only."""
    for i, tokens in enumerate(prompts):
        driver.add(f"stored{i}", tokens)
        driver.run()
        driver.settle()
    engine = driver.stack.cache
    for i in lower:
        for lease in engine.hold("", driver.stack.keys(driver.requests[f"stored{i}"])):
            engine.index.drop(lease)
            lease.release()


CROWDED = Shape(
    num_blocks=26, batched_tokens=256, prefix_caching=False, lower_tier=True, pool_slots=64
)


@pytest.mark.parametrize("found", [True, False])
def test_a_request_without_room_lets_those_pass_whose_loads_keep_it(found: bool) -> None:
    """vLLM 0.30 asks in order, and goes no further than to the first request that has no room.

    Here that one waited for
    a lower tier, which gives it what it has or not, while two behind it were loaded; each of the
    three takes 40 % of the blocks."""
    driver = Driver(CROWDED, fetch_deadline_s=10.0)
    prompts = [prompt(170, seed) for seed in range(3)]
    stored(driver, prompts, 0)
    if not found:
        assert driver.stack.store is not None
        driver.stack.store.faults.append(unavailable("read"))
    for i, tokens in enumerate(prompts):
        driver.add(f"r{i}", tokens, 4)
    driver.step()
    waiting = [driver.requests[f"r{i}"].status.name for i in range(3)]
    assert waiting == ["WAITING", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_REMOTE_KVS"]
    driver.run()
    driver.settle()
    assert driver.stack.workers[0].device.loads == 2 + found
    driver.close()


@pytest.mark.parametrize("lost", ["all", "half"])
@pytest.mark.parametrize("large", [1, 6])
def test_a_request_without_room_lets_those_pass_whose_loads_failed(large: int, lost: str) -> None:
    """vLLM 0.30 keeps room for a request whose load failed, until it has run.

    And that one is behind ``large`` others,
    which waited for a lower tier and have no room for it. One more gives up on the way."""
    half = lost == "half"
    driver = Driver(
        CROWDED,
        fetch_deadline_s=10.0,
        fails=lambda load, transfers: (
            range(half * len(transfers) // 2, len(transfers)) if load else ()
        ),
    )
    prompts = [*(prompt(250, seed) for seed in range(large)), prompt(170, 100)]
    stored(driver, prompts, *range(large))
    for i, tokens in enumerate(prompts):
        driver.add(f"r{i}", tokens, 4)
    driver.step()
    waiting = [driver.requests[f"r{i}"].status.name for i in range(large + 1)]
    assert waiting == ["WAITING"] * large + ["WAITING_FOR_REMOTE_KVS"]
    driver.add("gone", prompts[0], 4)
    for _ in range(4):
        driver.stack.work(1.0)
        driver.step()
    driver.abort("gone")
    begun = driver.steps
    driver.run()
    assert driver.steps - begun < 20 * (large + 1), "steps in which nothing was done"
    driver.settle()
    driver.close()


def test_who_gives_up_is_not_remembered_as_passed() -> None:
    """However many come and go while nothing can be done."""
    driver = Driver(CROWDED, fetch_deadline_s=10.0)
    side, idle = driver.stack.side, SimOutput()
    stored(driver, [prompt(50)])
    for number in range(50):
        request = driver.add(f"r{number}", prompt(50))
        side.num_new_matched_tokens(request, 0)
        side.build_meta(idle)
        assert side._without_room == {f"r{number}"}
        assert side.num_new_matched_tokens(request, 0) == (None, False), (
            "who had no room lets others pass"
        )
        driver.abort(f"r{number}")
    driver.settle()
    driver.close()


def test_a_request_without_room_lets_others_pass_after_reports_were_lost() -> None:
    """Something that nobody foresaw switches kvstow off as the workers report a load, part of which failed: vLLM keeps
    its blocks, and the request in front has no room."""
    driver = Driver(
        CROWDED,
        fetch_deadline_s=10.0,
        fails=lambda load, transfers: range(len(transfers) // 2, len(transfers)) if load else (),
    )
    driver.may_break = True
    prompts = [prompt(250, 0), prompt(170, 1)]
    stored(driver, prompts, 0)
    for i, tokens in enumerate(prompts):
        driver.add(f"r{i}", tokens, 4)
    driver.step()
    assert driver.requests["r1"].status.name == "WAITING_FOR_REMOTE_KVS"
    side = driver.stack.side
    take = side.update_from_workers

    def lose(meta: WorkerMeta) -> None:
        if meta.jobs:
            raise ZeroDivisionError
        take(meta)

    side.update_from_workers = lose  # type: ignore[method-assign]
    for _ in range(4):
        driver.stack.work(1.0)
        driver.step()
    assert side._broken
    driver.stack.clock.advance(JOB_DEADLINE_S)
    driver.run()
    driver.close()
