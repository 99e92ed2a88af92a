"""What bounds a tier, and how fast it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE_KEPT: Final = (
    0.95  # of what is known of a tier's speed, at each write that ends: the last 20 or so count
)


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of one tier. Bytes are frame bytes."""

    max_queued_bytes: int = 2 << 30  # writes accepted and not ended; each pins its slot of the pool
    max_queued_writes: int = 512  # half of an executor's queue: probes and reads must get in
    max_queued_s: float = (
        10.0  # what is queued should be written by then; with an empty queue one is always taken
    )
    assumed_write_bytes_s: float = (
        100e6  # until writes have ended: a cloud machine's network volume
    )
    max_read_bytes: int = 256 << 20  # reads in flight; each occupies its slot of the pool
    read_batch_bytes: int = (
        16 << 20
    )  # one call: small enough that several threads share a prompt's chunks
    hung_after_s: float = 10.0  # a call that runs longer puts the tier out of use until it returns
    work_deadline_s: float = (
        30.0  # without any progress for so long, an idle engine stops stepping for this tier
    )
    known_keys: int = 200_000  # remembered as held by the store; some 200 bytes each
    breaker_failures: int = 5
    breaker_open_s: float = 10.0


class WriteRate:
    """How fast a tier writes, all its threads together: bytes written, over the time in which any write ran."""

    def __init__(self, assumed_bytes_s: float) -> None:
        self._bytes, self._seconds = (
            assumed_bytes_s,
            1.0,
        )  # both fade alike, so that large writes weigh more
        self._until_s = float("-inf")  # all of the time before has been counted

    def ended(self, size: int, began_s: float, ended_s: float) -> None:
        self._bytes = self._bytes * RATE_KEPT + size
        self._seconds = self._seconds * RATE_KEPT + max(0.0, ended_s - max(began_s, self._until_s))
        self._until_s = max(self._until_s, ended_s)

    def seconds(self, size: int) -> float:
        """How long writing ``size`` bytes would take."""
        return size * self._seconds / self._bytes
