"""NVMe that stops answering: who asked first waits, none after.

Once it answers, all is found again.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from kvstow.direct.pipeline import BACKGROUND_PAUSE_S, HUNG_S
from kvstow.testing.manual import ManualExecutor
from tests.engine_contract.direct import opener
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape


class Drives(Sim):
    """A drive a rank, each of which can hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **shape: Any) -> None:
        self.drives: list[ManualExecutor] = []

        def open_direct(*args: Any) -> Any:
            device = opener(self.stack.clock, self.drives, [], random.Random(1), 0.0)(*args)
            self.stack.background.append(self.drives[-1])
            return device

        monkeypatch.setattr("kvstow.vllm.worker.open_direct", open_direct)
        super().__init__(Shape(direct_areas=4, prefix_caching=False, num_blocks=64, **shape))

    def hang(self, rank: int) -> None:
        self.stack.background.remove(self.drives[rank])

    def heal(self, rank: int) -> None:
        self.stack.background.append(self.drives[rank])

    def state(self) -> float:
        self.stack.counter("hit_tokens")
        state: float = self.stack.totals["gauges"]["tier_state|direct"]
        return state


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_only_who_asked_first_waits_for_nvme_that_hangs(
    tp: int, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvstow")
    sim = Drives(monkeypatch, tp=tp)
    first, second = prompt(50, seed=1), prompt(50, seed=2)
    sim.serve("a", first)
    stored = sim.serve("b", second)
    sim.serve("c", first)
    assert (sim.loads(), sim.held(stored), sim.state()) == (1, 3, 0)

    sim.hang(rank)
    sim.add("d", first)
    for _ in range(5):
        sim.step(work=True)
    assert sim.engine.has_requests(), "it waits"
    sim.stack.clock.advance(HUNG_S + 1)
    sim.settle()
    assert (sim.loads(), sim.state()) == (2, 2)

    began_s, stores = sim.stack.clock.monotonic(), sim.stores()
    for number in range(3):
        sim.serve(f"e{number}", second)
        sim.serve(f"f{number}", prompt(50, seed=10 + number))
    assert (sim.loads(), sim.stores()) == (2, stores), "it is asked for nothing"
    assert sim.stack.clock.monotonic() - began_s < 1.0
    assert sim.held(stored) == 3, "what was stored is not given up"

    sim.heal(rank)
    sim.stack.clock.advance(BACKGROUND_PAUSE_S)
    sim.serve("g", prompt(50, seed=20))
    sim.serve("h", second)
    assert (sim.loads(), sim.state()) == (3, 0)
    sim.serve("i", prompt(50, seed=21))
    assert sim.stores() > stores
    said = [record.message for record in caplog.records if "Tier direct" in record.message]
    assert said == ["Tier direct is bypassed: NVMe does not answer", "Tier direct is in use again"]
    sim.close()


def test_without_direct_storage_there_is_no_state_of_it() -> None:
    sim = Sim()
    sim.serve("a", prompt(50))
    sim.stack.counter("hit_tokens")
    assert "tier_state|direct" not in sim.stack.totals["gauges"]
    sim.close()
