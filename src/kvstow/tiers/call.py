"""One call of a store, from its queue to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Call:
    """A store call: queued, then either cancelled by its owner or begun by a worker, and ended.

    ``began_s`` and ``ended_s`` are times of the monotonic clock, None before. ``release_bytes``
    gives back what the call occupies, and is called if it is cancelled.
    """

    __slots__ = ("_claim", "began_s", "cancelled", "ended_s", "release_bytes")

    def __init__(self, release_bytes: Callable[[], None]) -> None:
        self._claim = threading.Lock()  # taken once, by the worker or by cancel()
        self.began_s: float | None = None
        self.ended_s: float | None = None
        self.cancelled = False
        self.release_bytes = release_bytes

    def begin(self, now_s: float) -> bool:
        """Begin, on a worker. Returns False if the call was cancelled."""
        if not self._claim.acquire(blocking=False):
            return False
        self.began_s = now_s
        return True

    def cancel(self) -> bool:
        """Cancel, on the owner's thread.

        Returns True if the call had not begun: it never touches its buffers, and its ``then`` never
        runs.
        """
        if self.cancelled or not self._claim.acquire(blocking=False):
            return False
        self.cancelled = True
        self.release_bytes()
        return True

    @property
    def seconds(self) -> float:
        """How long the store call took."""
        return (self.ended_s or 0.0) - (self.began_s or 0.0)
