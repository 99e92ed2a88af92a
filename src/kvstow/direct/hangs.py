"""Whether direct storage is bypassed, in the scheduler's process: workers say whose NVMe hangs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstow.metrics import Metrics

logger = logging.getLogger("kvstow")

WORKING, BYPASSED = 0, 2  # of ``tier_state``: as a breaker that is closed, or open


class Hangs:
    """True while there is a rank whose NVMe does not answer: no chunk is whole without it."""

    def __init__(self, metrics: Metrics, *, used: bool) -> None:
        """``used``: chunks have their places in direct storage. Without, no rank is ever heard of."""
        self._metrics = metrics
        self._ranks: set[tuple[int, int]] = set()
        if used:
            metrics.gauge("tier_state", WORKING, tier="direct")

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def heard(self, ranks: Mapping[tuple[int, int], bool]) -> None:
        """Ranks whose NVMe hangs from now on, or does no more. Says so where that changes anything."""
        before = bool(self)
        self._ranks = {rank for rank in self._ranks | ranks.keys() if ranks.get(rank, True)}
        if bool(self) is not before:
            logger.warning(
                "Tier direct is bypassed: NVMe does not answer"
                if self
                else "Tier direct is in use again"
            )
            self._metrics.gauge("tier_state", BYPASSED if self else WORKING, tier="direct")
