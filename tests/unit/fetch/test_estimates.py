"""Estimates and the arithmetic of load or recompute; the decision itself is in tests/property/test_cost.py."""

from __future__ import annotations

from random import Random

import pytest

from kvstow.fetch.estimates import SLACK_S, WIN, Costs, Line, Mean


def line(*seen: tuple[float, float]) -> Line:
    made = Line()
    for amount, seconds in seen:
        made.observe(amount, seconds)
    return made


def test_nothing_is_known_at_first() -> None:
    costs = Costs(2, 16)
    assert not Line().known
    assert Line().seconds(5) == 0
    assert costs.prefill_s is None
    assert costs.load_s(1, 100) is None
    assert costs.compute_s(1) is None
    assert costs.worth(0, 10**12, 1)
    assert costs.pays_from(0, 100, 0) == 1


def test_one_size_alone_is_a_line_through_nothing() -> None:
    assert line((10, 5.0), (10, 5.0)).fixed_s == pytest.approx(0)
    assert line((10, 5.0), (10, 5.0)).seconds(20) == pytest.approx(10.0)


def test_two_sizes_tell_what_is_fixed_from_what_grows() -> None:
    found = line(*[(10, 6.0), (100, 15.0)] * 40)
    assert found.fixed_s == pytest.approx(5.0, rel=0.2)
    assert found.each_s == pytest.approx(0.1, rel=0.1)


def test_neither_part_is_ever_negative() -> None:
    assert line(*[(10, 9.0), (100, 3.0)] * 10).each_s == 0
    assert line(*[(10, 0.1), (100, 15.0)] * 10).fixed_s == 0


def test_an_outlier_moves_little_and_a_lasting_change_moves_all() -> None:
    steady = [(10, 1.0), (40, 4.0)] * 10
    assert line(*steady, (10, 1000.0)).seconds(40) < 3 * 4.0
    assert line(*steady, *[(10, 100.0), (40, 400.0)] * 8).seconds(40) > 200
    assert line(*steady, *[(10, 0.01)] * 5).seconds(40) < 0.4


def test_a_mean_forgets() -> None:
    mean = Mean()
    mean.observe(1.0)
    assert (mean.known, mean.seconds) == (True, 1.0)
    mean.observe(1000.0)
    assert mean.seconds < 2
    for _ in range(60):
        mean.observe(0.1)
    assert mean.seconds == pytest.approx(0.1, rel=0.1)


def test_what_a_step_costs_anyway_is_not_the_prompts() -> None:
    costs = Costs(0, 16)
    for _ in range(20):
        costs.stepped(0, 0.010)
        costs.stepped(100, 0.020)
    assert costs.prefill_s == pytest.approx(1e-4, rel=0.1)


def test_steps_shorter_than_those_of_decoding_do_not_make_computing_free() -> None:
    costs = Costs(0, 16)
    for _ in range(20):
        costs.stepped(2048, 0.2)
        costs.stepped(0, 0.02)
    for _ in range(3):
        costs.stepped(500, 0.015)
    assert costs.prefill_s == pytest.approx(1e-4, rel=0.3)


def test_what_a_step_costs_anyway_is_seen_without_decoding_too() -> None:
    costs = Costs(0, 16)
    for tokens in (100, 2000) * 20:
        costs.stepped(tokens, 0.010 + tokens * 1e-4)
    assert costs.prefill_s == pytest.approx(1e-4, rel=0.2)


def test_the_first_step_of_a_cold_engine_is_forgotten_soon() -> None:
    costs = Costs(0, 16)
    costs.stepped(512, 20.0)
    for _ in range(10):
        costs.stepped(512, 0.05)
    assert costs.prefill_s == pytest.approx(1e-4, rel=1.0)


def test_a_few_tokens_tell_nothing_yet_and_tails_of_hits_little() -> None:
    costs = Costs(0, 16)
    costs.stepped(37, 0.05)
    assert costs.prefill_s is None
    for _ in range(10):
        costs.stepped(2048, 0.2048)
    for _ in range(50):
        costs.stepped(4, 0.01)
    assert costs.prefill_s == pytest.approx(1e-4, rel=0.3)


def test_steps_without_time_are_no_steps() -> None:
    costs = Costs(0, 16)
    costs.stepped(1000, 0.0)
    assert costs.prefill_s is None


def known(*, min_tokens: int | None = None) -> Costs:
    """A chunk takes 16 ms to compute; 100 bytes take 2 ms to load, and 10 ms are fixed."""
    costs = Costs(1, 16, min_tokens=min_tokens)
    costs.stepped(1000, 1.0)
    for size in (100, 1000) * 60:
        costs.reads[0].observe(size, 0.010 + size * 2e-5)
    return costs


def test_loading_pays_from_the_number_at_which_it_is_faster() -> None:
    costs = known()
    least = costs.pays_from(0, 100, 0)
    assert least == 1
    costs.reads[0].fixed_s = 0.1
    assert costs.pays_from(0, 100, 0) == 10  # 0.1 s over 0.8 * 16 ms - 2 ms
    assert costs.worth(0, 1000, 10)
    assert not costs.worth(0, 900, 9)
    assert costs.pays_from(0, 100, 5000) in (19, 20), "the queue is to be waited for too"
    costs.backlog_tokens = 10_000
    assert costs.pays_from(0, 100, 5000) == 1, (
        "loading is done while the engine has others to compute"
    )
    costs.backlog_tokens = 0
    costs.reads[0].each_s = 1.0
    assert costs.pays_from(0, 100, 0) is None


def test_a_question_costs_too() -> None:
    costs = known()
    assert costs.worth(0, 100, 1)
    costs.probes[0].observe(0.1)
    assert not costs.worth(0, 100, 1)


def test_min_tokens_replaces_what_is_learned() -> None:
    costs = known(min_tokens=33)
    assert not costs.worth(0, 200, 2)
    assert costs.worth(0, 10**12, 3)
    assert costs.plan([0.0, 0.0]) == 0
    assert costs.plan([1e9] * 3) == 3
    assert costs.plan([1e9], had=2) == 1
    assert costs.plan([1e9], going_on=True) == 1
    assert known(min_tokens=0).plan([1e9]) == 1
    assert known(min_tokens=0).worth(0, 10**12, 1)


def test_patience() -> None:
    costs = known()
    assert costs.patience_s(None, None) == SLACK_S
    assert costs.patience_s(0.001, None) == SLACK_S
    assert costs.patience_s(None, 0.03) == 0.03
    assert costs.patience_s(None, 30.0) == SLACK_S
    assert costs.patience_s(0.001, 30.0) == SLACK_S
    assert costs.patience_s(3.0, 30.0) == 6.0
    assert costs.patience_s(0.001, 0.1) == 0.025
    assert costs.patience_s(0.08, 0.1) == 0.1
    assert 0 < WIN < 1


def test_noisy_tails_of_hits_do_not_make_computing_seem_free() -> None:
    """Nor thousands of them in a row: what they say of a token's time is mostly how long steps differ anyway."""
    costs, noise = Costs(1, 128), Random(1)
    for _ in range(20):
        costs.stepped(0, 0.02)
    for _ in range(5):
        costs.stepped(2048, 0.02 + 2048 * 1e-4)
    for _ in range(3000):
        costs.stepped(10, max(1e-4, 0.02 + 10e-4 + noise.gauss(0, 0.003)))
        costs.stepped(0, max(1e-4, 0.02 + noise.gauss(0, 0.003)))
    assert costs.prefill_s is not None
    assert 0.5e-4 < costs.prefill_s < 2e-4
