"""Tickets of a device whose copies run on one executor's thread: their order, their ends and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

from kvstow.device.base import Finished, Transfer
from kvstow.errors import CopyError
from kvstow.runtime import Clock, Executor

FENCE_TIMEOUT_S: Final = 30.0  # tens of GB at memory speed: what takes longer is stuck
FAILURES: Final = (CopyError, RuntimeError, IndexError, ValueError)  # of a copy: a miss; anything else is a bug


class Tickets:
    """``executor`` is the device's own, with one thread, so tickets end in the order in which they came; it is closed
    with ``close``. A ticket that the executor has no room for fails at once."""

    def __init__(self, executor: Executor, clock: Clock, fence_timeout_s: float = FENCE_TIMEOUT_S) -> None:
        self._executor = executor
        self._clock = clock
        self._fence_timeout_s = fence_timeout_s
        self._in_flight: dict[int, int] = {}  # ticket to its transfers
        self._given_up: set[int] = set()  # a fence could not wait for these: whatever they moved is not to be used
        self._ended: list[Finished] = []
        self._closed = False

    def start(
        self,
        ticket: int,
        transfers: Sequence[Transfer],
        copy: Callable[[Transfer], int],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Copy each transfer, within one ``around()``, on the executor's thread; ``copy`` returns its bytes.

        A transfer whose copy raises fails alone; where ``around`` raises, all have failed.
        """
        clock = self._clock
        # The caller's lists of block ids grow while the copy waits its turn.
        batch = [Transfer(t.place, tuple(t.block_ids), t.first_block, t.group) for t in transfers]

        def work() -> Finished:
            began = clock.monotonic()
            failed: dict[int, str] = {}
            moved = 0
            try:
                with around():
                    for i, transfer in enumerate(batch):
                        try:
                            moved += copy(transfer)
                        except FAILURES as error:
                            failed[i] = str(error)
            except FAILURES as error:
                failed, moved = dict.fromkeys(range(len(batch)), str(error)), 0
            error_text = next(iter(failed.values()), None)
            return Finished(ticket, tuple(failed), error_text, moved, clock.monotonic() - began)

        self._in_flight[ticket] = len(batch)
        if self._closed or not self._executor.submit(work, lambda done, error: self._end(ticket, done, error)):
            self._end(ticket, None, CopyError("the device is closed, or its queue of copies is full"))

    def _end(self, ticket: int, done: Finished | None, error: BaseException | None) -> None:
        count = self._in_flight.pop(ticket)
        if ticket in self._given_up:
            self._given_up.discard(ticket)
            done, error = None, CopyError(f"the copy took longer than a fence waits ({self._fence_timeout_s} s)")
        self._ended.append(done or Finished(ticket, tuple(range(count)), str(error), 0, 0.0))

    def fail(self, ticket: int, count: int, error: str) -> None:
        """End a ticket of ``count`` transfers that could not be started."""
        self._ended.append(Finished(ticket, tuple(range(count)), error, 0, 0.0))

    def finished(self) -> list[Finished]:
        """Tickets that ended since the last call, each exactly once."""
        self._executor.poll()
        ended, self._ended = self._ended, []
        return ended

    def fence(self, tickets: Iterable[int] | None = None) -> None:
        """Wait for these tickets, all by default; what is left after ``fence_timeout_s`` has failed, and ``CopyError``
        is raised."""
        deadline = self._clock.monotonic() + self._fence_timeout_s
        waiting = set(self._in_flight) if tickets is None else self._in_flight.keys() & set(tickets)
        while waiting:
            left = deadline - self._clock.monotonic()
            if left <= 0 or not self._executor.wait(left):
                self._given_up |= waiting
                raise CopyError(f"{len(waiting)} copies did not end within {self._fence_timeout_s} s")
            self._executor.poll()
            waiting &= self._in_flight.keys()

    def close(self) -> None:
        """Wait, bounded, for what is in flight; a copy that does not end is reported as failed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(CopyError):
            self.fence()
        self._executor.close(self._fence_timeout_s)
        self._executor.poll()
