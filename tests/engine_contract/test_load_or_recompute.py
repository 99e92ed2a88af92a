"""TTFT with a lower tier of any speed, on a virtual clock, against the same requests without a cache."""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from kvstow.testing.memory_store import MemoryStore
from tests.rigs.paced import PacedStore
from tests.rigs.virtual import (
    BLOCK,
    FRAME_BYTES,
    TIER,
    Model,
    Served,
    VirtualServer,
    fill,
    request,
    virtual_server,
)

MODEL = Model()
DEADLINE_S = 0.2  # what a wait without a sign of life may take
SIZES = (1, 2, 5, 10, 20, 40, 80, 160)
PROMPTS = [(number, SIZES[number % len(SIZES)]) for number in range(24)]


@cache
def below() -> MemoryStore:
    store = MemoryStore()
    fill(store, MODEL, PROMPTS)
    return store


def pace(speed: float, **more: float) -> PacedStore:
    """A store that is ``speed`` times as slow as computing, per chunk."""
    return PacedStore(
        below(),
        **{"fixed_s": 0.001, "probe_s": 0.0002, "byte_s": speed * MODEL.chunk_byte_s, **more},
    )


def arrivals(
    count: int, gap_s: float, seed: int = 1, sizes: Sequence[int] = SIZES
) -> list[tuple[float, Any]]:
    rng, at = random.Random(seed), 0.0
    prompts = [prompt for prompt in PROMPTS if prompt[1] in sizes]
    found = []
    for i in range(count):
        at += rng.expovariate(1 / gap_s) if gap_s else 0.0
        found.append((at, request(f"r{i}", *prompts[i % len(prompts)])))
    return found


def serve(
    store: PacedStore | None, requests: list[tuple[float, Any]], **more: Any
) -> tuple[VirtualServer, list[Served]]:
    """By a new server, whose pool holds little: what is found comes from below."""
    server = virtual_server(
        below(), MODEL, pace=store, loads=store is not None, **{"pool_chunks": 340, **more}
    )
    served = server.run(requests)
    assert server.engine.drain(1e12)
    server.engine.close(1.0)
    return server, served


def mean_ttft(served: Sequence[Served]) -> float:
    return statistics.mean(each.ttft_s for each in served)


def hit_share(served: Sequence[Served]) -> float:
    return sum(each.loaded_tokens for each in served) / sum(
        each.request.num_prompt_tokens // BLOCK * BLOCK for each in served
    )


def assert_promise(served: Sequence[Served], without: Sequence[Served]) -> None:
    assert mean_ttft(served) <= 1.05 * mean_ttft(without) + DEADLINE_S


@pytest.mark.parametrize("gap_s", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("speed", [1.0, 10.0, 100.0])
def test_k4_a_slow_store_costs_no_more_than_one_deadline(speed: float, gap_s: float) -> None:
    _, without = serve(None, arrivals(120, gap_s))
    server, served = serve(pace(speed), arrivals(120, gap_s))
    assert_promise(served, without)
    decisions = server.counted("fetch_decisions")
    assert decisions.get(f"{TIER}|short", 0) + decisions.get(f"{TIER}|recompute", 0) > 60
    if gap_s == 0.5:  # once it is known to be slow, it costs nothing at all
        assert mean_ttft(served[40:]) <= 1.01 * mean_ttft(without[40:])


@pytest.mark.parametrize("gap_s", [0.5, 0.1])
def test_with_a_fast_store_every_hit_is_taken(gap_s: float) -> None:
    fast = pace(0.02, fixed_s=0.0002, probe_s=0.0)
    _, without = serve(None, arrivals(120, gap_s))
    _, served = serve(fast, arrivals(120, gap_s))
    for each in served:  # of a chunk or two some are computed before an answer could come
        chunks = each.request.num_prompt_tokens // BLOCK
        assert each.loaded_tokens == chunks * BLOCK or (chunks <= 2 and gap_s < 0.5)
    assert hit_share(served) >= 0.998
    assert mean_ttft(served) < 0.2 * mean_ttft(without)


def test_between_the_two_large_prompts_are_loaded_and_small_ones_computed() -> None:
    server, served = serve(pace(0.2, fixed_s=0.012), arrivals(120, 0.5))
    late = served[40:]
    for each in late:
        chunks = each.request.num_prompt_tokens // BLOCK
        if chunks <= 10:
            assert each.loaded_tokens == 0
        elif chunks >= 80:
            assert each.loaded_tokens == chunks * BLOCK
    assert server.counted("fetch_decisions")[f"{TIER}|short"] > 20


def changing(
    server: VirtualServer,
    store: PacedStore,
    speeds: dict[float, float],
    at: list[tuple[float, Any]],
) -> list[Served]:
    """Serve while the store's speed changes at the given seconds.

    Memory forgets everything then.
    """
    began_s, step, left = server.clock.monotonic(), server.side.build_meta, list(speeds.items())

    def build_meta(output: Any) -> Any:
        if left and server.clock.monotonic() - began_s >= left[0][0]:
            store.byte_s = MODEL.chunk_byte_s * left.pop(0)[1]
            server.engine.reset()
        return step(output)

    server.side.build_meta = build_meta
    return server.run(at)


def test_a_store_that_becomes_slow_and_fast_again_is_left_and_used_again() -> None:
    sizes = (40, 80, 160)
    _, without = serve(None, arrivals(300, 0.4, sizes=sizes))
    store = pace(0.05)
    server = virtual_server(below(), MODEL, pace=store, pool_chunks=340)
    served = changing(
        server, store, {0.0: 0.05, 40.0: 100.0, 80.0: 0.05}, arrivals(300, 0.4, sizes=sizes)
    )
    began_s = served[0].arrives_s - arrivals(1, 0.4, sizes=sizes)[0][0]
    assert_promise(served, without)
    by_phase: list[list[int]] = [[], [], []]
    for i, each in enumerate(served):
        by_phase[min(2, int((each.arrives_s - began_s) // 40))].append(i)
    first, slow, last = ([served[i] for i in phase] for phase in by_phase)
    assert hit_share(first[1:-2]) == 1.0
    assert hit_share(slow[10:]) < 0.1, (
        "only what was read to look at the tier again, and stayed in memory"
    )
    assert mean_ttft(slow) <= 1.05 * mean_ttft([without[i] for i in by_phase[1]]) + 0.05
    used_again = next(i for i, each in enumerate(last) if each.loaded_tokens)
    assert used_again <= 80, "as often as a tier is looked at again, and some"
    assert hit_share(last[used_again + 5 :]) == 1.0


def test_h6_k2_a_store_that_hangs_costs_a_wait_each_until_it_is_bypassed() -> None:
    sizes = (40, 80, 160)
    _, without = serve(None, arrivals(60, 0.4, sizes=sizes))
    store = pace(0.05)
    server = virtual_server(below(), MODEL, pace=store, pool_chunks=2000)
    server.run(arrivals(10, 0.4, sizes=(1, 2)))
    store.hangs = True
    served = server.run(
        [
            (at, request(f"h{each.request_id}", 3 + i % 20, 160))
            for i, (at, each) in enumerate(arrivals(60, 0.4, sizes=sizes))
        ]
    )
    assert max(each.ttft_s for each in served[:1]) <= 1.0
    assert mean_ttft(served) <= 1.05 * max(each.ttft_s for each in without) + DEADLINE_S


def test_many_at_once_share_one_queue() -> None:
    """64 requests in one instant: those whose turn would come late compute, and nobody is worse off."""
    burst = arrivals(64, 0.0, sizes=(20, 40, 80, 160))
    warm = arrivals(10, 0.5, seed=2, sizes=(20, 40))

    def both() -> list[tuple[float, Any]]:
        first = [(at, request(f"w{i}", *PROMPTS[3])) for i, (at, _) in enumerate(warm)]
        return first + [
            (30.0, each.__class__(each.request_id, each.prompt_token_ids, 4, BLOCK))
            for _, each in burst
        ]

    _, without = serve(None, both(), pool_chunks=6000)
    for speed in (0.1, 0.5, 1.0, 10.0):
        _, served = serve(pace(speed), both(), pool_chunks=6000)
        assert_promise(served, without)
        assert mean_ttft(served[10:]) <= 1.05 * mean_ttft(without[10:])
        if speed <= 0.5:
            assert mean_ttft(served[10:]) < 0.8 * mean_ttft(without[10:])


@pytest.mark.parametrize("speed", [0.05, 1.0, 100.0])
def test_tiny_prompts(speed: float) -> None:
    """A chunk or two: a question alone may cost more than computing them."""
    sizes = (1, 2)
    _, without = serve(None, arrivals(150, 0.05, sizes=sizes))
    _, served = serve(pace(speed, probe_s=0.002), arrivals(150, 0.05, sizes=sizes))
    assert_promise(served, without)
    assert mean_ttft(served[30:]) <= 1.02 * mean_ttft(without[30:])


def test_a_first_request_after_a_restart_is_restored_whole() -> None:
    """Nothing is known yet, and the chunks take longer than the first wait: they keep coming, so it goes on."""
    store = pace(0.1, byte_s=0.9 * BLOCK / 4000 / FRAME_BYTES)
    _, served = serve(store, [(0.0, request("first", *PROMPTS[7]))])
    assert served[0].loaded_tokens == 160 * BLOCK
    assert served[0].ttft_s > 2 * DEADLINE_S


def test_a_first_request_does_not_wait_for_a_slow_store() -> None:
    store = pace(1.0, byte_s=3.0 * BLOCK / 4000 / FRAME_BYTES)
    server, served = serve(store, [(0.0, request("first", *PROMPTS[7]))])
    assert 0 < served[0].loaded_tokens < 40 * BLOCK, "what had come by then is used"
    _, without = serve(None, [(0.0, request("first", *PROMPTS[7]))])
    assert served[0].ttft_s <= without[0].ttft_s + DEADLINE_S + 0.01
    assert sum(server.counted("fetch_deadline_exceeded").values()) == 1


def test_fixed_settings_replace_what_is_learned() -> None:
    slow = arrivals(40, 0.5, sizes=(10, 20, 40))
    _, always = serve(pace(3.0), slow, fetch_min_tokens=0, fetch_deadline_s=60.0)
    assert hit_share(always) == 1.0
    _, never = serve(pace(0.01), arrivals(40, 0.5, sizes=(10, 20, 40)), fetch_min_tokens=10**6)
    assert hit_share(never) == 0.0
    _, some = serve(pace(0.01), arrivals(40, 0.5, sizes=(10, 20, 40)), fetch_min_tokens=20 * BLOCK)
    assert {each.loaded_tokens for each in some} == {0, 20 * BLOCK, 40 * BLOCK}


@pytest.mark.parametrize(
    ("level", "check"),
    [
        (logging.DEBUG, lambda lines: any("loading pays from" in line for line in lines)),
        (logging.INFO, lambda lines: not any("loading pays" in line for line in lines)),
    ],
)
def test_decisions_are_logged_at_debug(
    level: int,
    check: Callable[[list[str]], bool],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvstow"), "propagate", True)
    with caplog.at_level(level, "kvstow"):
        serve(pace(0.1), arrivals(12, 0.5))
    assert check([record.getMessage() for record in caplog.records])


def test_estimates_are_gauges() -> None:
    server, _ = serve(pace(0.1), arrivals(40, 0.5))
    gauges = (
        server.totals.get("gauges", {}) or (server.counted("") and {}) or server.totals["gauges"]
    )
    assert gauges["prefill_seconds_per_token"] == pytest.approx(MODEL.token_s, rel=0.3)
    assert gauges[f"load_seconds_per_byte|{TIER}"] == pytest.approx(
        0.1 * MODEL.chunk_byte_s, rel=0.5
    )
    assert gauges[f"load_fixed_seconds|{TIER}"] < 0.005
