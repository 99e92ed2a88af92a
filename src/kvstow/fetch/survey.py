"""What an owner could have from lower tiers, and when. Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstow.fetch.judge import Judge
from kvstow.fetch.wait import Flight, Stage, Wait
from kvstow.key import ChunkKey
from kvstow.pool.index import Index


class Run(NamedTuple):
    """The chunks that an owner could have, from its cursor up to the first that no tier is known to hold."""

    ready_s: list[float | None]  # until each is here
    flights: list[Flight]  # those that some tier has, in order
    unanswered: bool  # what comes next, a tier is still asked for


def survey(wait: Wait, flights: Mapping[ChunkKey, Flight], index: Index, judge: Judge) -> Run:
    ready_s: list[float | None] = []
    found: list[Flight] = []
    mine: dict[int, int] = {}  # chunks that nobody has decided on yet, by tier
    paces: dict[int, tuple[float | None, float]] = {}
    for key in wait.keys[wait.cursor :]:
        if index.resident(key) or index.reserving(key):
            ready_s.append(0.0)
            continue
        flight = flights.get(key)
        if flight is None or wait not in flight.waits:
            break
        if flight.stage is Stage.ASKING:
            return Run(ready_s, found, True)
        found.append(flight)
        tier = flight.tier
        if flight.read is not None and flight.stage is Stage.READING:
            ready_s.append(judge.due_s(tier, flight.read))
            continue
        if tier not in paces:
            paces[tier] = judge.pace_s(tier, key.group)
        mine[tier] = mine.get(tier, 0) + (not flight.promised)
        begin_s, each_s = paces[tier]
        ready_s.append(None if begin_s is None else begin_s + each_s * mine[tier])
    return Run(ready_s, found, False)
