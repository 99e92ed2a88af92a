"""Which requests compute on lossy KV, from what a scheduler's output says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstow.vllm.requests import NEVER, Rules, Tracked
from kvstow.vllm.taint import Taint

RULES = Rules(block_tokens=16, hash_tokens=16, chunk_tokens=32, save_decode=False, lookahead=0)


def request() -> Tracked:
    return Tracked(SimpleNamespace(block_hashes=[], num_prompt_tokens=0), RULES, None, True, True)  # type: ignore[arg-type]


def output(
    new: dict[str, tuple[list[int], int]], cached: dict[str, Any] | None = None, resumed: str = ""
) -> Any:
    """``new``: blocks and computed tokens; ``cached``: new blocks or None, and computed tokens."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=(blocks,), num_computed_tokens=n)
            for r, (blocks, n) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed.split()),
            new_block_ids=[None if b is None else (b,) for b, _ in cached.values()],
            num_computed_tokens=[n for _, n in cached.values()],
        ),
    )


def test_what_is_computed_on_a_lossy_block_is_tainted_and_taints() -> None:
    taint, tracked = Taint(RULES), {name: request() for name in "abcd"}
    taint.loaded([1, 2], lossy=False)
    taint.loaded([3, 4], lossy=True)
    taint.step(output({"a": ([1, 2, 3, 4, 5, 6], 64)}), tracked)
    assert tracked["a"].exact_chunks == 1
    taint.step(output({}, {"a": ([7], 96)}), tracked)
    taint.step(output({"b": ([7, 8], 16), "c": ([1, 2, 9, 10], 32), "d": ([10, 11], 16)}), tracked)
    assert [tracked[name].exact_chunks for name in "bcd"] == [0, NEVER, NEVER]


def test_a_block_that_somebody_else_fills_is_as_its_filler() -> None:
    taint, tracked = Taint(RULES), {name: request() for name in "ab"}
    taint.loaded([1, 2], lossy=True)
    taint.step(output({"a": ([1, 2], 0)}), tracked)
    assert tracked["a"].exact_chunks == NEVER
    taint.loaded([3], lossy=True)
    taint.loaded([3], lossy=False)
    taint.step(output({"b": ([1, 2, 3], 48)}), tracked)
    assert tracked["b"].exact_chunks == NEVER


def test_within_a_step_in_any_order() -> None:
    """b got what a computes, and c, which resumes, what b computes."""
    for names in ("abc", "cba", "bca"):
        taint, tracked = Taint(RULES), {name: request() for name in "abc"}
        taint.loaded([1], lossy=True)
        news = {"a": ([1, 2], 16), "b": ([2, 3], 16)}
        new = {name: news[name] for name in names if name in news}
        taint.step(output(new, {"c": ([3, 4], 16)}, resumed="c"), tracked)
        assert [tracked[name].exact_chunks for name in "abc"] == [0, 0, 0]


def test_a_request_that_starts_again_is_judged_anew() -> None:
    taint, tracked = Taint(RULES), {"a": request()}
    taint.loaded([1, 2], lossy=True)
    taint.step(output({"a": ([1, 2, 3], 32)}), tracked)
    assert tracked["a"].exact_chunks == 0
    taint.step(output({}, {"a": ([4, 5, 6], 0)}, resumed="a"), tracked)
    assert tracked["a"].exact_chunks == NEVER
    taint.step(output({}, {"a": (None, 48)}), tracked)
    assert tracked["a"].exact_chunks == NEVER


def test_a_hit_that_ends_inside_a_block_keeps_its_taint() -> None:
    """All was restored, and the last token is computed again for its logits."""
    taint, tracked = Taint(RULES), {name: request() for name in "ab"}
    taint.loaded([1, 2], lossy=True)
    taint.step(output({"a": ([1, 2], 31)}), tracked)
    assert tracked["a"].exact_chunks == 0
    taint.step(output({"b": ([2, 3], 16)}), tracked)
    assert tracked["b"].exact_chunks == 0


def test_what_nobody_tracks_counts_as_tainted() -> None:
    taint, tracked = Taint(RULES), {name: request() for name in "ab"}
    taint.step(output({"x": ([1, 2], 0)}, {"y": ([3], 0)}), tracked)
    taint.step(output({"a": ([2, 4], 16), "b": ([3, 5], 16)}), tracked)
    assert [tracked[name].exact_chunks for name in "ab"] == [0, 0]
