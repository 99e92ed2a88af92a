"""Admission: which chunks are written at all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 200_000  # keys seen once; about 100 bytes each


class SecondSight:
    """Admits a key the second time that it is offered, so that chunks used once never wear the
    disk. Thread-safe.

    It remembers the last ``remembered`` keys that were offered once, by eight bytes of their
    digest. A false match admits a chunk early.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, digest: bytes) -> bool:
        """Whether the chunk with this digest may be written now."""
        short = digest[:8]
        with self._lock:
            if short in self._seen:
                del self._seen[short]
                return True
            self._seen[short] = None
            if len(self._seen) > self._remembered:
                self._seen.popitem(last=False)
            return False
