"""Retrying: what, how often, how long, and never at the cost of who waits."""

from __future__ import annotations

import random

import pytest

from kvstow.backends.base import REJECTED, Done
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.testing.faults import Fault, FaultStore, unavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import make_key, write_one
from kvstow.tiers.retry import ATTEMPTS, FIRST_PAUSE_S, TOTAL_S, Retry

KEYS = [make_key(0)]


class Made:
    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.inner = FaultStore(MemoryStore(), list(faults))
        self.pauses: list[float] = []
        self.store = Retry(self.inner, self.clock, random.Random(seed), pause=self._pause)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)


def test_k1_a_connection_that_was_dropped_while_idle_costs_no_chunk() -> None:
    made = Made(unavailable(calls=range(1)))
    assert made.store.contains(KEYS) == [False]
    assert made.inner.calls["contains"] == 2
    assert len(made.pauses) == 1


def test_attempts_are_bounded_and_the_last_error_is_raised() -> None:
    made = Made(unavailable())
    with pytest.raises(StoreUnavailable):
        made.store.contains(KEYS)
    assert made.inner.calls["contains"] == ATTEMPTS
    assert sum(made.pauses) <= TOTAL_S


def test_pauses_grow_and_are_jittered() -> None:
    seen = set()
    for seed in range(20):
        made = Made(unavailable(), seed=seed)
        with pytest.raises(StoreUnavailable):
            made.store.contains(KEYS)
        for n, pause in enumerate(made.pauses):
            assert 0.5 * FIRST_PAUSE_S * 2**n <= pause <= FIRST_PAUSE_S * 2**n
        seen.add(tuple(made.pauses))
    assert len(seen) == 20


def test_what_took_long_is_not_asked_again() -> None:
    made = Made()
    made.inner.faults = [
        Fault(error=StoreUnavailable("timed out"), delay=lambda: made.clock.advance(TOTAL_S))
    ]
    with pytest.raises(StoreUnavailable):
        made.store.contains(KEYS)
    assert made.inner.calls["contains"] == 1
    assert made.pauses == []


def test_a_refusal_is_not_asked_again() -> None:
    made = Made(Fault(error=StoreRefused("no right")))
    with pytest.raises(StoreRefused):
        made.store.delete(KEYS)
    assert made.inner.calls["delete"] == 1


def test_a_write_whose_answer_was_lost_is_there_and_written_once() -> None:
    made = Made()
    inner = made.inner
    lost = [True]
    write = inner.write

    def write_and_lose(items: object) -> object:
        outcome = write(items)  # type: ignore[arg-type]
        if lost:
            lost.clear()
            raise StoreUnavailable("reset by peer")
        return outcome

    inner.write = write_and_lose  # type: ignore[method-assign, assignment]
    assert write_one(made.store, KEYS[0], b"value") is REJECTED
    assert made.store.contains(KEYS) == [True]
    assert made.store.read([(KEYS[0], memoryview(bytearray(8)))]) == [Done(5)]


def test_closed_during_a_pause_it_asks_no_more() -> None:
    made = Made(unavailable("contains"))
    made.store._pause = lambda _: made.store.close()
    with pytest.raises(StoreUnavailable):
        made.store.contains(KEYS)
    assert made.inner.calls["contains"] == 1


def test_a_pause_that_took_longer_is_the_last() -> None:
    made = Made(unavailable())
    made.store._pause = lambda _: made.clock.advance(3600.0)
    with pytest.raises(StoreUnavailable):
        made.store.contains(KEYS)
    assert made.inner.calls["contains"] == 1


def test_closed_it_asks_no_more() -> None:
    made = Made(unavailable("contains"))
    made.store.close()
    with pytest.raises(StoreUnavailable):
        made.store.contains(KEYS)
    assert made.inner.calls["contains"] == 1
