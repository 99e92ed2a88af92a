"""What a data directory holds, as far as this process knows, and the order in which it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

TOUCH_S: Final = 60.0  # a file's mtime, its recency after a restart, is renewed at most this often
REORDER_BATCH: Final = 2_000  # keys moved under the lock at a time: a few ms


class Order(Protocol):
    """A ``kvstow.pool.policy`` over digests: after a restart there is a file's name, not the key that it digests."""

    def insert(self, key: Any, size: int = 1) -> None: ...
    def touch(self, key: Any) -> None: ...
    def remove(self, key: Any) -> None: ...
    def victim(self, evictable: Callable[[Any], bool]) -> Any: ...


class Entry:
    """One chunk's file. ``used_s`` is its last use as its mtime says, ``scan`` the last scan that saw it."""

    __slots__ = ("namespace", "scan", "size", "used_s")

    def __init__(self, namespace: bytes, size: int, used_s: float, scan: int) -> None:
        self.namespace = namespace
        self.size = size
        self.used_s = used_s
        self.scan = scan


class Found(NamedTuple):
    """A chunk's file as a scan or a ``stat`` found it."""

    digest: bytes
    size: int
    used_s: float


class Index:
    """Thread-safe; no call does I/O."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._entries: dict[bytes, Entry] = {}
        self._scan = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, digest: bytes) -> bool:
        return digest in self._entries

    def add(self, namespace: bytes, found: Iterable[Found]) -> None:
        """Files that are there; what is known already is only marked as seen."""
        with self._lock:
            for digest, size, used_s in found:
                entry = self._entries.get(digest)
                if entry is None:
                    self._entries[digest] = Entry(namespace, size, used_s, self._scan)
                    self._order.insert(digest, size)
                else:
                    entry.scan = self._scan

    def drop(self, digest: bytes) -> int | None:
        """Forget a file. Returns the size that it was known with."""
        if digest not in self._entries:
            return None
        with self._lock:
            if (entry := self._entries.pop(digest, None)) is None:
                return None
            self._order.remove(digest)
            return entry.size

    def touch(self, digest: bytes, now_s: float) -> bool:
        """The file was used. True: renew its mtime."""
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
        """Namespace, digest and size of the file that goes next; it is forgotten here."""
        with self._lock:
            digest = self._order.victim(_any)
            if digest is None:
                return None
            entry = self._entries.pop(digest)
            return entry.namespace, digest, entry.size

    def begin_scan(self) -> None:
        with self._lock:
            self._scan += 1

    def end_scan(self) -> None:
        """Forget what the scan did not see and nobody added since it began; after the first scan bring the rest in
        order of last use, because a scan finds files in no order at all. Later ones leave the policy its order."""
        with self._lock:
            gone = [digest for digest, entry in self._entries.items() if entry.scan < self._scan]
            for digest in gone:
                del self._entries[digest]
                self._order.remove(digest)
            order = (
                sorted(self._entries, key=lambda d: self._entries[d].used_s)
                if self._scan == 1
                else []
            )
        rest = iter(order)
        while batch := list(islice(rest, REORDER_BATCH)):
            with self._lock:
                for digest in batch:
                    if (entry := self._entries.get(digest)) is not None:
                        self._order.remove(digest)
                        self._order.insert(digest, entry.size)


def _any(_: Any) -> bool:
    return True
