"""What vllm-rbln's scheduler does besides vLLM's, in the simulated engine.

It may not take a hit after all, and it resumes a preempted request without a query.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape


def test_a_hit_that_a_sub_block_wins_is_dropped() -> None:
    """``update_state_after_alloc(..., 0)`` comes after the answer, with blocks that are not to be loaded."""
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(4 * sim.shape.chunk + 3)
    sim.serve("cold", tokens)
    sim.engine.rules.ignore_hit = 1.0
    sim.serve("sub-block", tokens, 3)
    assert (sim.loads(), sim.engine.loaded_tokens) == (0, 0)
    sim.engine.rules.ignore_hit = 0.0
    sim.serve("warm", tokens, 3)
    assert sim.engine.loaded_tokens == 4 * sim.shape.chunk
    sim.close()


def test_a_resumed_request_that_is_not_asked_about() -> None:
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(4 * sim.shape.chunk + 3)
    request = sim.add("a", tokens, max_tokens=6)
    for _ in range(3):
        sim.step(work=True)
    asked: list[str] = []
    ask = sim.engine._ask

    def without_query(of: Any, local: int) -> tuple[int, bool] | None:
        if of.num_preemptions:
            return 0, False
        asked.append(of.request_id)
        return ask(of, local)

    sim.engine._ask = without_query  # type: ignore[method-assign]
    sim.engine.preempt_now.add("a")
    sim.settle()
    assert request.is_finished()
    assert request.num_preemptions == 1
    assert asked == []
    assert sim.loads() == 0
    sim.serve("again", tokens, 2)
    assert sim.engine.loaded_tokens == 4 * sim.shape.chunk
    sim.close()
