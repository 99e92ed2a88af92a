"""Fetches with a learned deadline: what is started, how long is waited, what is looked at again."""

from __future__ import annotations

import pytest

from kvstow.cache import LookupState
from kvstow.fetch.decide import COLD_LIMIT_S, EXPLORE_AFTER_S, GRACE_S
from kvstow.testing.faults import unavailable
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, MISS0, TOKENS, Rig, hit, keys

ONE_A_READ = TierLimits(read_batch_bytes=FRAME_BYTES)
CHUNK_S = 0.032  # to compute one, in ``known``


def pending(rig: Rig, owner: str, *numbers: int) -> bool:
    return rig.fetch(owner, *numbers).state is LookupState.PENDING


def known(
    load_s: float, *, compute_s: float = CHUNK_S, tiers: int = 1, slots: int = 40, **more: object
) -> Rig:
    """A cache that knows: a chunk is computed in ``compute_s``, and read in ``load_s``."""
    rig = Rig(slots=slots, tiers=tiers, max_fetch_share=1.0, **more)  # type: ignore[arg-type]
    rig.engine.observe_step(1000, 1000 * compute_s / TOKENS)
    for line in rig.engine.estimates.reads:
        for count in (1, 4) * 20:
            line.observe(count * FRAME_BYTES, count * load_s)
    return rig


def decisions(rig: Rig, decision: str) -> float:
    return rig.counter("fetch_decisions", decision=decision)


def test_without_estimates_a_fetch_is_begun_and_abandoned_without_a_sign_of_life() -> None:
    rig = Rig()
    rig.put_below(1, 2)
    assert pending(rig, "r", 1, 2)
    rig.run()
    assert decisions(rig, "cold") == 1
    rig.clock.advance(GRACE_S - 0.001)
    assert pending(rig, "r", 1, 2)
    rig.clock.advance(0.002)
    assert rig.fetch("r", 1, 2) == MISS0
    assert rig.counter("fetch_deadline_exceeded", tier="t0") == 1
    rig.settle()
    rig.engine.forget("r")
    rig.assert_idle()


def test_without_estimates_progress_prolongs_the_wait_up_to_a_limit() -> None:
    """A chunk of 32 tokens every 5 ms is faster than most engines compute."""
    rig = Rig(slots=600, limits=ONE_A_READ, max_fetch_share=1.0)
    chunks = list(range(500))
    rig.put_below(*chunks)
    assert pending(rig, "r", *chunks)
    rig.run()
    waited = 0.0
    while pending(rig, "r", *chunks):
        rig.executors[0].run_next()
        rig.engine.poll()
        rig.clock.advance(0.005)
        waited += 0.005
    assert COLD_LIMIT_S <= waited <= COLD_LIMIT_S + 0.01
    assert 380 <= rig.fetch("r", *chunks).chunks <= 410, "what has come by then is used"
    assert rig.counter("fetch_extensions") >= 5


def test_without_estimates_a_slow_tier_is_left_after_the_first_wait() -> None:
    rig = Rig(
        slots=80, limits=ONE_A_READ, max_fetch_share=1.0
    )  # 32 tokens in 50 ms: slower than most compute
    chunks = list(range(60))
    rig.put_below(*chunks)
    assert pending(rig, "r", *chunks)
    rig.run()
    waited = 0.0
    while pending(rig, "r", *chunks):
        rig.executors[0].run_next()
        rig.engine.poll()
        rig.clock.advance(0.05)
        waited += 0.05
    assert waited <= GRACE_S + 0.051
    assert rig.fetch("r", *chunks).chunks >= 3


def test_k4_what_does_not_pay_is_not_asked_for() -> None:
    rig = known(load_s=CHUNK_S)
    rig.put_below(1, 2)
    assert rig.fetch("r", 1, 2) == MISS0
    assert rig.stores[0].calls == {}
    assert decisions(rig, "short") == 1
    rig.engine.forget("r")
    rig.assert_idle()


def test_asking_again_decides_nothing_again() -> None:
    rig = known(load_s=CHUNK_S)
    for _ in range(100):
        assert rig.fetch("r", 1, 2) == MISS0
    assert decisions(rig, "short") == 1


def test_one_missing_chunk_before_many_in_memory_is_worth_more() -> None:
    rig = known(load_s=3 * CHUNK_S)
    rig.put_below(0)
    rig.put(1, 2, 3, 4, 5)
    rig.settle()
    assert pending(rig, "r", *range(6))
    rig.settle()
    assert rig.fetch("r", *range(6)) == hit(6)


def test_what_is_found_is_decided_on_not_what_was_asked_for() -> None:
    rig = known(load_s=0.1 * CHUNK_S)
    rig.engine.estimates.reads[0].fixed_s = 2 * CHUNK_S
    rig.put_below(0, 1)
    assert pending(rig, "r", *range(10))
    rig.settle()
    assert rig.fetch("r", *range(10)) == MISS0
    assert decisions(rig, "recompute") == 1
    assert rig.counter("loaded_chunks") == 0


def test_a_slow_second_tier_does_not_hold_up_what_a_fast_first_one_has() -> None:
    rig = known(load_s=0.1 * CHUNK_S, tiers=2, slots=80)
    rig.put_below(*range(8), tier=0)
    rig.put_below(*range(8, 16), tier=1)
    for _ in range(40):
        rig.engine.estimates.reads[1].observe(4 * FRAME_BYTES, 4 * 50 * CHUNK_S)
    assert pending(rig, "r", *range(16))
    rig.settle()
    assert rig.fetch("r", *range(16)) == hit(8)
    assert rig.engine.origins("r") == {"t0": 8}


def test_a_queue_is_counted_and_leaves_those_who_come_late_to_compute() -> None:
    rig = known(load_s=0.3 * CHUNK_S, slots=200, limits=TierLimits(max_read_bytes=4 * FRAME_BYTES))
    for owner in range(6):
        rig.put_below(*range(owner * 10, owner * 10 + 10))
    asked = [pending(rig, f"r{owner}", *range(owner * 10, owner * 10 + 10)) for owner in range(6)]
    rig.run()  # the answers: what is decided on stands in the queue, read or not
    waiting = [pending(rig, f"r{owner}", *range(owner * 10, owner * 10 + 10)) for owner in range(6)]
    assert asked[0]
    assert waiting == [True, True, False, False, False, False]


def test_a_large_fetch_that_wins_is_not_cut_at_the_first_deadline() -> None:
    rig = known(load_s=0.05, compute_s=0.32, slots=80, limits=ONE_A_READ)
    chunks = list(range(30))
    rig.put_below(*chunks)
    assert pending(rig, "r", *chunks)
    rig.run()
    for _ in chunks:
        assert pending(rig, "r", *chunks)
        rig.clock.advance(0.05)
        rig.executors[0].run_next()
        rig.engine.poll()
    assert rig.fetch("r", *chunks) == hit(30)
    assert rig.counter("fetch_deadline_exceeded") == 0


def test_a_tier_that_stalls_is_left_after_a_wait_that_is_short_beside_computing() -> None:
    rig = known(load_s=0.001, slots=80, limits=ONE_A_READ)
    chunks = list(range(30))
    rig.put_below(*chunks)
    assert pending(rig, "r", *chunks)
    rig.run()
    waited = 0.0
    while pending(rig, "r", *chunks):
        rig.clock.advance(0.01)
        waited += 0.01
    assert waited <= 0.25 * 30 * CHUNK_S + 0.02


def test_a_new_request_does_not_wait_behind_a_read_that_is_overdue() -> None:
    rig = known(load_s=0.001, slots=80, limits=ONE_A_READ)
    rig.put_below(*range(42))
    assert pending(rig, "r", *range(40))
    rig.run()
    rig.clock.advance(0.15)
    assert pending(rig, "s", 40, 41), "it is asked: nothing says yet that the tier is late for this"
    rig.executors[0].run(40)  # the answer overtakes the reads
    rig.engine.poll()
    assert rig.fetch("s", 40, 41) == MISS0
    assert decisions(rig, "recompute") == 1


def test_a_tier_left_alone_is_read_now_and_then_and_no_request_waits_for_it() -> None:
    rig = known(load_s=3 * CHUNK_S, slots=160)
    rig.put_below(*range(60))
    requests = 60
    pause_s = EXPLORE_AFTER_S / 8
    for i in range(requests):
        assert rig.fetch(f"r{i}", i) == MISS0, "it answers at once"
        while rig.executors[0].pending:
            rig.clock.advance(3 * CHUNK_S)
            rig.executors[0].run_next()
            rig.engine.poll()
        rig.clock.advance(pause_s)
        rig.engine.poll()
        rig.engine.forget(f"r{i}")
    explored = decisions(rig, "explore")
    assert explored == rig.counter("loaded_chunks")
    assert requests // 12 <= explored <= requests // 8
    rig.assert_idle()


def test_a_tier_that_has_become_fast_is_used_again_after_some_reads() -> None:
    rig = known(load_s=100 * CHUNK_S, slots=200)
    rig.put_below(*range(120))
    for i in range(120):
        if pending(rig, f"r{i}", i):
            break
        rig.settle()  # no time passes: as fast as can be
        rig.engine.poll()
        rig.clock.advance(EXPLORE_AFTER_S + 0.1)
    assert decisions(rig, "explore") <= 8
    assert i < 120


def test_exploring_joins_what_was_found_and_ends_with_a_hung_tier() -> None:
    rig = known(load_s=100 * CHUNK_S)
    rig.put_below(1)
    rig.clock.advance(EXPLORE_AFTER_S + 1)
    assert rig.fetch("r", 1) == MISS0
    assert decisions(rig, "explore") == 1
    rig.engine.forget("r")
    rig.clock.advance(EXPLORE_AFTER_S + 1)
    rig.engine.poll()
    assert rig.counter("fetch_deadline_exceeded") == 0, "nobody has waited"
    rig.settle()
    rig.assert_idle()


def test_a_failed_read_says_only_that_a_tier_is_no_faster() -> None:
    rig = known(load_s=0.5 * CHUNK_S)
    before = rig.engine.estimates.reads[0].seconds(FRAME_BYTES)
    rig.put_below(1)
    rig.stores[0].faults = [unavailable("read")]
    assert pending(rig, "r", 1)
    rig.settle()
    assert rig.engine.estimates.reads[0].seconds(FRAME_BYTES) == before
    assert rig.fetch("r", 1) == MISS0


def test_what_has_arrived_stays_pinned_a_little_and_no_longer() -> None:
    rig = known(load_s=0.1 * CHUNK_S)
    rig.put_below(1)
    assert pending(rig, "r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)
    assert rig.pool.leased == 1
    rig.clock.advance(0.1)
    rig.engine.poll()
    assert rig.pool.leased == 1
    rig.clock.advance(0.2)
    rig.engine.poll()
    assert rig.pool.leased == 0


def test_a_full_pool_is_waited_for() -> None:
    rig = known(load_s=0.01 * CHUNK_S, slots=2)
    rig.put_below(1)
    held = [rig.engine.reserve(key, b"", TOKENS) for key in keys(8, 9)]
    assert pending(rig, "r", 1)
    rig.run()
    assert pending(rig, "r", 1)
    assert rig.counter("loaded_chunks") == 0
    for lease in held:
        assert lease is not None
        lease.release()
    rig.engine.poll()
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)


def test_a_reset_forgets_what_was_promised() -> None:
    rig = known(load_s=0.01 * CHUNK_S, slots=40, limits=TierLimits(max_read_bytes=FRAME_BYTES))
    rig.put_below(*range(5))
    assert pending(rig, "r", *range(5))
    rig.run()
    rig.engine.reset()
    rig.settle()
    assert rig.engine.fetcher.pending_bytes(0) == 0


def test_queues_are_empty_when_nothing_is_under_way() -> None:
    rig = known(load_s=0.05 * CHUNK_S, slots=30, limits=TierLimits(max_read_bytes=3 * FRAME_BYTES))
    for owner in range(5):
        rig.put_below(*range(owner * 10, owner * 10 + 10))
        rig.fetch(f"r{owner}", *range(owner * 10, owner * 10 + 10))
        rig.run()
        rig.engine.forget(f"r{owner - 1}")
    for owner in range(5):
        rig.engine.forget(f"r{owner}")
    rig.settle()
    assert rig.engine.fetcher.pending_bytes(0) == 0
    rig.assert_idle()


def test_a_fixed_least_number_counts_what_has_come_already() -> None:
    rig = Rig(
        slots=40, tiers=2, limits=ONE_A_READ, max_fetch_share=1.0, fetch_min_tokens=4 * TOKENS
    )
    rig.put_below(0, 1, 2, 3, tier=0)
    rig.put_below(4, tier=1)
    assert pending(rig, "r", *range(5))
    rig.run(only=[rig.executors[0]])
    rig.run(only=[rig.executors[0]])
    assert rig.found(*range(5)) == 4
    rig.settle()
    assert rig.fetch("r", *range(5)) == hit(5)
    assert rig.fetch("s", 10, 11, 12).state is LookupState.MISS
    assert rig.engine.fetcher.flights == 0


def test_a_tier_is_judged_by_when_its_calls_end_not_by_when_a_step_hears_of_it() -> None:
    rig = Rig()
    rig.put_below(1)
    assert pending(rig, "r", 1)
    rig.clock.advance(0.001)
    rig.executors[0].run_all()
    rig.clock.advance(0.1)
    rig.engine.poll()
    rig.clock.advance(0.002)
    rig.executors[0].run_all()
    rig.clock.advance(0.05)
    rig.engine.poll()
    assert rig.engine.estimates.probes[0].seconds == pytest.approx(0.001)
    assert rig.engine.estimates.reads[0].seconds(FRAME_BYTES) == pytest.approx(0.002)
    assert rig.gauge("load_seconds_per_byte|t0") == pytest.approx(0.002 / FRAME_BYTES)
