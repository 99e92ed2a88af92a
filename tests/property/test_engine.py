"""Random arrivals, holds, aborts, faults, resets and out-of-order completions, against an oracle that only knows what
bytes belong to a key, which keys were committed, and what the stores acknowledged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstow import frame
from kvstow.backends.base import Buffer, Done, Outcome
from kvstow.cache import LookupState
from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.pool.policy.lru import LRU
from kvstow.pool.policy.s3fifo import S3FIFO
from kvstow.pool.pool import Lease
from kvstow.testing.faults import Fault, unavailable
from kvstow.testing.manual import ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, LAYOUT, TOKENS, Rig, assert_bytes, fill, hit, key, keys

DEADLINE_S = 0.5
LEARNED_LIMIT_S = (
    60.0  # in ``compute`` a token takes 5 s / 64 at most, and a prompt and a backlog have 700
)
STEPS = 400
SEEDS = 320
BLOCK = 20  # seeds a test, so that a failure names a few and the rest still run


class Ledger(MemoryStore):
    """Remembers which values it took whole, as its caller sees it, and has not been told to delete."""

    def __init__(self) -> None:
        super().__init__()
        self.spoiled: set[ChunkKey] = set()

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        outcomes = super().write(items)
        for (chunk, parts), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Done) and sum(len(part) for part in parts) != FRAME_BYTES:
                self.spoiled.add(chunk)  # a torn write that its caller hears fail
        return outcomes

    def delete(self, chunks: Sequence[ChunkKey]) -> None:
        super().delete(chunks)
        self.spoiled.difference_update(chunks)

    def whole(self) -> set[ChunkKey]:
        return self._values.keys() - self.spoiled


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        limits = TierLimits(
            max_queued_writes=rng.choice((2, 100)),
            max_read_bytes=rng.choice((1, 3, 100)) * FRAME_BYTES,
            read_batch_bytes=rng.choice((1, 2, 100)) * FRAME_BYTES,
            known_keys=rng.choice((3, 1000)),
            breaker_failures=rng.choice((1, 3)),
            breaker_open_s=0.5,
            hung_after_s=5.0,
        )
        self.fixed = rng.random() < 0.5  # the deadline, else it is learned
        self.ledgers = [Ledger() for _ in range(rng.choice((0, 1, 2, 2)))]
        self.rig = Rig(
            slots=rng.randrange(2, 20),
            inners=self.ledgers,
            limits=limits,
            policy=rng.choice((LRU, S3FIFO))(),
            fetch_deadline_s=DEADLINE_S if self.fixed else None,
            fetch_min_tokens=rng.choice((None, None, 0, 3 * TOKENS)),
            max_pinned_share=rng.choice((0.3, 0.5, 1.0)),
            max_fetch_share=rng.choice((0.3, 1.0)),
        )
        self.engine = self.rig.engine
        self.generation = 0
        self.serial = 0
        self.owners: dict[str, list[int]] = {}
        self.waits_since: dict[str, float] = {}
        self.filling: list[tuple[Lease, int, int]] = []  # with chunk and generation
        self.held: list[tuple[Lease, int]] = []
        self.committed: set[int] = set()
        self.executors: list[ManualExecutor] = [self.rig.sealer, *self.rig.executors]
        for tier, ledger in enumerate(self.ledgers):
            for family in range(4):
                self.rig.put_below(
                    *(family * 100 + i for i in range(7) if rng.random() < 0.8), tier=tier
                )
            self.committed.update(i for i in range(400) if key(i) in ledger.whole())

    def prompt(self) -> list[int]:
        """Chunks of one of a few prompt families, which share prefixes."""
        family = self.rng.randrange(4)
        return [
            self.generation * 10_000 + family * 100 + i for i in range(self.rng.randrange(1, 7))
        ]

    def step(self) -> None:
        name, weight = zip(*self.WEIGHTS.items(), strict=True)
        getattr(self, self.rng.choices(name, weight)[0])()

    WEIGHTS = {  # noqa: RUF012
        "arrive": 12,
        "ask": 20,
        "schedule": 8,
        "abort_owner": 3,
        "store": 8,
        "worker_ends": 25,
        "release": 25,
        "work": 100,
        "poll": 50,
        "time": 8,
        "compute": 2,
        "faults": 1.5,
        "reset": 0.5,
        "look_back": 3,
    }

    def arrive(self) -> None:
        self.serial += 1
        self.owners[f"r{self.serial}"] = self.prompt()
        self.ask(f"r{self.serial}")

    def ask(self, owner: str | None = None) -> None:
        if not self.owners:
            return
        owner = owner or self.rng.choice(list(self.owners))
        chunks = self.owners[owner]
        start = self.rng.randrange(len(chunks)) if self.rng.random() < 0.2 else 0
        found = self.engine.fetch(owner, keys(*chunks), start)
        again = self.engine.fetch(owner, keys(*chunks), start)
        assert found == again
        if found.state is LookupState.PENDING:
            now = self.rig.clock.monotonic()
            most_s = DEADLINE_S if self.fixed else LEARNED_LIMIT_S
            assert now < self.waits_since.setdefault(owner, now) + most_s, (
                f"{owner} waits past its deadline"
            )
        else:
            assert (found.state is LookupState.HIT) == (found.chunks > start)
            assert self.rig.found(*chunks[start:]) == found.chunks - start

    def schedule(self) -> None:
        if not self.owners:
            return
        owner = self.rng.choice(list(self.owners))
        chunks = self.owners.pop(owner)
        promised = self.engine.lookup(keys(*chunks)).chunks
        leases = self.engine.hold(owner, keys(*chunks))
        assert len(leases) == promised
        for lease, chunk in zip(leases, chunks, strict=False):
            assert_bytes(lease, key(chunk))
            self.held.append((lease, chunk))

    def abort_owner(self) -> None:
        if self.owners:
            owner = self.rng.choice(list(self.owners))
            del self.owners[owner]
            for _ in range(self.rng.randrange(1, 3)):
                self.engine.forget(owner)

    def store(self) -> None:
        chunks = self.prompt()
        for i in self.engine.missing(keys(*chunks)):
            lease = self.engine.reserve(key(chunks[i]), b"", TOKENS)
            if lease is None:
                assert self.rig.pool.leased == self.rig.pool.slots
            else:
                self.filling.append((lease, chunks[i], self.generation))

    def worker_ends(self) -> None:
        if not self.filling:
            return
        lease, chunk, generation = self.filling.pop(self.rng.randrange(len(self.filling)))
        assert not self.rig.found(chunk)
        if self.rng.random() < 0.9:
            fill(lease, key(chunk))
            self.engine.commit(lease)
            assert self.rig.found(chunk) == (generation == self.generation)
            if generation == self.generation:
                self.committed.add(chunk)
        lease.release()

    def release(self) -> None:
        if self.held:
            lease, chunk = self.held.pop(self.rng.randrange(len(self.held)))
            assert self.rig.found(chunk) == (chunk // 10_000 == self.generation), (
                "a leased chunk was evicted"
            )
            assert_bytes(lease, key(chunk))
            lease.release()

    def work(self) -> None:
        executor = self.rng.choice(self.executors)
        if executor.pending:
            executor.run(self.rng.randrange(executor.pending))

    def poll(self) -> None:
        self.engine.poll()

    def time(self) -> None:
        self.rig.clock.advance(self.rng.choice((0.001, 0.01, 0.01, 0.05, 0.3)))

    def compute(self) -> None:
        self.engine.observe_step(self.rng.choice((0, 64, 1000)), self.rng.choice((0.001, 0.1, 5.0)))
        self.engine.set_backlog(self.rng.choice((0, 0, 500)))

    def faults(self) -> None:
        for store in self.rig.stores:
            store.faults = self.rng.choice(
                (
                    [],
                    [],
                    [unavailable()],
                    [unavailable("read")],
                    [unavailable("contains")],
                    [unavailable("write"), unavailable("delete")],
                    [Fault("read", flip_at=self.rng.randrange(FRAME_BYTES))],
                    [Fault("read", short_by=1)],
                    [Fault("write", short_by=FRAME_BYTES // 2, error=StoreUnavailable("torn"))],
                    [Fault("read", error=OSError("a bug"))],
                )
            )

    def reset(self) -> None:
        """The caller's keys are in another namespace from now on, its requests' too."""
        self.engine.reset()
        self.generation += 1
        self.committed.clear()
        for owner, chunks in self.owners.items():
            self.owners[owner] = [self.generation * 10_000 + chunk % 10_000 for chunk in chunks]
            if self.rng.random() < 0.5:
                self.engine.forget(owner)
                self.waits_since.pop(owner, None)

    def look_back(self) -> None:
        """Nothing of before a reset is ever found; nothing that nobody committed is."""
        if self.generation:
            old = [
                (self.generation - 1) * 10_000 + family * 100 + i
                for family in range(4)
                for i in range(7)
            ]
            assert not any(self.rig.found(chunk) for chunk in old)
        now = [self.generation * 10_000 + family * 100 + i for family in range(4) for i in range(7)]
        assert {chunk for chunk in now if self.rig.found(chunk)} <= self.committed

    def finish(self) -> None:
        """Faults end, everybody leaves, workers finish: nothing is pinned, and what is below is whole."""
        for store in self.rig.stores:
            store.faults = []
        while self.filling:
            self.worker_ends()
        while self.held:
            self.release()
        for owner in self.owners:
            self.engine.forget(owner)
        self.rig.settle()
        self.look_back()
        self.rig.assert_idle()
        for tier in range(len(self.rig.tiers)):
            assert self.engine.fetcher.pending_bytes(tier) == 0
        for ledger in self.ledgers:
            check_whole(ledger)
        if self.ledgers:
            self.check_readable()

    def check_readable(self) -> None:
        """A chunk that a tier has, whole, can be fetched by an engine that knows nothing yet."""
        fresh = Rig(slots=40, inners=self.ledgers, max_fetch_share=1.0)
        for family in range(4):
            chunks = [self.generation * 10_000 + family * 100 + i for i in range(7)]
            want = 0
            while want < 7 and any(key(chunks[want]) in ledger.whole() for ledger in self.ledgers):
                want += 1
            fresh.fetch(f"f{family}", *chunks)
            fresh.settle()
            assert fresh.fetch(f"f{family}", *chunks) == hit(want) if want else True
            for lease, chunk in zip(
                fresh.engine.hold(f"f{family}", keys(*chunks)), chunks, strict=False
            ):
                assert_bytes(lease, key(chunk))
                lease.release()


def check_whole(ledger: Ledger) -> None:
    for chunk in ledger.whole():
        buffer = memoryview(bytearray(FRAME_BYTES))
        assert ledger.read([(chunk, buffer)]) == [Done(FRAME_BYTES)]
        frame.check(buffer, FRAME_BYTES, chunk, LAYOUT.groups[0])


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_random_operations(first: int) -> None:
    for seed in range(first, first + BLOCK):
        world = World(seed)
        try:
            for step in range(STEPS):
                world.step()
                if step % 8 == 0:
                    world.rig.pool.check_integrity()
            world.finish()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
