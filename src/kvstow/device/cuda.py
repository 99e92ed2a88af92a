"""The CUDA device: pages on the GPU, copied on two side streams to and from pinned host memory.

Not run on hardware yet. What orders the copies is tested without it, on a recording accelerator
(tests/device/test_ordering.py); ``make test-cuda`` runs the rest where there is a GPU.

- A copy waits on an event recorded on the compute stream at the call: out after the kernels that
  fill the pages, in after the last reader of the old content. It also waits for copies in flight
  over the same blocks, if one is a load.
- A ticket is finished when the event recorded after its copies is complete, never before.
- The pool is pinned in bounded pieces in the background. What is not pinned yet is copied
  synchronously on the device's executor, because a copy between pageable memory and the GPU blocks
  its caller.
- A failed call or event fails its tickets. After a failed event the GPU's memory can't be trusted:
  all tickets in flight fail, and all later ones at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch

from kvstow.device.accelerator import BatchCopy, CudaAccelerator, Event, Stream
from kvstow.device.base import Finished, KVCache, KVSpec, Transfer
from kvstow.device.plan import GroupPlan, Move, attach_groups, check
from kvstow.device.segments import Arena, GroupAddresses, Segments
from kvstow.errors import CopyError
from kvstow.layout import GroupPages
from kvstow.pool.hostmem import populate
from kvstow.runtime import Clock, Executor

# registering one takes some 0.1 s: short enough to wait for at close
PIN_PIECE_BYTES: Final = 256 << 20
MAX_IN_FLIGHT: Final = 4096  # tickets; a step starts a few
DRAIN_TIMEOUT_S: Final = 30.0
DRAIN_STEP_S: Final = 0.001


@dataclass(slots=True)
class _Flight:
    """A ticket whose copies have started. ``event`` is None while the executor has it."""

    ticket: int
    load: bool
    count: int
    began: float
    failed: dict[int, str]
    moves: list[Move]
    segments: Segments
    event: Event | None = None
    blocks: dict[int, set[int]] = field(default_factory=dict)

    def touches(self, moves: Iterable[Move]) -> bool:
        return any(not self.blocks.get(move.group, set()).isdisjoint(move.ids) for move in moves)

    def fail_all(self, error: str) -> None:
        self.failed = dict.fromkeys(range(self.count), error)


class CudaDevice:
    """``Device`` over a CUDA GPU.

    ``executor`` is this device's own, with one thread; the device closes it. ``batch_copy`` is the
    engine's batched copy (see ``BatchCopy``), without which each range is one ``copy_``.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        batch_copy: BatchCopy | None = None,
        accelerator: CudaAccelerator | None = None,
        pin_piece_bytes: int = PIN_PIECE_BYTES,
        max_in_flight: int = MAX_IN_FLIGHT,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._gpu = accelerator or CudaAccelerator(batch_copy)
        self._piece_bytes = pin_piece_bytes
        self._max_in_flight = max_in_flight
        self._drain_timeout_s = drain_timeout_s
        self._plans: list[GroupPlan] = []
        self._addresses: list[GroupAddresses] = []
        self._arena = Arena([])
        self._streams: dict[bool, Stream] = {}  # by direction: load or not
        self._slow_stream: Stream | None = None
        self._pool: torch.Tensor | None = None
        self._shard = 0
        self.pinned_bytes = 0  # the pool is pinned up to here
        self._pinned: list[int] = []
        self.pin_error: str | None = None
        self._flights: dict[int, _Flight] = {}
        self._ended: list[Finished] = []
        self._broken: str | None = None
        self._closed = False

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        self._drain()
        with torch.inference_mode(False):
            self._plans = attach_groups(kv_caches, groups, self._gpu.device_type)
            self._addresses = [GroupAddresses(plan) for plan in self._plans]
            self._arena = Arena(self._plans)
        if not self._streams:
            self._gpu.select_device(self._plans[0].layers[0].planes[0].device)
            self._streams = {load: self._gpu.side_stream() for load in (False, True)}
            self._slow_stream = self._gpu.side_stream()
        return tuple(plan.pages for plan in self._plans)

    def map_pool(self, pool: memoryview, shard: int) -> None:
        self._drain()
        self._unpin()
        with torch.inference_mode(False):
            self._pool = torch.frombuffer(pool, dtype=torch.uint8)
        self._shard = shard
        self._pin_next()

    # --- pinning ---------------------------------------------------------------------------------------------------

    def _pin_next(self) -> None:
        """Pins the next piece in the background; its end starts the one after."""
        pool = self._pool
        if pool is None or self._closed or self.pin_error or self.pinned_bytes >= pool.numel():
            return
        begin = self.pinned_bytes
        length = min(self._piece_bytes, pool.numel() - begin)
        address = pool.data_ptr() + begin

        def pin() -> None:
            populate(pool.numpy().data, begin, length)  # once pinned, small pages stay small
            self._gpu.pin(address, length)

        def pinned(_: None, error: BaseException | None) -> None:
            if error is not None:
                self.pin_error = (
                    f"pinned {begin} of {pool.numel()} bytes of the host pool, then: {error}"
                )
                return
            self._pinned.append(address)
            self.pinned_bytes = begin + length
            self._pin_next()

        self._executor.submit(pin, pinned)

    def _unpin(self) -> None:
        for address in self._pinned:
            with suppress(RuntimeError):  # the GPU is gone: the process's end unpins
                self._gpu.unpin(address)
        self._pinned.clear()
        self.pinned_bytes = 0

    # --- copies ----------------------------------------------------------------------------------------------------

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=False)

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=True)

    def _start(self, ticket: int, transfers: Sequence[Transfer], *, load: bool) -> None:
        flight = self._plan(ticket, transfers, load=load)
        refused = self._broken or ("the device is closed" if self._closed else None)
        if refused is None and len(self._flights) >= self._max_in_flight:
            refused = f"{self._max_in_flight} copies are in flight"
        if refused is not None:
            flight.fail_all(refused)
        if refused is not None or not flight.moves:
            self._end(flight)
            return
        others = [
            other
            for other in self._flights.values()
            if (load or other.load) and other.touches(flight.moves)
        ]
        self._flights[ticket] = flight
        try:
            ready = self._gpu.record(self._gpu.compute_stream())
            after = [ready, *(other.event for other in others if other.event is not None)]
            if flight.segments.host_end <= self.pinned_bytes and all(
                other.event is not None for other in others
            ):
                self._enqueue(flight, after)
            else:
                self._hand_over(flight, after)
        except RuntimeError as error:
            self._break(str(error))

    def _plan(self, ticket: int, transfers: Sequence[Transfer], *, load: bool) -> _Flight:
        failed: dict[int, str] = {}
        moves: list[Move] = []
        blocks: dict[int, set[int]] = {}
        parts: list[Segments] = []
        pool_bytes = 0 if self._pool is None else self._pool.numel()
        for i, transfer in enumerate(transfers):
            try:
                move = check(transfer, self._plans, pool_bytes, self._shard, load=load)
            except CopyError as error:
                failed[i] = str(error)
                continue
            moves.append(move)
            blocks.setdefault(move.group, set()).update(move.ids)
            parts.append(self._addresses[move.group].segments(move, self._piece_bytes))
        flight = _Flight(
            ticket,
            load,
            len(transfers),
            self._clock.monotonic(),
            failed,
            moves,
            Segments.join(parts),
        )
        flight.blocks = blocks
        return flight

    def _enqueue(self, flight: _Flight, after: list[Event]) -> None:
        """Starts the copies on their side stream, after these events.

        Raises ``RuntimeError`` if the GPU is broken.
        """
        assert self._pool is not None
        stream = self._streams[flight.load]
        for event in after:
            self._gpu.wait(stream, event)
        try:
            self._gpu.copy(stream, flight.segments, self._pool, self._arena, load=flight.load)
        except RuntimeError as error:
            flight.fail_all(str(error))  # reported once the part that did start has ended
        flight.event = self._gpu.record(stream)

    def _hand_over(self, flight: _Flight, after: list[Event]) -> None:
        """Copies on the executor, range by range, between the GPU and memory that is not pinned."""
        pool, stream, arena, gpu = self._pool, self._slow_stream, self._arena, self._gpu
        assert pool is not None
        assert stream is not None

        def work() -> None:
            for event in after:
                gpu.wait(stream, event)
            gpu.copy_blocking(stream, flight.segments, pool, arena, load=flight.load)

        def then(_: None, error: BaseException | None) -> None:
            if error is not None:
                flight.fail_all(str(error))
            if self._flights.pop(flight.ticket, None) is not None:
                self._end(flight)

        if not self._executor.submit(work, then, urgent=True):
            del self._flights[flight.ticket]
            flight.fail_all("the device's queue of copies is full")
            self._end(flight)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, flight: _Flight) -> None:
        failed = tuple(sorted(flight.failed))
        moved = 0 if len(failed) == flight.count else flight.segments.total_bytes
        error = flight.failed[failed[0]] if failed else None
        self._ended.append(
            Finished(flight.ticket, failed, error, moved, self._clock.monotonic() - flight.began)
        )

    def _break(self, error: str) -> None:
        """Fails everything in flight and everything later: the GPU failed."""
        self._broken = f"the GPU failed: {error}"
        for ticket, flight in list(self._flights.items()):
            flight.fail_all(self._broken)
            del self._flights[ticket]
            self._end(flight)

    def _collect(self) -> None:
        self._executor.poll()
        waiting: set[bool] = set()  # on a stream copies end in order
        try:
            for ticket, flight in list(self._flights.items()):
                if flight.event is None or flight.load in waiting:
                    continue
                if not self._gpu.done(flight.event):
                    waiting.add(flight.load)
                    continue
                del self._flights[ticket]
                self._end(flight)
        except RuntimeError as error:
            self._break(str(error))

    def finished(self) -> list[Finished]:
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def fence(self, tickets: Sequence[int]) -> None:
        """Makes compute wait for these copies, and waits itself for those on the executor.

        Raises ``CopyError`` when the latter did not end within ``drain_timeout_s``, or the GPU
        failed.
        """
        flights = [self._flights[ticket] for ticket in set(tickets) if ticket in self._flights]
        try:
            for flight in flights:
                if flight.event is not None:
                    self._gpu.wait(self._gpu.compute_stream(), flight.event)
        except RuntimeError as error:
            self._break(str(error))
            raise CopyError(str(self._broken)) from error
        self._wait_for([flight for flight in flights if flight.event is None])

    def _drain(self) -> None:
        """Waits at most ``drain_timeout_s`` until nothing is in flight."""
        self._wait_for(list(self._flights.values()))

    def _wait_for(self, flights: Sequence[_Flight]) -> None:
        deadline = self._clock.monotonic() + self._drain_timeout_s
        while left := [flight for flight in flights if flight.ticket in self._flights]:
            self._collect()
            if self._clock.monotonic() >= deadline:
                text = f"{len(left)} copies did not end within {self._drain_timeout_s} s"
                for flight in left:
                    flight.fail_all(text)
                raise CopyError(text)
            if any(flight.ticket in self._flights for flight in flights):
                self._executor.wait(DRAIN_STEP_S)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(CopyError):
            self._drain()
        stopped = self._executor.close(self._drain_timeout_s)
        self._executor.poll()
        if self._flights:
            self._break("it did not finish its copies before the device was closed")
        if stopped:  # a thread that is stuck in a copy may still use what it pinned
            self._unpin()
        self._pool, self._addresses, self._plans, self._arena = None, [], [], Arena([])
