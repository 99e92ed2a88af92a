"""Fault catalogue E, F and B10: aborts, asynchronous life cycle, failed loads, resets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstow.device.base import Transfer
from kvstow.errors import StoreUnavailable
from kvstow.testing.faults import Fault
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape
from tests.rigs.sim_requests import SimRequest

POINTS = ("answered", "scheduled", "copying", "copied", "reported", "running")


def reported(sim: Sim) -> list[str]:
    """Every finished_recving from now on."""
    seen: list[str] = []
    for worker in sim.stack.workers:
        take = worker.connector.get_finished

        def get_finished(req_ids: set[str], take: Any = take) -> Any:
            sent, received = take(req_ids)
            seen.extend(received or ())
            return sent, received

        worker.connector.get_finished = get_finished
    return seen


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_e1_abort_around_an_asynchronous_load(point: str, tp: int) -> None:
    sim = Sim(Shape(tp=tp, prefix_caching=False))
    tokens = prompt(100)
    sim.serve("cold", tokens)
    seen = reported(sim)
    warm = sim.add("warm", tokens, 3)
    if point == "answered":
        sim.engine.rules.refuse_allocation = 1.0
        sim.step()
        sim.engine.abort("warm")
        sim.engine.rules.refuse_allocation = 0.0
    else:
        output = sim.schedule()
        assert sim.engine.is_loading("warm")
        if point == "scheduled":
            sim.engine.abort("warm")
        results = sim.engine.execute(output)
        if point == "copying":
            sim.engine.abort("warm")
        sim.engine.update(output, results)
        if point == "copied":
            sim.stack.work_all()
            sim.engine.abort("warm")
            assert warm.blocks, "kept until the workers have reported the load"
        if point in ("reported", "running"):
            sim.step(work=True)
            sim.step()
            if point == "running":
                sim.step()
            sim.engine.abort("warm")
    sim.settle()
    assert seen == ([] if point == "answered" else ["warm"] * tp)
    sim.serve("after", tokens, 2)
    assert seen.count("after") == tp
    sim.close()


def test_e2_the_end_of_an_aborted_load_frees_its_blocks() -> None:
    sim = Sim(Shape(num_blocks=10, prefix_caching=False))
    tokens = prompt(100)
    sim.serve("cold", tokens)
    for number in range(
        30
    ):  # each leaves 7 of 9 blocks for a while: one leak and nothing is admitted
        sim.add(f"warm{number}", tokens)
        for _ in range(number % 4):
            sim.step()
        sim.engine.abort(f"warm{number}")
    sim.settle()
    sim.serve("after", tokens, 2)
    sim.close()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("work", [0, 1, 2])
def test_e3_abort_while_a_lower_tier_is_asked(steps: int, work: int) -> None:
    """The probe queued or answered, the read queued, done or published: nothing stays pinned."""
    sim = Sim(Shape(lower_tier=True, pool_slots=16, prefix_caching=False))
    tokens = prompt(6 * 16 + 1)
    sim.serve("cold", tokens)
    sim.serve("filler", prompt(16 * 16, seed=5))
    sim.add("warm", tokens)
    for _ in range(steps):
        sim.step()
        for executor in sim.stack.background:
            for _ in range(work):
                executor.run_next()
    sim.engine.abort("warm")
    sim.settle()
    assert sim.stack.pool.leased == 0
    before = sim.engine.loaded_tokens
    sim.serve("again", tokens, 2)
    assert sim.engine.loaded_tokens - before == 96
    sim.close()


def every_copy(load: bool) -> Any:
    def fails(is_load: bool, transfers: Sequence[Transfer]) -> Sequence[int]:
        return range(len(transfers)) if is_load is load else ()

    return fails


@pytest.mark.parametrize("what", ["nothing", "duplicates", "failures"])
def test_e4_finished_whatever_became_of_the_stores(what: str) -> None:
    sim = Sim(
        Shape(prefix_caching=False), fails=every_copy(load=False) if what == "failures" else None
    )
    tokens = prompt(10 if what == "nothing" else 100)
    if what == "duplicates":
        sim.serve("first", tokens)
    sim.add("last", tokens)
    steps = 0
    while sim.engine.requests:
        sim.step(work=True)
        steps += 1
    assert steps <= 6
    sim.settle()
    if what == "failures":
        assert sim.held(sim.requests["last"]) == 0
        assert sim.stack.counter("failed_chunks") == 6
    sim.close()


def test_e5_a_lower_tier_that_never_answers() -> None:
    sim = Sim(Shape(lower_tier=True, pool_slots=8, prefix_caching=False), fetch_deadline_s=0.2)
    tokens = prompt(6 * 16 + 1)
    sim.serve("cold", tokens)
    sim.serve("filler", prompt(8 * 16, seed=5))
    connector, request = sim.stack.connector, SimRequest("warm", tokens, 1, 16)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    for _ in range(10):
        sim.stack.clock.advance(0.15)
        sim.stack.cache.poll()
        late = connector.get_num_new_matched_tokens(request, 0)
    assert late == (0, False)
    for _ in range(10):
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    sim.stack.work_all()  # now the answer comes
    sim.stack.cache.poll()
    assert sim.stack.pool.leased == 0
    connector.request_finished(request, [])
    sim.settle()
    sim.close()


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_a7_f5_a_failed_load_is_reported_from_its_first_hole_once(per_chunk: int) -> None:
    sim = Sim(
        Shape(blocks_per_chunk=per_chunk, prefix_caching=False, num_blocks=64),
        fails=lambda load, transfers: [2] if load else [],
    )
    tokens = prompt(5 * sim.shape.chunk + 7)
    sim.serve("cold", tokens)
    lost: list[set[int]] = []
    take = sim.stack.workers[0].connector.get_block_ids_with_load_errors
    sim.stack.workers[0].connector.get_block_ids_with_load_errors = lambda: (
        lost.append(take()) or lost[-1]
    )
    warm = sim.add("warm", tokens, 4)
    sim.step(work=True)
    blocks = list(warm.blocks)
    computed = sim.stack.workers[0].computed_tokens
    sim.settle()
    assert [found for found in lost if found] == [set(blocks[2 * per_chunk : 5 * per_chunk])]
    assert sim.stack.workers[0].computed_tokens - computed == len(tokens) - 2 * sim.shape.chunk + 3
    sim.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a8_f3_loads_that_always_fail(tp: int) -> None:
    """No copy ever works: the request is computed, soon, with nothing else going on."""
    sim = Sim(Shape(prefix_caching=False, tp=tp), fails=every_copy(load=True))
    tokens = prompt(100)
    sim.serve("cold", tokens)
    sim.add("warm", tokens, 4)
    steps = 0
    while sim.engine.requests:
        sim.step(work=True)
        steps += 1
    assert steps <= 10
    sim.settle()
    assert sim.loads() == 1
    assert sim.stack.counter("loaded_chunks") == 0
    sim.serve("next", tokens, 2)
    sim.close()


@pytest.mark.parametrize("same_bytes", [False, True])
def test_a13_a_rank_that_could_not_store_its_part(same_bytes: bool) -> None:
    sim = Sim(Shape(tp=2, same_bytes=same_bytes, prefix_caching=False))
    sim.stack.workers[0].device.fails = lambda load, transfers: [] if load else [2]
    first = sim.serve("cold", prompt(100))
    missing = sim.stack.cache.missing(sim.stack.keys(first))
    assert missing == [2], "a chunk is there once every rank has stored its part"
    sim.stack.workers[0].device.fails = None
    sim.serve("warm", prompt(100), 2)
    assert sim.engine.loaded_tokens == 32
    assert sim.held(first) == 6
    sim.close()


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_a14_lengths_around_chunks_in_three_passes(per_chunk: int) -> None:
    sim = Sim(Shape(blocks_per_chunk=per_chunk, pool_slots=200))
    chunk = sim.shape.chunk
    lengths = [n * chunk + extra for n in (1, 2, 3) for extra in (-1, 0, 1)]
    outputs: dict[int, list[list[int]]] = {length: [] for length in lengths}
    for run in range(3):
        if run == 2:
            sim.engine.pool.forget_cached()
        for length in lengths:
            outputs[length].append(
                sim.serve(f"{run}/{length}", prompt(length, seed=length), 5).output_token_ids
            )
    assert all(first == second == third for first, second, third in outputs.values())
    assert sim.engine.loaded_tokens >= sum(length // chunk * chunk for length in lengths)
    sim.close()


def test_b10_nothing_from_before_a_reset_is_found() -> None:
    sim = Sim(Shape(num_blocks=64, prefix_caching=False, lower_tier=True))
    tokens = prompt(100)
    sim.serve("old", tokens)
    sim.add("storing", prompt(100, seed=3), 9)
    while not sim.step().stores:
        for executor in sim.stack.background:
            executor.run_all()
    assert sim.stack.copies[0].pending, "its stores are on their way"
    assert sim.engine.reset()
    query = SimRequest("q", tokens, 1, 16)
    for _ in range(5):
        assert not sim.stack.connector.get_num_new_matched_tokens(query, 0)[0]
        sim.stack.work_all()
        sim.stack.cache.poll()
    sim.stack.connector.request_finished(query, [])
    sim.settle()
    loads = sim.loads()
    sim.serve("again", tokens)
    sim.serve("storing again", prompt(100, seed=3))
    assert sim.loads() == loads == 0
    assert sim.stack.pool.free == 32 - 12, "only what came after the reset is kept"
    sim.serve("warm", tokens, 2)
    assert sim.loads() == 1
    sim.close()


def test_b10_reset_during_a_load() -> None:
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(100)
    sim.serve("cold", tokens)
    sim.add("warm", tokens, 2)
    sim.step()
    assert sim.engine.reset() is False, "vLLM says no while a load is under way"
    sim.settle()
    assert sim.loads() == 1
    sim.serve("again", tokens)
    assert sim.loads() == 1
    sim.close()


def test_b10_reset_between_a_load_and_its_first_step() -> None:
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(100)
    sim.serve("cold", tokens)
    warm = sim.add("warm", tokens, 2)
    sim.step(work=True)
    sim.step()
    assert sim.loads() == 1
    assert not sim.stack.side._jobs._sent, "the load has been reported"
    assert not warm.num_output_tokens, "its blocks are filled; it has not run yet"
    assert sim.stack.connector.reset_cache()
    sim.settle()
    assert sim.stack.pool.free == 32, "what was loaded is from before the reset"
    sim.serve("again", tokens)
    assert sim.loads() == 1
    sim.close()


def test_g2_found_but_not_loaded() -> None:
    sim = Sim(Shape(num_blocks=64, pool_slots=6))
    tokens = prompt(6 * 16 + 1)
    sim.serve("cold", tokens)
    for number in range(5):
        sim.serve(f"on the device {number}", tokens)
    assert sim.loads() == 0
    assert sim.stack.pool.leased == 0
    assert sim.held(sim.serve("new", prompt(6 * 16 + 1, seed=4))) == 6
    sim.close()


def test_g8_probes_pin_nothing() -> None:
    sim = Sim(Shape(num_blocks=64, pool_slots=6, prefix_caching=False))
    tokens = prompt(6 * 16 + 1)
    sim.serve("cold", tokens)
    waiting = SimRequest("waiting", tokens, 1, 16)
    new = sim.add("new", prompt(6 * 16 + 1, seed=4))
    while sim.engine.requests:
        for _ in range(100):
            sim.stack.connector.get_num_new_matched_tokens(waiting, 0)
        sim.step(work=True)
    assert sim.held(new) == 6
    sim.stack.connector.request_finished(waiting, [])
    sim.settle()
    sim.close()


def test_h4_a_tier_that_fails_every_time() -> None:
    sim = Sim(Shape(lower_tier=True, pool_slots=8, prefix_caching=False))
    assert sim.stack.store is not None
    tokens = prompt(6 * 16 + 1)
    sim.serve("cold", tokens)
    sim.serve("filler", prompt(8 * 16, seed=5))
    sim.stack.store.faults.append(Fault("read", error=StoreUnavailable("gone")))
    sim.serve("warm", tokens, 2)
    assert sim.loads() == 0
    sim.close()
