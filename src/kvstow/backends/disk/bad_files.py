"""The files that a directory's readers must not open again."""

from __future__ import annotations

import threading
from typing import Final

MAX_BAD_FILES: Final = 1024  # some 100 bytes each


class BadFiles:
    """Digests of chunks whose file can't be read, or is corrupt and could not be moved aside.

    Each is a miss until its file is replaced. At most ``MAX_BAD_FILES`` are remembered: the oldest
    is forgotten first, and its file is tried again. Thread-safe.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> bool:
        """Remember a file. Returns False if it was remembered before."""
        with self._lock:
            if digest in self._digests:
                return False
            if len(self._digests) >= MAX_BAD_FILES:
                del self._digests[next(iter(self._digests))]
            self._digests[digest] = None
            return True

    def discard(self, digest: bytes) -> None:
        """Forget a file, which was removed or replaced."""
        with self._lock:
            self._digests.pop(digest, None)

    def clear(self) -> None:
        """Forget all files: the directory was opened anew."""
        with self._lock:
            self._digests.clear()
