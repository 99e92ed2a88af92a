"""Engines whose tiers have codecs, one after another over the same stores, against an oracle that knows each key's
bytes: what is not flagged lossy is exact, whatever was evicted, replaced, or written by a tier of another codec."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("backports.zstd")

from kvstow import frame
from kvstow.cache import Cache
from kvstow.codec import choose
from kvstow.errors import FrameError
from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.testing.faults import Fault, FaultStore
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier
from tests.unit.codec.kv import (
    FRAME_BYTES,
    GROUP,
    LAYOUT,
    TOKENS,
    coder,
    filled,
    key,
    near,
    payload,
    spans_of,
)

NAMES = ("raw", "lossless", "lossless", "int8", "quantized:low", "quantized:high", "fp8")
CHUNKS = 8
SEEDS = 60


class Life:
    """One engine over stores that outlive it."""

    def __init__(self, rng: random.Random, stores: list[MemoryStore]) -> None:
        self.rng, self.clock, metrics = rng, ManualClock(), Metrics()
        self.names = [rng.choice(NAMES) for _ in stores]
        self.faulty = [FaultStore(store) for store in stores]
        self.executors = [ManualExecutor(self.clock, run_in_wait=True) for _ in (0, *stores)]
        self.tiers = [
            Tier(
                f"t{i}",
                store,
                executor,
                layout=LAYOUT,
                clock=self.clock,
                metrics=metrics,
                coder=coder(name),
            )
            for i, (store, executor, name) in enumerate(
                zip(self.faulty, self.executors[1:], self.names, strict=True)
            )
        ]
        self.pool = HostPool.create(LAYOUT, rng.randint(2, 7) * FRAME_BYTES, name="life")
        self.engine = Cache(
            pool=self.pool,
            policy=LRU(),
            tiers=self.tiers,
            layout=LAYOUT,
            clock=self.clock,
            metrics=metrics,
            sealer=self.executors[0],
        )
        self.serial = 0

    def work(self) -> None:
        for executor in self.executors:
            while executor.pending and self.rng.random() < 0.7:
                executor.run(self.rng.randrange(executor.pending))
        self.engine.poll()

    def settle(self) -> None:
        while any(executor.outstanding for executor in self.executors):
            for executor in self.executors:
                executor.run_all()
            self.engine.poll()

    def store(self, i: int) -> None:
        """A worker offers what it computed, exactly."""
        if not self.engine.missing([key(i)]):
            return
        lease = self.engine.reserve(key(i), b"", TOKENS)
        if lease is None:
            return
        filled(lease.view(), i)
        if self.rng.random() < 0.9:
            self.engine.commit(lease)
            assert not self.engine.lossy(key(i))
            assert self.engine.missing([key(i)]) == []
        lease.release()

    def load(self, upto: int) -> None:
        self.serial += 1
        owner, wanted = f"r{self.serial}", [key(i) for i in range(upto)]
        for _ in range(self.rng.randint(1, 6)):
            self.engine.fetch(owner, wanted)
            self.work()
        leases = self.engine.hold(owner, wanted)
        exact_tiers = all(name in ("raw", "lossless") for name in self.names)
        for i, lease in enumerate(leases):
            got = spans_of(lease.view())
            if self.engine.lossy(key(i)):
                assert not exact_tiers, "lossy, and no tier may keep such"
                assert near(got, i)
            else:
                assert got == payload(i), f"chunk {i} passes for exact and is not"
        self.work()
        for i, lease in enumerate(
            leases
        ):  # what is leased does not change, whatever came meanwhile
            assert near(spans_of(lease.view()), i)
            lease.release()

    def close(self) -> None:
        for store in self.faulty:
            store.faults = []
        self.settle()
        self.clock.advance(60)
        self.engine.poll()
        assert self.pool.leased == 0
        self.pool.check_integrity()


def check_store(store: MemoryStore, wrote: set[str]) -> None:
    """Every frame is whole; an exact one gives back every bit."""
    for chunk, data in store._values.items():
        i = int.from_bytes(ChunkKey(chunk).prefix_hash, "little")
        slot = memoryview(bytearray(FRAME_BYTES))
        slot[: len(data)] = data
        header = frame.check(slot, len(data), chunk, GROUP, coded=True)
        if header.codec_id != frame.RAW:
            coder("raw").decode(slot, header)
        assert near(spans_of(slot), i)
        assert header.lossy or spans_of(slot) == payload(i)
        assert not header.lossy or any(choose.codec(name).lossy for name in wrote)


@pytest.mark.parametrize("block", range(0, SEEDS, 10))
def test_what_is_not_flagged_is_exact(block: int) -> None:
    for seed in range(block, block + 10):
        rng = random.Random(seed)
        stores = [MemoryStore() for _ in range(rng.choice((1, 2, 2)))]
        wrote: list[set[str]] = [set() for _ in stores]
        for _ in range(rng.randint(2, 4)):
            life = Life(rng, stores)
            for i, name in enumerate(life.names):
                wrote[i].add(name)
            for _ in range(40):
                kind = rng.random()
                if kind < 0.35:
                    life.store(rng.randrange(CHUNKS))
                elif kind < 0.75:
                    life.load(rng.randint(1, CHUNKS))
                elif kind < 0.95:
                    life.work()
                else:
                    at = rng.choice((10, 2020, 4100, 9000))
                    rng.choice(life.faulty).faults = [
                        Fault("read", flip_at=at),
                        Fault("write", short_by=4096),
                    ]
                life.clock.advance(0.01)
            life.close()
            for store, names in zip(stores, wrote, strict=True):
                clear_torn(store)
                check_store(store, names)


def clear_torn(store: MemoryStore) -> None:
    """A torn write stays until somebody reads it; here it is in the way."""
    for chunk, data in list(store._values.items()):
        try:
            slot = memoryview(bytearray(FRAME_BYTES))
            slot[: len(data)] = data
            frame.check(slot, len(data), chunk, GROUP, coded=True)
        except FrameError:
            store.delete([chunk])
