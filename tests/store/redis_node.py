"""An engine over a Redis, for the tests of several that share one."""

from __future__ import annotations

from typing import Any

from kvstow.backends.base import Store
from kvstow.cache import Cache, LookupState
from kvstow.metrics import Metrics, merge
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.tiers import Tier, TierLimits
from tests.unit.rig import FRAME_BYTES, LAYOUT, TOKENS, assert_bytes, fill, key, keys


class Node:
    """An engine with real threads and a pool of its own, one of several that share a server."""

    def __init__(self, store: Store, **limits: Any) -> None:
        self.metrics, clock = Metrics(), SystemClock()
        self.sealer, executor = ThreadExecutor("sealer"), ThreadExecutor("redis", threads=2)
        self.tier = Tier(
            *("redis", store, executor),
            layout=LAYOUT,
            clock=clock,
            metrics=self.metrics,
            limits=TierLimits(breaker_open_s=0.2, **limits),
        )
        self.pool = HostPool.create(LAYOUT, 16 * FRAME_BYTES, name="node")
        self.engine = Cache(
            pool=self.pool,
            policy=LRU(),
            tiers=[self.tier],
            layout=LAYOUT,
            clock=clock,
            metrics=self.metrics,
            sealer=self.sealer,
            fetch_deadline_s=5.0,
            fetch_min_tokens=0,
        )
        self._taken: dict[str, Any] = {}

    def put(self, *numbers: int) -> None:
        for i in numbers:
            lease = self.engine.reserve(key(i), b"", TOKENS)
            assert lease is not None
            fill(lease, key(i))
            self.engine.commit(lease)
            lease.release()
        self.settle()

    def settle(self) -> None:
        while self.engine.busy():
            (self.sealer if self.sealer.outstanding else self.tier.executor).wait(0.05)
            self.engine.poll()

    def get(self, *numbers: int) -> int:
        """Returns how many chunks a new request restores, after comparing each byte."""
        found = self.engine.fetch("request", keys(*numbers))
        while found.state is LookupState.PENDING:
            self.tier.executor.wait(0.05)
            self.engine.poll()
            found = self.engine.fetch("request", keys(*numbers))
        leases = self.engine.hold("request", keys(*numbers))
        for lease, i in zip(leases, numbers, strict=False):
            assert_bytes(lease, key(i))
            lease.release()
        assert len(leases) == found.chunks
        return found.chunks

    def counter(self, name: str, *labels: str) -> float:
        if snapshot := self.metrics.take():
            self._taken = merge(self._taken, snapshot)
        series = self._taken.get("counters", {})
        return sum(
            v
            for s, v in series.items()
            if s.split("|")[0] == name and set(labels) <= set(s.split("|")[1:])
        )

    def close(self) -> None:
        self.engine.close(5.0)
