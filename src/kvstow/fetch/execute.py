"""The executor of fetches: takes snapshots of waits, and applies the plans that they lead to.

A missing key gets a ``Flight``, which all owners that want it share. Results of tiers only change
flights and mark waits. ``poll`` then makes a pass: it decides for each marked wait
(``kvstow.fetch.decide``), the oldest first, applies the plan, and starts reads while their tier has
room and the pool a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

from kvstow.fetch.decide import EXPLORE_AFTER_S, GRACE_S, decide
from kvstow.fetch.estimates import Estimates
from kvstow.fetch.flights import Flight, Probe, Read, Wait
from kvstow.fetch.observe import awaited_tier, log_verdict, take_snapshot
from kvstow.fetch.queue import ReadQueue
from kvstow.fetch.snapshot import ChunkState, Decision, FetchRules, Plan, Snapshot, Verdict
from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool.index import Index, ReadOutcome
from kvstow.pool.slots import Lease
from kvstow.runtime import Clock
from kvstow.tiers import Tier


class Fetcher:
    """Fetches chunks for owners that wait. One thread owns it, and no method waits.

    ``chunk_bytes`` has a chunk's bytes by group. An owner pins at most ``max_slots`` chunks.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        *,
        clock: Clock,
        metrics: Metrics,
        estimates: Estimates,
        rules: FetchRules,
        chunk_bytes: Sequence[int],
        max_slots: int,
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._clock = clock
        self._metrics = metrics
        self._estimates = estimates
        self._rules = rules
        self._chunk_bytes = chunk_bytes
        self._max_slots = max_slots
        self._queues = [
            ReadQueue(tier, read, probe, clock.monotonic())
            for tier, read, probe in zip(tiers, estimates.reads, estimates.probes, strict=True)
        ]
        self._flights: dict[ChunkKey, Flight] = {}
        self._waits: dict[str, Wait] = {}
        self._open: dict[Wait, None] = {}  # the oldest first
        self._changed: dict[Wait, None] = {}

    def get(self, owner: str) -> Wait | None:
        return self._waits.get(owner)

    @property
    def flights(self) -> int:
        """How many keys are on their way."""
        return len(self._flights)

    @property
    def owners(self) -> int:
        """How many owners have asked and were not forgotten."""
        return len(self._waits)

    @property
    def open_waits(self) -> int:
        """How many owners wait, or have chunks pinned for them."""
        return len(self._open)

    def pending_bytes(self, tier: int) -> int:
        """Bytes that the tier reads, or that wait to be read from it."""
        return self._queues[tier].pending_bytes

    # --- owners -------------------------------------------------------------------------------------

    def ask(self, owner: str, keys: Sequence[ChunkKey], start: int) -> Wait:
        """Wait for ``keys[start:]``.

        An owner that asks again keeps its limit, and only its new keys are looked for.
        """
        wait = self._waits.get(owner)
        if wait is None:
            now = self._clock.monotonic()
            wait = Wait(owner, now, now)
            self._waits[owner] = wait
            self._open[wait] = None
        wait.keys = list(keys)
        wait.start = start
        wait.cursor = start
        wait.end = len(keys)
        wait.seen_version = -1
        if not wait.closed:
            self._advance(wait)
            self._join_flights(wait)
            self._mark_undecided(wait)
            self._pass()
        return wait

    def refresh(self, wait: Wait) -> None:
        """Bring ``wait.pending`` up to date with the index and the clock."""
        if wait.closed:
            return
        if wait.deadline_s <= self._clock.monotonic():
            self._expire(wait)
            self._pass()
        if wait in self._open and wait.seen_version != self._index.version:
            self._update(wait)

    def forget(self, owner: str) -> None:
        """Release what is held for ``owner`` and stop fetching for it. Idempotent."""
        wait = self._waits.pop(owner, None)
        if wait is not None and not wait.closed:
            self._close(wait)

    def poll(self) -> None:
        """Act on what tiers have answered, on patience that is over, and on freed slots."""
        if not self._open:
            return
        self._pass()  # first, so that nothing is late that has arrived
        now = self._clock.monotonic()
        expired = [wait for wait in self._open if wait.deadline_s <= now]
        if expired:
            for wait in expired:
                self._expire(wait)
            self._pass()

    def reset(self) -> None:
        """Publish nothing that is under way. Owners keep their deadline and get nothing more."""
        for wait in list(self._open):
            self._close(wait)
        for flight in list(self._flights.values()):
            self._end(flight)

    # --- waits --------------------------------------------------------------------------------------

    def _join_flights(self, wait: Wait) -> None:
        """Join or begin a flight for each key that is missing and new to ``wait``."""
        if not self._tiers:
            return
        for key in wait.keys[wait.cursor :]:
            if len(wait.asked) >= self._max_slots:
                break
            if key in wait.asked or self._index.resident(key) or self._index.reserving(key):
                continue
            wait.asked.add(key)
            flight = self._flights.get(key)
            if flight is not None and not self._tiers[flight.tier].usable:
                if flight.stage is ChunkState.READING:
                    continue  # a hung call fills its slot: a miss for whoever comes now
                flight = self._replace(flight)
            if flight is None:
                flight = Flight(key, self._chunk_bytes[key.group])
                self._flights[key] = flight
            flight.waits[wait] = None

    def _replace(self, old: Flight) -> Flight:
        """Start anew with a key whose tier hangs or fails; what that tier still answers is ignored."""
        new = Flight(old.key, old.size_bytes, waits=dict(old.waits))
        self._end(old)
        self._flights[old.key] = new
        for wait in new.waits:
            self._mark_undecided(wait)
        return new

    def _mark_undecided(self, wait: Wait) -> None:
        wait.undecided = True
        self._changed[wait] = None

    def _pass(self) -> None:
        """Decide and update until nothing changes any more; after each round, start reads."""
        while True:
            while self._changed:
                waits = sorted(self._changed, key=lambda wait: wait.began_s)
                self._changed.clear()
                for wait in waits:
                    if wait.closed:
                        continue
                    if wait.undecided:
                        self._decide(wait)
                    if wait in self._open and not wait.undecided:
                        self._update(wait)
            for number in range(len(self._queues)):
                self._start_reads(number)
            if not self._changed:
                return

    def _decide(self, wait: Wait, *, expired: bool = False) -> None:
        wait.undecided = False
        self._advance(wait)
        snapshot = take_snapshot(
            wait,
            rules=self._rules,
            queues=self._queues,
            flights=self._flights,
            index=self._index,
            estimates=self._estimates,
            now_s=self._clock.monotonic(),
            expired=expired,
        )
        self._apply(wait, snapshot, decide(snapshot))

    def _apply(self, wait: Wait, snapshot: Snapshot, plan: Plan) -> None:
        now = self._clock.monotonic()
        if plan.leave:
            self._close(wait)
            return
        for verdict in plan.verdicts:
            self._report(wait, snapshot, verdict)
        if plan.limit_s is not None:
            wait.limit_s = wait.began_s + plan.limit_s
            wait.compute_s = plan.compute_s
            wait.deadline_s = wait.limit_s
        if plan.patience_s is not None:
            wait.decided_s = now
            if self._rules.deadline_s is None and wait.limit_s is not None:
                wait.deadline_s = min(wait.limit_s, now + plan.patience_s)
        wait.end = len(wait.keys) if plan.chunks is None else wait.cursor + plan.chunks
        wait.unanswered = plan.unanswered
        if plan.explore is not None:
            self._explore(*plan.explore)
        for key in plan.abandoned:
            self._leave_flight(wait, self._flights[key])
        for key in plan.reads:
            flight = self._flights[key]
            self._queues[flight.tier].append(flight)
        for tier, keys in plan.probes.items():
            self._probe(tier, [self._flights[key] for key in keys])

    def _report(self, wait: Wait, snapshot: Snapshot, verdict: Verdict) -> None:
        name = self._tiers[verdict.tier].name
        self._metrics.count("fetch_decisions", tier=name, decision=verdict.decision)
        log_verdict(wait.owner, name, snapshot, verdict)

    def _expire(self, wait: Wait) -> None:
        """Decide whether a wait goes on whose patience is over."""
        if not wait.pending:
            self._close(wait)
            return
        tier = awaited_tier(wait, self._flights, self._tiers)
        self._decide(wait, expired=True)
        if wait.explores is not None:
            return
        if wait.closed:
            self._metrics.count("fetch_deadline_exceeded", tier=tier)
        else:
            self._metrics.count("fetch_extensions")
            self._changed[wait] = None

    def _advance(self, wait: Wait) -> None:
        keys = wait.keys
        while wait.cursor < len(keys) and self._index.resident(keys[wait.cursor]):
            wait.cursor += 1

    def _update(self, wait: Wait) -> None:
        """Note what has become resident, and whether the next chunk is on its way."""
        self._advance(wait)
        wait.seen_version = self._index.version
        pending = wait.unanswered
        if not pending and wait.cursor < wait.end:
            key = wait.keys[wait.cursor]
            flight = self._flights.get(key)
            pending = self._index.reserving(key) or (flight is not None and wait in flight.waits)
        if pending == wait.pending:
            if not pending and wait.explores is not None:
                self._close(wait)
            return
        wait.pending = pending
        if wait.explores is not None:
            if not pending:
                self._close(wait)
        elif pending:
            self._metrics.count("waits")
        else:
            self._end_waiting(wait)

    def _end_waiting(self, wait: Wait) -> None:
        """Read nothing more; what was fetched stays pinned a little, until vLLM has room."""
        now = self._clock.monotonic()
        self._metrics.observe("wait_seconds", now - wait.began_s)
        if self._rules.deadline_s is None:
            wait.deadline_s = max(wait.deadline_s, now + GRACE_S)
        for key in wait.keys[wait.cursor : wait.end]:
            flight = self._flights.get(key)
            if flight is not None and wait in flight.waits and flight.stage is ChunkState.FOUND:
                self._leave_flight(wait, flight)

    def _close(self, wait: Wait) -> None:
        if wait.pending and wait.explores is None:
            self._metrics.observe("wait_seconds", self._clock.monotonic() - wait.began_s)
        wait.closed = True
        wait.pending = False
        self._open.pop(wait, None)
        self._changed.pop(wait, None)
        for lease in wait.leases.values():
            lease.release()
        wait.leases.clear()
        for key in wait.asked:
            flight = self._flights.get(key)
            if flight is not None and wait in flight.waits:
                self._leave_flight(wait, flight)

    def _explore(self, tier: int, keys: Sequence[ChunkKey]) -> None:
        """Read a few chunks that no request waits for, to learn how fast a tier is now."""
        now = self._clock.monotonic()
        wait = Wait("", now, now + EXPLORE_AFTER_S, list(keys), end=len(keys), explores=tier)
        wait.asked.update(keys)
        wait.limit_s = wait.deadline_s
        for key in keys:
            self._flights[key].waits[wait] = None
        self._open[wait] = None
        self._queues[tier].explore(wait)
        self._mark_undecided(wait)
        name = self._tiers[tier].name
        self._metrics.count("fetch_decisions", tier=name, decision=Decision.EXPLORE)

    # --- flights ------------------------------------------------------------------------------------

    def _leave_flight(self, wait: Wait, flight: Flight) -> None:
        """End a flight that no owner wants, unless a worker has begun it: then its result does."""
        del flight.waits[wait]
        if flight.waits:
            return
        if flight.stage in (ChunkState.UNASKED, ChunkState.FOUND):
            self._end(flight)
        read = flight.read
        if read is None or read.call is None or any(each.waits for each in read.flights):
            return
        if read.call.cancel():
            self._queues[flight.tier].cancel(read)
            for each, lease in zip(read.flights, read.leases, strict=True):
                lease.release()
                self._end(each)

    def _end(self, flight: Flight) -> None:
        self._queues[flight.tier].discard(flight)
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
            self._changed.update(flight.waits)

    def _ask_next_tier(self, flight: Flight) -> None:
        """The flight's tier can't give its key: its waits decide on the tiers that follow."""
        self._queues[flight.tier].discard(flight)
        if self._flights.get(flight.key) is not flight:
            return
        for wait in flight.waits:
            self._mark_undecided(wait)
        if flight.tier + 1 == len(self._tiers) or not flight.waits:
            self._end(flight)
            return
        flight.stage = ChunkState.UNASKED
        flight.tier += 1
        flight.read = None

    def _probe(self, tier: int, flights: Sequence[Flight]) -> None:
        probe = Probe(flights, self._clock.monotonic())
        for flight in flights:
            flight.stage = ChunkState.PROBING
            flight.tier = tier
        keys = [flight.key for flight in flights]
        probe.call = self._tiers[tier].probe(keys, partial(self._answered, tier, probe))
        if probe.call is None:
            for flight in flights:
                self._ask_next_tier(flight)

    def _answered(self, tier: int, probe: Probe, held: Sequence[bool]) -> None:
        """A probe has ended. Runs in the tier's poll; the next pass acts on it."""
        self._queues[tier].answered(probe, self._clock.monotonic())
        for flight, found in zip(probe.flights, held, strict=True):
            if not found or not flight.waits:
                self._ask_next_tier(flight)
            elif self._flights.get(flight.key) is flight:
                flight.stage = ChunkState.FOUND
                for wait in flight.waits:
                    self._mark_undecided(wait)

    def _start_reads(self, number: int) -> None:
        """Read what waits for this tier, in batches, while it has room and the pool a slot."""
        queue = self._queues[number]
        if queue.waiting and not queue.tier.usable:
            for flight in list(queue.waiting):
                self._ask_next_tier(flight)
        while queue.waiting and not self._index.full:
            group = next(iter(queue.waiting)).key.group
            count = min(queue.tier.room(group), queue.tier.batch(group))
            flights = [f for f in islice(queue.waiting, max(0, count)) if f.key.group == group]
            if not flights or not self._read(number, flights):
                return

    def _read(self, number: int, candidates: Sequence[Flight]) -> bool:
        """Submit one read. False: the pool or the tier takes no more now."""
        queue = self._queues[number]
        flights: list[Flight] = []
        leases: list[Lease] = []
        for flight in candidates:
            if not self._index.absent((flight.key,)):
                self._end(flight)  # a worker fills it meanwhile
                continue
            lease = self._index.reserve(flight.key, b"", 0, fetching=True)
            if lease is None:
                break
            flights.append(flight)
            leases.append(lease)
        if not flights:
            return bool(self._changed)
        size = sum(flight.size_bytes for flight in flights)
        read = Read(flights, leases, size, queue.reading_bytes + size, self._clock.monotonic())
        items = [(flight.key, lease) for flight, lease in zip(flights, leases, strict=True)]
        read.call = queue.tier.read(items, partial(self._arrived, number, read))
        if read.call is None:
            for lease in leases:
                lease.release()
            return False
        queue.begin(read)
        for flight in flights:
            flight.stage = ChunkState.READING
            flight.read = read
        return True

    def _arrived(self, number: int, read: Read, results: Sequence[ReadOutcome]) -> None:
        """A read has ended. Runs in the tier's poll; the next pass acts on it."""
        queue = self._queues[number]
        name = queue.tier.name
        learned = queue.end(read, self._clock.monotonic(), complete=all(results))
        if learned is not None:
            self._metrics.gauge("load_fixed_seconds", learned.fixed_s, tier=name)
            self._metrics.gauge("load_seconds_per_byte", learned.unit_s, tier=name)
        for flight, lease, result in zip(read.flights, read.leases, results, strict=True):
            lossy = result is ReadOutcome.LOSSY
            if result and self._index.publish(lease, lossy=lossy) is not None:
                for wait in flight.waits:
                    pin = self._index.pin(flight.key)
                    if pin is not None:
                        wait.leases[flight.key] = pin
                        wait.origins[name] = wait.origins.get(name, 0) + 1
                self._end(flight)
            else:
                self._ask_next_tier(flight)
            lease.release()
