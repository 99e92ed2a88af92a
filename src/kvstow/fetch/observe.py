"""Takes the snapshot of a wait, and logs what was decided about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvstow.fetch.decide import loading_pays_from
from kvstow.fetch.estimates import Estimates
from kvstow.fetch.flights import Flight, Wait
from kvstow.fetch.queue import ReadQueue
from kvstow.fetch.snapshot import Chunk, ChunkState, Decision, FetchRules, Snapshot, Verdict
from kvstow.key import ChunkKey
from kvstow.pool.index import MEMORY, Index
from kvstow.tiers import Tier

logger = logging.getLogger("kvstow")


def take_snapshot(
    wait: Wait,
    *,
    rules: FetchRules,
    queues: Sequence[ReadQueue],
    flights: Mapping[ChunkKey, Flight],
    index: Index,
    estimates: Estimates,
    now_s: float,
    expired: bool,
) -> Snapshot:
    """Copies all that a decision about ``wait`` depends on. ``queues`` has one entry for each tier."""
    return Snapshot(
        rules=rules,
        tiers=[queue.state(now_s) for queue in queues],
        chunks=_chunks(wait, queues, flights, index, now_s),
        prefill_s=estimates.prefill_s,
        backlog_tokens=estimates.backlog_tokens,
        arrived=sum(wait.origins.values()),
        elapsed_s=now_s - wait.began_s,
        limit_s=None if wait.limit_s is None else wait.limit_s - wait.began_s,
        compute_s=wait.compute_s,
        expired=expired,
        progress=any(queue.read_since(wait.decided_s) for queue in queues),
        explores=wait.explores,
    )


def _chunks(
    wait: Wait,
    queues: Sequence[ReadQueue],
    flights: Mapping[ChunkKey, Flight],
    index: Index,
    now_s: float,
) -> list[Chunk]:
    """The wait's chunks from its cursor on."""
    chunks: list[Chunk] = []
    for key in wait.keys[wait.cursor :]:
        if index.resident(key) or index.reserving(key):
            chunks.append(Chunk(key, ChunkState.PRESENT))
            continue
        flight = flights.get(key)
        if flight is None or wait not in flight.waits:
            chunks.append(Chunk(key, ChunkState.ABSENT))
            continue
        queue = queues[flight.tier]
        queued = flight in queue.waiting
        expected_s = None if flight.read is None else queue.expected_s(flight.read, now_s)
        chunks.append(Chunk(key, flight.stage, flight.tier, flight.size_bytes, queued, expected_s))
    return chunks


def awaited_tier(wait: Wait, flights: Mapping[ChunkKey, Flight], tiers: Sequence[Tier]) -> str:
    """Names the tier that the wait's next chunk comes from.

    It is the pool while a chunk that was found waits for a slot.
    """
    for key in wait.keys[wait.cursor :]:
        flight = flights.get(key)
        if flight is not None and wait in flight.waits:
            return MEMORY if flight.stage is ChunkState.FOUND else tiers[flight.tier].name
    return MEMORY


def log_verdict(owner: str, tier: str, snapshot: Snapshot, verdict: Verdict) -> None:
    """Logs, for debugging, how many of the chunks that ``tier`` holds are loaded for ``owner``."""
    if verdict.decision is Decision.SHORT or not logger.isEnabledFor(logging.DEBUG):
        return
    size = max(chunk.size_bytes for chunk in snapshot.chunks)
    least = loading_pays_from(snapshot, verdict.tier, size)
    logger.debug(
        "Request %s: tier %s had %d chunks, loading pays from %s; %d are loaded",
        owner,
        tier,
        verdict.available,
        "no number" if least is None else least,
        verdict.chunks,
    )
