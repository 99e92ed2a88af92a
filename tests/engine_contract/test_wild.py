"""Everything at once, under vLLM's own scheduler: outputs are right, nothing waits for ever, nothing leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine_contract.scenario import Traffic, random_failures, random_shape
from tests.engine_contract.seeds import seeds
from tests.engine_contract.wild import Wild, make_adapters, random_settings

REQUESTS = 18
MOST_STEPS = 8000


def run_seed(seed: int, adapters: list[str], **fixed: Any) -> Wild:
    """One engine's life; what is random is decided here, in this order."""
    rng = random.Random(seed)
    shape = random_shape(rng, lower_tier=False, **fixed)
    settings = random_settings(rng, shape)
    chance = rng.choice((0.0, 0.0, 0.1))
    driver = Wild(
        shape, seed, settings, adapters[: settings.adapters], fails=random_failures(rng, chance)
    )
    traffic = Traffic(rng, shape, min(220, (shape.num_blocks - 2) * shape.block - 40))
    aborts, resets, sleeps = rng.choice((0.0, 0.03)), rng.choice((0.0, 0.0, 0.02)), rng.choice((0.0, 0.0, 0.01))
    pace, speed = rng.choice((0.1, 0.4, 1.0)), rng.choice((0.2, 0.5, 1.0))
    added = asleep = 0

    def disturb() -> None:
        if driver.unfinished and rng.random() < aborts:
            driver.abort(rng.choice(driver.unfinished))

    while added < REQUESTS or driver.unfinished:
        if added < REQUESTS and rng.random() < pace and len(driver.unfinished) < 8:
            said = [
                [*driver.requests[r].prompt_token_ids, *driver.outputs[r]]
                for r in driver.outputs if driver.requests[r].prompt_token_ids is not None
            ]
            driver.add_any(f"r{added}", traffic.prompt(said), rng.randint(1, 24), traffic.options())
            added += 1
        disturb()
        if rng.random() < resets:
            driver.reset(running=rng.random() < 0.7)
        if not asleep and rng.random() < sleeps:
            driver.pause(rng.choice(("abort", "keep")))
            asleep = rng.randint(1, 30)
        elif asleep:
            asleep -= 1
            if asleep == 0:
                driver.resume()
        driver.release(0.05)
        driver.stack.work(speed)
        driver.step(disturb)
        assert driver.steps < MOST_STEPS, f"no end in sight: {driver.unfinished}"
    driver.resume()
    driver.settle(speed)
    return driver


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("seed", seeds(30))
def test_random(seed: int, adapters: list[str]) -> None:
    run_seed(seed, adapters).close()
