"""Which of several directories work: a dead disk must not take the other disks' chunks with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Final

from kvstow.runtime import Clock

MAX_FAILURES: Final = 3  # in a row; then a directory is out of use
RETRY_S: Final = 10.0  # between trials of a directory that is out of use

logger = logging.getLogger("kvstow")


class FaultKind(Enum):
    """What fails in a directory. Each kind is counted, and heals, apart from the others."""

    READ = "read"
    WRITE = "write"
    HANG = "call"  # it has not returned


class Health:
    """Counts the faults of several directories. Thread-safe.

    A directory whose reads fail, or in which a call hangs, is out of use; one whose writes fail is
    still read. Where no directory works any more, or there is only one, all are asked all the same
    and their faults are the store's: the tier's breaker sees those.
    """

    def __init__(self, paths: Sequence[str], clock: Clock) -> None:
        self._paths = paths
        self._clock = clock
        self._failed_in_a_row: dict[tuple[int, FaultKind], int] = {}
        # Of what is out of use: when to try it.
        self._retry_s: dict[tuple[int, FaultKind], float] = {}
        self._logged: set[tuple[int, FaultKind]] = set()
        self._lock = threading.Lock()

    @property
    def down(self) -> int:
        """How many directories are out of use, or are not written."""
        return len({which for which, _ in list(self._retry_s)})

    def readable(self, which: int) -> bool:
        retry_s = self._retry_s
        return (which, FaultKind.READ) not in retry_s and (which, FaultKind.HANG) not in retry_s

    def writable(self, which: int) -> bool:
        return self.readable(which) and (which, FaultKind.WRITE) not in self._retry_s

    def may_read(self, which: int) -> bool:
        """Whether reads, look-ups and removals should go to a directory."""
        return self.readable(which) or not any(map(self.readable, range(len(self._paths))))

    def may_write(self, which: int) -> bool:
        """Whether writes should go to a directory."""
        return self.writable(which) or not any(map(self.writable, range(len(self._paths))))

    def due(self, which: int, kind: FaultKind) -> bool:
        """Whether a directory that is out of use should be tried now.

        Then it is not due for ``RETRY_S``.
        """
        now_s = self._clock.monotonic()
        with self._lock:
            retry_s = self._retry_s.get((which, kind))
            if retry_s is None or now_s < retry_s:
                return False
            self._retry_s[which, kind] = now_s + RETRY_S
            return True

    def worked(self, which: int, kind: FaultKind) -> None:
        """Take note that a call of this kind did its work."""
        if not self._failed_in_a_row.get((which, kind)):
            return
        with self._lock:
            self._failed_in_a_row[which, kind] = 0
            was_out = self._retry_s.pop((which, kind), None) is not None
            readable = self.readable(which)
        if was_out and kind is FaultKind.WRITE:
            logger.warning("Disk path %s is written again", self._paths[which])
        elif was_out and readable:
            logger.warning("Disk path %s is in use again", self._paths[which])

    def failed(
        self, which: int, kind: FaultKind, error: Exception, *, at_once: bool = False
    ) -> bool:
        """Take note of a fault; ``at_once``: it is enough to put the directory out of use.

        Returns True if it is the store's fault, because no directory works; False if it is one
        directory's among others that work.
        """
        if len(self._paths) == 1:
            return True
        with self._lock:
            was_readable = self.readable(which)
            failed = self._failed_in_a_row.get((which, kind), 0) + 1
            if at_once:
                failed = max(failed, MAX_FAILURES)
            self._failed_in_a_row[which, kind] = failed
            newly_out = failed >= MAX_FAILURES and (which, kind) not in self._retry_s
            if newly_out:
                self._retry_s[which, kind] = self._clock.monotonic() + RETRY_S
            first = (which, kind) not in self._logged
            self._logged.add((which, kind))
            works = self.writable if kind is FaultKind.WRITE else self.readable
            none_works = not any(map(works, range(len(self._paths))))
        path = self._paths[which]
        if newly_out and kind is FaultKind.WRITE:
            logger.warning("Disk path %s is not written, it is still read: %s", path, error)
        elif newly_out and was_readable:
            logger.warning("Disk path %s is out of use, its chunks are misses: %s", path, error)
        elif first and not newly_out:
            logger.warning(
                "A %s failed in %s (more failures of this kind are not logged): %s",
                kind.value,
                path,
                error,
            )
        return none_works
