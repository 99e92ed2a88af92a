"""One lower tier: a store, the threads that its calls block on, and what the owner's thread knows of both.

Owner's thread only, but for the functions that are handed to the executor: they touch the store and leased
buffers, nothing else. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvstow import frame
from kvstow.errors import FrameError, StoreError, StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool import Lease
from kvstow.runtime import Clock, Executor
from kvstow.store.base import Done, Missing, Outcome, Store
from kvstow.store.breaker import Breaker, BreakerState
from kvstow.tier.call import Call
from kvstow.tier.limits import TierLimits, WriteRate

T = TypeVar("T")

logger = logging.getLogger("kvstow")


class Tier:
    """``store`` behind a breaker, with bounded work in flight. Close it to close the store and the executor."""

    def __init__(
        self,
        name: str,
        store: Store,
        executor: Executor,
        *,
        layout: ChunkLayout,
        clock: Clock,
        metrics: Metrics,
        limits: TierLimits | None = None,
        integrity_key: bytes | None = None,
        set_aside: Callable[[Sequence[ChunkKey]], None] | None = None,
        take_corrupt: Callable[[], int] | None = None,
        paths_down: Callable[[], int] | None = None,
    ) -> None:
        """``set_aside`` removes corrupt values from the store some other way than ``delete``; on a worker.
        ``take_corrupt`` says how many the store found by itself since it was last asked, to be counted too;
        ``paths_down`` how many of the directories that it is spread over are out of use."""
        self.name = name
        self.limits = limits or TierLimits()
        self.executor = executor
        self._store = Breaker(
            store, clock, failures=self.limits.breaker_failures, open_s=self.limits.breaker_open_s
        )
        self._layout = layout
        self._integrity_key = integrity_key
        self._set_aside = set_aside or self._store.delete
        self._take_corrupt = take_corrupt
        self._paths_down = paths_down
        self._clock = clock
        self._metrics = metrics
        self._calls: dict[Call, None] = {}
        self._known: OrderedDict[ChunkKey, None] = OrderedDict()
        self._queued_writes = self._queued_bytes = self._read_bytes = 0
        self._rate = WriteRate(self.limits.assumed_write_bytes_s)
        self._hung = 0
        self._shown_down = -1
        self._watch_at_s = self._progress_s = clock.monotonic()
        self._shown = BreakerState.CLOSED
        self._bypassed = False  # as logged: trials in between, half-open, are not news
        metrics.gauge("tier_state", self._shown, tier=name)

    # --- health ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> BreakerState:
        """OPEN also while a call hangs: the breaker, inside that call, can't notice."""
        return BreakerState.OPEN if self._hung else self._store.state

    @property
    def usable(self) -> bool:
        return self.state is not BreakerState.OPEN

    def busy(self) -> bool:
        """Whether calls are outstanding and any ended, or was asked for, within ``work_deadline_s``."""
        return bool(self._calls) and self._clock.monotonic() - self._progress_s < self.limits.work_deadline_s

    def poll(self) -> int:
        """Take the results of ended calls and look for hung ones. Returns how many ended."""
        if self._take_corrupt is not None and (corrupt := self._take_corrupt()):
            self._metrics.count("corrupt_chunks", corrupt, tier=self.name)
        if self._paths_down is not None and (down := self._paths_down()) != self._shown_down:
            self._shown_down = down
            self._metrics.gauge("tier_paths_down", down, tier=self.name)
        if not self._calls and not self.executor.outstanding and self._shown is BreakerState.CLOSED:
            return 0
        ended = self.executor.poll()
        now = self._clock.monotonic()
        if now >= self._watch_at_s or (ended and self._hung):
            self._watch_at_s = now + self.limits.hung_after_s / 10
            late = now - self.limits.hung_after_s
            self._hung = sum(c.ended_s is None and c.began_s is not None and c.began_s <= late for c in self._calls)
        self._show()
        return ended

    def _show(self) -> None:
        state = self.state
        if state is self._shown:
            return
        if state is BreakerState.OPEN and not self._bypassed:
            self._bypassed = True
            logger.warning("Tier %s is bypassed: %s", self.name, "a call hangs" if self._hung else "its calls fail")
        elif state is BreakerState.CLOSED and self._bypassed:
            self._bypassed = False
            logger.warning("Tier %s is in use again", self.name)
        self._shown = state
        self._metrics.gauge("tier_state", state, tier=self.name)

    # --- what it holds, as far as is known ---------------------------------------------------------------------

    def holds(self, key: ChunkKey) -> bool:
        """Whether ``key`` was written to the store, or found there, and not missed since."""
        return key in self._known

    def _learn(self, key: ChunkKey, held: bool) -> None:
        if not held:
            self._known.pop(key, None)
            return
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > self.limits.known_keys:
            self._known.popitem(last=False)

    # --- calls ------------------------------------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey], then: Callable[[list[bool]], None]) -> Call | None:
        """Ask which of ``keys`` the store has; a failure is "none". None: not asked, the queue is full."""

        def end(_: Call, found: list[bool] | None, error: BaseException | None) -> None:
            if found is None:
                self._failed(len(keys), error)
            else:
                for key, held in zip(keys, found, strict=True):
                    self._learn(key, held)
            then(found or [False] * len(keys))

        return self._submit(lambda: self._store.contains(keys), end, lambda: None, urgent=True)

    def room(self, group: int) -> int:
        """How many more chunks of ``group`` may be read now."""
        free = self.limits.max_read_bytes - self._read_bytes
        return free // self._frame_bytes(group) if self._read_bytes else max(1, free // self._frame_bytes(group))

    def batch(self, group: int) -> int:
        """How many chunks of ``group`` make one read call."""
        return max(1, self.limits.read_batch_bytes // self._frame_bytes(group))

    def read(self, items: Sequence[tuple[ChunkKey, Lease]], then: Callable[[list[bool]], None]) -> Call | None:
        """Fill the leased slots. ``then`` hears which hold a whole frame of their key, checked; the others are
        misses, and corrupt ones are deleted from the store. None: nothing happens, the queue is full."""
        size = sum(self._frame_bytes(key.group) for key, _ in items)
        views = [(key, lease.view()) for key, lease in items]

        def end(call: Call, good: list[bool | None] | None, error: BaseException | None) -> None:
            self._read_bytes -= size
            self._ended_read(call, [key for key, _ in items], good, error)
            then([ok is True for ok in good] if good is not None else [False] * len(items))

        def give_up() -> None:
            self._read_bytes -= size

        call = self._submit(lambda: self._read_checked(views), end, give_up, urgent=True)
        if call is not None:
            self._read_bytes += size
        return call

    def _read_checked(self, views: Sequence[tuple[ChunkKey, memoryview]]) -> list[bool | None]:
        """On a worker: read and check. True: a whole frame; False: not there; None: corrupt, and set aside."""
        good: list[bool | None] = []
        for (key, view), outcome in zip(views, self._store.read(views), strict=True):
            try:
                if isinstance(outcome, Missing):
                    good.append(False)
                    continue
                if not isinstance(outcome, Done):
                    raise FrameError("longer than a frame of this key can be")
                group = self._layout.groups[key.group]
                frame.check(view, outcome.length, key, group, integrity_key=self._integrity_key)
                good.append(True)
            except FrameError:
                good.append(None)
        corrupt = [key for (key, _), ok in zip(views, good, strict=True) if ok is None]
        if corrupt:
            with suppress(StoreError):  # it is a miss either way; deleting is for those who come later
                self._set_aside(corrupt)
        return good

    def _ended_read(
        self, call: Call, keys: Sequence[ChunkKey], good: list[bool | None] | None, error: BaseException | None
    ) -> None:
        count, metrics = self._metrics.count, self._metrics
        if good is None:
            self._failed(len(keys), error)
            if isinstance(error, StoreRefused):
                for key in keys:
                    self._learn(key, False)
            return
        for key, ok in zip(keys, good, strict=True):
            self._learn(key, ok is True)
        if corrupt := sum(ok is None for ok in good):
            count("corrupt_chunks", corrupt, tier=self.name)
        size = sum(self._frame_bytes(key.group) for key, ok in zip(keys, good, strict=True) if ok)
        if size:
            count("loaded_chunks", good.count(True), tier=self.name)
            count("loaded_bytes", size, tier=self.name)
            metrics.observe("load_seconds", call.seconds, tier=self.name)
            metrics.observe("load_size_bytes", size, tier=self.name)

    def write(self, key: ChunkKey, lease: Lease, then: Callable[[bool], None]) -> Call | None:
        """Write the sealed frame in the leased slot; ``then`` hears whether the store has the key now.

        None: refused and counted, because too much is queued, in bytes or in time, or the tier is bypassed; ``then``
        never runs.
        """
        size = self._frame_bytes(key.group)
        if not self.usable:
            self._refuse("unavailable")
            return None
        queued = self._queued_bytes + size
        if self._queued_writes >= self.limits.max_queued_writes or queued > self.limits.max_queued_bytes:
            self._refuse("queue_full")
            return None
        if self._queued_writes and self._rate.seconds(queued) > self.limits.max_queued_s:
            self._refuse("queue_slow")
            return None
        view = lease.view()

        def end(call: Call, wrote: tuple[Outcome, bool] | None, error: BaseException | None) -> None:
            self._queue(-1, -size)
            self._ended_write(call, key, wrote, error)
            then(wrote is not None and wrote[1])

        call = self._submit(lambda: self._write_one(key, view), end, lambda: self._queue(-1, -size), urgent=False)
        if call is None:
            self._refuse("queue_full")
            return None
        self._queue(1, size)
        return call

    def _write_one(self, key: ChunkKey, view: memoryview) -> tuple[Outcome, bool]:
        """On a worker: what came of it, and whether the store has the key now. A rejected key is there already, or
        has no room, or is not admitted yet: then it must be offered again, so the store is asked."""
        [outcome] = self._store.write([(key, [view])])
        return outcome, isinstance(outcome, Done) or self._store.contains([key])[0]

    def _ended_write(
        self, call: Call, key: ChunkKey, wrote: tuple[Outcome, bool] | None, error: BaseException | None
    ) -> None:
        metrics = self._metrics
        if wrote is None:
            self._failed(1, error)
            return
        outcome, held = wrote
        self._learn(key, held)
        if isinstance(outcome, Done):
            self._rate.ended(self._frame_bytes(key.group), call.began_s or 0.0, call.ended_s or 0.0)
            metrics.count("stored_chunks", tier=self.name)
            metrics.count("stored_bytes", outcome.length, tier=self.name)
            metrics.observe("store_seconds", call.seconds, tier=self.name)
            metrics.observe("store_size_bytes", outcome.length, tier=self.name)
        else:
            metrics.count("refused_chunks", tier=self.name, reason="rejected")

    def _submit(
        self,
        work: Callable[[], T],
        then: Callable[[Call, T | None, BaseException | None], None],
        release_bytes: Callable[[], None],
        *,
        urgent: bool,
    ) -> Call | None:
        clock = self._clock

        def forget() -> None:
            self._calls.pop(call, None)
            release_bytes()

        call = Call(forget)

        def run() -> T | None:
            if not call.begin(clock.monotonic()):
                return None
            try:
                return work()
            finally:
                call.ended_s = clock.monotonic()

        def end(value: T | None, error: BaseException | None) -> None:
            if not call.cancelled:
                self._calls.pop(call, None)
                self._progress_s = clock.monotonic()
                then(call, value, error)

        if not self.executor.submit(run, end, urgent=urgent):
            return None
        self._calls[call] = None
        self._progress_s = clock.monotonic()
        return call

    def _frame_bytes(self, group: int) -> int:
        return self._layout.groups[group].frame_bytes

    def _refuse(self, reason: str) -> None:
        self._metrics.count("refused_chunks", tier=self.name, reason=reason)

    def _failed(self, chunks: int, error: BaseException | None) -> None:
        known = ((StoreUnavailable, "unavailable"), (StoreRefused, "refused"))
        reason = next((word for kind, word in known if isinstance(error, kind)), "error")
        self._metrics.count("failed_chunks", chunks, tier=self.name, reason=reason)

    def _queue(self, writes: int, size: int) -> None:
        self._queued_writes += writes
        self._queued_bytes += size
        self._metrics.gauge("queued_bytes", self._queued_bytes, tier=self.name)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun, wait at most ``timeout_s`` for what has. False: a call hangs, and the store
        stays open under it."""
        ended = self.executor.close(timeout_s)
        self.executor.poll()
        if ended:
            self._store.close()
        return ended
