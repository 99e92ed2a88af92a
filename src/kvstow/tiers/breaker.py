"""A Store wrapper that stops asking a store which keeps failing, and tries again after a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

from kvstow.backends.base import Store
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.runtime import Clock
from kvstow.tiers.store_wrapper import Wrapper

A = TypeVar("A")
R = TypeVar("R")


class BreakerState(IntEnum):
    """Its numbers are what the ``tier_state`` gauge shows."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class NotAsked(StoreUnavailable):
    """The breaker is open; what keeps failing is another error, which came before."""


class Breaker(Wrapper):
    """Forwards to ``store``; after ``failures`` failed calls in a row it is open for ``open_s`` seconds.

    Open, a call raises ``StoreUnavailable`` at once. Then, half-open, one call is let through as a trial while
    the others are still refused: its success closes the breaker, its failure opens it again.

    Every exception but ``StoreRefused`` is a failure: a store that refuses has answered. A call that began
    before the breaker opened decides nothing when it ends late, even if it has closed again by then. A call that
    never returns is not noticed here (this thread is inside it): the tier watches for those.
    """

    def __init__(
        self, store: Store, clock: Clock, *, failures: int = 5, open_s: float = 10.0
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._failures = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failed = 0
        self._opened_at: float | None = None
        self._trying = False
        self._times_opened = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._state()

    def _state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        elapsed = self._clock.monotonic() - self._opened_at >= self._open_s
        return BreakerState.HALF_OPEN if elapsed else BreakerState.OPEN

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        era, answered = self._enter(), False
        try:
            result = method(argument)
            answered = True
        except StoreRefused:
            answered = True
            raise
        finally:
            self._leave(era, answered)
        return result

    def _enter(self) -> int:
        """The era of this call: another begins whenever the breaker opens. Raises when the call may not go through."""
        with self._lock:
            state = self._state()
            if state is not BreakerState.CLOSED:
                if state is BreakerState.OPEN or self._trying:
                    raise NotAsked(f"not asked: {self._failed} calls in a row failed")
                self._trying = True
            return self._times_opened

    def _leave(self, era: int, answered: bool) -> None:
        with self._lock:
            if era != self._times_opened:
                return
            self._trying = False  # this was the trial, or there is none
            if answered:
                self._failed, self._opened_at = 0, None
                return
            self._failed += 1
            if self._failed >= self._failures:
                self._opened_at = self._clock.monotonic()
                self._times_opened += 1
