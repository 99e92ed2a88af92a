"""Fetching from lower tiers into the pool: one flight a key whoever asks, one bounded wait an owner.

A missing key gets a *flight*: it asks the tiers in order (all keys of a call in one probe), and once a tier has it
and everything before it is on its way, it is read into a slot. Owners that want the same key share the flight. An
owner's *wait* walks its keys in order (``_pump``), starts what may start, and stops at the first hole, because
nothing behind a hole is of use. A key that no tier could give ends its flight; the same owner never asks again.

What is worth waiting for, and for how long, ``Judge`` says: before a tier is asked, when its answer is there, and when
an owner's patience ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvstow.fetch.judge import Judge
from kvstow.fetch.survey import survey
from kvstow.fetch.wait import NOBODY, Flight, Question, Read, Stage, Wait
from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool.index import MEMORY, Got, Index
from kvstow.runtime import Clock
from kvstow.tiers.base import Lower


class Fetches:
    """Owner's thread only; never waits. ``max_slots`` bounds what one owner fetches and so holds."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Lower],
        *,
        clock: Clock,
        metrics: Metrics,
        judge: Judge,
        max_slots: int,
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._clock = clock
        self._metrics = metrics
        self._judge = judge
        self._max_slots = max_slots
        self._flights: dict[ChunkKey, Flight] = {}
        self._waits: dict[str, Wait] = {}
        self._open: dict[Wait, None] = {}  # not over, oldest first
        self._dirty: dict[Wait, None] = {}

    def get(self, owner: str) -> Wait | None:
        return self._waits.get(owner)

    # --- owners ---------------------------------------------------------------------------------------------------

    def ask(self, owner: str, keys: Sequence[ChunkKey], start: int) -> Wait:
        """Wait for ``keys[start:]``. Asked before: its limit stays; only keys new to this owner are looked for."""
        wait = self._waits.get(owner)
        new = wait is None
        if wait is None:
            now = self._clock.monotonic()
            wait = self._waits[owner] = Wait(owner, now, now, now)
            self._open[wait] = None
        wait.keys, wait.start, wait.cursor, wait.front, wait.end = (
            list(keys),
            start,
            start,
            start,
            len(keys),
        )
        wait.undecided, wait.seen_version = True, -1
        if not wait.over:
            self._advance(wait)
            if new:
                self._judge.begin(wait, len(keys) - wait.cursor)
            self._look_for(wait)
        return wait

    def _look_for(self, wait: Wait) -> None:
        """Join or begin a flight for each key that is missing and new to ``wait``."""
        fresh: list[Flight] = []
        for key in wait.keys[wait.cursor :] if self._tiers else ():
            if len(wait.asked) >= self._max_slots:
                break
            if key in wait.asked or self._index.resident(key) or self._index.reserving(key):
                continue
            wait.asked.add(key)
            flight = self._flights.get(key)
            if flight is not None and not self._tiers[flight.tier].usable:
                if flight.stage is Stage.READING:
                    continue  # a hung call fills its slot: a miss for whoever comes now
                self._judge.unpromise(flight)
                flight = None
            if flight is None:
                flight = self._flights[key] = Flight(key)
                fresh.append(flight)
            flight.waits[wait] = None
        self._ask_next(fresh)
        self._dirty[wait] = None
        self._run()

    def refresh(self, wait: Wait) -> None:
        """Bring ``wait.pending`` up to date with the index and the clock."""
        if not wait.over and wait.deadline_s <= self._clock.monotonic():
            self._expire(wait)
        if not wait.over and wait.seen_version != self._index.version:
            self._dirty[wait] = None
            self._run()

    def forget(self, owner: str) -> None:
        """Release what is held for ``owner`` and stop working for it. Idempotent."""
        wait = self._waits.pop(owner, None)
        if wait is not None and not wait.over:
            self._leave(wait)

    def poll(self) -> None:
        """Let go of owners whose deadline has passed; go on for those that want a slot."""
        if not self._open:
            return
        now = self._clock.monotonic()
        for wait in [wait for wait in self._open if wait.deadline_s <= now]:
            self._expire(wait)
        self._dirty.update((wait, None) for wait in self._open if wait.blocked)
        self._run()

    def reset(self) -> None:
        """Nothing that is under way is published. Owners keep their deadline and get nothing more."""
        for wait in list(self._open):
            self._leave(wait)
        self._flights.clear()
        self._judge.reset()

    def _expire(self, wait: Wait) -> None:
        if wait.pending and wait.explores == NOBODY:
            if self._goes_on(wait):
                return
            stuck = next(
                (f for k in wait.keys if (f := self._flights.get(k)) and wait in f.waits), None
            )
            tier = (
                MEMORY
                if stuck is None or stuck.stage is Stage.FOUND
                else self._tiers[stuck.tier].name
            )
            self._metrics.count("fetch_deadline_exceeded", tier=tier)
        self._leave(wait)

    def _goes_on(self, wait: Wait) -> bool:
        """At the end of its patience: whether something has come, and the rest is still worth its wait."""
        if self._clock.monotonic() >= wait.limit_s or not self._judge.stirred(wait.looked_s):
            return False
        run = survey(wait, self._flights, self._index, self._judge)
        chunks = self._judge.still(run.ready_s)
        if chunks == 0:
            return False
        wait.end = min(wait.end, wait.cursor + chunks)
        self._judge.renew(wait, run.ready_s)
        self._dirty[wait] = None
        self._run()
        return True

    def _leave(self, wait: Wait) -> None:
        wait.over = True
        self._set_pending(wait, False)
        self._open.pop(wait, None)
        self._dirty.pop(wait, None)
        for lease in wait.leases.values():
            lease.release()
        wait.leases.clear()
        for key in wait.asked:
            flight = self._flights.get(key)
            if flight is not None and flight.waits.pop(wait, 0) is None and not flight.waits:
                self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        """Nobody waits for it. What a worker has begun ends on its own and is an ordinary cached chunk then."""
        if flight.stage is Stage.FOUND:
            self._judge.unpromise(flight)
            del self._flights[flight.key]
        read = flight.read
        if (
            read is None
            or read.call is None
            or any(f.waits for f in read.flights)
            or not read.call.cancel()
        ):
            return
        self._judge.gone(flight.tier, read)
        for each, lease in zip(read.flights, read.leases, strict=True):
            lease.release()
            self._end(each)

    # --- flights --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Walk every wait that something changed for, older ones first."""
        while self._dirty:
            waits = sorted(self._dirty, key=lambda wait: wait.began_s)
            self._dirty.clear()
            for wait in waits:
                self._pump(wait)

    def _pump(self, wait: Wait) -> None:
        """Start what may start for ``wait``, in order, up to the first hole."""
        if wait.over:
            return
        found: dict[int, list[Flight]] = {}
        room: dict[int, int] = {}
        wait.blocked = False
        pending = self._advance(wait)
        if wait.undecided:
            self._decide(wait)
        pending = pending or wait.unanswered
        for i in range(wait.front, wait.end):
            key = wait.keys[i]
            if self._index.resident(key):
                wait.front += wait.front == i
                continue
            if self._index.reserving(key):
                pending = True
                continue
            flight = self._flights.get(key)
            if flight is None or wait not in flight.waits:
                break
            pending = True
            if flight.stage is Stage.ASKING:
                break
            if flight.stage is Stage.READING:
                wait.front += wait.front == i
            else:
                tier = flight.tier
                if tier not in room:
                    room[tier] = 0 if self._index.full else self._tiers[tier].room(key.group)
                    found[tier] = []
                if len(found[tier]) == room[tier]:
                    wait.blocked = True
                    break
                found[tier].append(flight)
        for tier, flights in found.items():
            if flights and not self._start(tier, flights):
                wait.blocked = True
        self._set_pending(wait, pending)
        wait.seen_version = self._index.version

    def _decide(self, wait: Wait) -> None:
        """A tier has answered: how much of what it has is worth waiting for."""
        run = survey(wait, self._flights, self._index, self._judge)
        wait.undecided, wait.unanswered, wait.end = False, run.unanswered, len(wait.keys)
        first = next((f for f in run.flights if f.stage is Stage.FOUND and not f.promised), None)
        first = first or next(iter(run.flights), None)
        if first is None:
            return
        chunks = self._judge.plan(wait, first, run.ready_s)
        wait.end = wait.cursor + chunks
        if chunks:
            wanted = set(wait.keys[wait.cursor : wait.end])
            for flight in run.flights:
                if flight.stage is Stage.FOUND and flight.key in wanted:
                    self._judge.promise(flight)
            self._judge.renew(wait, run.ready_s[:chunks])
        elif not run.unanswered:
            self._explore(run.flights)

    def _explore(self, flights: Sequence[Flight]) -> None:
        """Read a chunk or a few of a tier that decisions went against, for nobody, to learn how fast it is now."""
        tier = self._judge.due_to_explore()
        if tier is None:
            return
        now = self._clock.monotonic()
        wait = Wait("", now, now, now, undecided=False)
        fresh: list[Flight] = []
        keys: list[ChunkKey] = []
        for key in [flight.key for flight in flights][: self._judge.explores(tier)]:
            flight = self._flights.get(key)
            if flight is None and self._index.absent((key,)):
                flight = self._flights[key] = Flight(key, tier=tier - 1)
                fresh.append(flight)
            elif flight is None or flight.tier != tier or flight.stage is not Stage.FOUND:
                break
            flight.waits[wait] = None
            wait.asked.add(key)
            keys.append(key)
        if keys:
            wait.keys, wait.end = keys, len(keys)
            self._judge.explore(tier, wait)
            self._open[wait] = self._dirty[wait] = None
            self._ask_next(fresh)

    def _advance(self, wait: Wait) -> bool:
        """Take note of what has become resident. True: the next chunk is being read.

        The walk goes on at ``front``, not here, or a hundred owners of one long prompt would each pass over
        everything in flight whenever a part of it arrives.
        """
        keys, index = wait.keys, self._index
        while wait.cursor < len(keys) and index.resident(keys[wait.cursor]):
            wait.cursor += 1
        if wait.cursor < wait.front:
            flight = self._flights.get(keys[wait.cursor])
            if flight is not None and wait in flight.waits and flight.stage is Stage.READING:
                return True
        wait.front = wait.cursor
        return False

    def _set_pending(self, wait: Wait, pending: bool) -> None:
        ended, begun = wait.pending and not pending, pending and not wait.pending
        wait.pending = pending
        if wait.explores != NOBODY:
            if not pending and not wait.over:
                self._leave(wait)
        elif begun:
            self._metrics.count("waits")
        elif ended:
            self._metrics.observe("wait_seconds", self._clock.monotonic() - wait.began_s)
            self._judge.keep(wait)

    def _ask_next(self, flights: Iterable[Flight]) -> None:
        """Ask each flight's next usable tier; a flight without one ends."""
        asks: dict[int, list[Flight]] = {}
        ended: list[Flight] = []
        for flight in flights:
            self._judge.unpromise(flight)
            tier = flight.tier + 1
            while tier < len(self._tiers) and not self._tiers[tier].usable:
                tier += 1
            if tier == len(self._tiers) or not flight.waits:
                self._end(flight)
                ended.append(flight)
            else:
                flight.tier, flight.stage, flight.read = tier, Stage.ASKING, None
                asks.setdefault(tier, []).append(flight)
        for tier, asked in asks.items():
            keys = [flight.key for flight in asked]
            question = Question(asked, self._clock.monotonic())
            if self._worth_asking(tier, asked):
                question.call = self._tiers[tier].probe(
                    keys, partial(self._answered, tier, question)
                )
            if question.call is None:
                self._ask_next(asked)
        if ended:
            self._explore(ended)

    def _worth_asking(self, tier: int, flights: Sequence[Flight]) -> bool:
        waits = flights[0].waits
        for wait in waits:
            if wait.explores != NOBODY:
                return wait.explores == tier
        gained = max(len(wait.keys) - wait.cursor for wait in waits)
        return self._judge.worth_asking(tier, len(flights), flights[0].key.group, gained)

    def _answered(self, tier: int, question: Question, found: Sequence[bool]) -> None:
        self._judge.answered(tier, question)
        missed = []
        for flight, held in zip(question.flights, found, strict=True):
            for wait in flight.waits:
                wait.undecided = wait.explores == NOBODY
                self._dirty[wait] = None
            if self._flights.get(flight.key) is not flight:
                continue
            if held and flight.waits:
                flight.stage = Stage.FOUND
            else:
                missed.append(flight)
        self._ask_next(missed)
        self._run()

    def _end(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
            self._dirty.update(flight.waits)

    def _start(self, tier: int, flights: Sequence[Flight]) -> bool:
        """Read these, for which there is room in flight, in batches. False: some must wait for a slot."""
        source = self._tiers[tier]
        if not source.usable:
            self._ask_next(flights)
            return True
        size = source.batch(flights[0].key.group)
        for at in range(0, len(flights), size):
            read = Read([], [])
            for flight in flights[at : at + size]:
                lease = self._index.reserve(flight.key, b"", 0, fetching=True)
                if lease is None:
                    break
                self._judge.unpromise(flight)
                flight.stage, flight.read = Stage.READING, read
                read.flights.append(flight)
                read.leases.append(lease)
            if not self._read(tier, read):
                break
        return all(flight.stage is not Stage.FOUND for flight in flights)

    def _read(self, tier: int, read: Read) -> bool:
        if not read.flights:
            return False
        items = [
            (flight.key, lease) for flight, lease in zip(read.flights, read.leases, strict=True)
        ]
        self._judge.submitted(tier, read)
        read.call = self._tiers[tier].read(items, partial(self._arrived, tier, read))
        if read.call is not None:
            return True
        self._judge.gone(tier, read)
        for flight, lease in zip(read.flights, read.leases, strict=True):
            lease.release()
            flight.stage, flight.read = Stage.FOUND, None
            self._judge.promise(flight)
        return False

    def _arrived(self, tier: int, read: Read, good: Sequence[Got]) -> None:
        self._judge.ended(tier, read, whole=all(good))
        name = self._tiers[tier].name
        failed = []
        for flight, lease, ok in zip(read.flights, read.leases, good, strict=True):
            if ok and self._index.publish(lease, lossy=ok is Got.LOSSY) is not None:
                for wait in flight.waits:
                    pin = self._index.pin(flight.key)
                    if pin is not None:
                        wait.leases[flight.key] = pin
                        wait.origins[name] = wait.origins.get(name, 0) + 1
                self._end(flight)
            elif self._flights.get(flight.key) is flight:
                failed.append(flight)
            lease.release()
        self._ask_next(failed)
        self._run()
