"""What bounds a tier, and how fast it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE_KEPT: Final = 0.95  # of what is known of the speed, at each write: the last 20 or so count


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


class WriteRate:
    """Estimates how fast a tier writes, all its threads together: bytes written, over the time in which any write
    ran."""

    def __init__(self, assumed_bytes_s: float) -> None:
        # Both sums fade alike, so that large writes weigh more.
        self._bytes = assumed_bytes_s
        self._seconds = 1.0
        self._counted_until_s = float("-inf")

    def observe(self, size: int, began_s: float, ended_s: float) -> None:
        """Take note of a write of ``size`` bytes."""
        new_s = max(0.0, ended_s - max(began_s, self._counted_until_s))
        self._bytes = self._bytes * RATE_KEPT + size
        self._seconds = self._seconds * RATE_KEPT + new_s
        self._counted_until_s = max(self._counted_until_s, ended_s)

    def seconds(self, size: int) -> float:
        """Expected seconds to write ``size`` bytes."""
        return size * self._seconds / self._bytes
