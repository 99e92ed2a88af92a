"""The decision to load or to recompute: a pure function from a snapshot of one wait to a plan.

``decide`` reads no clock and changes nothing. ``kvstow.fetch.execute`` takes the snapshot and
applies the plan. docs/how-to/load-or-recompute.md describes the decisions for users,
docs/decisions/0008-load-or-recompute.md the model, docs/decisions/0025-decide-then-execute.md why
the decision is a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from kvstow.fetch.snapshot import (
    Chunk,
    ChunkState,
    Decision,
    Plan,
    Snapshot,
    TierState,
    Verdict,
)
from kvstow.key import ChunkKey

#: A load must take at most this share of the time to compute the same chunks: estimates are rough.
MARGIN: Final = 0.8
#: A wait in which nothing arrives may cost this share of the time to compute: by as much an
#: estimate may be off.
OVERRUN: Final = 1 / MARGIN - 1
#: The longest wait for a sign of life beyond twice the expected time; the whole of it while nothing
#: is known. Enough for a first answer of a remote store, and little beside a long prompt.
GRACE_S: Final = 0.2
#: Seconds to compute a prompt token on a fast engine. Assumed after the first wait, until this
#: engine's rate is known.
ASSUMED_PREFILL_S: Final = 1 / 4000
#: The longest wait while this engine's rate is not known, so only of the first few requests.
COLD_LIMIT_S: Final = 2.0
#: A tier that decisions go against is read for its estimate's sake so long after its last read.
#: Such a read is given up after the same time.
EXPLORE_AFTER_S: Final = 2.0
#: Chunks of every second such read; the others read one. Two sizes tell fixed seconds from seconds
#: a byte.
EXPLORE_CHUNKS: Final = 4


@dataclass(slots=True)
class Run:
    """The chunks that a wait could have, up to the first that no tier is known to hold.

    ``ready_s`` has the seconds until each is in the pool, None where not known. ``fetched`` are
    those that come from a tier. ``unanswered``: a tier is still asked for the chunk that follows.
    """

    ready_s: list[float | None] = field(default_factory=list)
    fetched: list[Chunk] = field(default_factory=list)
    unanswered: bool = False


def decide(snapshot: Snapshot) -> Plan:
    """Decide what to probe, what to read, and how long to wait, for one wait."""
    if snapshot.explores is not None:
        return _explorer_plan(snapshot, snapshot.explores)
    snapshot, behind_hole = _cut_at_hole(snapshot)
    if snapshot.expired:
        return _plan_after_patience(snapshot)
    probes, unasked, short = _choose_probes(snapshot)
    probed = {key for keys in probes.values() for key in keys}
    run = _available(snapshot, probed)
    count = worthwhile_chunks(snapshot, run.ready_s) if run.fetched else 0
    verdicts = [Verdict(tier, Decision.SHORT) for tier in short]
    explore = None
    if run.fetched:
        verdicts.append(_verdict(snapshot, run, count))
    if verdicts and not count and not run.unanswered:
        rejected = verdicts[-1].tier
        candidates = unasked
        if run.fetched:
            candidates = _found([c for c in run.fetched if c.tier == rejected])
        explore = _exploration(snapshot, rejected, candidates)
    abandoned = behind_hole + unasked
    if run.fetched and not run.unanswered:
        abandoned += _found(snapshot.chunks[count:])
    limit_s, compute_s, patience_s = _patience(snapshot, run, count)
    return Plan(
        probes=probes,
        reads=_to_queue(snapshot.chunks[:count]),
        abandoned=abandoned,
        chunks=count if run.fetched else None,
        unanswered=run.unanswered,
        patience_s=patience_s,
        limit_s=limit_s,
        compute_s=compute_s,
        explore=explore,
        verdicts=verdicts,
    )


def _cut_at_hole(snapshot: Snapshot) -> tuple[Snapshot, list[ChunkKey]]:
    """Return the snapshot up to the first absent chunk, and what is not needed because it comes after."""
    for i, chunk in enumerate(snapshot.chunks):
        if chunk.state is ChunkState.ABSENT:
            behind = [
                later.key
                for later in snapshot.chunks[i:]
                if later.state in (ChunkState.UNASKED, ChunkState.FOUND)
            ]
            return replace(snapshot, chunks=snapshot.chunks[:i]), behind
    return snapshot, []


def _choose_probes(
    snapshot: Snapshot,
) -> tuple[dict[int, list[ChunkKey]], list[ChunkKey], list[int]]:
    """Return the keys to ask each tier for, the keys that remain, and the tiers not worth asking."""
    unasked = [chunk for chunk in snapshot.chunks if chunk.state is ChunkState.UNASKED]
    probes: dict[int, list[ChunkKey]] = {}
    short: list[int] = []
    for number, tier in enumerate(snapshot.tiers):
        candidates = [chunk for chunk in unasked if chunk.tier <= number]
        if not candidates or not tier.usable:
            continue
        if worth_asking(snapshot, tier, sum(chunk.size_bytes for chunk in candidates)):
            probes[number] = [chunk.key for chunk in candidates]
            unasked = [chunk for chunk in unasked if chunk.tier > number]
        else:
            short.append(number)
    return probes, [chunk.key for chunk in unasked], short


def worth_asking(snapshot: Snapshot, tier: TierState, size_bytes: int) -> bool:
    """Return whether loading ``size_bytes`` could pay for the whole run, if the tier held them."""
    rules = snapshot.rules
    gained = len(snapshot.chunks)
    if rules.min_tokens is not None:
        return gained * rules.chunk_tokens >= rules.min_tokens
    load_s = tier.load_s(size_bytes)
    compute_s = _compute_s(snapshot)
    if load_s is None or compute_s is None:
        return True
    return load_s + (tier.probe_s or 0.0) <= MARGIN * compute_s


def _compute_s(snapshot: Snapshot) -> float | None:
    """Return the seconds to compute the backlog and then all chunks. None: not known."""
    if snapshot.prefill_s is None:
        return None
    tokens = snapshot.rules.chunk_tokens * len(snapshot.chunks) + snapshot.backlog_tokens
    return snapshot.prefill_s * tokens


def _available(snapshot: Snapshot, probed: set[ChunkKey]) -> Run:
    run = Run()
    new_bytes: dict[int, int] = {}  # by tier: found and not queued, up to the chunk at hand
    for chunk in snapshot.chunks:
        if chunk.state is ChunkState.UNASKED:
            run.unanswered = chunk.key in probed
            break
        if chunk.state is ChunkState.PROBING:
            run.unanswered = True
            break
        if chunk.state is ChunkState.PRESENT:
            run.ready_s.append(0.0)
            continue
        run.fetched.append(chunk)
        if chunk.state is ChunkState.READING:
            run.ready_s.append(chunk.expected_s)
            continue
        tier = snapshot.tiers[chunk.tier]
        if not chunk.queued:
            new_bytes[chunk.tier] = new_bytes.get(chunk.tier, 0) + chunk.size_bytes
        load_s = tier.load_s(new_bytes.get(chunk.tier, 0))
        run.ready_s.append(None if load_s is None else load_s + tier.overdue_s)
    return run


def worthwhile_chunks(snapshot: Snapshot, ready_s: Sequence[float | None]) -> int:
    """Return how many chunks of a run to wait for: the number that saves most time, 0 when none does.

    ``ready_s`` has the seconds until each chunk is in the pool; None: not known, and taken as 0.
    Loading while the engine computes its backlog costs nothing. Without an estimate of computing
    all chunks are worth a first wait, and a second only where a fast engine would be slower.
    """
    rules = snapshot.rules
    if rules.min_tokens is not None:
        tokens = (snapshot.arrived + len(ready_s)) * rules.chunk_tokens
        return len(ready_s) if snapshot.expired or tokens >= rules.min_tokens else 0
    if snapshot.prefill_s is not None:
        chunk_s = MARGIN * snapshot.prefill_s * rules.chunk_tokens
        backlog_s = snapshot.prefill_s * snapshot.backlog_tokens
    elif snapshot.expired:
        chunk_s = ASSUMED_PREFILL_S * rules.chunk_tokens
        backlog_s = ASSUMED_PREFILL_S * snapshot.backlog_tokens
    else:
        return len(ready_s)
    best = 0
    most_saved_s = 0.0
    wait_s = 0.0
    for count, ready in enumerate(ready_s, 1):
        wait_s = max(wait_s, (ready or 0.0) - backlog_s)
        saved_s = chunk_s * count - wait_s
        if saved_s > most_saved_s:
            best = count
            most_saved_s = saved_s
    return best


def _verdict(snapshot: Snapshot, run: Run, count: int) -> Verdict:
    """Name the decision on a run after the tier of its first chunk that is not queued yet."""
    new = [c for c in run.fetched if c.state is ChunkState.FOUND and not c.queued]
    tier = (new or run.fetched)[0].tier
    available = len(run.ready_s)
    if count == 0:
        decision = Decision.RECOMPUTE
    elif snapshot.prefill_s is None or None in run.ready_s:
        decision = Decision.COLD
    elif count == available:
        decision = Decision.LOAD
    else:
        decision = Decision.PART
    return Verdict(tier, decision, available, count)


def _found(chunks: Sequence[Chunk]) -> list[ChunkKey]:
    return [chunk.key for chunk in chunks if chunk.state is ChunkState.FOUND]


def _exploration(
    snapshot: Snapshot, tier: int, keys: Sequence[ChunkKey]
) -> tuple[int, Sequence[ChunkKey]] | None:
    """Return what to read of a rejected tier for the sake of its estimate, if that is old."""
    wanted = snapshot.tiers[tier].explore_chunks
    if not keys or not wanted or snapshot.rules.min_tokens is not None:
        return None
    return tier, keys[:wanted]


def _to_queue(chunks: Sequence[Chunk]) -> list[ChunkKey]:
    return [c.key for c in chunks if c.state is ChunkState.FOUND and not c.queued]


def _patience(
    snapshot: Snapshot, run: Run, count: int
) -> tuple[float | None, float | None, float | None]:
    """Return a new wait's limit, the time to compute all of it, and the time to the next decision."""
    limit_s = None
    compute_s = snapshot.compute_s
    if snapshot.limit_s is None:
        compute_s = _compute_s(snapshot)
        limit_s = COLD_LIMIT_S if compute_s is None else compute_s
        if snapshot.rules.deadline_s is not None:
            limit_s = snapshot.rules.deadline_s
    patience_s = None
    if count:
        patience_s = patience(_next_arrival_s(run.ready_s[:count]), compute_s)
    elif limit_s is not None:
        probes_s = [tier.probe_s for tier in snapshot.tiers if tier.usable]
        known_s = [seconds for seconds in probes_s if seconds is not None]
        expected_s = max(known_s, default=0.0) if len(known_s) == len(probes_s) else None
        patience_s = patience(expected_s, compute_s)
    return limit_s, compute_s, patience_s


def _next_arrival_s(ready_s: Sequence[float | None]) -> float | None:
    return next((seconds for seconds in ready_s if seconds != 0.0), 0.0)


def patience(expected_s: float | None, compute_s: float | None) -> float:
    """Return how many seconds to wait before the next decision.

    ``expected_s`` is the time until the next chunk or answer, ``compute_s`` the time to compute all
    that is waited for; either is None while not known.
    """
    if compute_s is None:
        return GRACE_S
    if expected_s is None:
        return min(GRACE_S, compute_s)
    return min(compute_s, max(2 * expected_s, min(OVERRUN * compute_s, GRACE_S)))


def _plan_after_patience(snapshot: Snapshot) -> Plan:
    """Go on only while something arrives and the rest still pays."""
    if snapshot.limit_s is None or snapshot.elapsed_s >= snapshot.limit_s or not snapshot.progress:
        return Plan(leave=True)
    run = _available(snapshot, set())
    count = worthwhile_chunks(snapshot, run.ready_s)
    if count == 0:
        return Plan(leave=True)
    return Plan(
        reads=_to_queue(snapshot.chunks[:count]),
        abandoned=[] if run.unanswered else _found(snapshot.chunks[count:]),
        chunks=count,
        unanswered=run.unanswered,
        patience_s=patience(_next_arrival_s(run.ready_s), snapshot.compute_s),
    )


def _explorer_plan(snapshot: Snapshot, tier: int) -> Plan:
    """Read whatever the explored tier has; no other tier is asked."""
    if snapshot.expired:
        return Plan(leave=True)
    unasked = [c for c in snapshot.chunks if c.state is ChunkState.UNASKED]
    asked = [c.key for c in unasked if c.tier <= tier and snapshot.tiers[tier].usable]
    other = _found([chunk for chunk in snapshot.chunks if chunk.tier != tier])
    return Plan(
        probes={tier: asked} if asked else {},
        reads=_to_queue([chunk for chunk in snapshot.chunks if chunk.tier == tier]),
        abandoned=other if asked else other + [c.key for c in unasked],
        chunks=len(snapshot.chunks),
    )


def loading_pays_from(snapshot: Snapshot, tier: int, size_bytes: int) -> int | None:
    """Return the least number of chunks of ``size_bytes`` that pays to load, with the tier's queue
    as it is. None: no number does."""
    if snapshot.prefill_s is None:
        return 1
    state = snapshot.tiers[tier]
    queue_s = (state.load_s(0) or 0.0) - snapshot.prefill_s * snapshot.backlog_tokens
    if queue_s <= 0:
        return 1
    gain_s = MARGIN * snapshot.prefill_s * snapshot.rules.chunk_tokens - state.byte_s * size_bytes
    return ceil(queue_s / gain_s) if gain_s > 0 else None
