"""The index of chunks in the pool (or in direct storage), and of those on their way into it.

A key is in one of four states: absent, RESERVED (a worker fills its slot), FETCHING (a read from a tier
fills it) or RESIDENT (findable, and known to the policy). Leases pin slots; states don't. A lossy copy is
resident until an exact one replaces it.
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
    """The result of a tier's read for one key. Only a miss is false."""

    MISS = 0
    EXACT = 1
    LOSSY = 2


@dataclass(slots=True, eq=False)
class Filling:
    """A slot that is being filled for ``key``. ``fetching``: by a read from a tier."""

    key: ChunkKey
    lease: Lease
    parent: bytes
    tokens: int
    fetching: bool


class Index:
    """Maps keys to slots. Owner's thread only. ``version`` changes whenever any key's state does."""

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
        """Whether the resident copy went through a lossy codec."""
        return key in self._lossy

    def filling(self, key: ChunkKey) -> Filling | None:
        return self._filling.get(key)

    def reserving(self, key: ChunkKey) -> bool:
        """Whether a worker is filling a slot for ``key``."""
        filling = self._filling.get(key)
        return filling is not None and not filling.fetching

    def absent(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Returns the indices of the keys without an exact copy that is resident or being filled."""
        resident, filling, lossy = self._resident, self._filling, self._lossy
        if lossy:
            return [
                i
                for i, key in enumerate(keys)
                if (key not in resident or key in lossy) and key not in filling
            ]
        return [i for i, key in enumerate(keys) if key not in resident and key not in filling]

    def lookup(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Returns the end of the run of resident chunks that begins at ``start``. Pins nothing.

        Touches every resident chunk of ``keys``, tail first, also before ``start`` and behind a hole.
        """
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
        """Leases a resident chunk. None: it is not resident."""
        slot = self._resident.get(key)
        if slot is None:
            return None
        lease = self._pool.lease(slot)
        lease.key = key
        return lease

    def reserve(self, key: ChunkKey, parent: bytes, tokens: int, *, fetching: bool) -> Lease | None:
        """Reserves a slot for a key that is absent, or resident and lossy. None: every slot is pinned.

        Evicts by policy where no slot is free. The lease ends in ``publish``; releasing it before makes
        the key absent again.
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
        filling = Filling(key, lease, parent, tokens, fetching)
        self._filling[key] = filling
        self._by_slot[lease.slot] = filling
        if not fetching:
            self.reserved += 1
        lease.key = key
        lease.on_abort = self._forget
        self.version += 1
        return lease

    @property
    def full(self) -> bool:
        """Whether every slot is pinned, so that ``reserve`` would return None."""
        return self._pool.leased == self._pool.slots

    def _evictable(self, key: ChunkKey) -> bool:
        return self._pool.evictable(self._resident[key])

    def publish(self, lease: Lease, *, lossy: bool = False) -> Filling | None:
        """Makes the key of a filled slot findable. The lease only pins the slot from now on.

        A resident lossy copy of the key is dropped; leases on it stay valid. None: no key is being filled
        under this lease any more, because a reset came in between; nothing is published.
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
        """Makes the chunk under this lease unfindable, if it is resident. The lease stays valid."""
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
        del self._by_slot[lease.slot]
        del self._filling[filling.key]
        if not filling.fetching:
            self.reserved -= 1
        self.version += 1
        return filling

    def reset(self) -> None:
        """Makes every key absent. Leased slots are freed with their last lease; nothing being filled can be
        published.
        """
        for key, slot in self._resident.items():
            self._policy.remove(key)
            self._pool.free_slot(slot)
        self._resident.clear()
        self._lossy.clear()
        self._filling.clear()
        self._by_slot.clear()
        self.reserved = 0
        self.version += 1
