"""Time and threads. All other modules take a Clock and an Executor as arguments."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from kvstow.errors import KVStowError, WorkDropped

T = TypeVar("T")

MAX_REST_S: Final = 2.0
# A piece of work moves a chunk of some MiB, so that more of them in a queue are minutes of I/O.
DEFAULT_QUEUE_LIMIT: Final = 1024


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


def rest(stop: threading.Event, worked_s: float, share: float) -> bool:
    """Pause a background thread after ``worked_s`` of work. Returns whether ``stop`` was set.

    It pauses so long that work takes ``share`` of the time, but at most ``MAX_REST_S`` at once.
    """
    return stop.wait(min(worked_s * (1 / share - 1), MAX_REST_S))


def repeat(
    work: Callable[[], None],
    stop: threading.Event,
    *,
    pause_s: float,
    failed: Callable[[Exception], None],
    restart_s: float,
) -> None:
    """On a background thread: do ``work`` again and again until ``stop`` is set, with ``pause_s`` between.

    An exception that ``work`` does not handle is passed to ``failed``; then it is done again after ``restart_s``.
    """
    while not stop.is_set():
        wait_s = pause_s
        try:
            work()
        except Exception as error:
            failed(error)
            wait_s = restart_s
        stop.wait(wait_s)


class Executor(Protocol):
    """Runs blocking work on threads and hands each result back on its owner's thread.

    ``then`` runs inside ``poll()``, on the thread that calls it, once for every accepted piece of
    work. It gets either the value or the exception that the work ended in. So state that only
    ``then`` and the owner touch needs no lock.
    """

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        *,
        urgent: bool = False,
    ) -> bool:
        """Queue ``work``. Urgent work runs before other work. False: the queue is full."""
        ...

    def poll(self) -> int:
        """Run ``then`` of all work that has ended. Returns their number. Never blocks."""
        ...

    @property
    def outstanding(self) -> int:
        """Number of accepted pieces of work whose ``then`` has not run yet."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until some work has ended, for at most ``timeout_s``. Returns whether some has."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Accept no more, drop work that has not begun, and wait at most ``timeout_s``.

        Returns whether all threads have ended. Dropped work ends in ``WorkDropped``. The next
        ``poll`` hands that to its ``then`` like any other end, so that its pins are released.
        """
        ...


class Work:
    """One accepted piece of work and, once it has run, how it ended."""

    __slots__ = ("_error", "_then", "_value", "_work")

    def __init__(
        self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._work: Callable[[], Any] | None = work
        self._then = then
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work and keep its value or exception; then drop the references that it held."""
        assert self._work is not None, "work runs once"
        try:
            self._value = self._work()
        # The owner's thread decides what any fault means, SystemExit included.
        except BaseException as error:
            if _is_printable(error):
                self._error = error
            else:
                self._error = KVStowError(f"{type(error).__name__}, which can't be printed")
        self._work = None

    def drop(self) -> None:
        """End the work without doing it."""
        self._work = None
        self._error = WorkDropped("the executor was closed before this work began")

    def finish(self) -> None:
        """Call ``then`` with the value or exception."""
        self._then(self._value, self._error)


def _is_printable(error: BaseException) -> bool:
    """Whether ``str`` of an exception works. A library's may raise, on the owner's thread."""
    try:
        str(error)
    except BaseException:
        return False
    return True


class ThreadExecutor:
    """An executor of ``threads`` daemon threads, which wait on an event.

    At most ``queue_limit`` pieces of work wait to begin. Only the owner submits, polls, waits and
    closes. Only ``run`` of a piece of work happens on another thread.
    """

    def __init__(self, name: str, threads: int = 1, queue_limit: int = DEFAULT_QUEUE_LIMIT) -> None:
        if threads < 1 or queue_limit < 1:
            raise ValueError(
                f"executor {name}: {threads} threads, queue of {queue_limit}: both must be at "
                "least 1"
            )
        self._queue_limit = queue_limit
        self._urgent: deque[Work] = deque()
        self._background: deque[Work] = deque()
        self._done: deque[Work] = deque()
        self._outstanding = 0
        self._closed = False
        lock = threading.Lock()
        self._queued = threading.Condition(lock)
        self._ended = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._loop, name=f"kvstow-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        *,
        urgent: bool = False,
    ) -> bool:
        with self._queued:
            if self._closed or len(self._urgent) + len(self._background) >= self._queue_limit:
                return False
            (self._urgent if urgent else self._background).append(Work(work, then))
            self._outstanding += 1
            self._queued.notify()
        return True

    def poll(self) -> int:
        ended = len(self._done)  # work that a ``then`` submits is for the next poll
        for _ in range(ended):
            work = self._done.popleft()
            self._outstanding -= 1
            work.finish()
        return ended

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def wait(self, timeout_s: float) -> bool:
        with self._ended:
            return self._ended.wait_for(lambda: bool(self._done), timeout_s)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._queued:
            self._closed = True
            for queue in (self._urgent, self._background):
                for work in queue:
                    work.drop()
                self._done.extend(queue)
                queue.clear()
            self._queued.notify_all()
            self._ended.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> Work | None:
        with self._queued:
            self._queued.wait_for(lambda: self._urgent or self._background or self._closed)
            if self._urgent:
                return self._urgent.popleft()
            return self._background.popleft() if self._background else None

    def _loop(self) -> None:
        while (work := self._next()) is not None:
            work.run()
            with self._ended:
                self._done.append(work)
                # An idle thread must not keep the last result, and the memory it views, alive.
                del work
                self._ended.notify_all()


def run_within(
    name: str, work: Callable[[], T], timeout_s: float
) -> tuple[T, None] | tuple[None, BaseException] | None:
    """Run ``work`` on a thread of its own and return its value and its exception.

    None: it has not ended after ``timeout_s``, and its thread is left to itself.
    """
    ended: list[tuple[Any, Any]] = []
    executor = ThreadExecutor(name)
    executor.submit(work, lambda value, error: ended.append((value, error)))
    executor.wait(timeout_s)
    executor.poll()
    executor.close(0.0)
    return ended[0] if ended else None
