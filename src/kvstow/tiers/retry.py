"""A Store wrapper that repeats a call which failed at once."""

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
TOTAL_S: Final = 0.15  # less than a request waits for a fetch


class Retry(StoreWrapper):
    """Forwards to ``store``; repeats a call that ended in ``StoreUnavailable``, up to ``ATTEMPTS``
    calls in all.

    This heals short faults: a connection that a middlebox dropped while it was idle, a failover. No
    call is repeated later than ``TOTAL_S`` after the first began, so one that timed out is not.
    Every operation of a Store may be repeated: if the answer to a write was lost, the second write
    is ``REJECTED``, and the value is there.

    The n-th pause lasts between half of ``FIRST_PAUSE_S * 2 ** (n - 1)`` seconds and all of it, as
    ``rng`` says, so that engines which lost one server don't come back in step. ``pause`` waits for
    a number of seconds and returns true if the store was closed meanwhile.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        rng: random.Random,
        *,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._rng = rng
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        until_s = self._clock.monotonic() + TOTAL_S
        pause_s = FIRST_PAUSE_S
        for _ in range(ATTEMPTS - 1):
            try:
                return method(argument)
            except StoreUnavailable:
                if not self._wait(pause_s * self._rng.uniform(0.5, 1.0), until_s):
                    raise
            pause_s *= 2
        return method(argument)

    def _wait(self, pause_s: float, until_s: float) -> bool:
        """Pause before the next attempt. Returns False if there must be none."""
        if self._clock.monotonic() + pause_s > until_s:
            return False
        if self._pause(pause_s) or self._closed.is_set():
            return False
        return self._clock.monotonic() <= until_s  # the machine may have been suspended meanwhile
