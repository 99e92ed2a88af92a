"""An engine whose every event a test orders: manual clock, manual executors, fault-injecting stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from kvstow.cache import Cache, Lookup, LookupState
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics, merge
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool, Lease
from kvstow.testing.faults import FaultStore
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier, TierLimits

NAMESPACE = Namespace.from_fields({"made by": "rig"})
LAYOUT = ChunkLayout(
    (GroupLayout(block_tokens=16, blocks_per_chunk=2, shard_block_bytes=(1000, 2048)),)
)
FRAME_BYTES = LAYOUT.max_frame_bytes
TOKENS = LAYOUT.chunk_tokens


def key(i: int) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, i.to_bytes(32, "little"))


def keys(*numbers: int) -> list[ChunkKey]:
    return [key(i) for i in numbers]


@lru_cache(maxsize=4096)
def payload(chunk: ChunkKey) -> list[bytes]:
    """The bytes of a chunk's spans: a pattern that no other key has."""
    rng = random.Random(bytes(chunk))
    return [rng.randbytes(length) for length in LAYOUT.groups[0].payload_lengths]


def fill(lease: Lease, chunk: ChunkKey) -> None:
    """What a worker does with a reserved slot."""
    for span, data in zip(lease.spans(), payload(chunk), strict=True):
        span[:] = data


def assert_bytes(lease: Lease, chunk: ChunkKey) -> None:
    assert [bytes(span) for span in lease.spans()] == payload(chunk), (
        f"foreign or wrong bytes under {chunk!r}"
    )


class Rig:
    """``tiers`` lower tiers named t0, t1, ..., each a FaultStore over a MemoryStore on its own ManualExecutor."""

    def __init__(
        self,
        slots: int = 8,
        tiers: int = 1,
        *,
        limits: TierLimits | None = None,
        inners: Sequence[MemoryStore] | None = None,
        executor: Callable[[int], Any] | None = None,
        policy: Any = None,
        **engine: Any,
    ) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.pool = HostPool.create(LAYOUT, slots * FRAME_BYTES, name="rig")
        self.sealer = ManualExecutor(self.clock, run_in_wait=True)
        self.inners = list(inners) if inners is not None else [MemoryStore() for _ in range(tiers)]
        self.stores = [FaultStore(store) for store in self.inners]
        manual = lambda _: ManualExecutor(self.clock, run_in_wait=True)  # noqa: E731
        self.executors = [(executor or manual)(i) for i in range(len(self.stores))]
        self.tiers = [
            Tier(
                f"t{i}",
                store,
                executor,
                layout=LAYOUT,
                clock=self.clock,
                metrics=self.metrics,
                limits=limits,
            )
            for i, (store, executor) in enumerate(zip(self.stores, self.executors, strict=True))
        ]
        self.policy = policy or LRU()
        self.engine = Cache(
            pool=self.pool,
            policy=self.policy,
            tiers=self.tiers,
            layout=LAYOUT,
            clock=self.clock,
            metrics=self.metrics,
            sealer=self.sealer,
            **engine,
        )
        self._taken: dict[str, Any] = {}

    def put(self, *numbers: int) -> None:
        """Store chunks as a worker does; nothing is sealed or written yet."""
        for i in numbers:
            lease = self.engine.reserve(key(i), b"", TOKENS)
            assert lease is not None, f"no slot for {i}"
            fill(lease, key(i))
            self.engine.commit(lease)
            lease.release()

    def put_below(self, *numbers: int, tier: int = 0) -> None:
        """Have chunks in a lower tier that this engine knows nothing of."""
        source = Rig(slots=len(numbers) * 2, inners=[self.inners[tier]])
        source.put(*numbers)
        source.settle()

    def run(self, *, only: Iterable[ManualExecutor] | None = None) -> None:
        """All queued work once, then a poll."""
        for executor in only or (self.sealer, *self.executors):
            executor.run_all()
        self.engine.poll()

    def settle(self) -> None:
        """Until nothing is outstanding. No time passes."""
        while any(executor.outstanding for executor in (self.sealer, *self.executors)):
            self.run()

    def fetch(self, owner: str, *numbers: int) -> Lookup:
        return self.engine.fetch(owner, keys(*numbers))

    def found(self, *numbers: int) -> int:
        """Leading chunks in the pool, without touching any."""
        count = 0
        for i in numbers:
            if not self.engine.index.resident(key(i)):
                break
            count += 1
        return count

    def below(self, *numbers: int, tier: int = 0) -> list[bool]:
        return self.inners[tier].contains(keys(*numbers))

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a counter over the series that have ``labels``."""
        snapshot = self.metrics.take()
        if snapshot:
            self._taken = merge(self._taken, snapshot)
        wanted = set(labels.values())
        series = self._taken.get("counters", {})
        return sum(
            v
            for s, v in series.items()
            if s.split("|")[0] == name and wanted <= set(s.split("|")[1:])
        )

    def gauge(self, series: str) -> float:
        self.counter("")
        return float(self._taken["gauges"][series])

    def assert_idle(self) -> None:
        """Nothing is pinned or under way, and every slot is accounted for."""
        self.pool.check_integrity()
        assert self.pool.leased == 0
        assert self.pool.free + len(self.engine.index) == self.pool.slots
        assert len(self.policy) == len(self.engine.index)
        assert self.engine.fetcher.flights == 0
        assert not self.engine.busy()


MISS0 = Lookup(LookupState.MISS, 0)


def hit(chunks: int) -> Lookup:
    return Lookup(LookupState.HIT, chunks)
