"""Whose turn it is to run Python: what the tier's threads take from the thread that schedules has a bound.

A thread that comes out of a system call waits for the interpreter's lock, at most 5 ms; then whoever computes has to
give it up. So beside a thread that computes all the time each of a store's threads comes in every 5 ms, one behind the
other, and the more there are, the more they take. Here one of them at a time is in the store's own Python, between two
long calls; the others wait where they don't ask for that lock. Sealing, checking and evicting take no turn.
docs/decisions/0016-turns.md says what that gains and costs, with measurements.
"""

from __future__ import annotations

import threading
from typing import Final

LONGEST_S: Final = 0.1  # who has waited so long takes it that the one before hangs in a system call


class Turns:
    """A store's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> threading.Lock:
        """Wait for a turn, at most ``LONGEST_S``. Releasing what is returned ends it."""
        lock = self._lock
        if not lock.acquire(timeout=LONGEST_S):
            lock = threading.Lock()  # whoever comes from now on waits for this one
            lock.acquire()
            self._lock = lock
        return lock
