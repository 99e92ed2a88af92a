"""Tickets of devices whose copies run on one executor thread, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import torch

from kvstow.device.base import Finished, Transfer
from kvstow.device.plan import GroupPlan, Move, check
from kvstow.errors import CopyError
from kvstow.runtime import Clock, Executor

FENCE_TIMEOUT_S: Final = 30.0  # tens of GB at memory speed: what takes longer is stuck
# of a copy: a miss; anything else is a bug
FAILURES: Final = (CopyError, RuntimeError, IndexError, ValueError)


class TicketDevice:
    """Base of devices that copy on an executor's thread.

    A subclass implements ``attach``, which fills ``_plans``, ``_copy_context`` and ``_copy``.

    ``executor`` is the device's own, with one thread, so tickets end in the order in which they
    came; it is closed with ``close``. A ticket that the executor has no room for fails at once.
    """

    def __init__(self, executor: Executor, clock: Clock, fence_timeout_s: float) -> None:
        self._executor = executor
        self._clock = clock
        self._fence_timeout_s = fence_timeout_s
        self._in_flight: dict[int, int] = {}  # ticket to its transfers
        # a fence ran out of time for these: what they moved later does not count
        self._abandoned: set[int] = set()
        self._ended: list[Finished] = []
        self._closed = False
        self._plans: list[GroupPlan] = []
        self._pool: torch.Tensor | None = None
        self._shard = 0

    def _copy_context(self) -> Callable[[], AbstractContextManager[object]]:
        """Returns a factory for the context of a ticket's copies, entered on the executor's thread.

        Called by ``copy_out`` and ``copy_in``. Raises ``CopyError`` where the ticket can't be
        started.
        """
        raise NotImplementedError

    def _copy(self, pool: torch.Tensor, move: Move, *, load: bool) -> int:
        """Copies one checked transfer on the executor's thread. Returns the bytes moved."""
        raise NotImplementedError

    def map_pool(self, pool: memoryview, shard: int) -> None:
        # an inference tensor made here could not be written on another thread
        with torch.inference_mode(False):
            self._pool = torch.frombuffer(pool, dtype=torch.uint8)
        self._shard = shard

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=False)

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=True)

    def _start(self, ticket: int, transfers: Sequence[Transfer], *, load: bool) -> None:
        """Queues one ticket.

        A transfer whose copy raises fails alone; where ``_copy_context`` raises, all have failed.
        """
        clock, pool, plans, shard = self._clock, self._pool, self._plans, self._shard
        pool_bytes = 0 if pool is None else pool.numel()
        # The caller's lists of block ids grow while the copy waits its turn.
        batch = [Transfer(t.place, tuple(t.block_ids), t.first_block, t.group) for t in transfers]
        try:
            copy_context = self._copy_context()
        except CopyError as error:
            self._ended.append(Finished(ticket, tuple(range(len(batch))), str(error), 0, 0.0))
            return

        def work() -> Finished:
            began = clock.monotonic()
            failed: dict[int, str] = {}
            moved = 0
            try:
                with copy_context():
                    for i, transfer in enumerate(batch):
                        try:
                            move = check(transfer, plans, pool_bytes, shard, load=load)
                            assert pool is not None
                            moved += self._copy(pool, move, load=load)
                        except FAILURES as error:
                            failed[i] = str(error)
            except FAILURES as error:
                failed, moved = dict.fromkeys(range(len(batch)), str(error)), 0
            error_text = next(iter(failed.values()), None)
            return Finished(ticket, tuple(failed), error_text, moved, clock.monotonic() - began)

        self._in_flight[ticket] = len(batch)
        if self._closed or not self._executor.submit(
            work, lambda done, error: self._end(ticket, done, error)
        ):
            self._end(
                ticket, None, CopyError("the device is closed, or its queue of copies is full")
            )

    def _end(self, ticket: int, done: Finished | None, error: BaseException | None) -> None:
        count = self._in_flight.pop(ticket)
        if ticket in self._abandoned:
            self._abandoned.discard(ticket)
            done, error = (
                None,
                CopyError(f"the copy took longer than a fence waits ({self._fence_timeout_s} s)"),
            )
        self._ended.append(done or Finished(ticket, tuple(range(count)), str(error), 0, 0.0))

    def finished(self) -> list[Finished]:
        """Tickets that ended since the last call, each exactly once."""
        self._executor.poll()
        ended, self._ended = self._ended, []
        return ended

    def fence(self, tickets: Iterable[int] | None = None) -> None:
        """Waits for these copies, or for all.

        Copies that are left after ``fence_timeout_s`` count as failed; then it raises
        ``CopyError``.
        """
        deadline = self._clock.monotonic() + self._fence_timeout_s
        waiting = set(self._in_flight) if tickets is None else self._in_flight.keys() & set(tickets)
        while waiting:
            left = deadline - self._clock.monotonic()
            if left <= 0 or not self._executor.wait(left):
                self._abandoned |= waiting
                raise CopyError(
                    f"{len(waiting)} copies did not end within {self._fence_timeout_s} s"
                )
            self._executor.poll()
            waiting &= self._in_flight.keys()

    def close(self) -> None:
        """Waits at most ``fence_timeout_s`` for copies in flight and reports the others as failed.

        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(CopyError):
            self.fence()
        self._executor.close(self._fence_timeout_s)
        self._executor.poll()
        self._pool, self._plans = None, []
