"""The wrappers of stores against oracles: calls that overlap in any order, and faults of any kind below all of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done, Outcome
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import make_key
from kvstow.tiers.breaker import Breaker, BreakerState, NotAsked
from kvstow.tiers.checked import CheckedStore
from kvstow.tiers.limit import WriteLimit
from kvstow.tiers.retry import ATTEMPTS, TOTAL_S, Retry
from kvstow.tiers.store_wrapper import StoreWrapper

OPEN_S = 10.0
FAILURES = 3
PATIENCE_S = 30.0
KEYS = [make_key(i) for i in range(4)]


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


ERRORS = (StoreUnavailable, StoreRefused, ZeroDivisionError, Mute, SystemExit, KeyboardInterrupt)


class Held(MemoryStore):
    """Each call waits, on its own thread, until it is told how to end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # "in", or how a call ended

    def contains(self, keys: Sequence[Any]) -> list[bool]:
        end: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.events.put(end)
        told = end.get(timeout=PATIENCE_S)
        if isinstance(told, BaseException):
            raise told
        return told  # type: ignore[no-any-return]


class Overlapping:
    """Calls of one breaker that begin and end in any order, and what is known of it: when it opened, how often a call
    failed since it closed, which calls began since."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock, self.store = Random(seed), ManualClock(), Held()
        self.breaker = Breaker(self.store, self.clock, failures=FAILURES, open_s=OPEN_S)
        self.running: list[
            tuple[queue.SimpleQueue[Any], int, bool]
        ] = []  # how to end it, times opened, a trial
        self.opened: list[float] = []
        self.closed, self.failed = True, 0

    def begin(self) -> None:
        trial = not self.closed
        busy = any(one[2] for one in self.running)
        passes = self.closed or (not busy and self.clock.monotonic() - self.opened[-1] >= OPEN_S)
        threading.Thread(target=self._call, daemon=True).start()
        came = self.store.events.get(timeout=PATIENCE_S)
        assert isinstance(came, queue.SimpleQueue) == passes, "as the oracle says"
        if passes:
            self.running.append((came, len(self.opened), trial))
        else:
            assert isinstance(came, NotAsked)

    def _call(self) -> None:
        try:
            self.store.events.put(self.breaker.contains(KEYS))
        except BaseException as error:
            self.store.events.put(error)

    def end(self, told: Any = None) -> None:
        if not self.running:
            return
        to, era, trial = self.running.pop(self.rng.randrange(len(self.running)))
        told = told or self.rng.choice([[True] * 4, *(error() for error in ERRORS)])
        to.put(told)
        assert self.store.events.get(timeout=PATIENCE_S) is told, (
            "what the store answers or raises comes through"
        )
        if era != len(self.opened):
            return
        if isinstance(told, list | StoreRefused):
            self.closed, self.failed = True, 0
            return
        self.failed += 1
        if trial or self.failed >= FAILURES:
            self.closed = False
            self.opened.append(self.clock.monotonic())

    def step(self) -> None:
        self.rng.choice([self.begin, self.begin, self.end, self.end, self.wait])()
        assert (self.breaker.state is BreakerState.CLOSED) == self.closed
        assert sum(trial for _, _, trial in self.running) <= 1
        if self.breaker.state is BreakerState.OPEN:
            with pytest.raises(NotAsked):
                self.breaker.contains(KEYS)

    def wait(self) -> None:
        self.clock.advance(self.rng.choice([0.0, 0.1, OPEN_S / 2, OPEN_S, 1e6]))


@pytest.mark.parametrize("seed", range(20))
def test_k2_calls_that_overlap_in_any_order(seed: int) -> None:
    machine = Overlapping(seed)
    for _ in range(120):
        machine.step()
    while machine.running:
        machine.end()
    machine.clock.advance(OPEN_S)
    machine.begin()
    machine.end([True] * 4)
    assert machine.breaker.state is BreakerState.CLOSED, "it always recovers"


class Bottom(MemoryStore):
    """Commits a fault with each call; knows what was ever put, and when it was asked."""

    def __init__(self, rng: Random, clock: ManualClock) -> None:
        super().__init__()
        self.rng, self.clock = rng, clock
        self.faulty = True
        self.meanwhile: Callable[[], None] = lambda: None
        self.put: list[tuple[Any, bytes]] = []

    def contains(self, keys: Any) -> Any:
        return self._with_faults(keys, super().contains)

    def read(self, items: Any) -> Any:
        return self._with_faults(items, super().read)

    def write(self, items: Any) -> Any:
        return self._with_faults(items, super().write)

    def delete(self, keys: Any) -> None:
        self._with_faults(keys, super().delete)

    def _put(self, key: Any, value: bytes) -> Outcome:
        outcome = super()._put(key, value)
        if isinstance(outcome, Done):
            self.put.append((key, value))
        return outcome

    def _with_faults(self, given: Any, work: Callable[[Any], Any]) -> Any:
        if not self.faulty:
            return work(given)
        self.clock.advance(self.rng.choice([0.0, 0.0, 0.0, 0.001, TOTAL_S, 5.0, 3600.0]))
        self.meanwhile()
        fault = self.rng.choice(["none", "none", "before", "half way", "after", "answer"])
        error = self.rng.choice((StoreUnavailable,) * 6 + ERRORS)()
        if fault == "before":
            raise error
        if fault == "half way":
            work(given[: len(given) // 2])
            raise error
        answer = work(given)
        if fault == "after":
            raise error
        if fault == "answer":
            return self.rng.choice(
                [None, "yes", [*(answer or []), True], [3.5] * len(given), [Done(-1)] * len(given)]
            )
        return answer


class Witness(StoreWrapper):
    """Sees each call that is made below it: when it began, how deep inside of other calls, and what it ended in."""

    def __init__(self, store: Any, clock: ManualClock) -> None:
        super().__init__(store)
        self.clock, self.depth = clock, 0
        self.calls: list[list[Any]] = []
        self.wrote: list[tuple[float, int]] = []  # when, bytes

    def write(self, items: Any) -> Any:
        self.wrote.append((self.clock.monotonic(), sum(sum(map(len, parts)) for _, parts in items)))
        return super().write(items)

    def _call(self, method: Any, argument: Any) -> Any:
        self.calls.append(seen := [self.clock.monotonic(), self.depth, None])
        try:
            return method(argument)
        except BaseException as error:
            seen[2] = error
            raise


RATE, BURST_S, LARGEST = 100.0, 2.0, 300


class Stack:
    """All wrappers, as a remote tier has them, over a store that commits faults."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = Random(seed), ManualClock()
        self.bottom = Bottom(self.rng, self.clock)
        self.bottom.meanwhile = self._meanwhile
        self.asked = Witness(CheckedStore(self.bottom), self.clock)
        self.passed = Witness(
            Retry(self.asked, self.clock, Random(seed), pause=self._pause), self.clock
        )
        limit = WriteLimit(self.passed, self.clock, bytes_s=RATE, burst_s=BURST_S)
        self.store = Breaker(limit, self.clock, failures=FAILURES, open_s=OPEN_S)
        self.closed_at: int | None = None

    def _pause(self, seconds: float) -> None:
        self.clock.advance(seconds * self.rng.choice([1.0, 1.0, 50.0]))
        if self.rng.random() < 0.02 and self.closed_at is None:
            self.close()

    def close(self) -> None:
        self.store.close()
        self.closed_at = len(self.asked.calls)

    def _meanwhile(self) -> None:
        """Another thread's whole call."""
        if self.asked.depth <= 2 and self.closed_at is None and self.rng.random() < 0.3:
            self.step()

    def step(self) -> None:
        self.clock.advance(self.rng.choice([0.0, 0.5, OPEN_S]))
        asked, began_s = len(self.asked.calls), self.clock.monotonic()
        step = self.rng.choice([self.contains, self.read, self.write, self.write, self.delete])
        circuit = {self.contains: self.store._lookups, self.read: self.store._reads}.get(
            step, self.store._writes
        )
        state = circuit.state
        self.asked.depth += 1
        step()
        own = [
            (at, error)
            for at, depth, error in self.asked.calls[asked:]
            if depth == self.asked.depth
        ]
        self.asked.depth -= 1
        assert len(own) <= (ATTEMPTS if state is not BreakerState.OPEN else 0)
        assert all(at <= began_s + TOTAL_S for at, _ in own), "retries stay within their time"
        assert all(isinstance(error, StoreUnavailable) for _, error in own[:-1])

    def _keys(self) -> list[Any]:
        return self.rng.choices(KEYS, k=self.rng.randrange(5))

    def contains(self) -> None:
        keys = self._keys()
        found = self._call(self.store.contains, keys)
        assert found is None or [type(one) for one in found] == [bool] * len(keys)
        ever = {key for key, _ in self.bottom.put}
        assert not found or all(
            key in ever for key, there in zip(keys, found, strict=True) if there
        )

    def read(self) -> None:
        items = [
            (key, memoryview(bytearray(self.rng.choice([0, 64, 400])))) for key in self._keys()
        ]
        outcomes = self._call(self.store.read, items)
        for (key, buffer), outcome in zip(items, outcomes or [], strict=outcomes is not None):
            if isinstance(outcome, Done):
                assert (key, bytes(buffer[: outcome.length])) in self.bottom.put, (
                    "it came from the store"
                )
            else:
                assert outcome in (MISSING, REJECTED)

    def write(self) -> None:
        values = [
            (key, self.rng.randbytes(self.rng.choice([0, 10, 50, LARGEST]))) for key in self._keys()
        ]
        before = len(self.bottom.put)
        outcomes = self._call(
            self.store.write, [(key, [memoryview(value)]) for key, value in values]
        )
        for (key, value), outcome in zip(values, outcomes or [], strict=outcomes is not None):
            if isinstance(outcome, Done):
                assert outcome.length == len(value)
                assert (key, value) in self.bottom.put[before:], "no success is invented"
            else:
                assert outcome in (MISSING, REJECTED)

    def delete(self) -> None:
        self._call(self.store.delete, self._keys())

    @staticmethod
    def _call(method: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return method(argument)
        except ERRORS:
            return None


@pytest.mark.parametrize("seed", range(40))
def test_k2_whatever_the_store_does_answers_are_true_and_it_is_used_again(seed: int) -> None:
    stack = Stack(seed)
    for _ in range(100):
        stack.step()
        if stack.closed_at is not None:
            assert len(stack.asked.calls) == stack.closed_at, "a closed store is asked nothing"
            return
    wrote = stack.passed.wrote
    for i, (since_s, _) in enumerate(wrote):
        for j in range(i, len(wrote)):
            passed = sum(size for _, size in wrote[i : j + 1])
            assert passed <= RATE * (wrote[j][0] - since_s + BURST_S) + LARGEST, (
                "in no time more than the limit"
            )
    stack.bottom.faulty = False
    stack.clock.advance(3600.0)
    assert stack.store.contains(KEYS) == [key in stack.bottom._values for key in KEYS]
    stack.store.delete(KEYS)
    assert stack.store.write([(KEYS[0], [memoryview(b"x")])]) == [Done(1)]
    assert stack.store.read([(KEYS[0], memoryview(bytearray(1)))]) == [Done(1)]
    assert stack.store.state is BreakerState.CLOSED
