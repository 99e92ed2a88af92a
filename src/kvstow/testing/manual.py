"""A clock and an executor that a test drives by hand, so that it orders every event and never
sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvstow.runtime import DEFAULT_QUEUE_LIMIT, Work

T = TypeVar("T")


class ManualClock:
    """A clock whose time passes only in ``advance``."""

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic(self) -> float:
        return self._monotonic_s

    def wall(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time never goes back: advance({seconds})")
        self._monotonic_s += seconds
        self._wall_s += seconds


class ManualExecutor:
    """An ``Executor`` without threads. Accepted work waits: urgent work first, the rest in order.

    ``run_next``, ``run`` and ``run_all`` do work on the caller's thread. Its ``then`` runs in
    ``poll``, as with threads. ``wait`` never blocks: if no work has ended it runs one piece if
    ``run_in_wait`` is set, else it lets ``timeout_s`` pass on ``clock``. So a loop of ``wait`` and
    ``poll`` with a deadline ends, in the same way every time.
    """

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        run_in_wait: bool = False,
    ) -> None:
        self._clock = clock
        self._queue_limit = queue_limit
        self._run_in_wait = run_in_wait
        self._urgent: list[Work] = []
        self._background: list[Work] = []
        self._done: deque[Work] = deque()
        self._outstanding = 0
        self._closed = False

    @property
    def pending(self) -> int:
        """Pieces of accepted work that have not run."""
        return len(self._urgent) + len(self._background)

    def run(self, index: int) -> None:
        """Do the ``index``-th pending piece of work."""
        if not 0 <= index < self.pending:
            raise IndexError(f"work {index} of {self.pending} pending")
        urgent = len(self._urgent)
        work = self._urgent.pop(index) if index < urgent else self._background.pop(index - urgent)
        work.run()
        self._done.append(work)

    def run_next(self) -> bool:
        """Do the next piece of work. Returns False if there is none."""
        if not self.pending:
            return False
        self.run(0)
        return True

    def run_all(self) -> int:
        """Do all pending work, and what it submits. Returns the number of pieces."""
        ran = 0
        while self.run_next():
            ran += 1
        return ran

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        *,
        urgent: bool = False,
    ) -> bool:
        if self._closed or self.pending >= self._queue_limit:
            return False
        (self._urgent if urgent else self._background).append(Work(work, then))
        self._outstanding += 1
        return True

    def poll(self) -> int:
        ended = len(self._done)
        for _ in range(ended):
            work = self._done.popleft()
            self._outstanding -= 1
            work.finish()
        return ended

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def wait(self, timeout_s: float) -> bool:
        if not self._done and self._run_in_wait:
            self.run_next()
        if not self._done and self._clock is not None:
            self._clock.advance(timeout_s)
        return bool(self._done)

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        for work in (*self._urgent, *self._background):
            work.drop()
            self._done.append(work)
        self._urgent.clear()
        self._background.clear()
        return True
