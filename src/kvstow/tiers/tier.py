"""One lower tier: a store, the threads that its calls block on, and what the owner's thread knows
of both.

Owner's thread only, but for the functions that are handed to the executor: they touch the store and
leased buffers, nothing else. Nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvstow.backends.base import Done, Store, StoreReport
from kvstow.backends.limits import TierLimits
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.index import ReadOutcome
from kvstow.pool.pool import Lease
from kvstow.runtime import Clock, Executor
from kvstow.tiers.breaker import Breaker, BreakerState
from kvstow.tiers.call import Call
from kvstow.tiers.health import LOOK_UP, READ, WRITE, TierHealth
from kvstow.tiers.limits import WriteRate
from kvstow.tiers.transfers import FrameTransfers, ReadResult, Unusable, WriteResult

if TYPE_CHECKING:
    from kvstow.codec.frames import FrameCoder

T = TypeVar("T")


class Tier:
    """``store`` behind a breaker, with bounded work in flight.

    Close it to close the store and the executor.
    """

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
        coder: FrameCoder | None = None,
        integrity_key: bytes | None = None,
    ) -> None:
        """``coder`` codes what is written; None: frames are raw.

        With ``integrity_key`` every frame's MAC is checked.
        """
        self.name = name
        self.limits = limits or TierLimits()
        self.executor = executor
        self._store = Breaker(
            store, clock, failures=self.limits.breaker_failures, open_s=self.limits.breaker_open_s
        )
        self._health = TierHealth(name, self._store, metrics)
        self._layout = layout
        self._transfers = FrameTransfers(
            self._store, layout, clock, coder=coder, integrity_key=integrity_key
        )
        self.exact = coder is None or not coder.lossy  # values come back as they were written
        self._clock = clock
        self._metrics = metrics
        self._calls: dict[Call, None] = {}
        self._known: OrderedDict[ChunkKey, None] = OrderedDict()
        self._queued_writes = 0
        self._queued_bytes = 0
        self._read_bytes = 0
        self._rate = WriteRate(self.limits.assumed_write_bytes_s)
        self._hung_aside = 0  # calls that hang in a part which the store works without
        self._shown_down = -1
        self._progress_s = clock.monotonic()
        self._look_for_hung_s = self._progress_s

    # --- health -----------------------------------------------------------------------------------

    @property
    def state(self) -> BreakerState:
        """The worse of reads and writes; OPEN also while a call hangs."""
        return self._health.state

    @property
    def usable(self) -> bool:
        """Whether the tier may be looked up and read."""
        return self._health.usable

    @property
    def writable(self) -> bool:
        """Whether the tier may be written. A tier that can't be read is not written either."""
        return self._health.writable

    def busy(self) -> bool:
        """Whether calls are outstanding and any ended, or was asked for, within
        ``work_deadline_s``."""
        waited_s = self._clock.monotonic() - self._progress_s
        return len(self._calls) > self._hung_aside and waited_s < self.limits.work_deadline_s

    def poll(self) -> int:
        """Take the results of ended calls and look for hung ones. Returns how many ended."""
        report = self._store.report()
        self._count_report(report)
        if not self._calls and not self.executor.outstanding and self._health.settled:
            return 0
        ended = self.executor.poll()
        now_s = self._clock.monotonic()
        hung = self._health.hung_calls + self._hung_aside
        if now_s >= self._look_for_hung_s or (ended and hung):
            self._look_for_hung_s = now_s + self.limits.hung_after_s / 10
            self._count_hung(now_s - self.limits.hung_after_s, report.hung_calls)
        self._health.show()
        return ended

    def _count_report(self, report: StoreReport) -> None:
        if report.corrupt:
            self._metrics.count("corrupt_chunks", report.corrupt, tier=self.name)
        if report.maintenance_failures:
            failures = report.maintenance_failures
            self._metrics.count("maintenance_failures", failures, tier=self.name)
        down = report.paths_down
        if down is not None and down != self._shown_down:
            self._shown_down = down
            self._metrics.gauge("tier_paths_down", down, tier=self.name)

    def _count_hung(self, late_s: float, hung_aside: int) -> None:
        """Count the calls that began at ``late_s`` or before and have not ended.

        The store works without ``hung_aside`` of them.
        """
        hung = sum(
            call.ended_s is None and call.began_s is not None and call.began_s <= late_s
            for call in self._calls
        )
        self._hung_aside = min(hung, hung_aside)
        self._health.hung_calls = hung - self._hung_aside

    # --- what it holds, as far as is known --------------------------------------------------------

    def holds(self, key: ChunkKey) -> bool:
        """Whether ``key`` was written to the store, or found there, and not missed since.

        Asks nothing.
        """
        return key in self._known

    def _learn(self, key: ChunkKey, held: bool) -> None:
        if not held:
            self._known.pop(key, None)
            return
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > self.limits.known_keys:
            self._known.popitem(last=False)

    # --- calls ------------------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey], then: Callable[[list[bool]], None]) -> Call | None:
        """Ask which of ``keys`` the store has; after a failure it has none.

        Returns None if the queue is full.
        """

        def end(_: Call, found: list[bool] | None, error: BaseException | None) -> None:
            if found is None:
                self._health.failed(LOOK_UP, len(keys), error)
            else:
                for key, held in zip(keys, found, strict=True):
                    self._learn(key, held)
            then(found or [False] * len(keys))

        return self._submit(lambda: self._store.contains(keys), end, lambda: None, urgent=True)

    def room(self, group: int) -> int:
        """How many more chunks of ``group`` may be read now; at least one while nothing is read."""
        chunks = (self.limits.max_read_bytes - self._read_bytes) // self._frame_bytes(group)
        return chunks if self._read_bytes else max(1, chunks)

    def batch(self, group: int) -> int:
        """How many chunks of ``group`` make one read call."""
        return max(1, self.limits.read_batch_bytes // self._frame_bytes(group))

    def read(
        self, items: Sequence[tuple[ChunkKey, Lease]], then: Callable[[list[ReadOutcome]], None]
    ) -> Call | None:
        """Fill the leased slots.

        ``then`` hears for each key whether its slot holds its payload, checked, and whether
        exactly. The others are misses; corrupt values are removed from the store. Returns None, and
        does nothing, if the queue is full.
        """
        size = sum(self._frame_bytes(key.group) for key, _ in items)
        keys = [key for key, _ in items]
        views = [(key, lease.view()) for key, lease in items]

        def end(call: Call, results: list[ReadResult] | None, error: BaseException | None) -> None:
            self._read_bytes -= size
            if results is None:
                self._health.failed(READ, len(keys), error)
                for key in keys:  # what can't be read must be stored anew when it is computed
                    self._learn(key, False)
                then([ReadOutcome.MISS] * len(keys))
            else:
                self._ended_read(call, keys, results)
                then([result.outcome for result in results])

        def give_up() -> None:
            self._read_bytes -= size

        call = self._submit(lambda: self._transfers.read(views), end, give_up, urgent=True)
        if call is not None:
            self._read_bytes += size
        return call

    def _ended_read(
        self, call: Call, keys: Sequence[ChunkKey], results: Sequence[ReadResult]
    ) -> None:
        metrics = self._metrics
        for key, result in zip(keys, results, strict=True):
            self._learn(key, result.outcome is not ReadOutcome.MISS)
            if result.unusable is Unusable.CORRUPT:
                metrics.count("corrupt_chunks", tier=self.name)
            elif result.unusable is not None:
                metrics.count("failed_chunks", tier=self.name, reason=result.unusable.value)
        loaded = [result for result in results if result.outcome is not ReadOutcome.MISS]
        if loaded:
            size = sum(result.length for result in loaded)
            decode_s = sum(result.decode_s for result in loaded)
            metrics.count("loaded_chunks", len(loaded), tier=self.name)
            metrics.count("loaded_bytes", size, tier=self.name)
            metrics.count("decode_seconds", decode_s, tier=self.name)
            metrics.observe("load_seconds", call.seconds, tier=self.name)
            metrics.observe("load_size_bytes", size, tier=self.name)

    def write(self, key: ChunkKey, lease: Lease, then: Callable[[bool], None]) -> Call | None:
        """Write the sealed, exact frame in the leased slot. ``then`` hears whether the store has
        the key now.

        Returns None, and ``then`` never runs, where the write is refused and counted: too much is
        queued, in bytes or in seconds, or the tier is not to be written.
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

        def end(call: Call, result: WriteResult | None, error: BaseException | None) -> None:
            self._queue(-1, -size)
            if result is None:
                self._health.failed(WRITE, 1, error)
            else:
                self._ended_write(call, key, result)
            then(result is not None and result.held)

        def give_up() -> None:
            self._queue(-1, -size)

        call = self._submit(lambda: self._transfers.write(key, view), end, give_up, urgent=False)
        if call is None:
            self._refuse("queue_full")
            return None
        self._queue(1, size)
        return call

    def _ended_write(self, call: Call, key: ChunkKey, result: WriteResult) -> None:
        metrics = self._metrics
        self._learn(key, result.held)
        metrics.count("encode_seconds", result.encode_s, tier=self.name)
        if not isinstance(result.outcome, Done):
            metrics.count("refused_chunks", tier=self.name, reason="rejected")
            return
        size = self._frame_bytes(key.group)
        length = result.outcome.length
        self._rate.observe(size, call.began_s or 0.0, call.ended_s or 0.0)
        metrics.count("stored_chunks", tier=self.name)
        metrics.count("stored_bytes", length, tier=self.name)
        metrics.count("stored_raw_bytes", size, tier=self.name)
        metrics.observe("store_seconds", call.seconds, tier=self.name)
        metrics.observe("store_size_bytes", length, tier=self.name)

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

    def _queue(self, writes: int, size: int) -> None:
        self._queued_writes += writes
        self._queued_bytes += size
        self._metrics.gauge("queued_bytes", self._queued_bytes, tier=self.name)

    def close(self, timeout_s: float) -> bool:
        """Drop the calls that have not begun, and wait at most ``timeout_s`` for those that have.

        Returns False if a call hangs: then the store stays open under it.
        """
        ended = self.executor.close(timeout_s)
        self.executor.poll()
        if ended:
            self._store.close()
        return ended
