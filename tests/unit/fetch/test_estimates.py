"""What is learned from observations. The decisions are in test_decide.py."""

from __future__ import annotations

from random import Random

import pytest

from kvstow.fetch.estimates import Estimates, LinearEstimate, MovingAverage


def line(*seen: tuple[float, float]) -> LinearEstimate:
    made = LinearEstimate()
    for amount, seconds in seen:
        made.observe(amount, seconds)
    return made


def test_nothing_is_known_at_first() -> None:
    estimates = Estimates(2)
    assert not LinearEstimate().known
    assert LinearEstimate().seconds(5) == 0
    assert MovingAverage().seconds is None
    assert estimates.prefill_s is None
    assert not estimates.reads[1].known


def test_one_size_alone_is_a_line_through_nothing() -> None:
    assert line((10, 5.0), (10, 5.0)).fixed_s == pytest.approx(0)
    assert line((10, 5.0), (10, 5.0)).seconds(20) == pytest.approx(10.0)


def test_two_sizes_tell_what_is_fixed_from_what_grows() -> None:
    found = line(*[(10, 6.0), (100, 15.0)] * 40)
    assert found.fixed_s == pytest.approx(5.0, rel=0.2)
    assert found.unit_s == pytest.approx(0.1, rel=0.1)


def test_neither_part_is_ever_negative() -> None:
    assert line(*[(10, 9.0), (100, 3.0)] * 10).unit_s == 0
    assert line(*[(10, 0.1), (100, 15.0)] * 10).fixed_s == 0


def test_an_outlier_moves_little_and_a_lasting_change_moves_all() -> None:
    steady = [(10, 1.0), (40, 4.0)] * 10
    assert line(*steady, (10, 1000.0)).seconds(40) < 3 * 4.0
    assert line(*steady, *[(10, 100.0), (40, 400.0)] * 8).seconds(40) > 200
    assert line(*steady, *[(10, 0.01)] * 5).seconds(40) < 0.4


def test_a_mean_forgets() -> None:
    mean = MovingAverage()
    mean.observe(1.0)
    assert mean.seconds == 1.0
    mean.observe(1000.0)
    assert mean.seconds is not None
    assert mean.seconds < 2
    for _ in range(60):
        mean.observe(0.1)
    assert mean.seconds == pytest.approx(0.1, rel=0.1)


def test_what_a_step_costs_anyway_is_not_the_prompts() -> None:
    estimates = Estimates(0)
    for _ in range(20):
        estimates.observe_step(0, 0.010)
        estimates.observe_step(100, 0.020)
    assert estimates.prefill_s == pytest.approx(1e-4, rel=0.1)


def test_steps_shorter_than_those_of_decoding_do_not_make_computing_free() -> None:
    estimates = Estimates(0)
    for _ in range(20):
        estimates.observe_step(2048, 0.2)
        estimates.observe_step(0, 0.02)
    for _ in range(3):
        estimates.observe_step(500, 0.015)
    assert estimates.prefill_s == pytest.approx(1e-4, rel=0.3)


def test_what_a_step_costs_anyway_is_seen_without_decoding_too() -> None:
    estimates = Estimates(0)
    for tokens in (100, 2000) * 20:
        estimates.observe_step(tokens, 0.010 + tokens * 1e-4)
    assert estimates.prefill_s == pytest.approx(1e-4, rel=0.2)


def test_the_first_step_of_a_cold_engine_is_forgotten_soon() -> None:
    estimates = Estimates(0)
    estimates.observe_step(512, 20.0)
    for _ in range(10):
        estimates.observe_step(512, 0.05)
    assert estimates.prefill_s == pytest.approx(1e-4, rel=1.0)


def test_a_few_tokens_tell_nothing_yet_and_tails_of_hits_little() -> None:
    estimates = Estimates(0)
    estimates.observe_step(37, 0.05)
    assert estimates.prefill_s is None
    for _ in range(10):
        estimates.observe_step(2048, 0.2048)
    for _ in range(50):
        estimates.observe_step(4, 0.01)
    assert estimates.prefill_s == pytest.approx(1e-4, rel=0.3)


def test_steps_without_time_are_no_steps() -> None:
    estimates = Estimates(0)
    estimates.observe_step(1000, 0.0)
    assert estimates.prefill_s is None


def test_noisy_tails_of_hits_do_not_make_computing_seem_free() -> None:
    """Nor thousands of them in a row: what they say of a token's time is mostly how long steps differ anyway."""
    estimates = Estimates(1)
    noise = Random(1)
    for _ in range(20):
        estimates.observe_step(0, 0.02)
    for _ in range(5):
        estimates.observe_step(2048, 0.02 + 2048 * 1e-4)
    for _ in range(3000):
        estimates.observe_step(10, max(1e-4, 0.02 + 10e-4 + noise.gauss(0, 0.003)))
        estimates.observe_step(0, max(1e-4, 0.02 + noise.gauss(0, 0.003)))
    assert estimates.prefill_s is not None
    assert 0.5e-4 < estimates.prefill_s < 2e-4
