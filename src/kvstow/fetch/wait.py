"""What is under way, as data: flights of keys, reads of tiers, waits of owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstow.key import ChunkKey
from kvstow.pool.slots import Lease
from kvstow.tiers.base import Call

NOBODY = -1


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
    promised: bool = (
        False  # FOUND, and somebody has decided to wait for it: it stands in the tier's queue
    )


@dataclass(slots=True, eq=False)
class Question:
    """One probe: the flights whose keys a tier is asked for."""

    flights: list[Flight]
    since_s: float
    call: Call | None = None


@dataclass(slots=True, eq=False)
class Read:
    """One read call: the flights and the leases on the slots it fills. ``behind``: bytes that were under way from its
    tier when it was asked for, its own included."""

    flights: list[Flight]
    leases: list[Lease]
    call: Call | None = None
    size: int = 0
    behind: int = 0
    since_s: float = 0.0


@dataclass(slots=True, eq=False)
class Wait:
    """What one owner waits for. ``over``: it starts nothing more and holds nothing.

    ``deadline_s`` is when its patience ends and it is looked at again; ``limit_s`` when it ends for good. ``end``: it
    wants nothing behind this index, or nothing yet. ``explores``: the tier whose speed it is to find out; nobody
    waits for that.
    """

    owner: str
    deadline_s: float
    limit_s: float
    began_s: float
    keys: Sequence[ChunkKey] = ()
    start: int = 0
    cursor: int = 0  # everything before it was resident when the walk came by
    front: int = 0  # everything before it was resident or being read: where the walk goes on
    end: int = 0
    asked: set[ChunkKey] = field(default_factory=set)
    leases: dict[ChunkKey, Lease] = field(default_factory=dict)
    origins: dict[str, int] = field(default_factory=dict)  # chunks fetched for this owner, by tier
    pending: bool = False
    blocked: bool = False  # wants a slot or room in flight
    undecided: bool = True  # a tier has answered since it was decided what to wait for
    unanswered: bool = False  # a tier is still asked for what comes next
    over: bool = False
    explores: int = NOBODY
    worth_s: float | None = None  # what computing all of it would take; None: it wasn't known
    looked_s: float = 0.0  # when it was last looked at whether waiting pays
    seen_version: int = -1

    def asks(self, keys: Sequence[ChunkKey], start: int) -> bool:
        """Whether ``keys`` from ``start`` are what it waits for. A prompt's last key names all of it."""
        mine = self.keys
        return (
            start == self.start
            and len(mine) == len(keys)
            and (mine is keys or not mine or mine[-1] == keys[-1])
        )


@dataclass(slots=True)
class Queue:
    """What is on its way from one tier, in bytes; its reads, the oldest first."""

    reading: int = 0
    promised: int = 0  # found and wanted, not being read yet
    reads: dict[Read, None] = field(default_factory=dict)
    passed_over: int = 0  # decisions against this tier since a read of it ended
    heard_s: float = float("-inf")  # when a read last ended
    explorer: Wait | None = None
    explored: int = 0
