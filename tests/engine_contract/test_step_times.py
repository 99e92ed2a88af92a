"""What the scheduler's side learns of the time that steps take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.testing.manual import ManualClock
from kvstow.vllm.metadata import StepMeta, WorkerMeta
from kvstow.vllm.prefill import MAX_OPEN_STEPS, StepTimes, prefill_tokens
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape


class FakeEngine:
    """Stands in for the engine: keeps what it is told."""

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self.steps: list[tuple[int, float]] = []
        self.behind: list[int] = []

    def observe_step(self, prefill: int, seconds: float) -> None:
        self.steps.append((prefill, round(seconds, 6)))

    def set_backlog(self, tokens: int) -> None:
        self.behind.append(tokens)


def output(new: int = 0, decoding: int = 0, drafts: int = 0, more: int = 0) -> Any:
    """``new`` tokens of a new request, ``decoding`` requests of one token and ``drafts`` each, ``more`` prompt tokens
    of one of them."""
    return SimpleNamespace(
        total_num_scheduled_tokens=new + decoding * (1 + drafts) + more,
        scheduled_spec_decode_tokens={f"d{i}": [0] * drafts for i in range(decoding)}
        if drafts
        else {},
        scheduled_cached_reqs=SimpleNamespace(req_ids=[f"d{i}" for i in range(decoding)]),
    )


def times(learns: bool = True) -> tuple[StepTimes, FakeEngine, ManualClock]:
    clock, engine = ManualClock(), FakeEngine(learns)
    made: Any = StepTimes(engine, clock)  # type: ignore[arg-type]
    return made, engine, clock


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (output(new=100), 100),
        (output(decoding=5), 0),
        (output(decoding=5, drafts=3), 0),
        (output(100, 5, 3), 100),
        (output(decoding=2, more=99), 99),
        (output(), 0),
    ],
)
def test_prompt_tokens_of_a_step(step: Any, expected: int) -> None:
    assert prefill_tokens(step) == expected


def test_a_step_lasts_from_its_metadata_to_its_answer_and_pauses_are_no_steps() -> None:
    made, engine, clock = times()
    for _ in range(2):
        number = made.began(output(new=100))
        clock.advance(0.5)
        made.ended(number)
        clock.advance(60.0)
    assert engine.steps == [(100, 0.5), (100, 0.5)]


def test_with_asynchronous_scheduling_a_step_begins_when_the_one_before_ends() -> None:
    made, engine, clock = times()
    first = made.began(output(new=100))
    clock.advance(0.1)
    second = made.began(output(decoding=1))
    clock.advance(0.4)
    made.ended(first)
    third = made.began(output(new=7))
    clock.advance(0.2)
    made.ended(second)
    clock.advance(0.3)
    made.ended(third)
    assert engine.steps == [(100, 0.5), (0, 0.2), (7, 0.3)]


def test_a_step_without_an_answer_is_passed_over_and_nothing_grows() -> None:
    made, engine, clock = times()
    for _ in range(5 * MAX_OPEN_STEPS):
        number = made.began(output(new=10))
    clock.advance(1.0)
    made.ended(number - 1)
    made.ended(number - 1)
    made.ended(number + 100)
    assert engine.steps == [(10, 1.0)]
    assert not made._open


def test_steps_without_tokens_and_engines_without_tiers_are_not_timed() -> None:
    made, engine, _ = times()
    assert made.began(output()) == 0
    made, engine, _ = times(learns=False)
    assert made.began(output(new=5)) == 0
    made.admitted(100)
    assert not engine.steps
    assert not engine.behind


def test_the_backlog_is_what_was_admitted_and_not_computed() -> None:
    made, engine, _ = times()
    made.admitted(100)
    made.admitted(50)
    made.began(output(new=80))
    made.began(output(new=50, decoding=1))
    made.began(output(decoding=2))  # whatever is left was aborted or preempted
    assert engine.behind == [100, 150, 70, 20, 0]


def test_workers_give_the_number_back_and_ranks_agree() -> None:
    one, other = WorkerMeta(step=7), WorkerMeta(step=7)
    assert one.aggregate(other).step == 7
    assert StepMeta().step == WorkerMeta().step == 0


def test_the_engine_hears_of_every_step_of_a_real_run() -> None:
    sim = Sim(Shape(lower_tier=True, tp=2))
    heard: list[int] = []
    sim.stack.cache.observe_step = lambda tokens, seconds: heard.append(tokens)  # type: ignore[method-assign]
    sim.serve("a", prompt(48), max_tokens=3)
    assert heard == [48, 0, 0]
