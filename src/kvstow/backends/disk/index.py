"""The chunk files of a data directory that this process knows, in the order of their eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

TOUCH_S: Final = 60.0  # a file's mtime, its recency after a restart, is renewed at most this often
REORDER_BATCH: Final = 2_000  # keys moved under the lock at a time: a few ms


class EvictionOrder(Protocol):
    """A ``kvstow.pool.policy`` over digests: a file is named by its key's digest."""

    def insert(self, key: Any, size: int = 1) -> None: ...
    def touch(self, key: Any) -> None: ...
    def remove(self, key: Any) -> None: ...
    def victim(self, evictable: Callable[[Any], bool]) -> Any: ...


class ChunkEntry:
    """One chunk's file.

    ``used_s`` is its last use as its mtime says, ``scan`` the last scan that saw it.
    """

    __slots__ = ("namespace", "scan", "size", "used_s")

    def __init__(self, namespace: bytes, size: int, used_s: float, scan: int) -> None:
        self.namespace = namespace
        self.size = size
        self.used_s = used_s
        self.scan = scan


class ChunkFile(NamedTuple):
    """A chunk's file as a scan or a ``stat`` saw it. ``size`` is in bytes, ``used_s`` its mtime."""

    digest: bytes
    size: int
    used_s: float


class Look:
    """One look at the filesystem. ``removed`` has the digests of files removed meanwhile."""

    __slots__ = ("removed",)

    def __init__(self) -> None:
        self.removed: set[bytes] = set()


class ChunkIndex:
    """Thread-safe; no call does I/O.

    A file is removed in three steps: ``victim`` or ``begin_removal`` forgets it, the caller unlinks
    it, and calls ``end_removal``. What a thread has seen of it meanwhile, ``add`` ignores: see
    ``look``.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._entries: dict[bytes, ChunkEntry] = {}
        self._removing: set[bytes] = set()
        self._looks: list[Look] = []
        self._scan = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, digest: bytes) -> bool:
        return digest in self._entries

    @contextmanager
    def look(self) -> Iterator[Look]:
        """Begin a look at the filesystem, before the first ``stat``; ``add`` takes what it has
        seen."""
        look = Look()
        with self._lock:
            self._looks.append(look)
        try:
            yield look
        finally:
            with self._lock:
                self._looks.remove(look)

    def add(self, namespace: bytes, files: Iterable[ChunkFile], look: Look | None = None) -> None:
        """Take note of files that are there. Those known already are only marked as seen.

        ``look`` is the one that saw them; None: this process has just published them. Files that
        are being removed, or were removed during the look, are left out.
        """
        with self._lock:
            for digest, size, used_s in files:
                entry = self._entries.get(digest)
                if entry is not None:
                    entry.scan = self._scan
                elif digest not in self._removing and (look is None or digest not in look.removed):
                    self._entries[digest] = ChunkEntry(namespace, size, used_s, self._scan)
                    self._order.insert(digest, size)

    def drop(self, digest: bytes) -> None:
        """Forget a file that is not there."""
        if digest in self._entries:
            with self._lock:
                self._forget(digest)

    def begin_removal(self, digest: bytes) -> int | None:
        """Forget a file that the caller is about to remove.

        Returns the size that it was known with.
        """
        with self._lock:
            self._removing.add(digest)
            return self._forget(digest)

    def end_removal(self, digest: bytes) -> None:
        """The file is removed, or could not be. It may be found again from now on."""
        with self._lock:
            self._removing.discard(digest)
            for look in self._looks:
                look.removed.add(digest)

    def _forget(self, digest: bytes) -> int | None:
        entry = self._entries.pop(digest, None)
        if entry is None:
            return None
        self._order.remove(digest)
        return entry.size

    def touch(self, digest: bytes, now_s: float) -> bool:
        """Take note that the file was read. Returns True if its mtime should be renewed."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return False
            self._order.touch(digest)
            stale = now_s - entry.used_s >= TOUCH_S
            if stale:
                entry.used_s = now_s
            return stale

    def victim(self) -> tuple[bytes, bytes, int] | None:
        """Namespace, digest and size in bytes of the file to evict next, whose removal begins."""
        with self._lock:
            digest = self._order.victim(lambda _: True)
            if digest is None:
                return None
            entry = self._entries.pop(digest)
            self._removing.add(digest)
            return entry.namespace, digest, entry.size

    def begin_scan(self) -> None:
        with self._lock:
            self._scan += 1

    def end_scan(self, *, complete: bool) -> None:
        """Forget the files that were neither seen by a complete scan nor added since it began.

        The first scan also sorts all files by last use, because it finds them in no order. Later
        ones leave the order as it is.
        """
        with self._lock:
            if complete:
                entries = self._entries.items()
                for digest in [d for d, entry in entries if entry.scan < self._scan]:
                    self._forget(digest)
            by_last_use: list[bytes] = []
            if self._scan == 1:
                by_last_use = sorted(self._entries, key=lambda d: self._entries[d].used_s)
        rest = iter(by_last_use)
        while batch := list(islice(rest, REORDER_BATCH)):
            with self._lock:
                for digest in batch:
                    entry = self._entries.get(digest)
                    if entry is not None:
                        self._order.remove(digest)
                        self._order.insert(digest, entry.size)
