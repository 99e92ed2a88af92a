from __future__ import annotations

import logging

import pytest

from kvstow import frame
from kvstow.errors import StoreRefused
from kvstow.pool import Lease
from kvstow.store.breaker import BreakerState
from kvstow.testing.faults import Fault, unavailable
from kvstow.tier import Tier, TierLimits
from tests.unit.rig import FRAME_BYTES, LAYOUT, TOKENS, Rig, assert_bytes, fill, key, keys


def sealed(rig: Rig, i: int) -> Lease:
    lease = rig.pool.reserve()
    assert lease is not None
    fill(lease, key(i))
    frame.seal(lease.view(), key(i), LAYOUT.groups[0], TOKENS, b"", rig.clock.wall())
    return lease


def write(rig: Rig, i: int, ended: list[bool] | None = None) -> bool:
    ended = [] if ended is None else ended
    return rig.tiers[0].write(key(i), sealed(rig, i), ended.append) is not None


def work(rig: Rig) -> Tier:
    rig.executors[0].run_all()
    rig.tiers[0].poll()
    return rig.tiers[0]


def test_what_is_written_is_held_read_back_and_counted() -> None:
    rig = Rig()
    tier, ended, good = rig.tiers[0], [], []  # type: ignore[var-annotated]
    assert write(rig, 1, ended)
    assert rig.gauge("queued_bytes|t0") == FRAME_BYTES
    assert not tier.holds(key(1))
    work(rig)
    assert ended == [True]
    assert tier.holds(key(1))
    assert rig.gauge("queued_bytes|t0") == 0
    lease = rig.pool.reserve()
    assert lease is not None
    tier.read([(key(1), lease)], good.extend)
    work(rig)
    assert good == [True]
    assert_bytes(lease, key(1))
    assert rig.counter("stored_bytes", tier="t0") == rig.counter("loaded_bytes", tier="t0") == FRAME_BYTES
    assert rig.counter("stored_chunks", tier="t0") == rig.counter("loaded_chunks", tier="t0") == 1


def test_reads_tell_whole_missing_and_corrupt_apart_and_delete_the_corrupt() -> None:
    rig = Rig(slots=10)
    tier, good = rig.tiers[0], []  # type: ignore[var-annotated]
    for i in (1, 3, 4, 5):
        assert write(rig, i)
    work(rig)
    rig.stores[0].faults = [
        Fault("read", key(3), flip_at=5000),
        Fault("read", key(4), short_by=4096),
        Fault("read", key(5), flip_at=100),
    ]
    leases = [rig.pool.reserve() for _ in range(5)]
    tier.read([(k, lease) for k, lease in zip(keys(1, 2, 3, 4, 5), leases, strict=True) if lease], good.extend)
    work(rig)
    assert good == [True, False, False, False, False]
    assert rig.below(1, 2, 3, 4, 5) == [True, False, False, False, False]
    assert [tier.holds(k) for k in keys(1, 2, 3, 4, 5)] == [True, False, False, False, False]
    assert rig.counter("corrupt_chunks", tier="t0") == 3


def test_another_keys_frame_is_corrupt() -> None:
    rig = Rig()
    good: list[bool] = []
    foreign = sealed(rig, 2)
    rig.inners[0].write([(key(1), [foreign.view()])])
    lease = rig.pool.reserve()
    assert lease is not None
    rig.tiers[0].read([(key(1), lease)], good.extend)
    work(rig)
    assert good == [False]
    assert rig.below(1) == [False]


def test_a_value_too_long_for_the_slot_is_corrupt() -> None:
    rig = Rig()
    good: list[bool] = []
    rig.inners[0].write([(key(1), [memoryview(bytes(FRAME_BYTES + 1))])])
    lease = rig.pool.reserve()
    assert lease is not None
    rig.tiers[0].read([(key(1), lease)], good.extend)
    work(rig)
    assert good == [False]
    assert rig.below(1) == [False]


def test_probes_learn_and_unlearn() -> None:
    rig = Rig()
    found: list[bool] = []
    write(rig, 1)
    tier = work(rig)
    tier.probe(keys(1, 2), found.extend)
    work(rig)
    assert found == [True, False]
    rig.inners[0].delete(keys(1))
    tier.probe(keys(1), found.extend)
    work(rig)
    assert found == [True, False, False]
    assert not tier.holds(key(1))


@pytest.mark.parametrize(
    ("error", "reason"), [(None, "unavailable"), (StoreRefused("no"), "refused"), (OSError(), "error")]
)
def test_failures_are_misses_with_a_reason(error: Exception | None, reason: str) -> None:
    rig = Rig()
    tier, heard, wrote = rig.tiers[0], [], []  # type: ignore[var-annotated]
    rig.stores[0].faults = [unavailable() if error is None else Fault(error=error)]
    tier.probe(keys(1, 2), heard.extend)
    lease = rig.pool.reserve()
    assert lease is not None
    tier.read([(key(1), lease)], heard.extend)
    write(rig, 3, wrote)
    work(rig)
    assert heard == [False, False, False]
    assert wrote == [False]
    assert not tier.holds(key(3))
    assert rig.counter("failed_chunks", tier="t0", reason=reason) == 4
    assert not tier.busy()


def test_writes_are_bounded_in_bytes_and_number() -> None:
    rig = Rig(limits=TierLimits(max_queued_bytes=2 * FRAME_BYTES))
    assert [write(rig, i) for i in range(3)] == [True, True, False]
    work(rig)
    assert write(rig, 3)
    rig = Rig(limits=TierLimits(max_queued_writes=1))
    assert [write(rig, i) for i in range(2)] == [True, False]
    assert rig.counter("refused_chunks", tier="t0", reason="queue_full") == 1


def test_reads_are_bounded_in_bytes_but_one_always_goes() -> None:
    rig = Rig(limits=TierLimits(max_read_bytes=2 * FRAME_BYTES, read_batch_bytes=1))
    tier = rig.tiers[0]
    assert (tier.room(0), tier.batch(0)) == (2, 1)
    lease = rig.pool.reserve()
    assert lease is not None
    tier.read([(key(1), lease)], lambda _: None)
    assert tier.room(0) == 1
    work(rig)
    assert tier.room(0) == 2
    assert Rig(limits=TierLimits(max_read_bytes=1)).tiers[0].room(0) == 1


def test_a_cancelled_call_never_runs_and_gives_its_room_back() -> None:
    rig = Rig()
    ended: list[bool] = []
    call = rig.tiers[0].write(key(1), sealed(rig, 1), ended.append)
    assert call is not None
    assert call.cancel()
    assert not call.cancel()
    assert rig.gauge("queued_bytes|t0") == 0
    work(rig)
    assert ended == []
    assert "write" not in rig.stores[0].calls
    other = rig.tiers[0].write(key(2), sealed(rig, 2), ended.append)
    rig.executors[0].run_all()
    assert other is not None
    assert not other.cancel()
    work(rig)
    assert ended == [True]


def test_what_is_known_is_bounded_and_forgets_the_oldest() -> None:
    rig = Rig(limits=TierLimits(known_keys=2))
    for i in (1, 2):
        write(rig, i)
    tier = work(rig)
    tier.probe(keys(1), lambda _: None)
    work(rig)
    write(rig, 3)
    work(rig)
    assert [tier.holds(k) for k in keys(1, 2, 3)] == [True, False, True]


def test_a_hung_call_puts_the_tier_out_of_use_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(limits=TierLimits(hung_after_s=10.0))
    tier = rig.tiers[0]
    states: list[BreakerState] = []

    def hang() -> None:
        for _ in range(3):
            rig.clock.advance(4)
            tier.poll()
            states.append(tier.state)

    rig.stores[0].faults = [Fault("contains", delay=hang)]
    tier.probe(keys(1), lambda _: None)
    rig.clock.advance(60)  # in the queue it does not hang
    tier.poll()
    assert tier.usable
    with caplog.at_level(logging.WARNING, "kvstow"):
        rig.executors[0].run_all()
    assert states == [BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN]
    assert not tier.usable
    assert rig.gauge("tier_state|t0") == 2
    assert tier.write(key(2), sealed(rig, 2), lambda _: None) is None
    assert rig.counter("refused_chunks", tier="t0", reason="unavailable") == 1
    tier.poll()
    assert tier.usable
    assert rig.gauge("tier_state|t0") == 0
    assert [r.getMessage() for r in caplog.records] == ["Tier t0 is bypassed: a call hangs", "Tier t0 is in use again"]


def test_the_breaker_is_shown_once_a_change(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(limits=TierLimits(breaker_failures=2, breaker_open_s=10.0))
    tier = rig.tiers[0]
    rig.stores[0].faults = [unavailable()]
    with caplog.at_level(logging.WARNING, "kvstow"):
        for _ in range(2):
            tier.probe(keys(1), lambda _: None)
            work(rig)
        for _ in range(5):
            tier.poll()
    assert rig.gauge("tier_state|t0") == 2
    with caplog.at_level(logging.WARNING, "kvstow"):
        for faults in ([unavailable()], []):
            rig.clock.advance(10)
            tier.poll()
            assert rig.gauge("tier_state|t0") == 1
            rig.stores[0].faults = list(faults)
            tier.probe(keys(1), lambda _: None)
            work(rig)
    assert rig.gauge("tier_state|t0") == 0
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Tier t0 is bypassed: its calls fail", "Tier t0 is in use again"]


def test_busy_ends_without_progress() -> None:
    rig = Rig(limits=TierLimits(work_deadline_s=30.0))
    tier = rig.tiers[0]
    for i in range(2):
        write(rig, i)
    rig.clock.advance(20)
    assert tier.busy()
    rig.executors[0].run_next()
    tier.poll()
    rig.clock.advance(20)
    assert tier.busy()
    rig.clock.advance(10)
    assert not tier.busy()


def test_an_integrity_key_refuses_what_is_not_keyed_with_it() -> None:
    rig = Rig()
    good: list[bool] = []
    write(rig, 1)
    work(rig)
    keyed = Tier(
        "k",
        rig.inners[0],
        rig.executors[0],
        layout=LAYOUT,
        clock=rig.clock,
        metrics=rig.metrics,
        integrity_key=b"s" * 32,
    )
    lease = rig.pool.reserve()
    assert lease is not None
    keyed.read([(key(1), lease)], good.extend)
    rig.executors[0].run_all()
    keyed.poll()
    assert good == [False]


def test_corrupt_values_are_set_aside_as_the_tier_was_told_and_those_found_elsewhere_counted() -> None:
    rig = Rig(slots=4, tiers=1)
    [tier] = rig.tiers
    aside: list[object] = []
    tier._set_aside = aside.extend
    elsewhere = iter([2])
    tier._take_corrupt = lambda: next(elsewhere, 0)
    rig.inners[0].write([(key(1), [memoryview(b"not a frame")])])
    rig.fetch("a", 1)
    rig.settle()
    assert aside == [key(1)]
    assert rig.below(1) == [True], "set aside is not deleted"
    tier.poll()
    taken = rig.metrics.take() or {}
    assert taken["counters"]["corrupt_chunks|t0"] == 3
