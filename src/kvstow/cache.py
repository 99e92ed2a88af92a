"""The cache: a state machine that knows where every chunk is and what moves next.

One owner thread calls everything here; only ``drain`` and ``close`` wait. Executors run store calls
and checksums on leased slots, and ``poll`` takes their results. So every state change happens in a
call on the owner's thread: there are no locks, and a test can order every event.

    Cache ─ Index           chunks in the pool, or on their way into it
          ─ Fetcher         lower tiers -> pool, for owners that wait
          ─ WriteThrough    pool -> lower tiers, in the background
          ─ Tier, Tier ...  in the order in which they are asked

A chunk in the pool is a hit. A chunk that only a lower tier holds is fetched and checked, and is a hit
then. Any fault on the way is a miss.
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
# A query takes the results that have arrived since the last step, at most this often.
POLL_AGAIN_S: Final = 0.001
LEAST_JOIN_S: Final = 0.5  # for idle threads to notice that their executor closes


class LookupState(Enum):
    """The answer of a lookup."""

    HIT = "hit"
    PENDING = "pending"  # something for this owner is on its way: ask again
    MISS = "miss"


class Lookup(NamedTuple):
    """A lookup's answer. ``chunks`` is the end of the run of usable chunks from ``start``.

    While PENDING, ``chunks`` is a lower bound.
    """

    state: LookupState
    chunks: int


class Cache:
    """Finds, stores and moves chunks. It owns the pool, the sealer and the tiers; ``close`` closes them.

    Args:
        pool: Slots of host memory or of direct storage.
        policy: Chooses the chunk to evict.
        tiers: Lower tiers, in the order in which they are asked.
        layout: Layout of the chunks.
        clock: Clock of the process.
        metrics: Counters and gauges.
        sealer: Executor that computes headers and checksums.
        fetch_deadline_s: Limit of one owner's whole wait. None: the time that computing instead would
            take, learned from ``observe_step``.
        fetch_min_tokens: Least tokens for which a fetch is started. None: learned.
        work_deadline_s: Time for which an idle engine stays ``busy`` with work that makes no progress.
        max_pinned_share: Share of the slots that write-through may pin.
        max_fetch_share: Share of the slots that may be fetched for one owner.
        integrity_key: Key of the MAC in every frame. None: frames carry checksums only.
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
        now_s = clock.monotonic()
        self._reserved_s = now_s
        self._polled_s = now_s
        self._memo: tuple[object, Lookup] | None = None
        self._shown = (-1, -1)
        metrics.gauge(f"{pool.gauges}_capacity_bytes", pool.capacity_bytes)
        metrics.gauge("chunk_tokens", layout.chunk_tokens)
        self.show()

    @property
    def place_tier(self) -> str:
        """Name of the tier that workers copy to and from: ``memory`` or ``direct``."""
        return self._pool.tier

    @property
    def version(self) -> int:
        """A number that changes whenever a key becomes findable, ceases to be, or starts being filled."""
        return self.index.version

    # --- finding ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], start: int = 0) -> Lookup:
        """Looks chunks up in the pool, from chunk ``start`` on. The caller has the chunks before it.

        Touches every resident chunk of ``keys``. Takes no lease and starts nothing.
        """
        end = self.index.lookup(keys, start)
        return Lookup(LookupState.HIT if end > start else LookupState.MISS, end)

    def fetch(self, owner: str, keys: Sequence[ChunkKey], start: int = 0) -> Lookup:
        """Looks chunks up, and fetches missing ones from lower tiers. Idempotent and cheap to repeat.

        The answer is PENDING while a chunk that extends the run is on its way: probed, read, or filled
        by a worker. An owner waits only for chunks that are expected sooner than they could be
        computed, and at most ``fetch_deadline_s`` in all, counted from the first call that found a
        chunk missing. After that, or once nothing more can arrive, the answer is HIT or MISS at once.
        Fetched chunks stay pinned until ``hold``, ``forget`` or the owner's deadline.
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
        if wait.pending:
            return Lookup(LookupState.PENDING, wait.cursor)
        return self._remembered(owner, keys, start)

    def _remembered(self, owner: str, keys: Sequence[ChunkKey], start: int) -> Lookup:
        """Looks chunks up, and remembers the answer to the last owner until something changes.

        vLLM asks for the head of its waiting queue some 500 times a second while it has no room.
        """
        asked = (owner, start, len(keys), keys[-1] if keys else None, self.index.version)
        if self._memo is None or self._memo[0] != asked:
            self._memo = asked, self.lookup(keys, start)
        return self._memo[1]

    def _may_come(self, key: ChunkKey) -> bool:
        return self.index.filling(key) is not None or any(tier.usable for tier in self._tiers)

    def origins(self, owner: str) -> Mapping[str, int]:
        """Counts the chunks fetched for ``owner``, by tier. Empty after ``hold`` or ``forget``."""
        wait = self.fetcher.get(owner)
        return {} if wait is None else wait.origins

    def hold(self, owner: str, keys: Sequence[ChunkKey]) -> list[Lease]:
        """Leases the leading resident chunks of ``keys``, and forgets ``owner``.

        They may be fewer than a lookup found: chunks can be evicted in between.
        """
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
        """Whether every tier returns chunks exactly as they were written."""
        return all(tier.exact for tier in self._tiers)

    def lossy(self, key: ChunkKey) -> bool:
        """Whether the pool's copy of ``key`` went through a lossy codec."""
        return self.index.lossy(key)

    def forget(self, owner: str) -> None:
        """Releases the chunks pinned for ``owner`` and ends its fetches. Idempotent."""
        self.fetcher.forget(owner)

    # --- storing ---------------------------------------------------------------------------------

    def missing(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Returns the indices of the keys whose exact copy no tier holds or is being given.

        Tiers are not asked; their known keys count. A bypassed tier holds nothing, and a tier with a
        lossy codec holds no exact copies.
        """
        tiers = [tier for tier in self._tiers if tier.exact and tier.usable]
        absent = self.index.absent(keys)
        if not tiers:
            return absent
        return [i for i in absent if not any(tier.holds(keys[i]) for tier in tiers)]

    def reserve(self, key: ChunkKey, parent: bytes, tokens: int) -> Lease | None:
        """Reserves a slot for a worker to fill with an exact copy of ``key``.

        None: the chunk is there or on its way, or every slot is pinned (counted as refused). ``commit``
        the lease once every rank has filled its part. Releasing it before aborts the chunk.
        """
        if not self.index.absent((key,)):
            return None
        lease = self.index.reserve(key, parent, tokens, fetching=False)
        if lease is None:
            self._metrics.count("refused_chunks", tier=self.place_tier, reason="pool_full")
        self._reserved_s = self._clock.monotonic()
        return lease

    def commit(self, lease: Lease) -> None:
        """Publishes the chunk of a filled slot, and writes it through to the lower tiers.

        The lease stays a pin, which the caller releases. A lease from before a ``reset`` is released
        here, and its chunk is not published.
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
        """Makes the chunk of a slot that a worker could not fill or read a miss from now on."""
        self.index.drop(lease)
        self._pool.mark_failed(lease.slot)

    # --- time ------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether ``observe_step`` has an effect."""
        return bool(self._tiers)

    def set_backlog(self, prefill_tokens: int) -> None:
        """Sets the number of prompt tokens that vLLM has admitted and not computed yet.

        They are computed before the tokens of a request that asks now.
        """
        self.estimates.backlog_tokens = prefill_tokens

    def observe_step(self, prefill_tokens: int, seconds: float) -> None:
        """Learns the speed of computing from a step of vLLM with ``prefill_tokens`` prompt tokens."""
        self.estimates.observe_step(prefill_tokens, seconds)
        token_s = self.estimates.prefill_s
        if prefill_tokens and token_s is not None:
            self._metrics.gauge("prefill_seconds_per_token", token_s)

    def poll(self) -> None:
        """Takes results of finished work and acts on deadlines that have passed. Called every step."""
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
        """Updates the pool's gauges. Leases also end between polls."""
        pool = self._pool
        shown = (pool.free, pool.leased)
        if shown != self._shown:
            self._shown = shown
            self._metrics.gauge(
                f"{pool.gauges}_used_bytes", (pool.slots - pool.free) * pool.slot_bytes
            )
            self._metrics.gauge(f"{pool.gauges}_leased_slots", pool.leased)

    def busy(self) -> bool:
        """Whether an idle vLLM must keep stepping for work that is outstanding and makes progress."""
        if any(tier.busy() for tier in self._tiers) or self._writes.busy() or self._pool.busy():
            return True
        recent = self._clock.monotonic() - self._reserved_s < self._work_deadline_s
        return self.index.reserved > 0 and recent

    def reset(self) -> None:
        """Makes every stored chunk unfindable, and publishes nothing that is under way.

        Leases stay valid. Lower tiers keep their chunks: after a reset the caller's keys are in another
        namespace.
        """
        self._writes.cancel()
        self.fetcher.reset()
        self.index.reset()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is being sealed, written or read. False: ``timeout_s`` passed first."""
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
        """Drains, then closes everything. A call that hangs is left behind in its daemon thread."""
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
