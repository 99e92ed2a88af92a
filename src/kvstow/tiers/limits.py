"""An estimate of how fast a tier writes."""

from __future__ import annotations

from typing import Final

RATE_KEPT: Final = 0.95  # of what is known of the speed, at each write: the last 20 or so count


class WriteRate:
    """Estimates how fast a tier writes, all its threads together: bytes written, over the time in
    which any write ran."""

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
