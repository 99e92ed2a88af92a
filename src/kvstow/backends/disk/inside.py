"""Which calls are in which directory: one that hangs keeps a bounded number of threads, and others notice."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstow.errors import StoreUnavailable
from kvstow.runtime import Clock

HUNG_S: Final = 5.0  # a directory hangs that has had a call for so long; less than until the tier counts it as hung


class Inside:
    """Thread-safe. At most half of ``threads`` (of one, one) are in a directory at a time; more than that wait until
    one comes out, at most ``HUNG_S``. None: as many as come."""

    def __init__(self, directories: int, threads: int | None, clock: Clock) -> None:
        self._began_s: list[dict[object, float]] = [{} for _ in range(directories)]
        self._threads = math.inf if threads is None else threads
        self._clock = clock
        self._changed = threading.Condition()

    @contextmanager
    def visit(self, which: int) -> Iterator[None]:
        """A call in a directory. Raises ``StoreUnavailable`` at once for one that hangs."""
        began_s = self._began_s[which]
        visit = object()
        with self._changed:
            while 2 * len(began_s) >= self._threads and (left_s := self._left_s(which)) > 0:
                self._changed.wait(left_s)
            if self._left_s(which) <= 0:
                raise StoreUnavailable(f"a call has not returned for {HUNG_S:g} s")
            began_s[visit] = self._clock.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del began_s[visit]
                self._changed.notify_all()

    def hangs(self, which: int) -> bool:
        return which in self.look()[0]

    def look(self) -> tuple[list[int], int]:
        """Directories that hang, and how many calls do in them; 0 where that leaves no directory or no thread for
        others. Who waits to enter one is sent away."""
        with self._changed:
            hanging = [which for which in range(len(self._began_s)) if self._left_s(which) <= 0]
            stuck = sum(len(self._began_s[which]) for which in hanging)
            if hanging:
                self._changed.notify_all()
            none_left = len(hanging) == len(self._began_s) or stuck >= self._threads
            return hanging, 0 if none_left else stuck

    def _left_s(self, which: int) -> float:
        """Until it counts as hung."""
        oldest_s = next(iter(self._began_s[which].values()), None)
        return HUNG_S if oldest_s is None else oldest_s + HUNG_S - self._clock.monotonic()
