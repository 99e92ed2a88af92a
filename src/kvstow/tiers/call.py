"""A store call on its way: cancelled, or begun, never both."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Call:
    """One store call: queued, begun by a worker unless cancelled before, ended on the owner's thread."""

    __slots__ = ("_claim", "began_s", "cancelled", "ended_s", "release_bytes")

    def __init__(self, release_bytes: Callable[[], None]) -> None:
        self._claim = threading.Lock()  # taken once, by whoever comes first: the worker or cancel()
        self.began_s: float | None = None
        self.ended_s: float | None = None
        self.cancelled = False
        self.release_bytes = release_bytes

    def begin(self, now_s: float) -> bool:
        """Worker: False if it was cancelled."""
        if not self._claim.acquire(blocking=False):
            return False
        self.began_s = now_s
        return True

    def cancel(self) -> bool:
        """Owner: True if it has not begun; then it never touches its buffers, and its ``then`` never runs."""
        if self.cancelled or not self._claim.acquire(blocking=False):
            return False
        self.cancelled = True
        self.release_bytes()
        return True

    @property
    def seconds(self) -> float:
        return (self.ended_s or 0.0) - (self.began_s or 0.0)
