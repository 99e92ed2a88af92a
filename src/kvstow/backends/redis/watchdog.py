"""A time limit for calls of a library that only limits each single read and write of a socket.

redis-py gives up after ``socket_timeout`` seconds without a byte. A server that sends one byte now and then is never
given up, and nothing in redis-py limits the whole. So a thread closes the connections of a call that takes too long,
by redis-py's own public method, and the call ends with an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from kvstow.runtime import Clock, ThreadExecutor

REPEAT_S: Final = 0.05  # a library that connects again after the first time is stopped again
CLOSE_S: Final = 1.0


class Limit:
    """The time limit of one call, as a context manager. Leaving it raises ``TimeoutError`` if the time was exceeded,
    whatever the call itself returned or raised."""

    def __init__(self, watchdog: Watchdog, timeout_s: float, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.due_s = math.inf
        self.exceeded = False
        self._watchdog = watchdog
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._watchdog.add(self, self._timeout_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._watchdog.remove(self)
        if self.exceeded and (kind is None or issubclass(kind, Exception)):
            raise TimeoutError(f"not done in {self._timeout_s:g} s") from error


class Watchdog:
    """One thread that interrupts the calls whose limit has passed. It starts with the first call.

    ``harmless`` are exceptions that an interruption may raise because it races with the call. They are ignored,
    and the call is interrupted again.
    """

    def __init__(self, clock: Clock, harmless: tuple[type[Exception], ...] = ()) -> None:
        self._clock = clock
        self._harmless = harmless
        self._changed = threading.Condition()
        self._limits: list[Limit] = []
        self._wakes_s = math.inf
        self._executor: ThreadExecutor | None = None
        self._closed = False

    def limit(self, timeout_s: float, interrupt: Callable[[], None]) -> Limit:
        """Limits the block to ``timeout_s`` seconds. ``interrupt`` runs on the watchdog's thread when they have
        passed, and again until the block ends."""
        return Limit(self, timeout_s, interrupt)

    def add(self, limit: Limit, timeout_s: float) -> None:
        """Watches ``limit`` from now on."""
        with self._changed:
            limit.due_s = self._clock.monotonic() + timeout_s
            self._limits.append(limit)
            if self._executor is None and not self._closed:
                self._executor = ThreadExecutor("redis-watchdog")
                self._executor.submit(self._watch, lambda _value, _error: None)
            elif limit.due_s < self._wakes_s:
                self._changed.notify()

    def remove(self, limit: Limit) -> None:
        """Stops watching ``limit``: ``exceeded`` is final."""
        with self._changed:
            self._limits.remove(limit)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._executor is not None:
            self._executor.close(CLOSE_S)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._sleep()
                if self._closed:
                    return
                due = self._mark_due()
            for limit in due:
                try:
                    limit.interrupt()
                except self._harmless:
                    continue

    def _sleep(self) -> None:
        """Waits for the earliest limit, for a limit that is earlier, or for the end."""
        if self._closed:
            return
        self._wakes_s = min((limit.due_s for limit in self._limits), default=math.inf)
        if self._wakes_s == math.inf:
            self._changed.wait()
        else:
            self._changed.wait(max(0.0, self._wakes_s - self._clock.monotonic()))

    def _mark_due(self) -> list[Limit]:
        now = self._clock.monotonic()
        due = [limit for limit in self._limits if limit.due_s <= now]
        for limit in due:
            limit.exceeded = True
            limit.due_s = now + REPEAT_S
        return due
