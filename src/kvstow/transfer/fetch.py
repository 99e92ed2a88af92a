"""Fetching from lower tiers into the pool: one flight a key whoever asks, one total deadline an owner.

A missing key gets a *flight*: it asks the tiers in order (all keys of a call in one probe), and once a tier has it
and everything before it is on its way, it is read into a slot. Owners that want the same key share the flight. An
owner's *wait* walks its keys in order (``_pump``), starts what may start, and stops at the first hole, because
nothing behind a hole is of use. A key that no tier could give ends its flight; the same owner never asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvstow.index import MEMORY, Got, Index
from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool import Lease
from kvstow.runtime import Clock
from kvstow.transfer.base import Call, Lower


class Stage(Enum):
    ASKING = "asking"
    FOUND = "found"  # tier ``tier`` has it; not being read yet
    READING = "reading"


@dataclass(slots=True, eq=False)
class Flight:
    """One missing key on its way. Without waits it is nobody's any more, and ends as soon as it can."""

    key: ChunkKey
    stage: Stage = Stage.ASKING
    tier: int = -1  # index of the tier that is asked, has it, or is read
    waits: dict[Wait, None] = field(default_factory=dict)
    read: Read | None = None


@dataclass(slots=True, eq=False)
class Read:
    """One read call: the flights and the leases on the slots it fills."""

    flights: list[Flight]
    leases: list[Lease]
    call: Call | None = None


@dataclass(slots=True, eq=False)
class Wait:
    """What one owner waits for. ``over``: past its deadline, or the cache was reset; it starts nothing more."""

    owner: str
    deadline_s: float
    began_s: float
    keys: Sequence[ChunkKey] = ()
    start: int = 0
    cursor: int = 0  # everything before it was resident when the walk came by
    front: int = 0  # everything before it was resident or being read: where the walk goes on
    asked: set[ChunkKey] = field(default_factory=set)
    leases: dict[ChunkKey, Lease] = field(default_factory=dict)
    origins: dict[str, int] = field(default_factory=dict)  # chunks fetched for this owner, by tier
    pending: bool = False
    blocked: bool = False  # wants a slot or room in flight
    over: bool = False
    seen_version: int = -1

    def asks(self, keys: Sequence[ChunkKey], start: int) -> bool:
        """Whether ``keys`` from ``start`` are what it waits for. A prompt's last key names all of it."""
        mine = self.keys
        return start == self.start and len(mine) == len(keys) and (mine is keys or not mine or mine[-1] == keys[-1])


class Fetches:
    """Owner's thread only; never waits. ``max_slots`` bounds what one owner fetches and so holds."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Lower],
        *,
        clock: Clock,
        metrics: Metrics,
        deadline_s: float,
        max_slots: int,
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._clock = clock
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._max_slots = max_slots
        self._flights: dict[ChunkKey, Flight] = {}
        self._waits: dict[str, Wait] = {}
        self._open: dict[Wait, None] = {}  # not over; oldest first, and so in order of deadline
        self._dirty: dict[Wait, None] = {}

    def get(self, owner: str) -> Wait | None:
        return self._waits.get(owner)

    # --- owners ---------------------------------------------------------------------------------------------------

    def ask(self, owner: str, keys: Sequence[ChunkKey], start: int) -> Wait:
        """Wait for ``keys[start:]``. Asked before: the deadline stays; only keys new to this owner are looked for."""
        wait = self._waits.get(owner)
        if wait is None:
            now = self._clock.monotonic()
            wait = self._waits[owner] = Wait(owner, now + self._deadline_s, now)
            self._open[wait] = None
        wait.keys, wait.start, wait.cursor, wait.front = list(keys), start, start, start
        wait.seen_version = -1
        if not wait.over:
            self._look_for(wait)
        return wait

    def _look_for(self, wait: Wait) -> None:
        """Join or begin a flight for each key that is missing and new to ``wait``."""
        fresh: list[Flight] = []
        for key in wait.keys[wait.start :] if self._tiers else ():
            if len(wait.asked) >= self._max_slots:
                break
            if key in wait.asked or self._index.resident(key):
                continue
            filling = self._index.filling(key)
            if filling is not None and not filling.fetching:
                continue
            wait.asked.add(key)
            flight = self._flights.get(key)
            if flight is not None and not self._tiers[flight.tier].usable:
                if flight.stage is Stage.READING:
                    continue  # a hung call fills its slot: a miss for whoever comes now
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
        while self._open and (wait := next(iter(self._open))).deadline_s <= now:
            self._expire(wait)
        self._dirty.update((wait, None) for wait in self._open if wait.blocked)
        self._run()

    def reset(self) -> None:
        """Nothing that is under way is published. Owners keep their deadline and get nothing more."""
        for wait in list(self._open):
            self._leave(wait)
        self._flights.clear()

    def _expire(self, wait: Wait) -> None:
        if wait.pending:
            stuck = next((f for k in wait.keys if (f := self._flights.get(k)) and wait in f.waits), None)
            tier = MEMORY if stuck is None or stuck.stage is Stage.FOUND else self._tiers[stuck.tier].name
            self._metrics.count("fetch_deadline_exceeded", tier=tier)
        self._leave(wait)

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
            del self._flights[flight.key]
        read = flight.read
        if read is None or read.call is None or any(f.waits for f in read.flights) or not read.call.cancel():
            return
        for each, lease in zip(read.flights, read.leases, strict=True):
            lease.release()
            self._end(each)

    # --- flights --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Walk every wait that something changed for, older ones first."""
        while self._dirty:
            waits = sorted(self._dirty, key=lambda wait: wait.deadline_s)
            self._dirty.clear()
            for wait in waits:
                self._pump(wait)

    def _pump(self, wait: Wait) -> None:
        """Start what may start for ``wait``, in order, up to the first hole."""
        found: dict[int, list[Flight]] = {}
        room: dict[int, int] = {}
        wait.blocked = False
        pending = self._advance(wait)
        for i in range(wait.front, len(wait.keys)):
            key = wait.keys[i]
            if self._index.resident(key):
                wait.front += wait.front == i
                continue
            filling = self._index.filling(key)
            if filling is not None and not filling.fetching:
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
        if pending and not wait.pending:
            self._metrics.count("waits")
        if wait.pending and not pending:
            self._metrics.observe("wait_seconds", self._clock.monotonic() - wait.began_s)
        wait.pending = pending

    def _ask_next(self, flights: Iterable[Flight]) -> None:
        """Ask each flight's next usable tier; a flight without one ends."""
        asks: dict[int, list[Flight]] = {}
        for flight in flights:
            tier = flight.tier + 1
            while tier < len(self._tiers) and not self._tiers[tier].usable:
                tier += 1
            if tier == len(self._tiers) or not flight.waits:
                self._end(flight)
            else:
                flight.tier, flight.stage, flight.read = tier, Stage.ASKING, None
                asks.setdefault(tier, []).append(flight)
        for tier, asked in asks.items():
            keys = [flight.key for flight in asked]
            if self._tiers[tier].probe(keys, partial(self._answered, asked)) is None:
                self._ask_next(asked)

    def _answered(self, flights: Sequence[Flight], found: Sequence[bool]) -> None:
        missed = []
        for flight, held in zip(flights, found, strict=True):
            if self._flights.get(flight.key) is not flight:
                continue
            self._dirty.update(flight.waits)
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
                flight.stage, flight.read = Stage.READING, read
                read.flights.append(flight)
                read.leases.append(lease)
            if not self._read(source, read):
                break
        return all(flight.stage is not Stage.FOUND for flight in flights)

    def _read(self, source: Lower, read: Read) -> bool:
        if not read.flights:
            return False
        items = [(flight.key, lease) for flight, lease in zip(read.flights, read.leases, strict=True)]
        read.call = source.read(items, partial(self._arrived, source, read))
        if read.call is not None:
            return True
        for flight, lease in zip(read.flights, read.leases, strict=True):
            lease.release()
            flight.stage, flight.read = Stage.FOUND, None
        return False

    def _arrived(self, source: Lower, read: Read, good: Sequence[Got]) -> None:
        failed = []
        for flight, lease, ok in zip(read.flights, read.leases, good, strict=True):
            if ok and self._index.publish(lease, lossy=ok is Got.LOSSY) is not None:
                for wait in flight.waits:
                    pin = self._index.pin(flight.key)
                    if pin is not None:
                        wait.leases[flight.key] = pin
                        wait.origins[source.name] = wait.origins.get(source.name, 0) + 1
                self._end(flight)
            elif self._flights.get(flight.key) is flight:
                failed.append(flight)
            lease.release()
        self._ask_next(failed)
        self._run()
