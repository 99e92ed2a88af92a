"""The reads of one tier: those under way, those that wait for room, and what they teach."""

from __future__ import annotations

from kvstow.fetch.decide import EXPLORE_AFTER_S, EXPLORE_CHUNKS
from kvstow.fetch.estimates import LinearEstimate, MovingAverage
from kvstow.fetch.flights import Flight, Probe, Read, Wait
from kvstow.fetch.snapshot import TierState
from kvstow.tiers import Tier


class ReadQueue:
    """Counts the bytes pending from one tier, and feeds the estimates of its reads and probes."""

    def __init__(
        self, tier: Tier, read: LinearEstimate, probe: MovingAverage, now_s: float
    ) -> None:
        self.tier = tier
        self.waiting: dict[Flight, None] = {}  # found and wanted, in the order to read them
        self.waiting_bytes = 0
        self.reading_bytes = 0
        self._reads: dict[Read, None] = {}  # under way, the oldest first
        self._read_estimate = read
        self._probe_estimate = probe
        self._last_read_s = now_s
        self._explorer: Wait | None = None
        self._explored = 0

    @property
    def pending_bytes(self) -> int:
        return self.waiting_bytes + self.reading_bytes

    def append(self, flight: Flight) -> None:
        self.waiting[flight] = None
        self.waiting_bytes += flight.size_bytes

    def discard(self, flight: Flight) -> None:
        if flight in self.waiting:
            del self.waiting[flight]
            self.waiting_bytes -= flight.size_bytes

    def begin(self, read: Read) -> None:
        """Move a read's flights from those that wait to those under way."""
        for flight in read.flights:
            self.discard(flight)
        self._reads[read] = None
        self.reading_bytes += read.size_bytes

    def cancel(self, read: Read) -> None:
        """Forget a read that had not begun."""
        if read in self._reads:
            del self._reads[read]
            self.reading_bytes -= read.size_bytes

    def end(self, read: Read, now_s: float, *, complete: bool) -> LinearEstimate | None:
        """Learn from a read that has ended. Returns the estimate if it has changed.

        A read that failed only shows that the tier is no faster than this.
        """
        self.cancel(read)
        self._last_read_s = now_s
        seconds = _ended_s(read, now_s) - read.since_s
        estimate = self._read_estimate
        if not complete and seconds <= estimate.seconds(read.queued_bytes):
            return None
        estimate.observe(read.queued_bytes, seconds)
        return estimate

    def answered(self, probe: Probe, now_s: float) -> None:
        self._probe_estimate.observe(_ended_s(probe, now_s) - probe.since_s)

    def read_since(self, since_s: float) -> bool:
        """Whether a read has ended since."""
        return self._last_read_s > since_s

    def expected_s(self, read: Read, now_s: float) -> float | None:
        """Seconds until ``read`` ends; one that is overdue takes as long again. None: not known."""
        if not self._read_estimate.known:
            return None
        return abs(read.since_s + self._read_estimate.seconds(read.queued_bytes) - now_s)

    def state(self, now_s: float) -> TierState:
        """The tier's part of a snapshot."""
        estimate = self._read_estimate
        overdue_s = 0.0
        for read in self._reads:
            due_s = read.since_s + estimate.seconds(read.queued_bytes)
            overdue_s = max(0.0, now_s - due_s)
            break
        usable = self.tier.usable
        return TierState(
            usable=usable,
            pending_bytes=self.pending_bytes,
            fixed_s=estimate.fixed_s if estimate.known else None,
            byte_s=estimate.unit_s,
            probe_s=self._probe_estimate.seconds,
            overdue_s=overdue_s,
            explore_chunks=self._explore_chunks(now_s) if usable else 0,
        )

    def _explore_chunks(self, now_s: float) -> int:
        if self._explorer is not None and not self._explorer.closed:
            return 0
        if now_s - self._last_read_s <= EXPLORE_AFTER_S:
            return 0
        return EXPLORE_CHUNKS if self._explored % 2 else 1

    def explore(self, wait: Wait) -> None:
        self._explorer = wait
        self._explored += 1


def _ended_s(work: Read | Probe, now_s: float) -> float:
    """When its store call ended; the owner's thread may notice only a step later."""
    if work.call is None or work.call.ended_s is None:
        return now_s
    return work.call.ended_s
