"""Which of several directories are asked: a dead disk must not take the other disks' chunks with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvstow.runtime import Clock

FAILURES: Final = 3  # in a row; then a directory is out of use
RETRY_S: Final = 10.0  # between trials of one that is

logger = logging.getLogger("kvstow")


class Health:
    """Thread-safe. A directory that is alone, or the last that worked, is asked all the same and its faults are the
    store's: it is the tier's breaker that sees them."""

    def __init__(self, paths: Sequence[str], clock: Clock) -> None:
        self._paths = paths
        self._clock = clock
        self._failed = [0] * len(paths)
        self._retry_s: dict[int, float] = {}  # of those out of use: when to try again
        self._lock = threading.Lock()

    @property
    def down(self) -> int:
        return len(self._retry_s)

    def works(self, which: int) -> bool:
        return which not in self._retry_s

    def asks(self, which: int) -> bool:
        """Whether calls should go to it."""
        return which not in self._retry_s or len(self._retry_s) == len(self._paths)

    def due(self, which: int) -> bool:
        """Whether one that is out of use should be tried. Then not again for ``RETRY_S``."""
        now = self._clock.monotonic()
        with self._lock:
            due = which in self._retry_s and now >= self._retry_s[which]
            if due:
                self._retry_s[which] = now + RETRY_S
        return due

    def worked(self, which: int) -> None:
        if not self._failed[which]:
            return
        with self._lock:
            self._failed[which] = 0
            back = self._retry_s.pop(which, None) is not None
        if back:
            logger.warning("Disk path %s is in use again", self._paths[which])

    def failed(self, which: int, error: Exception, *, at_once: bool = False) -> bool:
        """Take note of a fault, which may be enough ``at_once``. True: it is the store's; False: of one directory
        among others that work."""
        if len(self._paths) == 1:
            return True
        with self._lock:
            self._failed[which] += FAILURES if at_once else 1
            new = self._failed[which] >= FAILURES and which not in self._retry_s
            if new:
                self._retry_s[which] = self._clock.monotonic() + RETRY_S
            alone = len(self._retry_s) == len(self._paths)
        if new:
            logger.warning(
                "Disk path %s is out of use, its chunks are misses: %s", self._paths[which], error
            )
        return alone
