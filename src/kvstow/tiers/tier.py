"""One lower tier: a store, the threads that its calls block on, and what the owner's thread knows of both.

Owner's thread only, but for the functions that are handed to the executor: they touch the store and leased
buffers, nothing else. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstow.backends.base import Done, Store
from kvstow.errors import StoreRefused, StoreUnavailable, WorkDropped
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.index import Got
from kvstow.pool.pool import Lease
from kvstow.runtime import Clock, Executor
from kvstow.text import printable
from kvstow.tiers.breaker import Breaker, BreakerState, NotAsked
from kvstow.tiers.call import Call
from kvstow.tiers.limits import TierLimits, WriteRate
from kvstow.tiers.moves import CORRUPT, Came, Coder, Moves, Wrote

T = TypeVar("T")

ERROR_CHARACTERS: Final = 300  # of a store's error that are logged
MAX_LOGGED_FAILURES: Final = 32  # kinds of failures, of which the first of each is logged
LOOK_UP: Final = "look-up"
READ: Final = "read"
WRITE: Final = "write"

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
        coder: Coder | None = None,
        integrity_key: bytes | None = None,
        set_aside: Callable[[Sequence[ChunkKey]], None] | None = None,
        take_corrupt: Callable[[], int] | None = None,
        paths_down: Callable[[], int] | None = None,
        stuck: Callable[[], int] | None = None,
        take_maintenance_failures: Callable[[], int] | None = None,
    ) -> None:
        """``coder`` None: frames are raw. ``set_aside`` removes corrupt values from the store some other way than
        ``delete``; on a worker.
        ``take_corrupt`` says how many the store found by itself since it was last asked, to be counted too;
        ``paths_down`` how many of the directories that it is spread over are out of use, ``stuck`` how many calls hang
        in these while it works on without them."""
        self.name = name
        self.limits = limits or TierLimits()
        self.executor = executor
        self._store = Breaker(
            store, clock, failures=self.limits.breaker_failures, open_s=self.limits.breaker_open_s
        )
        self._layout = layout
        self._moves = Moves(self._store, layout, clock, set_aside or self._store.delete)
        self.use(coder, integrity_key)
        self._take_corrupt = take_corrupt
        self._paths_down = paths_down
        self._stuck = stuck
        self._take_maintenance_failures = take_maintenance_failures
        self._clock = clock
        self._metrics = metrics
        self._calls: dict[Call, None] = {}
        self._known: OrderedDict[ChunkKey, None] = OrderedDict()
        self._queued_writes = self._queued_bytes = self._read_bytes = 0
        self._rate = WriteRate(self.limits.assumed_write_bytes_s)
        self._hung = self._lost = (
            0  # calls that hang: the tier, or in a part that it works on without
        )
        self._shown_down = -1
        self._watch_at_s = self._progress_s = clock.monotonic()
        self._shown = BreakerState.CLOSED
        self._last_errors: dict[str, str] = {}  # of the store's own, by operation, shortened
        self._logged_failures: set[tuple[str, str, int | None]] = set()
        self._bypassed = False  # as logged: trials in between, half-open, are not news
        self._not_written = False  # as logged
        metrics.gauge("tier_state", self._shown, tier=name)

    def use(self, coder: Coder | None, integrity_key: bytes | None) -> None:
        """Before the first call: code what is written, and check every frame's MAC."""
        self._moves.coder, self._moves.integrity_key = coder, integrity_key
        self.exact = coder is None or not coder.lossy  # what it holds comes back as it was written

    # --- health ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> BreakerState:
        """The worse of reads and writes; OPEN also while a call hangs, which the breaker can't notice."""
        return BreakerState.OPEN if self._hung else self._store.state

    @property
    def usable(self) -> bool:
        """Whether the tier may be looked up and read."""
        return not self._hung and self._store.read_state is not BreakerState.OPEN

    @property
    def writable(self) -> bool:
        """Whether the tier may be written. A tier that can't be read is not written either."""
        return self.usable and self._store.write_state is not BreakerState.OPEN

    def busy(self) -> bool:
        """Whether calls are outstanding and any ended, or was asked for, within ``work_deadline_s``."""
        waited_s = self._clock.monotonic() - self._progress_s
        return len(self._calls) > self._lost and waited_s < self.limits.work_deadline_s

    def poll(self) -> int:
        """Take the results of ended calls and look for hung ones. Returns how many ended."""
        if self._take_corrupt is not None and (corrupt := self._take_corrupt()):
            self._metrics.count("corrupt_chunks", corrupt, tier=self.name)
        if self._take_maintenance_failures is not None:
            failures = self._take_maintenance_failures()
            if failures:
                self._metrics.count("maintenance_failures", failures, tier=self.name)
        if self._paths_down is not None and (down := self._paths_down()) != self._shown_down:
            self._shown_down = down
            self._metrics.gauge("tier_paths_down", down, tier=self.name)
        if not self._calls and not self.executor.outstanding and self._shown is BreakerState.CLOSED:
            return 0
        ended = self.executor.poll()
        now = self._clock.monotonic()
        if now >= self._watch_at_s or (ended and self._hung + self._lost):
            self._watch_at_s = now + self.limits.hung_after_s / 10
            late = now - self.limits.hung_after_s
            hung = sum(
                c.ended_s is None and c.began_s is not None and c.began_s <= late
                for c in self._calls
            )
            self._lost = min(hung, self._stuck()) if hung and self._stuck is not None else 0
            self._hung = hung - self._lost
        self._show()
        return ended

    def _show(self) -> None:
        """Log what has changed, and bring the gauge up to date."""
        self._log_reads()
        self._log_writes()
        state = self.state
        if state is not self._shown:
            self._shown = state
            self._metrics.gauge("tier_state", state, tier=self.name)

    def _log_reads(self) -> None:
        if not self._bypassed and not self.usable:
            self._bypassed = True
            error = self._last_errors.get(READ) or self._last_errors.get(LOOK_UP, "")
            why = "a call hangs" if self._hung else f"its calls fail: {error}"
            logger.warning("Tier %s is bypassed: %s", self.name, why)
        elif self._bypassed and not self._hung and self._store.read_state is BreakerState.CLOSED:
            self._bypassed = False
            logger.warning("Tier %s is in use again", self.name)

    def _log_writes(self) -> None:
        state = self._store.write_state
        if state is BreakerState.OPEN and not self._not_written and not self._bypassed:
            self._not_written = True
            logger.warning(
                "Tier %s is not written, it is still read: its writes fail: %s",
                self.name,
                self._last_errors.get(WRITE, ""),
            )
        elif state is BreakerState.CLOSED and self._not_written:
            self._not_written = False
            logger.warning("Tier %s is written again", self.name)

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
                self._failed(LOOK_UP, len(keys), error)
            else:
                for key, held in zip(keys, found, strict=True):
                    self._learn(key, held)
            then(found or [False] * len(keys))

        return self._submit(lambda: self._store.contains(keys), end, lambda: None, urgent=True)

    def room(self, group: int) -> int:
        """How many more chunks of ``group`` may be read now."""
        free = self.limits.max_read_bytes - self._read_bytes
        return (
            free // self._frame_bytes(group)
            if self._read_bytes
            else max(1, free // self._frame_bytes(group))
        )

    def batch(self, group: int) -> int:
        """How many chunks of ``group`` make one read call."""
        return max(1, self.limits.read_batch_bytes // self._frame_bytes(group))

    def read(
        self, items: Sequence[tuple[ChunkKey, Lease]], then: Callable[[list[Got]], None]
    ) -> Call | None:
        """Fill the leased slots. ``then`` hears which hold the payload of their key, checked, and whether exactly;
        the others are misses, and corrupt ones are removed from the store. None: nothing happens, the queue is full.
        """
        size = sum(self._frame_bytes(key.group) for key, _ in items)
        views = [(key, lease.view()) for key, lease in items]

        def end(call: Call, came: list[Came] | None, error: BaseException | None) -> None:
            self._read_bytes -= size
            self._ended_read(call, [key for key, _ in items], came, error)
            then([one.got for one in came] if came is not None else [Got.MISS] * len(items))

        def give_up() -> None:
            self._read_bytes -= size

        call = self._submit(lambda: self._moves.read(views), end, give_up, urgent=True)
        if call is not None:
            self._read_bytes += size
        return call

    def _ended_read(
        self,
        call: Call,
        keys: Sequence[ChunkKey],
        came: Sequence[Came] | None,
        error: BaseException | None,
    ) -> None:
        metrics = self._metrics
        if came is None:
            self._failed(READ, len(keys), error)
            for key in keys:  # what can't be read must be stored anew when it is computed
                self._learn(key, False)
            return
        for key, one in zip(keys, came, strict=True):
            self._learn(key, one.got is not Got.MISS)
            if one.why == CORRUPT:
                metrics.count("corrupt_chunks", tier=self.name)
            elif one.why:
                metrics.count("failed_chunks", tier=self.name, reason=one.why)
        used = [one for one in came if one.got is not Got.MISS]
        if used:
            size = sum(one.length for one in used)
            metrics.count("loaded_chunks", len(used), tier=self.name)
            metrics.count("loaded_bytes", size, tier=self.name)
            metrics.count("decode_seconds", sum(one.decode_s for one in used), tier=self.name)
            metrics.observe("load_seconds", call.seconds, tier=self.name)
            metrics.observe("load_size_bytes", size, tier=self.name)

    def write(self, key: ChunkKey, lease: Lease, then: Callable[[bool], None]) -> Call | None:
        """Write the sealed, exact frame in the leased slot; ``then`` hears whether the store has the key now.

        None: refused and counted, because too much is queued, in bytes or in time, or the tier is bypassed; ``then``
        never runs.
        """
        size = self._frame_bytes(key.group)
        if not self.writable:
            self._refuse("unavailable")
            return None
        queued = self._queued_bytes + size
        if (
            self._queued_writes >= self.limits.max_queued_writes
            or queued > self.limits.max_queued_bytes
        ):
            self._refuse("queue_full")
            return None
        if self._queued_writes and self._rate.seconds(queued) > self.limits.max_queued_s:
            self._refuse("queue_slow")
            return None
        view = lease.view()

        def end(call: Call, wrote: Wrote | None, error: BaseException | None) -> None:
            self._queue(-1, -size)
            self._ended_write(call, key, wrote, error)
            then(wrote is not None and wrote.held)

        call = self._submit(
            lambda: self._moves.write(key, view), end, lambda: self._queue(-1, -size), urgent=False
        )
        if call is None:
            self._refuse("queue_full")
            return None
        self._queue(1, size)
        return call

    def _ended_write(
        self, call: Call, key: ChunkKey, wrote: Wrote | None, error: BaseException | None
    ) -> None:
        metrics = self._metrics
        if wrote is None:
            self._failed(WRITE, 1, error)
            return
        outcome, held, encode_s = wrote
        self._learn(key, held)
        metrics.count("encode_seconds", encode_s, tier=self.name)
        if isinstance(outcome, Done):
            size = self._frame_bytes(key.group)
            self._rate.ended(size, call.began_s or 0.0, call.ended_s or 0.0)
            metrics.count("stored_chunks", tier=self.name)
            metrics.count("stored_bytes", outcome.length, tier=self.name)
            metrics.count("stored_raw_bytes", size, tier=self.name)
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

    def _failed(self, operation: str, chunks: int, error: BaseException | None) -> None:
        """Count a failed call, and log the first of its kind."""
        reason = "error"
        if isinstance(error, StoreUnavailable):
            reason = "unavailable"
        elif isinstance(error, StoreRefused):
            reason = "refused"
        self._metrics.count("failed_chunks", chunks, tier=self.name, reason=reason)
        if error is None or isinstance(error, NotAsked | WorkDropped):
            return
        text = printable(str(error)[:ERROR_CHARACTERS])
        self._last_errors[operation] = text
        cause = error.__cause__ or error
        code = cause.errno if isinstance(cause, OSError) else None
        kind = (operation, type(error).__name__, code)
        if kind not in self._logged_failures and len(self._logged_failures) < MAX_LOGGED_FAILURES:
            self._logged_failures.add(kind)
            logger.warning(
                "Tier %s: a %s failed: %s (more failures of this kind are counted, not logged)",
                self.name,
                operation,
                text,
            )

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
