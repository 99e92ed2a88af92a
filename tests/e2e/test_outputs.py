"""Restored output equals recomputed output: real vLLM, tiny random models, float32, greedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import BLOCK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

Scenario = Callable[[str], Any]


def test_a14_every_length_cold_warm_and_after_a_reset_of_the_engines_cache(
    scenario: Scenario,
) -> None:
    seen = scenario("lengths")
    assert seen["different"] == []
    assert seen["restored"] == {str(n): n // BLOCK * BLOCK for n in range(BLOCK - 1, 3 * BLOCK + 2)}


def test_pages_come_back_byte_for_byte(scenario: Scenario) -> None:
    seen = scenario("lengths")
    assert seen["wrong_pages"] == []
    assert seen["pages_loaded"] > 100
    assert seen["pages_stored"] == seen["counters"]["stored_chunks|memory"]


def test_n1_counters_say_what_happened(scenario: Scenario) -> None:
    seen = scenario("lengths")
    counters = seen["counters"]
    restored_last_pass = sum(seen["restored"].values())
    assert counters["hit_tokens|memory"] >= restored_last_pass
    assert counters["hit_tokens|memory"] == counters["hit_chunks|memory"] * BLOCK
    assert counters["loaded_chunks|memory"] == counters["hit_chunks|memory"]
    assert counters["miss_chunks"] == counters["stored_chunks|memory"]


def test_a_request_may_opt_out(scenario: Scenario) -> None:
    assert scenario("lengths")["opt_outs"] == {
        "after_skip_store": 0,
        "skip_load": 0,
        "plain": 2 * BLOCK,
    }


def test_b10_reset_cache_hides_everything_and_later_stores_are_found(scenario: Scenario) -> None:
    assert scenario("lengths")["reset"] == {"after": 0, "again": 2 * BLOCK}


def test_a6_pressure_never_changes_an_output(scenario: Scenario) -> None:
    seen = scenario("pressure")
    assert seen["different"] == [[]] * 5
    assert seen["wrong_pages"] == []
    assert seen["leased"] == 0
    assert seen["pages_loaded"] > 0, "nothing was restored: this test shows nothing"
    assert seen["counters"]["evicted_chunks|memory"] > 0, (
        "nothing was evicted: there was no pressure"
    )


def test_a16_latents_on_a_cpu_are_refused_as_vllm_restores_no_prefix_of_them(
    scenario: Scenario,
) -> None:
    assert "restored prefix" in scenario("mla")["refused"]


def test_sliding_windows_through_the_one_group_fallback(scenario: Scenario) -> None:
    seen = scenario("gemma3")
    assert seen["different"] == []
    assert seen["wrong_pages"] == []
    assert all(tokens > 0 for tokens in seen["restored"].values())


def test_a_lossy_tier_gives_back_what_is_near_and_what_is_computed_on_it_is_not_kept(
    scenario: Scenario,
) -> None:
    seen = scenario("gemma3")["lossy"]
    computed, restored = seen["computed"], seen["restored"]
    assert restored["cached"] == 5 * BLOCK
    assert seen["continued"]["cached"] == 5 * BLOCK
    assert seen["continued"]["files"] == restored["files"] == seen["files"], (
        "what follows lossy KV was stored"
    )
    assert seen["exact"]["cached"] == 0
    assert seen["exact"]["tokens"] == computed["tokens"]
    assert seen["stored_bytes"] < seen["raw_bytes"]
    astray = abs(computed["log_p"][0] - restored["log_p"][0])
    same = sum(a == b for a, b in zip(computed["tokens"], restored["tokens"], strict=True))
    print(
        f"quantized: {same} of {len(computed['tokens'])} tokens as computed, the first's log p {astray:.4f} off"
    )
    assert astray < 1.0


def test_tensor_parallel_ranks_share_one_object_a_chunk(scenario: Scenario) -> None:
    seen = scenario("tensor_parallel")
    assert seen["different"] == []
    assert seen["restored"] == [BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert seen["objects"] == seen["counters"]["stored_chunks|memory"] == 6


def test_generated_chunks_are_restored_in_the_next_turn(scenario: Scenario) -> None:
    seen = scenario("pressure")
    assert seen["second_turn"]["restored"] == 3 * BLOCK
    assert seen["second_turn"]["warm"] == seen["second_turn"]["cold"]
    assert seen["wrong_pages_then"] == []
