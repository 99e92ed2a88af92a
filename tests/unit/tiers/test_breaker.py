from __future__ import annotations

import pytest

from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.testing.faults import Fault, FaultStore, unavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import make_key
from kvstow.tiers.breaker import Breaker, BreakerState

KEYS = [make_key(0)]


def make(failures: int = 3) -> tuple[Breaker, FaultStore, ManualClock]:
    clock = ManualClock()
    store = FaultStore(MemoryStore())
    return Breaker(store, clock, failures=failures, open_s=10.0), store, clock


def fail(breaker: Breaker) -> None:
    with pytest.raises(StoreUnavailable):
        breaker.contains(KEYS)


def test_it_opens_after_failures_in_a_row_and_then_asks_nothing() -> None:
    breaker, store, _ = make()
    store.faults = [unavailable()]
    fail(breaker)
    fail(breaker)
    store.faults = []
    breaker.contains(KEYS)  # a success in between starts the count anew
    store.faults = [unavailable()]
    fail(breaker)
    fail(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    asked = store.calls["contains"]
    fail(breaker)
    assert store.calls == {"contains": asked}


def test_after_a_while_one_trial_decides() -> None:
    breaker, store, clock = make(failures=1)
    store.faults = [unavailable()]
    fail(breaker)
    clock.advance(9.9)
    assert breaker.state is BreakerState.OPEN
    clock.advance(0.1)
    assert breaker.state is BreakerState.HALF_OPEN
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    clock.advance(10)
    store.faults = []
    assert breaker.contains(KEYS) == [False]
    assert breaker.state is BreakerState.CLOSED


def test_half_open_others_are_refused_while_the_trial_runs() -> None:
    breaker, store, clock = make(failures=1)
    store.faults = [unavailable()]
    fail(breaker)
    clock.advance(10)
    inside: list[BreakerState] = []

    def during_the_trial() -> None:
        fail(breaker)
        inside.append(breaker.state)

    store.faults = [Fault(delay=during_the_trial)]
    asked = store.calls["contains"]
    breaker.contains(KEYS)
    assert inside == [BreakerState.HALF_OPEN]
    assert store.calls["contains"] == asked + 1


def test_a_refusal_is_an_answer() -> None:
    breaker, store, clock = make(failures=1)
    store.faults = [Fault(error=StoreRefused("too large"))]
    for _ in range(3):
        with pytest.raises(StoreRefused):
            breaker.contains(KEYS)
    assert breaker.state is BreakerState.CLOSED
    store.faults = [unavailable()]
    fail(breaker)
    clock.advance(10)
    store.faults = [Fault(error=StoreRefused("too large"))]
    with pytest.raises(StoreRefused):
        breaker.contains(KEYS)
    assert breaker.state is BreakerState.CLOSED


def test_any_other_exception_is_a_failure() -> None:
    breaker, store, _ = make(failures=1)
    store.faults = [Fault(error=RuntimeError("a bug in a store"))]
    with pytest.raises(RuntimeError):
        breaker.contains(KEYS)
    assert breaker.state is BreakerState.OPEN


def test_a_call_from_before_it_opened_decides_nothing_late() -> None:
    breaker, store, _ = make(failures=1)

    def others_fail_meanwhile() -> None:
        store.faults = [unavailable()]
        fail(breaker)

    store.faults = [Fault(delay=others_fail_meanwhile)]
    breaker.contains(KEYS)
    assert breaker.state is BreakerState.OPEN


def test_a_call_from_before_it_opened_decides_nothing_even_later() -> None:
    """As when a server was silent: the last calls of its silence time out after one has found it again."""
    breaker, store, clock = make(failures=1)

    def others_find_it_dead_and_again_alive() -> None:
        store.faults = [unavailable()]
        fail(breaker)
        clock.advance(10)
        store.faults = []
        breaker.contains(KEYS)

    store.faults = [
        Fault(delay=others_find_it_dead_and_again_alive, error=StoreUnavailable("timed out"))
    ]
    fail(breaker)
    assert breaker.state is BreakerState.CLOSED


def test_close_is_forwarded_when_open() -> None:
    breaker, store, _ = make(failures=1)
    store.faults = [unavailable("contains")]
    fail(breaker)
    breaker.close()
    assert store.calls["close"] == 1


READS = [(KEYS[0], memoryview(bytearray(8)))]
WRITES = [(KEYS[0], [memoryview(b"x")])]


def fail_write(breaker: Breaker) -> None:
    with pytest.raises(StoreUnavailable):
        breaker.write(WRITES)


def test_each_kind_of_call_has_its_own_health() -> None:
    breaker, store, clock = make(failures=3)
    store.faults = [unavailable("write")]
    for _ in range(3):
        breaker.contains(KEYS)
        breaker.read(READS)
        fail_write(breaker)
    assert breaker.write_state is BreakerState.OPEN
    assert breaker.read_state is BreakerState.CLOSED
    assert breaker.state is BreakerState.OPEN
    asked = store.calls["write"]
    fail_write(breaker)
    with pytest.raises(StoreUnavailable):
        breaker.delete(KEYS)
    assert store.calls["write"] == asked
    assert "delete" not in store.calls
    assert breaker.contains(KEYS) == [False]
    clock.advance(10)
    breaker.contains(KEYS)
    breaker.read(READS)
    assert breaker.write_state is BreakerState.HALF_OPEN
    store.faults = []
    breaker.write(WRITES)
    assert breaker.state is BreakerState.CLOSED


def test_looks_say_nothing_of_reads() -> None:
    breaker, store, _ = make(failures=3)
    store.faults = [unavailable("read")]
    for _ in range(3):
        breaker.contains(KEYS)
        with pytest.raises(StoreUnavailable):
            breaker.read(READS)
    assert breaker.read_state is BreakerState.OPEN


def test_a_rejected_write_and_a_delete_say_nothing_of_writes() -> None:
    """A full disk rejects what is there already, and deletes."""
    breaker, store, clock = make(failures=3)
    breaker.write(WRITES)
    for _ in range(3):
        breaker.write(WRITES)
        breaker.delete([make_key(1)])
        store.faults = [unavailable("write")]
        fail_write(breaker)
        store.faults = []
    assert breaker.write_state is BreakerState.OPEN
    clock.advance(10)
    breaker.write(WRITES)
    breaker.delete([make_key(1)])
    assert breaker.write_state is BreakerState.HALF_OPEN
    breaker.delete(KEYS)
    breaker.write(WRITES)
    assert breaker.write_state is BreakerState.CLOSED


@pytest.mark.parametrize("first", ["look-up", "write"])
def test_after_an_outage_one_look_up_is_enough(first: str) -> None:
    """Or a burst of writes would be refused, all but the trial."""
    breaker, store, clock = make(failures=3)
    store.faults = [unavailable()]
    if first == "look-up":
        fail(breaker)
    for _ in range(3):
        fail_write(breaker)
        with pytest.raises(StoreUnavailable):
            breaker.read(READS)
    if first == "write":
        fail(breaker)
    assert (breaker.read_state, breaker.write_state) == (BreakerState.OPEN, BreakerState.OPEN)
    store.faults = []
    clock.advance(10)
    assert breaker.contains(KEYS) == [False]
    assert breaker.state is BreakerState.CLOSED
    store.faults = [unavailable("write")]
    for _ in range(3):
        fail_write(breaker)
    breaker.contains(KEYS)
    assert breaker.write_state is BreakerState.OPEN, "the outage is over: only writes fail now"
