from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import pytest

from kvstow import frame
from kvstow.backends.base import REJECTED, Buffer, Outcome, StoreReport
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.pool.pool import Lease
from kvstow.testing.faults import Fault, unavailable
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier, TierLimits
from kvstow.tiers.breaker import BreakerState
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
    assert (
        rig.counter("stored_bytes", tier="t0")
        == rig.counter("loaded_bytes", tier="t0")
        == FRAME_BYTES
    )
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
    tier.read(
        [(k, lease) for k, lease in zip(keys(1, 2, 3, 4, 5), leases, strict=True) if lease],
        good.extend,
    )
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
    ("error", "reason"),
    [(None, "unavailable"), (StoreRefused("no"), "refused"), (OSError(), "error")],
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


def writes_taking(rig: Rig, seconds: float) -> None:
    rig.stores[0].faults = [Fault("write", delay=lambda: rig.clock.advance(seconds))]


def taken(rig: Rig, chunks: int) -> int:
    """How many of ``chunks`` writes at once the tier takes; then they are done."""
    accepted = sum(write(rig, i) for i in range(chunks))
    work(rig)
    rig.inners[0].delete(keys(*range(chunks)))
    return accepted


def test_what_is_queued_is_bounded_in_seconds_from_the_first_write_on() -> None:
    limits = TierLimits(max_queued_s=10.0, assumed_write_bytes_s=FRAME_BYTES / 5.0)
    rig = Rig(slots=40, limits=limits)
    assert taken(rig, 8) == 2, "assumed: 5 s a chunk"
    assert rig.counter("refused_chunks", tier="t0", reason="queue_slow") == 6
    assert rig.counter("refused_chunks", tier="t0", reason="queue_full") == 0


def test_the_bound_in_seconds_follows_the_speed_of_the_writes_that_ended() -> None:
    rig = Rig(
        slots=2000, limits=TierLimits(max_queued_s=10.1, assumed_write_bytes_s=FRAME_BYTES / 5.0)
    )
    writes_taking(rig, 0.5)
    for _ in range(100):
        taken(rig, 1)
    assert taken(rig, 40) == 20, "10 s of 0.5 s each"
    writes_taking(rig, 2.0)
    for _ in range(100):
        taken(rig, 1)
    assert taken(rig, 40) == 5


def test_writes_that_run_at_once_count_once() -> None:
    """Two threads write a chunk each in 2 s: that is one a second."""
    rig = Rig(slots=2000, limits=TierLimits(max_queued_s=10.1, assumed_write_bytes_s=FRAME_BYTES))
    executor = rig.executors[0]

    def beside() -> None:
        rig.stores[0].faults = [Fault("write", delay=lambda: rig.clock.advance(2.0))]
        executor.run_next()  # begins and ends while the first is still at it

    for _ in range(100):
        write(rig, 1)
        write(rig, 2)
        rig.stores[0].faults = [Fault("write", delay=beside)]
        work(rig)
        rig.inners[0].delete(keys(1, 2))
    assert taken(rig, 40) == 10


def test_an_empty_queue_takes_a_write_however_slow_the_tier_was() -> None:
    rig = Rig(
        slots=500,
        limits=TierLimits(max_queued_s=10.0, hung_after_s=1e6, assumed_write_bytes_s=FRAME_BYTES),
    )
    writes_taking(rig, 3600.0)
    assert taken(rig, 8) == 8
    assert taken(rig, 8) == 1, "or it would never be known that the tier is fast again"
    writes_taking(rig, 0.01)
    for _ in range(300):
        taken(rig, 1)
    assert taken(rig, 8) == 8


def test_a_failed_or_rejected_write_says_nothing_of_the_speed() -> None:
    rig = Rig(
        slots=500,
        limits=TierLimits(assumed_write_bytes_s=FRAME_BYTES / 5.0, breaker_failures=10**6),
    )
    rig.inners[0].write([(key(1), [memoryview(b"there already")])])
    for _ in range(100):
        write(rig, 1)
        work(rig)
    rig.stores[0].faults = [unavailable()]
    for _ in range(100):
        write(rig, 2)
        work(rig)
    rig.stores[0].faults = []
    assert taken(rig, 8) == 2


class Choosy(MemoryStore):
    """Rejects every key the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        new = [bytes(key) for key, _ in items if bytes(key) not in self.seen]
        self.seen.update(new)
        return [REJECTED] * len(items) if new else super().write(items)


def test_a_key_that_was_not_admitted_is_not_held_and_one_that_was_there_is() -> None:
    rig = Rig(inners=[Choosy()])
    tier, ended = rig.tiers[0], []  # type: ignore[var-annotated]
    for _ in range(3):
        write(rig, 1, ended)
        work(rig)
    assert ended == [False, True, True]
    assert rig.counter("refused_chunks", tier="t0", reason="rejected") == 2
    assert rig.counter("stored_chunks", tier="t0") == 1
    assert tier.holds(key(1))
    rig.stores[0].calls.clear()
    write(rig, 2)
    work(rig)
    assert not tier.holds(key(2))
    assert rig.stores[0].calls == {"write": 1, "contains": 1}
    write(rig, 2)
    work(rig)
    assert tier.holds(key(2))
    assert rig.stores[0].calls == {"write": 2, "contains": 1}, "what was stored is not asked for"


def test_background_work_that_failed_is_counted() -> None:
    rig = Rig()
    failures = iter([0, 2, 0])
    rig.tiers[0]._store.report = lambda: StoreReport(maintenance_failures=next(failures))
    for _ in range(3):
        rig.tiers[0].poll()
    assert rig.counter("maintenance_failures", tier="t0") == 2


def test_directories_out_of_use_are_shown_once_a_change() -> None:
    rig = Rig()
    down = iter([0, 0, 1, 1, 0])
    shown = []
    rig.tiers[0]._store.report = lambda: StoreReport(paths_down=next(down))
    for _ in range(5):
        rig.tiers[0].poll()
        shown.append(((rig.metrics.take() or {}).get("gauges") or {}).get("tier_paths_down|t0"))
    assert shown == [0, None, 1, None, 0]


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


def test_a_hung_call_puts_the_tier_out_of_use_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    assert [r.getMessage() for r in caplog.records] == [
        "Tier t0 is bypassed: a call hangs",
        "Tier t0 is in use again",
    ]


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
    assert said == [
        "Tier t0: a look-up failed: injected (more failures of this kind are counted, not logged)",
        "Tier t0 is bypassed: its calls fail: injected",
        "Tier t0 is in use again",
    ]


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


def test_corrupt_values_are_set_aside_as_the_tier_was_told_and_those_found_elsewhere_counted() -> (
    None
):
    rig = Rig(slots=4, tiers=1)
    [tier] = rig.tiers
    aside: list[object] = []
    tier._store.set_aside = aside.extend
    elsewhere = iter([2])
    tier._store.report = lambda: StoreReport(corrupt=next(elsewhere, 0))
    rig.inners[0].write([(key(1), [memoryview(b"not a frame")])])
    rig.fetch("a", 1)
    rig.settle()
    assert aside == [key(1)]
    assert rig.below(1) == [True], "set aside is not deleted"
    tier.poll()
    taken = rig.metrics.take() or {}
    assert taken["counters"]["corrupt_chunks|t0"] == 3


def prompt_of_three(rig: Rig, first: int) -> None:
    """Look three chunks up, compute them and store them."""
    numbers = range(first, first + 3)
    rig.fetch(f"r{first}", *numbers)
    rig.settle()
    rig.engine.forget(f"r{first}")
    rig.put(*numbers)
    rig.settle()


def test_a_tier_that_refuses_every_write_is_not_written_and_still_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(slots=16, limits=TierLimits(breaker_failures=5, breaker_open_s=10.0))
    tier = rig.tiers[0]
    rig.put(1)
    rig.settle()
    rig.stores[0].faults = [unavailable("write")]
    with caplog.at_level(logging.WARNING, "kvstow"):
        for first in (100, 200):
            prompt_of_three(rig, first)
    assert rig.gauge("tier_state|t0") == 2
    assert (tier.usable, tier.writable) == (True, False)
    rig.engine.reset()
    rig.fetch("again", 1)
    rig.settle()
    assert rig.fetch("again", 1).chunks == 1, "what can be read is read"
    asked = rig.stores[0].calls["write"]
    with caplog.at_level(logging.WARNING, "kvstow"):
        prompt_of_three(rig, 300)
    assert rig.stores[0].calls["write"] == asked
    assert rig.gauge("tier_state|t0") == 2, "a read or a look-up says nothing of writes"
    rig.stores[0].faults = []
    rig.clock.advance(10)
    with caplog.at_level(logging.WARNING, "kvstow"):
        prompt_of_three(rig, 400)
    assert rig.gauge("tier_state|t0") == 0
    assert tier.writable
    assert [r.getMessage() for r in caplog.records] == [
        "Tier t0: a write failed: injected (more failures of this kind are counted, not logged)",
        "Tier t0 is not written, it is still read: its writes fail: injected",
        "Tier t0 is written again",
    ]


def test_a_tier_whose_reads_fail_is_bypassed_however_often_it_is_looked_at() -> None:
    rig = Rig(slots=16, limits=TierLimits(breaker_failures=3))
    rig.put(*range(10))
    rig.settle()
    rig.engine.reset()
    rig.stores[0].faults = [unavailable("read")]
    for i in range(3):
        rig.fetch(f"r{i}", i)
        rig.settle()
    assert not rig.tiers[0].usable
    assert not rig.tiers[0].writable


def test_the_first_failure_of_a_kind_is_logged_at_once_and_made_printable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(slots=16, limits=TierLimits(breaker_failures=100))
    full = StoreUnavailable("no room")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    with caplog.at_level(logging.WARNING, "kvstow"):
        for error in (full, full, StoreUnavailable("a server's \x1b[2J words"), full):
            rig.stores[0].faults = [Fault("write", error=error)]
            write(rig, 1)
            work(rig)
        rig.stores[0].faults = [Fault("contains", error=full)]
        rig.tiers[0].probe(keys(1), lambda _: None)
        work(rig)
    more = "(more failures of this kind are counted, not logged)"
    assert [r.getMessage() for r in caplog.records] == [
        f"Tier t0: a write failed: no room {more}",
        f"Tier t0: a write failed: a server's \\x1b[2J words {more}",
        f"Tier t0: a look-up failed: no room {more}",
    ]


def test_what_is_dropped_at_the_end_is_no_failure_to_log(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    write(rig, 1)
    with caplog.at_level(logging.WARNING, "kvstow"):
        rig.tiers[0].close(0.0)
    assert not caplog.records
