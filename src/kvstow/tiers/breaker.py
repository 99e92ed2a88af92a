"""A Store wrapper that stops asking a store which keeps failing, and tries again after a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

from kvstow.backends.base import Buffer, Done, Outcome, Store
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import Clock
from kvstow.tiers.store_wrapper import StoreWrapper

A = TypeVar("A")
R = TypeVar("R")


class BreakerState(IntEnum):
    """The numbers are what the ``tier_state`` gauge shows; the greater is the worse."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class NotAsked(StoreUnavailable):
    """The breaker is open. The store's own error came before."""


class _Circuit:
    """The health of one kind of call. Thread-safe.

    After ``failures`` failed calls in a row it is open for ``open_s`` seconds: a call raises
    ``NotAsked``. Then, half-open, one call is let through as a trial while the others are still
    refused. Its success closes the circuit, its failure opens it again.

    A call that began before the circuit opened decides nothing when it ends late, even if the
    circuit has closed again by then.
    """

    def __init__(self, clock: Clock, failures: int, open_s: float) -> None:
        self._clock = clock
        self._failures = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        self._opened_s: float | None = None
        self._trying = False
        self._times_opened = 0
        self._outage = False  # look-ups have failed too since this circuit opened

    @property
    def failing(self) -> bool:
        """Whether the last call that decided something has failed."""
        return self._failed_in_a_row > 0

    def follow(self, lookups: _Circuit) -> None:
        """Close with the look-ups, if they failed as well: the store was out, and answers now."""
        with self._lock:
            if lookups.failing:
                self._outage = self._outage or self._opened_s is not None
            elif self._outage:
                self._close()

    def _close(self) -> None:
        self._failed_in_a_row = 0
        self._opened_s = None
        self._outage = False

    @property
    def state(self) -> BreakerState:
        opened_s = self._opened_s
        if opened_s is None:
            return BreakerState.CLOSED
        if self._clock.monotonic() - opened_s >= self._open_s:
            return BreakerState.HALF_OPEN
        return BreakerState.OPEN

    def call(self, method: Callable[[A], R], argument: A, works: Callable[[R], bool]) -> R:
        """The value of ``method``. ``works`` says whether that value shows that calls of this kind
        work.

        Every exception but ``StoreRefused`` is a failure: a store that refuses has answered.
        """
        times_opened = self._begin()
        failed = True
        worked = False
        try:
            result = method(argument)
            failed = False
            worked = works(result)
        except StoreRefused:
            failed = False
            worked = True
            raise
        finally:
            self._end(times_opened, worked, failed)
        return result

    def _begin(self) -> int:
        """How often the circuit has opened so far.

        Raises ``NotAsked`` if the call may not go through.
        """
        with self._lock:
            state = self.state
            if state is not BreakerState.CLOSED:
                if state is BreakerState.OPEN or self._trying:
                    raise NotAsked(f"not asked: {self._failed_in_a_row} calls in a row failed")
                self._trying = True
            return self._times_opened

    def _end(self, times_opened: int, worked: bool, failed: bool) -> None:
        with self._lock:
            if times_opened != self._times_opened:
                return
            self._trying = False  # this was the trial, or there is none
            if worked:
                self._close()
            elif failed:
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= self._failures:
                    self._opened_s = self._clock.monotonic()
                    self._times_opened += 1


class Breaker(StoreWrapper):
    """Forwards to ``store``; refuses calls of a kind that keeps failing.

    Look-ups, reads and writes have a circuit each, so a full disk goes on being read, and an index
    in memory that answers look-ups does not hide that nothing can be read. After an outage, in
    which look-ups failed as well, one that succeeds closes all circuits. A delete, and a write that
    is rejected, don't show that writes work.

    A call that never returns is not noticed here, because this thread is inside it: the tier
    watches for those.
    """

    def __init__(
        self, store: Store, clock: Clock, *, failures: int = 5, open_s: float = 10.0
    ) -> None:
        super().__init__(store)
        self._lookups = _Circuit(clock, failures, open_s)
        self._reads = _Circuit(clock, failures, open_s)
        self._writes = _Circuit(clock, failures, open_s)

    @property
    def read_state(self) -> BreakerState:
        """State of look-ups and reads together."""
        return max(self._lookups.state, self._reads.state)

    @property
    def write_state(self) -> BreakerState:
        return self._writes.state

    @property
    def state(self) -> BreakerState:
        """The worst state of any kind of call."""
        return max(self.read_state, self.write_state)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        try:
            return self._lookups.call(self._store.contains, keys, lambda _: True)
        finally:
            self._reads.follow(self._lookups)
            self._writes.follow(self._lookups)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        try:
            return self._reads.call(self._store.read, items, lambda _: True)
        finally:
            self._reads.follow(self._lookups)

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        try:
            return self._writes.call(
                self._store.write,
                items,
                lambda outcomes: any(isinstance(outcome, Done) for outcome in outcomes),
            )
        finally:
            self._writes.follow(self._lookups)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._writes.call(self._store.delete, keys, lambda _: False)
