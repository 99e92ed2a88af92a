"""The background work of a disk store: scans, the scrub, trials, clearing up after the dead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstow.backends.disk.scrub import Scrub
from kvstow.backends.disk.volume import DiskVolume
from kvstow.errors import KVStowError
from kvstow.fields.values import format_size
from kvstow.runtime import Clock, Executor, repeat

TICK_S: Final = 1.0  # between two rounds of background work
RESTART_S: Final = 60.0  # until work starts again that ended by an unforeseen error
MAX_LOGGED_FAILURES: Final = 32  # kinds of failures, of which the first of each is logged in full
SCAN_EVERY_S: Final = 600.0  # a scan finds other processes' files, and corrects the ledger
SCAN_AGAIN_S: Final = 10.0  # at the earliest, where a scan is wanted
SCAN_PAUSE_S: Final = 0.02  # between directories of an ordinary scan: 5 s for 256 directories
REAP_EVERY_S: Final = 10.0

logger = logging.getLogger("kvstow")


class Maintenance:
    """Looks after the directories of a store, each on a thread of its own.

    ``try_again`` tries a directory that is out of use, where that is due. It returns whether the
    directory can be read. ``scrubs`` has one for each volume, or none at all.
    """

    def __init__(
        self,
        volumes: Sequence[DiskVolume],
        scrubs: Sequence[Scrub],
        *,
        scrub_bytes_s: int,
        try_again: Callable[[int], bool],
        clock: Clock,
    ) -> None:
        self._volumes = volumes
        self._scrubs = scrubs
        self._scrub_bytes_s = scrub_bytes_s
        self._try_again = try_again
        self._clock = clock
        self.stop: Final = threading.Event()
        self._due = [_Due() for _ in volumes]
        self._lock = threading.Lock()
        self._failures = 0  # not counted yet
        self._logged: set[tuple[int, type[Exception], int | None]] = set()

    def start(self, executor: Executor) -> None:
        """Work until ``stop`` is set, on threads of ``executor``, which needs one for each
        directory."""
        for which in range(len(self._volumes)):
            executor.submit(partial(self._loop, which), lambda _value, _error: None)

    def take_failures(self) -> int:
        """How often work has ended by an unforeseen error since the last call."""
        with self._lock:
            count = self._failures
            self._failures = 0
        return count

    def _loop(self, which: int) -> None:
        repeat(
            partial(self.run_once, which),
            self.stop,
            pause_s=TICK_S,
            failed=partial(self._failed, which),
            restart_s=RESTART_S,
        )

    def _failed(self, which: int, error: Exception) -> None:
        with self._lock:
            self._failures += 1
        logger.error(
            "Background work in %s ended by an unforeseen error, it starts again in %g s: %r",
            self._volumes[which].path,
            RESTART_S,
            error,
            exc_info=error if self._first_of_its_kind(which, error) else None,
        )

    def _first_of_its_kind(self, which: int, error: Exception) -> bool:
        """Whether work in a directory has not failed with such an error before."""
        code = error.errno if isinstance(error, OSError) else None
        kind = (which, type(error), code)
        with self._lock:
            if kind in self._logged or len(self._logged) >= MAX_LOGGED_FAILURES:
                return False
            self._logged.add(kind)
            return True

    def run_once(self, which: int) -> None:
        """Do what is due in a directory. What the directory refuses is logged, each kind once."""
        volume = self._volumes[which]
        try:
            volume.access.check_in_place()
            if not self._try_again(which):
                return
            self._scan_or_reap(volume, self._due[which])
            if self._scrubs:
                self._scrubs[which].step(volume.access.attach(), self._scrub_bytes_s, self.stop)
        except (KVStowError, OSError) as error:  # calls fail likewise: the breaker sees them
            cause = error.__cause__
            if self._first_of_its_kind(which, cause if isinstance(cause, OSError) else error):
                logger.warning(
                    "Background work in %s failed (more failures of this kind are not logged): %s",
                    volume.path,
                    error,
                )

    def _scan_or_reap(self, volume: DiskVolume, due: _Due) -> None:
        now_s = self._clock.monotonic()
        wanted = volume.scan_wanted
        if now_s >= (due.wanted_scan_s if wanted else due.scan_s):
            due.scan_s = now_s + SCAN_EVERY_S
            due.wanted_scan_s = now_s + SCAN_AGAIN_S
            due.reap_s = now_s + REAP_EVERY_S
            result = volume.scan(self.stop, 0.0 if wanted else SCAN_PAUSE_S)
            if result is not None and not due.logged:
                due.logged = True
                logger.info(
                    "Disk tier: %s held %d chunks (%s) at the start, at most %s",
                    volume.path,
                    sum(namespace.chunks for namespace in result.namespaces),
                    format_size(result.bytes),
                    format_size(volume.limits.size_bytes),
                )
        elif now_s >= due.reap_s:
            due.reap_s = now_s + REAP_EVERY_S
            volume.reap()


@dataclass(slots=True)
class _Due:
    """When a directory's work is due, on the monotonic clock.

    ``wanted_scan_s`` is for a scan that is wanted.
    """

    scan_s: float = 0.0
    wanted_scan_s: float = 0.0
    reap_s: float = 0.0
    logged: bool = False  # what the first scan found
