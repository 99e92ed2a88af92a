"""Where every chunk is and what moves next: the state machine behind the connector.

One owner thread calls everything here; nothing but ``drain`` and ``close`` waits. Workers (executors) only run
store calls and checksums on leased slots; their results are taken in ``poll``. So every state change happens in a
call on the owner's thread, there are no locks, and a test can order every event.

    Cache ─ Index           what is in the pool, or on its way into it
           ─ Fetches         lower tier -> pool, for owners that wait
           ─ WriteThrough    pool -> lower tiers, in the background
           ─ Tier, Tier ...  in the order in which they are asked

What is in the pool is a hit. What only a lower tier has is fetched, checked, and is a hit then. Any fault on the way
is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import count
from typing import Final, NamedTuple

from kvstow import frame
from kvstow.fetch.estimates import Estimates
from kvstow.fetch.execute import Fetcher
from kvstow.fetch.snapshot import FetchRules
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.index import Index
from kvstow.pool.policy.base import Policy
from kvstow.pool.slots import Lease, Slots
from kvstow.runtime import Clock, Executor
from kvstow.tiers import Tier
from kvstow.tiers.write_through import WriteThrough

WAIT_SLICE_S: Final = 0.02  # drain waits on one executor at a time
POLL_AGAIN_S: Final = (
    0.001  # a query looks for what has come since the last step: steps are long, many are asked
)
LEAST_JOIN_S: Final = 0.5  # for idle threads to notice that their executor closes


class Found(Enum):
    HIT = "hit"
    PENDING = "pending"  # something for this owner is on its way: ask again
    MISS = "miss"


class Lookup(NamedTuple):
    """``chunks``: end of the run of chunks from ``start`` that are usable now; for PENDING a lower estimate."""

    state: Found
    chunks: int


class Cache:
    """Owns the pool, the sealer and the tiers: ``close`` closes them.

    ``fetch_deadline_s`` bounds all the waiting of one owner; None: what computing instead would take, as learned from
    ``stepped``. A fetch of fewer than ``fetch_min_tokens`` is not started; None: as learned. ``work_deadline_s`` bounds
    how long an idle engine stays ``busy`` for work that makes no progress. ``max_pinned_share`` of the pool's slots
    may be pinned by write-through, and at most ``max_fetch_share`` be fetched for one owner.
    """

    def __init__(
        self,
        *,
        pool: Slots,
        policy: Policy,
        tiers: Sequence[Tier],
        layout: ChunkLayout,
        clock: Clock,
        metrics: Metrics,
        sealer: Executor,
        fetch_deadline_s: float | None = None,
        fetch_min_tokens: int | None = None,
        work_deadline_s: float = 30.0,
        max_pinned_share: float = 0.5,
        max_fetch_share: float = 0.5,
        integrity_key: bytes | None = None,
    ) -> None:
        self._pool = pool
        self._tiers = tuple(tiers)
        self._layout = layout
        self._clock = clock
        self._metrics = metrics
        self._sealer = sealer
        self._work_deadline_s = work_deadline_s
        self._integrity_key = integrity_key
        self.index = Index(pool, policy, metrics)
        self.estimates = Estimates(len(self._tiers))
        self.fetcher = Fetcher(
            self.index,
            self._tiers,
            clock=clock,
            metrics=metrics,
            estimates=self.estimates,
            rules=FetchRules(layout.chunk_tokens, fetch_min_tokens, fetch_deadline_s),
            chunk_bytes=[group.frame_bytes for group in layout.groups],
            max_slots=max(1, int(pool.slots * max_fetch_share)),
        )
        self._writes = WriteThrough(
            self._tiers,
            sealer,
            clock=clock,
            metrics=metrics,
            max_pinned=max(1, int(pool.slots * max_pinned_share)),
            work_deadline_s=work_deadline_s,
        )
        self._reserved_s = self._polled_s = clock.monotonic()
        self._memo: tuple[object, Lookup] | None = None
        self._shown = (-1, -1)
        metrics.gauge(f"{pool.gauges}_capacity_bytes", pool.capacity_bytes)
        metrics.gauge("chunk_tokens", layout.chunk_tokens)
        self.show()

    @property
    def place_tier(self) -> str:
        """Which tier workers copy to and from: ``memory`` or ``direct``."""
        return self._pool.tier

    @property
    def version(self) -> int:
        """Changes whenever a key becomes findable, or stops being so, or starts being filled."""
        return self.index.version

    # --- finding --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], start: int = 0) -> Lookup:
        """What is in the pool now, from chunk ``start``; those before it are the caller's own.

        Touches every resident chunk of ``keys``. Takes no lease and starts nothing.
        """
        end = self.index.lookup(keys, start)
        return Lookup(Found.HIT if end > start else Found.MISS, end)

    def fetch(self, owner: str, keys: Sequence[ChunkKey], start: int = 0) -> Lookup:
        """``lookup``, and get what is missing from lower tiers. Idempotent and cheap to repeat.

        PENDING while a chunk that extends the run is on its way: asked for, read, or filled by a worker right now.
        An owner waits only for what is expected sooner than it could be computed, and at most ``fetch_deadline_s``
        in all, counted from the first call that found a chunk missing; after that, and after everything that could
        come has come, it gets HIT or MISS at once. Chunks fetched for it are pinned until ``hold``, ``forget`` or
        its deadline.
        """
        wait = self.fetcher.get(owner)
        if wait is None:
            found = self._remembered(owner, keys, start)
            if found.chunks >= len(keys) or not self._may_come(keys[found.chunks]):
                return found
            wait = self.fetcher.ask(owner, keys, start)
        elif not wait.wants(keys, start):
            wait = self.fetcher.ask(owner, keys, start)
        if wait.pending:
            now = self._clock.monotonic()
            # What has arrived must be known before a wait is given up.
            if now - self._polled_s >= POLL_AGAIN_S or wait.deadline_s <= now:
                self._take_results()
                self.fetcher.poll()
        self.fetcher.refresh(wait)
        return (
            Lookup(Found.PENDING, wait.cursor)
            if wait.pending
            else self._remembered(owner, keys, start)
        )

    def _remembered(self, owner: str, keys: Sequence[ChunkKey], start: int) -> Lookup:
        """``lookup``, at once for the owner that asked last if nothing has changed: the head of vLLM's waiting
        queue is asked some 500 times a second when it cannot be admitted."""
        asked = (owner, start, len(keys), keys[-1] if keys else None, self.index.version)
        if self._memo is None or self._memo[0] != asked:
            self._memo = asked, self.lookup(keys, start)
        return self._memo[1]

    def _may_come(self, key: ChunkKey) -> bool:
        return self.index.filling(key) is not None or any(tier.usable for tier in self._tiers)

    def origins(self, owner: str) -> Mapping[str, int]:
        """How many chunks were fetched for ``owner``, by tier; empty once it was held or forgotten."""
        wait = self.fetcher.get(owner)
        return {} if wait is None else wait.origins

    def hold(self, owner: str, keys: Sequence[ChunkKey]) -> list[Lease]:
        """Leases on the leading resident chunks of ``keys``, perhaps fewer than a lookup said. Forgets ``owner``."""
        leases: list[Lease] = []
        for key in keys:
            lease = self.index.pin(key)
            if lease is None:
                break
            leases.append(lease)
        self.fetcher.forget(owner)
        return leases

    @property
    def exact(self) -> bool:
        """Whether every tier gives back what it was given."""
        return all(tier.exact for tier in self._tiers)

    def lossy(self, key: ChunkKey) -> bool:
        """Whether what the pool has of ``key`` went through a lossy codec."""
        return self.index.lossy(key)

    def forget(self, owner: str) -> None:
        """``owner`` needs nothing any more: release what is pinned for it. Idempotent."""
        self.fetcher.forget(owner)

    # --- storing --------------------------------------------------------------------------------------------------

    def missing(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Indices of the keys of which no tier holds or is being given an exact copy, as far as is known unasked.

        A tier that is bypassed holds nothing, and one with a lossy codec holds no exact copies.
        """
        tiers = [tier for tier in self._tiers if tier.exact and tier.usable]
        absent = self.index.absent(keys)
        return (
            [i for i in absent if not any(tier.holds(keys[i]) for tier in tiers)]
            if tiers
            else absent
        )

    def reserve(self, key: ChunkKey, parent: bytes, tokens: int) -> Lease | None:
        """A slot for a worker to fill with ``key``, exactly. None: it is there or on its way, or every slot is pinned
        (counted).

        ``commit`` it once every rank has filled its part; released uncommitted, it aborts.
        """
        if not self.index.absent((key,)):
            return None
        lease = self.index.reserve(key, parent, tokens, fetching=False)
        if lease is None:
            self._metrics.count("refused_chunks", tier=self.place_tier, reason="pool_full")
        self._reserved_s = self._clock.monotonic()
        return lease

    def commit(self, lease: Lease) -> None:
        """The slot is filled: its chunk can be found, and is written through to the lower tiers.

        The lease stays a pin and is released by the caller. A lease from before a ``reset`` is released here, and
        nothing is published.
        """
        filling = self.index.publish(lease)
        if filling is None:
            lease.release()
            return
        if self._tiers:
            key, pin = filling.key, self._pool.lease(lease.slot)
            about = (
                key,
                self._layout.groups[key.group],
                filling.tokens,
                filling.parent,
                self._clock.wall(),
            )
            self._writes.start(
                key, pin, partial(frame.seal, pin.view(), *about, integrity_key=self._integrity_key)
            )

    def failed(self, lease: Lease) -> None:
        """A worker could not fill or read this slot: its chunk is a miss from now on."""
        self.index.drop(lease)
        self._pool.spoil(lease.slot)

    # --- time -----------------------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether ``stepped`` is of any use."""
        return bool(self._tiers)

    def backlog(self, prefill_tokens: int) -> None:
        """So many prompt tokens vLLM has admitted and not computed: they come before those of who asks now."""
        self.estimates.backlog_tokens = prefill_tokens

    def stepped(self, prefill_tokens: int, seconds: float) -> None:
        """A step of vLLM took ``seconds`` and computed so many prompt tokens: what loading is measured against."""
        self.estimates.observe_step(prefill_tokens, seconds)
        if prefill_tokens and (each_s := self.estimates.prefill_s) is not None:
            self._metrics.gauge("prefill_seconds_per_token", each_s)

    def poll(self) -> None:
        """Take what workers have finished, and let deadlines pass. Call it every step."""
        self._take_results()
        if self._sealer.outstanding:
            self._sealer.poll()
        if self._writes:
            self._writes.poll()
        self.fetcher.poll()
        self._pool.poll()
        self.show()

    def _take_results(self) -> None:
        self._polled_s = self._clock.monotonic()
        for tier in self._tiers:
            tier.poll()

    def show(self) -> None:
        """Bring the pool's gauges up to date; leases also end between polls."""
        pool = self._pool
        shown = (pool.free, pool.leased)
        if shown != self._shown:
            self._shown = shown
            self._metrics.gauge(
                f"{pool.gauges}_used_bytes", (pool.slots - pool.free) * pool.slot_bytes
            )
            self._metrics.gauge(f"{pool.gauges}_leased_slots", pool.leased)

    def busy(self) -> bool:
        """Whether an idle vLLM must keep stepping: work is outstanding, and made progress within its deadline."""
        if any(tier.busy() for tier in self._tiers) or self._writes.busy() or self._pool.busy():
            return True
        recent = self._clock.monotonic() - self._reserved_s < self._work_deadline_s
        return self.index.reserved > 0 and recent

    def reset(self) -> None:
        """Nothing that was stored is found any more, and nothing under way is published.

        Leases stay good. Lower tiers are not touched: after a reset the caller's keys are in another namespace.
        """
        self._writes.cancel()
        self.fetcher.reset()
        self.index.reset()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is being sealed, written or read. False: ``timeout_s`` passed first."""
        deadline_s = self._clock.monotonic() + timeout_s
        for turn in count():
            self.poll()
            executors = [
                e for e in (self._sealer, *(t.executor for t in self._tiers)) if e.outstanding
            ]
            left_s = deadline_s - self._clock.monotonic()
            if not executors or left_s <= 0:
                return not executors
            executors[turn % len(executors)].wait(min(left_s, WAIT_SLICE_S))
        raise AssertionError("unreachable: count() does not end")

    def close(self, timeout_s: float) -> None:
        """``drain``, then give everything back. What hangs is left behind in its (daemon) thread."""
        deadline_s = self._clock.monotonic() + timeout_s
        self.drain(timeout_s)
        self.fetcher.reset()
        self._writes.cancel()
        left_s = max(LEAST_JOIN_S, deadline_s - self._clock.monotonic())
        self._sealer.close(left_s)
        self._sealer.poll()
        for tier in self._tiers:
            tier.close(max(LEAST_JOIN_S, deadline_s - self._clock.monotonic()))
        self._pool.close(max(LEAST_JOIN_S, deadline_s - self._clock.monotonic()))
