"""Limits of a tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The bounds of one tier. Bytes are bytes of frames."""

    #: Writes accepted and not ended, in bytes; each pins its slot of the pool.
    max_queued_bytes: int = 2 << 30
    #: Half of an executor's queue, because look-ups and reads must get in.
    max_queued_writes: int = 512
    #: Seconds that what is queued may take to write; with an empty queue one write is always taken.
    max_queued_s: float = 10.0
    #: Speed of writes until some have ended: that of a cloud machine's network volume.
    assumed_write_bytes_s: float = 100e6
    #: Reads in flight, in bytes; each occupies its slot of the pool.
    max_read_bytes: int = 256 << 20
    #: Bytes of one read call: few enough that several threads share a prompt's chunks.
    read_batch_bytes: int = 16 << 20
    #: A call that runs longer puts the tier out of use until it returns.
    hung_after_s: float = 10.0
    #: After so long without progress an idle engine stops stepping for this tier.
    work_deadline_s: float = 30.0
    #: Keys remembered as held by the store; some 200 bytes each.
    known_keys: int = 200_000
    #: Failed calls of a kind in a row that open the breaker, and for how long.
    breaker_failures: int = 5
    breaker_open_s: float = 10.0
