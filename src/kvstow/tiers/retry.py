"""A Store wrapper that asks again at once when a call failed at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from kvstow.backends.base import Store
from kvstow.errors import StoreUnavailable
from kvstow.runtime import Clock
from kvstow.tiers.store_wrapper import StoreWrapper

A = TypeVar("A")
R = TypeVar("R")

ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 0.01
TOTAL_S: Final = 0.15  # less than a fetch is waited for


class Retry(StoreWrapper):
    """Forwards to ``store``; a call that ended in ``StoreUnavailable`` is made again, at most ``attempts`` in all.

    It heals what is over by then: a connection that somebody in between dropped while it was idle, a failover. So
    nothing is asked again later than ``total_s`` after it was asked first, and what timed out is not. Every operation
    of a Store may be repeated: of a write whose answer was lost the second is ``REJECTED``, and the value is there.

    Before the n-th try it pauses for half to all of ``first_pause_s * 2 ** n``, as ``rng`` says, so that engines which
    lost one server don't come back in step. ``pause`` waits so many seconds; closing ends it.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        rng: random.Random,
        *,
        attempts: int = ATTEMPTS,
        first_pause_s: float = FIRST_PAUSE_S,
        total_s: float = TOTAL_S,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._rng = rng
        self._attempts = attempts
        self._first_pause_s = first_pause_s
        self._total_s = total_s
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        until_s = self._clock.monotonic() + self._total_s
        for attempt in range(1, self._attempts):
            try:
                return method(argument)
            except StoreUnavailable:
                pause_s = self._first_pause_s * 2 ** (attempt - 1) * self._rng.uniform(0.5, 1.0)
                if (
                    self._clock.monotonic() + pause_s > until_s
                    or self._pause(pause_s)
                    or self._closed.is_set()
                ):
                    raise
                if (
                    self._clock.monotonic() > until_s
                ):  # the pause was longer: a machine that was suspended
                    raise
        return method(argument)
