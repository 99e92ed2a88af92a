"""Fetches under way, as data: the flights of keys, the probes and reads of tiers, the waits of owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstow.fetch.snapshot import ChunkState
from kvstow.key import ChunkKey
from kvstow.pool.slots import Lease
from kvstow.tiers.call import Call


@dataclass(slots=True, eq=False)
class Flight:
    """One missing key that owners want.

    All its owners share it; without owners it ends as soon as it can. ``stage`` is UNASKED,
    PROBING, FOUND or READING, and ``tier`` the tier that this stage speaks of.
    """

    key: ChunkKey
    size_bytes: int
    stage: ChunkState = ChunkState.UNASKED
    tier: int = 0
    waits: dict[Wait, None] = field(default_factory=dict)
    read: Read | None = None


@dataclass(slots=True, eq=False)
class Probe:
    """One call that asks a tier for the keys of ``flights``."""

    flights: Sequence[Flight]
    since_s: float
    call: Call | None = None


@dataclass(slots=True, eq=False)
class Read:
    """One call that reads the keys of ``flights`` into the slots of ``leases``.

    ``queued_bytes`` were being read from the tier when it was submitted, its own ``size_bytes``
    included.
    """

    flights: Sequence[Flight]
    leases: Sequence[Lease]
    size_bytes: int
    queued_bytes: int
    since_s: float
    call: Call | None = None


@dataclass(slots=True, eq=False)
class Wait:
    """What one owner waits for: ``keys`` from ``start`` on.

    The chunks before ``cursor`` were in the pool when it was last advanced. The wait wants those
    before ``end``, and is ``unanswered`` while a tier is asked for the next one. At ``deadline_s``
    it is decided on again, at ``limit_s`` it ends; None: not decided yet. ``asked`` are the keys
    that it has joined a flight for, once each. ``leases`` pin what was fetched for it, and
    ``origins`` counts that by tier. ``explores`` is the tier that it reads for the estimate's sake,
    None for a request. A ``closed`` wait wants and holds nothing.
    """

    owner: str
    began_s: float
    deadline_s: float
    keys: Sequence[ChunkKey] = ()
    start: int = 0
    cursor: int = 0
    end: int = 0
    unanswered: bool = False
    limit_s: float | None = None
    compute_s: float | None = None
    decided_s: float = 0.0
    asked: set[ChunkKey] = field(default_factory=set)
    leases: dict[ChunkKey, Lease] = field(default_factory=dict)
    origins: dict[str, int] = field(default_factory=dict)
    pending: bool = False
    undecided: bool = True
    closed: bool = False
    explores: int | None = None
    seen_version: int = -1

    def wants(self, keys: Sequence[ChunkKey], start: int) -> bool:
        """Whether it waits for ``keys`` from ``start``; a prompt's last key identifies them all."""
        mine = self.keys
        if start != self.start or len(mine) != len(keys):
            return False
        return mine is keys or not mine or mine[-1] == keys[-1]
