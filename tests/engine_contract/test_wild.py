"""Everything at once, under vLLM's own scheduler: outputs are right, nothing waits for ever, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine_contract.scenario import Traffic, random_failures, random_shape
from tests.engine_contract.seeds import seeds
from tests.engine_contract.wild import Wild, make_adapters, random_settings

REQUESTS = 24
MOST_STEPS = 8000
BATCH = 15


def run_seed(seed: int, adapters: list[str], **fixed: Any) -> Wild:
    """One engine's life; what is random is decided here, in this order."""
    rng = random.Random(seed)
    little = {
        "pool_slots": rng.choice((4, 8, 16, 64)),
        "prefix_caching": rng.random() < 0.3,
        "blocks_per_chunk": rng.choice((1, 1, 2)),
    }
    shape = random_shape(rng, lower_tier=False, **{**little, **fixed})
    settings = random_settings(rng, shape)
    if (
        settings.drafts
    ):  # then vLLM takes a step's ends before it saves; EAGLE fills a last position a step late
        shape = replace(shape, defer_save=True, lookahead=rng.choice((0, 1)))
    chance = rng.choice((0.0, 0.0, 0.1))
    driver = Wild(
        shape, seed, settings, adapters[: settings.adapters], fails=random_failures(rng, chance)
    )
    traffic = Traffic(rng, shape, min(220, (shape.num_blocks - 2) * shape.block - 40))
    aborts, resets, sleeps = (
        rng.choice((0.0, 0.03)),
        rng.choice((0.0, 0.0, 0.02)),
        rng.choice((0.0, 0.0, 0.01)),
    )
    forgets = rng.choice((0.0, 0.05, 0.2))
    pace, speed = rng.choice((0.1, 0.4, 1.0)), rng.choice((0.2, 0.5, 1.0))
    added = asleep = 0

    def disturb() -> None:
        if driver.unfinished and rng.random() < aborts:
            driver.abort(rng.choice(driver.unfinished))

    while added < REQUESTS or driver.unfinished:
        if added < REQUESTS and rng.random() < pace and len(driver.unfinished) < 8:
            said = [
                [*driver.requests[r].prompt_token_ids, *driver.outputs[r]]
                for r in driver.outputs
                if driver.requests[r].prompt_token_ids is not None
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
        if rng.random() < forgets:
            driver.forget_the_pool()
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


@pytest.mark.parametrize("batch", seeds(2))
def test_random(batch: int, adapters: list[str]) -> None:
    loads = fetched = hung = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            driver = run_seed(seed, adapters)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loads += driver.stack.workers[0].device.loads
        fetched += sum(
            driver.stack.totals["counters"].get(f"loaded_chunks|t{i}", 0) for i in range(3)
        )
        hung += sum(executor.hung for executor in driver.hanging)
        driver.close()
    assert min(loads, fetched, hung) > 0, "a connector that does nothing would pass"
