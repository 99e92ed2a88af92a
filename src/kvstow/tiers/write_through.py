"""Write-through: committed chunks are sealed and written to every lower tier in the background, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool.pool import Lease
from kvstow.runtime import Clock, Executor
from kvstow.tiers.call import Call
from kvstow.tiers.tier import Tier

Seal = Callable[[], object]


@dataclass(slots=True, eq=False)
class Write:
    """One chunk on its way down. ``lease`` pins its slot until the last tier's call has ended."""

    key: ChunkKey
    lease: Lease
    cancelled: bool = False
    calls: dict[str, Call] = field(default_factory=dict)


class WriteThrough:
    """Seals committed chunks and writes them to every lower tier. Owner's thread only; never waits.

    Writes pin at most ``max_pinned`` chunks at a time, so that slow tiers can't starve the pool. Each tier
    limits the bytes queued for it. A refused chunk is counted and stays in memory.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        sealer: Executor,
        *,
        clock: Clock,
        metrics: Metrics,
        max_pinned: int,
        work_deadline_s: float,
    ) -> None:
        self._tiers = tiers
        self._sealer = sealer
        self._clock = clock
        self._metrics = metrics
        self._max_pinned = max_pinned
        self._work_deadline_s = work_deadline_s
        self._sealed_s = clock.monotonic()
        self._writes: dict[Write, None] = {}
        self._bypassed: set[str] = set()

    def __len__(self) -> int:
        """Number of chunks being sealed or written."""
        return len(self._writes)

    def busy(self) -> bool:
        """Whether chunks are being sealed, with progress. Tiers report their own writes."""
        return (
            bool(self._sealer.outstanding)
            and self._clock.monotonic() - self._sealed_s < self._work_deadline_s
        )

    def start(self, key: ChunkKey, lease: Lease, seal: Seal) -> None:
        """Seals the slot and writes it to every tier. Takes over ``lease``; ``seal`` runs on the sealer."""
        write = Write(key, lease)
        reason = None if any(tier.writable for tier in self._tiers) else "unavailable"
        if reason is None and len(self._writes) >= self._max_pinned:
            reason = "pinned"
        if reason is None and not self._sealer.submit(
            seal, lambda _, error: self._sealed(write, error)
        ):
            reason = "queue_full"
        if reason is None:
            self._writes[write] = None
            self._sealed_s = self._clock.monotonic()
            return
        lease.release()
        for tier in self._tiers:
            self._metrics.count("refused_chunks", tier=tier.name, reason=reason)

    def _sealed(self, write: Write, error: BaseException | None) -> None:
        self._sealed_s = self._clock.monotonic()
        if write.cancelled or error is not None:
            if error is not None:
                for tier in self._tiers:
                    self._metrics.count("failed_chunks", tier=tier.name, reason="seal")
            self._end(write)
            return
        for tier in self._tiers:
            call = tier.write(write.key, write.lease, partial(self._written, write, tier.name))
            if call is not None:
                write.calls[tier.name] = call
        if not write.calls:
            self._end(write)

    def _written(self, write: Write, tier: str, _: bool) -> None:
        del write.calls[tier]
        if not write.calls:
            self._end(write)

    def _end(self, write: Write) -> None:
        if write not in self._writes:
            return
        del self._writes[write]
        write.lease.release()

    def poll(self) -> None:
        """Drops the writes that wait for a tier which has just become unwritable, so that they pin no slot."""
        for tier in self._tiers:
            if tier.writable:
                self._bypassed.discard(tier.name)
            elif tier.name not in self._bypassed:
                self._bypassed.add(tier.name)
                dropped = sum(self._drop(write, tier.name) for write in list(self._writes))
                self._metrics.count("refused_chunks", dropped, tier=tier.name, reason="unavailable")

    def cancel(self) -> None:
        """Drops every write that no worker has begun. Begun ones end on their own."""
        for write in list(self._writes):
            write.cancelled = True
            for tier in list(write.calls):
                self._drop(write, tier)

    def _drop(self, write: Write, tier: str) -> bool:
        """Cancels a write to ``tier``. True: it had not begun and never will."""
        call = write.calls.get(tier)
        if call is None or not call.cancel():
            return False
        self._written(write, tier, False)
        return True
