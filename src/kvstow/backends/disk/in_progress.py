"""The calls that are in progress in several directories: one that hangs keeps a bounded number of
threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstow.errors import StoreUnavailable
from kvstow.runtime import Clock

HUNG_S: Final = 5.0  # a call that takes longer hangs; less than the tier's own limit


class CallsInProgress:
    """Counts the calls in each directory. Thread-safe.

    At most half of ``threads`` are in one directory at a time, or one if there is one; more calls
    wait until one leaves, at most ``HUNG_S``. None: no limit.
    """

    def __init__(self, directories: int, threads: int | None, clock: Clock) -> None:
        # Of each directory its calls and when they began, the oldest first.
        self._began_s: list[dict[object, float]] = [{} for _ in range(directories)]
        self._threads = math.inf if threads is None else threads
        self._clock = clock
        self._changed = threading.Condition()

    @contextmanager
    def enter(self, which: int) -> Iterator[None]:
        """Count the block as a call in a directory.

        Raises ``StoreUnavailable`` if a call there hangs.
        """
        began_s = self._began_s[which]
        call = object()
        with self._changed:
            while 2 * len(began_s) >= self._threads:
                left_s = self._seconds_until_hung(which)
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._seconds_until_hung(which) <= 0:
                raise StoreUnavailable(f"a call has not returned for {HUNG_S:g} s")
            began_s[call] = self._clock.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del began_s[call]
                self._changed.notify_all()

    def hangs(self, which: int) -> bool:
        """Whether a call hangs in a directory."""
        return which in self.hanging()[0]

    def hanging(self) -> tuple[list[int], int]:
        """The directories in which a call hangs, and the number of all calls in these.

        The number is 0 where no directory or no thread is left for other calls. Calls that wait to
        enter such a directory are woken, and fail.
        """
        with self._changed:
            directories = range(len(self._began_s))
            hanging = [which for which in directories if self._seconds_until_hung(which) <= 0]
            calls = sum(len(self._began_s[which]) for which in hanging)
            if hanging:
                self._changed.notify_all()
            none_left = len(hanging) == len(directories) or calls >= self._threads
            return hanging, 0 if none_left else calls

    def _seconds_until_hung(self, which: int) -> float:
        oldest_s = next(iter(self._began_s[which].values()), None)
        return HUNG_S if oldest_s is None else oldest_s + HUNG_S - self._clock.monotonic()
