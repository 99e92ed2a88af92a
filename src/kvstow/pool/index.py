"""Which chunks are in the pool (or, of the second kind, in direct storage), and which are on their way into it.

A key is in one of four states: absent, RESERVED (a worker fills its slot), FETCHING (a tier read fills it) or
RESIDENT (findable; the policy knows it). What pins a slot is a lease, never a state. What a lossy codec gave back is
resident too, until an exact copy, RESERVED meanwhile, takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstow.key import ChunkKey
from kvstow.metrics import Metrics
from kvstow.pool.policy.base import Policy
from kvstow.pool.slots import Lease, Slots

MEMORY = "memory"  # the pool's name among the tiers


class ReadOutcome(IntEnum):
    """What a tier's read gave for one key. Only a miss is false."""

    MISS = 0
    EXACT = 1
    LOSSY = 2


@dataclass(slots=True, eq=False)
class Filling:
    """A slot that is being filled for ``key``: RESERVED, or FETCHING where ``fetching``."""

    key: ChunkKey
    lease: Lease
    parent: bytes
    tokens: int
    fetching: bool


class Index:
    """Owner's thread only. ``version`` changes whenever any key's state does."""

    def __init__(self, pool: Slots, policy: Policy, metrics: Metrics) -> None:
        self.version = 0
        self.reserved = 0  # keys that workers are filling
        self._pool = pool
        self._policy = policy
        self._metrics = metrics
        self._resident: dict[ChunkKey, int] = {}  # to its slot
        self._lossy: set[ChunkKey] = set()  # of the resident ones
        self._filling: dict[ChunkKey, Filling] = {}
        self._by_slot: dict[int, Filling] = {}

        for key, slot in pool.found():
            self._resident[key] = slot
            policy.insert(key)

    def __len__(self) -> int:
        return len(self._resident)

    def resident(self, key: ChunkKey) -> bool:
        return key in self._resident

    def lossy(self, key: ChunkKey) -> bool:
        """Whether what is resident is not what was computed, only near it."""
        return key in self._lossy

    def filling(self, key: ChunkKey) -> Filling | None:
        return self._filling.get(key)

    def reserving(self, key: ChunkKey) -> bool:
        """Whether a worker fills it."""
        filling = self._filling.get(key)
        return filling is not None and not filling.fetching

    def absent(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Indices of the keys of which no exact copy is resident or being filled in."""
        resident, filling, lossy = self._resident, self._filling, self._lossy
        if lossy:
            return [
                i
                for i, key in enumerate(keys)
                if (key not in resident or key in lossy) and key not in filling
            ]
        return [i for i, key in enumerate(keys) if key not in resident and key not in filling]

    def lookup(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """End of the run of resident chunks that begins at ``start``; touches every resident chunk, tail first,
        those before ``start`` and behind a hole included. Pins nothing."""
        resident = self._resident
        present = [key for key in reversed(keys) if key in resident]
        self._policy.touch_many(present)
        if len(present) == len(keys):
            return len(keys)
        end = start
        while end < len(keys) and keys[end] in resident:
            end += 1
        return end

    def pin(self, key: ChunkKey) -> Lease | None:
        """A lease on a resident chunk."""
        slot = self._resident.get(key)
        if slot is None:
            return None
        lease = self._pool.lease(slot)
        lease.key = key
        return lease

    def reserve(self, key: ChunkKey, parent: bytes, tokens: int, *, fetching: bool) -> Lease | None:
        """A slot for a key that is absent, or resident and lossy, evicting by policy. None: every slot is pinned.

        The lease ends in ``publish``; released before, it makes the key absent again.
        """
        if self.full:
            return None
        lease = self._pool.reserve(key.group)
        while lease is None:
            victim = self._policy.victim(self._evictable)
            if victim is None:
                return None
            self._pool.free_slot(self._resident.pop(victim))
            self._lossy.discard(victim)
            self._metrics.count("evicted_chunks", tier=self._pool.tier)
            lease = self._pool.reserve(key.group)
        self._filling[key] = self._by_slot[lease.slot] = Filling(
            key, lease, parent, tokens, fetching
        )
        self.reserved += not fetching
        lease.key = key
        lease.on_abort = self._forget
        self.version += 1
        return lease

    @property
    def full(self) -> bool:
        """Whether every slot is pinned: ``reserve`` has nothing to give."""
        return self._pool.leased == self._pool.slots

    def _evictable(self, key: ChunkKey) -> bool:
        return self._pool.evictable(self._resident[key])

    def publish(self, lease: Lease, *, lossy: bool = False) -> Filling | None:
        """The slot is filled: its key is findable; the lease only pins it from now on. A lossy copy of the key that
        is resident goes; leases on it stay good.

        None: no key is being filled under this lease any more (a reset came between); nothing is published.
        """
        filling = self._forget(lease)
        if filling is not None:
            lease.commit()
            replaced = self._resident.pop(filling.key, None)
            if replaced is not None:
                self._policy.remove(filling.key)
                self._pool.free_slot(replaced)
                self._lossy.discard(filling.key)
            self._resident[filling.key] = lease.slot
            self._policy.insert(filling.key)
            if lossy:
                self._lossy.add(filling.key)
        return filling

    def drop(self, lease: Lease) -> None:
        """The chunk under this lease is not to be found any more, if it is resident. The lease stays good."""
        key = lease.key
        if key is not None and self._resident.get(key) == lease.slot:
            del self._resident[key]
            self._lossy.discard(key)
            self._policy.remove(key)
            self._pool.free_slot(lease.slot)
            self.version += 1

    def _forget(self, lease: Lease) -> Filling | None:
        filling = self._by_slot.get(lease.slot)
        if filling is None or filling.lease is not lease:
            return None
        del self._by_slot[lease.slot], self._filling[filling.key]
        self.reserved -= not filling.fetching
        self.version += 1
        return filling

    def reset(self) -> None:
        """Every key is absent. Slots are free once nobody leases them; leases being filled can't be published."""
        for key, slot in self._resident.items():
            self._policy.remove(key)
            self._pool.free_slot(slot)
        self._resident.clear()
        self._lossy.clear()
        self._filling.clear()
        self._by_slot.clear()
        self.reserved = 0
        self.version += 1
