"""The only door to time and threads. Everything else takes a Clock and an Executor as arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Source of time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for time stamps only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Executor(Protocol):
    """Runs blocking work on threads and hands each result back on its owner's thread.

    ``then`` runs inside ``poll()``, on the thread that calls it, once for every accepted piece of work, with
    either the value or the exception that the work ended in. So state that only ``then`` and the owner
    touch needs no lock.
    """

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        *,
        urgent: bool = False,
    ) -> bool:
        """Queue ``work``; urgent work is run before what is not. False: the queue is full, nothing will run."""
        ...

    def poll(self) -> int:
        """Run ``then`` of all work that has ended. Returns how many. Never blocks."""
        ...

    @property
    def outstanding(self) -> int:
        """Work accepted whose ``then`` has not run yet."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until some work has ended or ``timeout_s`` passed. True if ``poll`` has something to do."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Accept no more, drop what has not started, wait at most ``timeout_s``. True if all threads ended."""
        ...
