"""Write-through: sealed and written behind everybody's back, within bounds, never losing a slot."""

from __future__ import annotations

import pytest

from kvstow.testing.faults import Fault, unavailable
from kvstow.testing.manual import ManualExecutor
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, Rig, hit, key, keys


def test_a_commit_reaches_every_tier_and_then_pins_nothing() -> None:
    rig = Rig(tiers=2)
    rig.put(1, 2)
    assert rig.engine.busy()
    assert rig.pool.leased == 2
    rig.settle()
    for tier in range(2):
        assert rig.below(1, 2, tier=tier) == [True, True]
    assert rig.stores[0].calls == rig.stores[1].calls == {"write": 2}
    rig.assert_idle()


def test_a_slow_tier_keeps_the_pin_and_does_not_hold_up_the_other() -> None:
    rig = Rig(tiers=2)
    rig.put(1)
    rig.run(only=[rig.sealer])
    rig.run(only=[rig.executors[1]])
    assert rig.below(1, tier=1) == [True]
    assert rig.pool.leased == 1
    rig.run(only=[rig.executors[0]])
    assert rig.pool.leased == 0


def test_pins_are_bounded_and_the_rest_stays_in_memory() -> None:
    rig = Rig(slots=8, max_pinned_share=0.25)
    rig.put(1, 2, 3)
    assert rig.pool.leased == 2
    assert rig.counter("refused_chunks", tier="t0", reason="pinned") == 1
    rig.settle()
    assert rig.below(1, 2, 3) == [True, True, False]
    assert rig.engine.lookup(keys(1, 2, 3)) == hit(3)
    rig.put(4)
    rig.settle()
    assert rig.below(4) == [True]


def test_a_full_sealer_refuses_for_every_tier() -> None:
    rig = Rig(tiers=2)
    rig.sealer.close(0)
    rig.put(1)
    assert rig.counter("refused_chunks", reason="queue_full") == 2
    rig.assert_idle()


def test_a_full_tier_refuses_for_itself() -> None:
    rig = Rig(tiers=2)
    rig.executors[0].close(0)
    rig.put(1)
    rig.settle()
    assert rig.below(1, tier=1) == [True]
    assert rig.counter("refused_chunks", tier="t0", reason="queue_full") == 1
    rig.assert_idle()


def test_no_usable_tier_means_no_seal() -> None:
    rig = Rig(limits=TierLimits(breaker_failures=1))
    rig.stores[0].faults = [unavailable()]
    rig.put(1)
    rig.settle()
    rig.put(2)
    assert rig.sealer.outstanding == 0
    assert rig.counter("refused_chunks", tier="t0", reason="unavailable") == 1
    rig.assert_idle()


def test_a_failed_seal_is_counted_and_written_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("parent too long")

    rig = Rig()
    monkeypatch.setattr("kvstow.frame.seal", fail)
    rig.put(1)
    rig.settle()
    assert rig.counter("failed_chunks", tier="t0", reason="seal") == 1
    assert rig.stores[0].calls == {}
    assert rig.engine.lookup(keys(1)) == hit(1)
    rig.assert_idle()


@pytest.mark.parametrize("progress", ["committed", "sealed", "written"])
def test_a_reset_drops_what_has_not_begun(progress: str) -> None:
    rig = Rig(slots=4)
    rig.put(1)
    if progress != "committed":
        rig.run(only=[rig.sealer])
    if progress == "written":
        rig.executors[0].run_all()
    rig.engine.reset()
    if progress == "sealed":
        assert rig.pool.free == 4
    rig.settle()
    assert rig.below(1) == [progress == "written"]
    rig.assert_idle()
    assert rig.pool.free == 4


def test_a_tier_that_hangs_pins_no_more_than_what_it_has_begun() -> None:
    rig = Rig(slots=8, tiers=2, limits=TierLimits(hung_after_s=5.0))
    leased: list[int] = []

    def hang() -> None:
        rig.run(only=[rig.executors[1]])
        leased.append(rig.pool.leased)
        rig.clock.advance(6)
        rig.engine.poll()
        leased.append(rig.pool.leased)
        rig.put(9)
        rig.run(only=[rig.sealer])
        rig.run(only=[rig.executors[1]])

    rig.put(1, 2, 3)
    rig.run(only=[rig.sealer])
    rig.stores[0].faults = [Fault("write", key(1), delay=hang)]
    rig.executors[0].run_next()
    assert leased == [3, 1]
    assert rig.below(1, 2, 3, 9, tier=1) == [True] * 4
    rig.settle()
    assert rig.below(1, 2, 3, 9, tier=0) == [True, False, False, False]
    assert rig.counter("refused_chunks", tier="t0", reason="unavailable") == 3
    rig.assert_idle()


def test_drain_waits_for_writes_and_gives_up_in_time() -> None:
    rig = Rig(tiers=2)
    rig.put(1, 2)
    assert rig.engine.drain(5.0)
    assert rig.below(1, 2, tier=1) == [True, True]
    rig = Rig()
    rig.executors[0] = rig.tiers[0].executor = ManualExecutor(rig.clock)  # nobody works
    rig.put(1)
    began = rig.clock.monotonic()
    assert not rig.engine.drain(5.0)
    assert rig.clock.monotonic() - began == pytest.approx(5.0)


def test_queued_bytes_are_bounded_per_tier() -> None:
    rig = Rig(limits=TierLimits(max_queued_bytes=FRAME_BYTES))
    rig.put(1, 2)
    rig.run(only=[rig.sealer])
    assert rig.counter("refused_chunks", tier="t0", reason="queue_full") == 1
    rig.settle()
    assert rig.below(1, 2) == [True, False]
    rig.assert_idle()
