"""Bypass of direct storage, in the scheduler's process, while a worker's NVMe does not answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstow.metrics import Metrics

logger = logging.getLogger("kvstow")

WORKING, BYPASSED = 0, 2  # of ``tier_state``: as a breaker that is closed, or open


class HungRanks:
    """The ranks whose NVMe does not answer.

    True while there is one: no chunk is whole without it.
    """

    def __init__(self, metrics: Metrics, *, used: bool) -> None:
        """``used`` is False where chunks are not in direct storage; then no rank ever reports."""
        self._metrics = metrics
        self._ranks: set[tuple[int, int]] = set()
        if used:
            metrics.gauge("tier_state", WORKING, tier="direct")

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def update(self, ranks: Mapping[tuple[int, int], bool]) -> None:
        """Takes reports: True for a rank whose NVMe hangs, False for one that works again.

        Logs when the bypass begins and ends.
        """
        before = bool(self)
        self._ranks = {rank for rank in self._ranks | ranks.keys() if ranks.get(rank, True)}
        if bool(self) is not before:
            logger.warning(
                "Tier direct is bypassed: NVMe does not answer"
                if self
                else "Tier direct is in use again"
            )
            self._metrics.gauge("tier_state", BYPASSED if self else WORKING, tier="direct")
