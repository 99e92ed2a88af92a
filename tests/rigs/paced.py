"""A store of any speed on a clock that only tests move: what would take a minute takes no time, and always the same."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstow.backends.base import Buffer, Done, Outcome, Store
from kvstow.key import ChunkKey
from kvstow.runtime import DEFAULT_QUEUE_LIMIT, Work
from kvstow.testing.manual import ManualClock

T = TypeVar("T")

NEVER_S = 1e9


class PacedClock(ManualClock):
    """As a call on a virtual thread sees it, time is that thread's."""

    def __init__(self) -> None:
        super().__init__()
        self.thread_s: float | None = None

    def monotonic(self) -> float:
        return super().monotonic() if self.thread_s is None else self.thread_s


class PacedStore:
    """Forwards to ``store``, and says how long each call would have taken: ``fixed_s``, and ``byte_s`` for each byte.

    ``spend`` hears it. Calls overlap in what is fixed; bytes come one after another, through one pipe. All of it may be
    changed at any time; ``hangs``: reads that begin now never end.
    """

    def __init__(
        self, store: Store, *, fixed_s: float = 0.0, byte_s: float = 0.0, probe_s: float = 0.0
    ) -> None:
        self.fixed_s, self.byte_s, self.probe_s = fixed_s, byte_s, probe_s
        self.hangs = False
        self.read_bytes = 0
        self.probes = 0
        self._store = store
        self.spend: Callable[[float, float], None] = lambda fixed_s, pipe_s: None

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.spend(self.probe_s, 0.0)
        self.probes += 1
        return self._store.contains(keys)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        outcomes = self._store.read(items)
        size = sum(outcome.length for outcome in outcomes if isinstance(outcome, Done))
        self.read_bytes += size
        self.spend(NEVER_S if self.hangs else self.fixed_s, size * self.byte_s)
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return self._store.write(items)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._store.delete(keys)

    def close(self) -> None:
        return  # the store behind it is the caller's: another server may come after this one


class PacedExecutor:
    """An ``Executor`` of ``threads`` virtual threads, each busy on ``clock`` for as long as ``store`` says."""

    def __init__(
        self,
        clock: PacedClock,
        store: PacedStore,
        threads: int = 4,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
    ) -> None:
        self._clock = clock
        store.spend = self._spend
        self._queue_limit = queue_limit
        self._free_s = [clock.monotonic()] * threads
        self._pipe_s = clock.monotonic()
        self._waiting: tuple[list[tuple[float, Work]], list[tuple[float, Work]]] = (
            [],
            [],
        )  # urgent, not
        self._running: list[tuple[float, int, Work]] = []
        self._begun = 0
        self._outstanding = 0
        self._closed = False

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        *,
        urgent: bool = False,
    ) -> bool:
        if self._closed or sum(map(len, self._waiting)) >= self._queue_limit:
            return False
        self._waiting[not urgent].append((self._clock.monotonic(), Work(work, then)))
        self._outstanding += 1
        return True

    def _begin_due(self) -> None:
        """Begin all work whose turn came by now, in order."""
        now = self._clock.monotonic()
        while queue := self._waiting[0] or self._waiting[1]:
            thread = min(range(len(self._free_s)), key=self._free_s.__getitem__)
            start = max(queue[0][0], self._free_s[thread])
            if start > now:
                return
            _, work = queue.pop(0)
            self._clock.thread_s = start
            work.run()
            end, self._clock.thread_s = self._clock.thread_s, None
            self._free_s[thread] = end
            self._begun += 1
            heapq.heappush(self._running, (end, self._begun, work))

    def _spend(self, fixed_s: float, pipe_s: float) -> None:
        assert self._clock.thread_s is not None
        end = self._clock.thread_s + fixed_s
        if pipe_s:
            end = max(end, self._pipe_s) + pipe_s
            self._pipe_s = end if fixed_s < NEVER_S else self._pipe_s
        self._clock.thread_s = end

    def poll(self) -> int:
        self._begin_due()
        ended = 0
        while self._running and self._running[0][0] <= self._clock.monotonic():
            *_, work = heapq.heappop(self._running)
            self._outstanding -= 1
            ended += 1
            work.finish()
        return ended

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def wait(self, timeout_s: float) -> bool:
        self._begin_due()
        if self._running and self._running[0][0] > self._clock.monotonic():
            self._clock.advance(min(timeout_s, self._running[0][0] - self._clock.monotonic()))
        return bool(self._running) and self._running[0][0] <= self._clock.monotonic()

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        for queue in self._waiting:
            for _, work in queue:
                work.drop()
                heapq.heappush(self._running, (float("-inf"), id(work), work))
            queue.clear()
        return not self._running
