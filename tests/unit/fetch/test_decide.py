"""The decision as a function: snapshots in, plans out; no engine, no clock, no store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvstow.fetch.decide import (
    COLD_LIMIT_S,
    EXPLORE_AFTER_S,
    GRACE_S,
    OVERRUN,
    decide,
    loading_pays_from,
    patience,
    worth_asking,
    worthwhile_chunks,
)
from kvstow.fetch.snapshot import (
    Chunk,
    ChunkState,
    Decision,
    FetchRules,
    Snapshot,
    TierState,
    Verdict,
)
from tests.unit.rig import key, keys

TOKENS = 16
PREFILL_S = 0.001  # so a chunk takes 16 ms to compute
BYTES = 100
FAST = TierState(fixed_s=0.001, byte_s=1e-5, probe_s=0.0002)  # 1 ms a chunk
SLOW = TierState(fixed_s=0.001, byte_s=1e-2, probe_s=0.0002)  # 1 s a chunk
NEW = TierState()

PRESENT, UNASKED, PROBING = ChunkState.PRESENT, ChunkState.UNASKED, ChunkState.PROBING
FOUND, READING, ABSENT = ChunkState.FOUND, ChunkState.READING, ChunkState.ABSENT


def chunks(*states: ChunkState, tier: int = 0, **more: Any) -> list[Chunk]:
    """One chunk for each state, with the keys 0, 1, ..."""
    return [Chunk(key(i), state, tier, BYTES, **more) for i, state in enumerate(states)]


def snapshot(
    wanted: Sequence[Chunk], *tiers: TierState, rules: FetchRules | None = None, **more: Any
) -> Snapshot:
    more.setdefault("prefill_s", PREFILL_S)
    return Snapshot(rules or FetchRules(TOKENS), tiers or (FAST,), wanted, **more)


# --- which tiers are asked ------------------------------------------------------------------------


def test_the_first_tier_is_asked_for_all_keys_in_one_probe() -> None:
    plan = decide(snapshot(chunks(UNASKED, UNASKED), FAST, FAST))
    assert plan.probes == {0: keys(0, 1)}
    assert plan.unanswered
    assert not plan.abandoned
    assert not plan.verdicts


def test_a_tier_out_of_use_and_one_that_has_answered_are_not_asked() -> None:
    down = replace(FAST, usable=False)
    assert decide(snapshot(chunks(UNASKED), down, FAST)).probes == {1: keys(0)}
    assert decide(snapshot(chunks(UNASKED, tier=1), FAST, FAST)).probes == {1: keys(0)}
    plan = decide(snapshot(chunks(UNASKED), down))
    assert (plan.probes, plan.abandoned, plan.unanswered) == ({}, keys(0), False)


def test_keys_whose_tiers_differ_are_asked_for_apart() -> None:
    wanted = [*chunks(UNASKED), Chunk(key(9), UNASKED, 1, BYTES)]
    assert decide(snapshot(wanted, FAST, FAST)).probes == {0: keys(0), 1: keys(9)}


def test_k4_a_tier_that_cannot_pay_is_not_asked_and_the_next_is() -> None:
    plan = decide(snapshot(chunks(UNASKED), SLOW, FAST))
    assert plan.probes == {1: keys(0)}
    assert plan.verdicts == [Verdict(0, Decision.SHORT)]


def test_a_tier_that_cannot_pay_ends_the_wait() -> None:
    plan = decide(snapshot(chunks(UNASKED, UNASKED), SLOW))
    assert plan.abandoned == keys(0, 1)
    assert not plan.probes
    assert not plan.unanswered


def test_present_chunks_behind_a_missing_one_are_gained_too() -> None:
    tier = TierState(fixed_s=0.05)  # three chunks' time
    assert not decide(snapshot(chunks(UNASKED), tier)).probes
    assert decide(snapshot(chunks(UNASKED, *[PRESENT] * 5), tier)).probes


def test_an_unknown_tier_or_engine_is_asked() -> None:
    assert decide(snapshot(chunks(UNASKED), NEW)).probes
    assert decide(snapshot(chunks(UNASKED), SLOW, prefill_s=None)).probes


def test_a_probe_and_a_queue_cost_too() -> None:
    wanted = snapshot(chunks(UNASKED))
    assert worth_asking(wanted, FAST, BYTES)
    assert not worth_asking(wanted, replace(FAST, probe_s=0.1), BYTES)
    assert not worth_asking(wanted, replace(FAST, pending_bytes=10_000), BYTES)


# --- what is read ---------------------------------------------------------------------------------


def test_all_that_was_found_is_read_in_order_where_it_pays() -> None:
    plan = decide(snapshot(chunks(FOUND, PRESENT, FOUND)))
    assert plan.reads == keys(0, 2)
    assert plan.chunks == 3
    assert plan.verdicts == [Verdict(0, Decision.LOAD, 3, 3)]


def test_nothing_behind_a_hole_is_read_or_asked_for() -> None:
    plan = decide(snapshot(chunks(FOUND, ABSENT, FOUND, UNASKED, READING)))
    assert plan.reads == keys(0)
    assert not plan.probes
    assert plan.abandoned == keys(2, 3)


def test_nothing_behind_an_unanswered_chunk_is_read_yet() -> None:
    plan = decide(snapshot(chunks(FOUND, PROBING, FOUND)))
    assert plan.reads == keys(0)
    assert plan.unanswered
    assert not plan.abandoned


def test_what_is_queued_is_not_queued_again() -> None:
    assert not decide(snapshot(chunks(FOUND, queued=True))).reads


def test_what_does_not_pay_is_abandoned() -> None:
    plan = decide(snapshot(chunks(FOUND, FOUND), SLOW))
    assert not plan.reads
    assert plan.chunks == 0
    assert plan.abandoned == keys(0, 1)
    assert plan.verdicts == [Verdict(0, Decision.RECOMPUTE, 2, 0)]


def test_a_slow_second_tier_does_not_hold_up_what_a_fast_first_one_has() -> None:
    wanted = [*chunks(FOUND, FOUND), Chunk(key(2), FOUND, 1, BYTES)]
    plan = decide(snapshot(wanted, FAST, SLOW))
    assert plan.reads == keys(0, 1)
    assert plan.abandoned == keys(2)
    assert plan.verdicts == [Verdict(0, Decision.PART, 3, 2)]


def test_a_read_that_another_request_began_is_waited_for_while_it_pays() -> None:
    soon = chunks(READING, expected_s=0.001)
    late = chunks(READING, expected_s=1.0)
    assert decide(snapshot(soon)).chunks == 1
    assert decide(snapshot(late)).chunks == 0
    assert decide(snapshot(late)).verdicts == [Verdict(0, Decision.RECOMPUTE, 1, 0)]


def test_the_queue_and_an_overdue_read_come_first() -> None:
    assert decide(snapshot(chunks(FOUND))).reads
    assert not decide(snapshot(chunks(FOUND), replace(FAST, pending_bytes=10_000))).reads
    assert not decide(snapshot(chunks(FOUND), replace(FAST, overdue_s=0.1))).reads


def test_loading_while_others_are_computed_is_free() -> None:
    busy = replace(FAST, pending_bytes=10_000)
    assert decide(snapshot(chunks(FOUND), busy, backlog_tokens=200)).reads


def test_without_estimates_a_first_load_is_cold() -> None:
    for plan in (
        decide(snapshot(chunks(FOUND), NEW)),
        decide(snapshot(chunks(FOUND), SLOW, prefill_s=None)),
    ):
        assert plan.reads == keys(0)
        assert plan.verdicts == [Verdict(0, Decision.COLD, 1, 1)]


def test_chunks_that_a_worker_fills_are_waited_for_whatever_comes_after() -> None:
    assert decide(snapshot(chunks(PRESENT, ABSENT))).chunks is None


# --- overrides ------------------------------------------------------------------------------------


def test_min_tokens_replaces_what_is_learned() -> None:
    rules = FetchRules(TOKENS, min_tokens=33)
    assert not decide(snapshot(chunks(UNASKED, UNASKED), rules=rules)).probes
    assert decide(snapshot(chunks(UNASKED, UNASKED, UNASKED), SLOW, rules=rules)).probes
    assert not decide(snapshot(chunks(FOUND, FOUND), rules=rules)).reads
    assert decide(snapshot(chunks(FOUND, FOUND, FOUND), SLOW, rules=rules)).reads == keys(0, 1, 2)
    assert decide(snapshot(chunks(FOUND), SLOW, rules=rules, arrived=2)).reads == keys(0)
    assert decide(snapshot(chunks(FOUND), SLOW, rules=FetchRules(TOKENS, min_tokens=0))).reads


def test_min_tokens_explores_nothing() -> None:
    rules = FetchRules(TOKENS, min_tokens=1000)
    old = replace(SLOW, explore_chunks=4)
    assert decide(snapshot(chunks(UNASKED), old, rules=rules)).explore is None


def test_a_deadline_replaces_the_limit_that_is_learned() -> None:
    rules = FetchRules(TOKENS, deadline_s=3.0)
    assert decide(snapshot(chunks(UNASKED), rules=rules)).limit_s == 3.0


# --- how long it is waited ------------------------------------------------------------------------


def test_a_wait_is_limited_by_what_computing_takes() -> None:
    plan = decide(snapshot(chunks(*[UNASKED] * 10)))
    assert plan.limit_s == plan.compute_s == pytest.approx(10 * TOKENS * PREFILL_S)
    assert decide(snapshot(chunks(UNASKED), prefill_s=None)).limit_s == COLD_LIMIT_S
    assert decide(snapshot(chunks(FOUND), limit_s=1.0)).limit_s is None, "only a new wait's"


def test_patience() -> None:
    assert patience(None, None) == GRACE_S
    assert patience(0.001, None) == GRACE_S
    assert patience(None, 0.03) == 0.03
    assert patience(None, 30.0) == GRACE_S
    assert patience(0.001, 30.0) == GRACE_S
    assert patience(3.0, 30.0) == 6.0
    assert patience(0.001, 0.1) == pytest.approx(OVERRUN * 0.1)
    assert patience(0.08, 0.1) == 0.1


def test_patience_over_without_progress_or_time_ends_the_wait() -> None:
    going = snapshot(chunks(READING, expected_s=0.001), expired=True, progress=True, limit_s=1.0)
    assert not decide(going).leave
    assert decide(replace(going, progress=False)).leave
    assert decide(replace(going, elapsed_s=1.0)).leave
    assert decide(replace(going, chunks=chunks(READING, expected_s=1.0))).leave


def test_a_wait_that_goes_on_gives_up_what_no_longer_pays() -> None:
    wanted = [*chunks(READING, expected_s=0.001), Chunk(key(1), FOUND, 1, BYTES, queued=True)]
    slow = replace(SLOW, pending_bytes=BYTES)
    going = snapshot(wanted, FAST, slow, expired=True, progress=True, limit_s=1.0, compute_s=1.0)
    plan = decide(going)
    assert (plan.chunks, plan.abandoned) == (1, keys(1))
    assert plan.patience_s == GRACE_S


def test_without_an_estimate_of_computing_a_wait_goes_on_only_for_what_is_fast() -> None:
    def going(expected_s: float) -> Snapshot:
        return snapshot(
            chunks(READING, expected_s=expected_s),
            prefill_s=None,
            expired=True,
            progress=True,
            limit_s=COLD_LIMIT_S,
        )

    assert not decide(going(0.5 * TOKENS / 4000)).leave
    assert decide(going(2 * TOKENS / 4000)).leave


# --- exploring ------------------------------------------------------------------------------------


def test_a_tier_that_was_rejected_is_explored_when_its_estimate_is_old() -> None:
    old = replace(SLOW, explore_chunks=2)
    assert decide(snapshot(chunks(FOUND, FOUND, FOUND), old)).explore == (0, keys(0, 1))
    assert decide(snapshot(chunks(UNASKED), old)).explore == (0, keys(0))
    assert decide(snapshot(chunks(FOUND), SLOW)).explore is None
    assert decide(snapshot(chunks(FOUND), replace(FAST, explore_chunks=2))).explore is None


def test_an_exploring_wait_asks_and_reads_its_tier_only() -> None:
    plan = decide(snapshot(chunks(UNASKED), FAST, SLOW, explores=1))
    assert plan.probes == {1: keys(0)}
    assert decide(snapshot(chunks(FOUND, tier=1), FAST, SLOW, explores=1)).reads == keys(0)
    assert decide(snapshot(chunks(FOUND), FAST, SLOW, explores=1)).abandoned == keys(0)
    assert decide(snapshot(chunks(UNASKED, tier=1), SLOW, explores=0)).abandoned == keys(0)
    assert decide(snapshot(chunks(READING), SLOW, explores=0, expired=True)).leave
    assert EXPLORE_AFTER_S > 0


# --- arithmetic -----------------------------------------------------------------------------------


def test_loading_pays_from_the_number_at_which_it_is_faster() -> None:
    def least(tier: TierState, **more: Any) -> int | None:
        return loading_pays_from(snapshot([], tier, **more), 0, BYTES)

    tier = TierState(fixed_s=0.1, byte_s=2e-5)
    assert least(replace(tier, fixed_s=0.01)) == 1
    assert least(tier) == 10, "0.1 s over 0.8 * 16 ms - 2 ms"
    assert least(replace(tier, pending_bytes=5000)) == 19, "the queue is waited for too"
    assert least(replace(tier, pending_bytes=5000), backlog_tokens=10_000) == 1
    assert least(replace(tier, byte_s=1.0)) is None
    assert least(NEW, prefill_s=None) == 1


def test_unknown_times_count_as_none() -> None:
    assert worthwhile_chunks(snapshot([]), [None, None]) == 2
    assert worthwhile_chunks(snapshot([]), []) == 0
