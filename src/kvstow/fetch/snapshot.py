"""The input and the output of a decision about one wait: ``Snapshot`` and ``Plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from kvstow.key import ChunkKey


class ChunkState(Enum):
    """Where one wanted chunk is."""

    PRESENT = "present"  # in the pool, or a worker is filling it
    UNASKED = "unasked"  # tiers from ``tier`` on can be asked for it
    PROBING = "probing"  # tier ``tier`` is being asked for it
    FOUND = "found"  # tier ``tier`` holds it
    READING = "reading"  # tier ``tier`` is reading it
    ABSENT = "absent"  # no tier gives it to this wait


class Chunk(NamedTuple):
    """One wanted chunk in a snapshot.

    ``queued``: it is FOUND, and an earlier plan has put it into its tier's read queue.
    ``expected_s``: seconds until its read ends; None: not known, or not READING.
    """

    key: ChunkKey
    state: ChunkState
    tier: int = -1
    size_bytes: int = 0
    queued: bool = False
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class FetchRules:
    """The settings of all fetches.

    ``min_tokens`` loads any run of as many tokens, ``deadline_s`` bounds each wait; None: learned.
    """

    chunk_tokens: int
    min_tokens: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierState:
    """One lower tier at the time of a snapshot.

    ``pending_bytes`` are being read or wait to be read. ``fixed_s`` and ``byte_s`` estimate a read;
    ``fixed_s`` is None before the first. ``probe_s`` is the mean time of a probe, None before the
    first. ``overdue_s`` says how late the oldest read is. ``explore_chunks`` is how many chunks to
    read if a decision goes against the tier; 0: its estimate is fresh.
    """

    usable: bool = True
    pending_bytes: int = 0
    fixed_s: float | None = None
    byte_s: float = 0.0
    probe_s: float | None = None
    overdue_s: float = 0.0
    explore_chunks: int = 0

    def load_s(self, size_bytes: int) -> float | None:
        """Seconds to read ``size_bytes`` behind all that is pending. None: not known."""
        if self.fixed_s is None:
            return None
        return self.fixed_s + self.byte_s * (self.pending_bytes + size_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision for one wait depends on.

    ``chunks`` begins at the first chunk that is missing and has all that follow. ``prefill_s`` is
    the seconds to compute a prompt token, None while not known. ``backlog_tokens`` are computed
    before this wait's. ``arrived`` counts the chunks fetched for this wait. ``limit_s`` bounds the
    wait in seconds from its start, None for a new one; ``compute_s`` is what computing all of it
    was expected to take. ``expired``: its patience is over. ``progress``: a read has ended since
    the last decision. ``explores`` is the tier that this wait reads for the estimate's sake, None
    for a request.
    """

    rules: FetchRules
    tiers: Sequence[TierState]
    chunks: Sequence[Chunk]
    prefill_s: float | None = None
    backlog_tokens: int = 0
    arrived: int = 0
    elapsed_s: float = 0.0
    limit_s: float | None = None
    compute_s: float | None = None
    expired: bool = False
    progress: bool = False
    explores: int | None = None


class Decision(StrEnum):
    """Names a decision in the metric ``fetch_decisions``."""

    LOAD = "load"  # all chunks found
    PART = "part"  # the first of them
    COLD = "cold"  # begun without estimates
    RECOMPUTE = "recompute"  # found, and computing is faster
    SHORT = "short"  # too few to ask the tier
    EXPLORE = "explore"  # read for the tier's estimate


class Verdict(NamedTuple):
    """A decision about one tier. ``chunks`` of the ``available`` ones are waited for."""

    tier: int
    decision: Decision
    available: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions for one wait.

    ``probes`` maps a tier to the keys to ask it for. ``reads`` are the keys to queue, in order.
    ``abandoned`` are keys that the wait does not need any more. ``chunks`` counts the chunks of the
    snapshot to wait for, None for all that may come. ``unanswered``: a tier is still asked for the
    next chunk. ``patience_s`` is the time until the next decision; None: unchanged. ``limit_s`` and
    ``compute_s`` are set for a new wait. ``leave``: the wait ends. ``explore`` names a tier and the
    keys to read from it for its estimate's sake.
    """

    probes: Mapping[int, Sequence[ChunkKey]] = field(default_factory=dict)
    reads: Sequence[ChunkKey] = ()
    abandoned: Sequence[ChunkKey] = ()
    chunks: int | None = None
    unanswered: bool = False
    patience_s: float | None = None
    limit_s: float | None = None
    compute_s: float | None = None
    leave: bool = False
    explore: tuple[int, Sequence[ChunkKey]] | None = None
    verdicts: Sequence[Verdict] = ()
