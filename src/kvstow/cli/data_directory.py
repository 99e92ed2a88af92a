"""What an operator asks of a data directory, beside any server that uses it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstow.errors import StoreRefused
from kvstow.runtime import SystemClock
from kvstow.store.disk import names
from kvstow.store.disk.check import Check
from kvstow.store.disk.mount import Mount, attach, faults, reap
from kvstow.store.disk.quarantine import quarantine, shrink
from kvstow.store.disk.remove import awaited, remove_chunk, remove_empty_namespace
from kvstow.store.disk.scan import Count, about, family, namespaces, scan
from kvstow.store.disk.scrub import Verified, chunks_after, verify


@dataclass(frozen=True, slots=True)
class Usage:
    """``counted`` by a walk; ``ledger_bytes`` is what the processes think, reservations included."""

    path: str
    counted: Count
    ledger_bytes: int | None
    processes: int
    free_bytes: int


class DataDirectory:
    """One data directory. It takes part as a process does, so nothing it does upsets a server's count."""

    def __init__(self, path: str) -> None:
        """Raises ``StoreRefused`` for a directory that no disk tier has used: none is made."""
        if not os.path.isfile(os.path.join(path, names.LEDGER)):
            raise StoreRefused(f"{path} holds no kvstow chunks: it has no {names.LEDGER} file")
        self.path = path
        with faults(f"opening {path}"):
            self._mount: Mount = attach(path)

    def close(self) -> None:
        self._mount.detach()

    def usage(self) -> Usage:
        """Count everything; the ledger is brought in line with it."""
        with faults(f"counting {self.path}"):
            ledger = self._mount.ledger
            before = ledger.look()
            count = scan(self._mount.root, ledger, lambda _, __: None, stop=threading.Event())
            assert count is not None, "nobody stopped it"
            book = ledger.reconcile(before, count.bytes)
            return Usage(self.path, count, book.used_bytes, len(book.reserved) - 1, self._mount.free_bytes())

    def about(self, namespace: str) -> Mapping[str, Any]:
        """What ``namespace.json`` says; empty where it can't be read."""
        return about(self._mount.root, namespace)

    def family(self, namespace: str) -> str:
        """The namespace that it is inside of, or itself."""
        return family(namespace, self.about(namespace))

    def verify(self, check: Check, *, set_aside: bool) -> Iterator[Verified]:
        """Every chunk, checked. Bad ones are moved to the quarantine if asked for."""
        with faults(f"verifying {self.path}"):
            for path in chunks_after(self._mount.root, ""):
                result = verify(self._mount, path, check)
                if result is None:
                    continue
                if set_aside and not result.good:
                    quarantine(self._mount, path, result.digest, "corrupt", 1 << 62)
                yield result

    def remove(self, chosen: Callable[[str, float], bool]) -> tuple[int, int]:
        """Remove the chunks of which ``chosen(namespace, last use)`` is true. Returns how many, and their bytes.

        Empty namespaces go as well, except those that a running engine may be about to write to: they do where they
        are chosen whatever the last use.
        """
        removed = freed = 0

        def found(namespace: bytes, chunks: list[Any]) -> None:
            nonlocal removed, freed
            size, epoch = 0, self._mount.ledger.epoch
            for chunk in chunks:
                if chosen(namespace.hex(), chunk.used_s):
                    got = remove_chunk(self._mount, namespace, chunk.digest)
                    removed += got > 0
                    size += got
            self._mount.ledger.remove(size, epoch)
            freed += size

        with faults(f"removing chunks in {self.path}"):
            count = scan(self._mount.root, self._mount.ledger, found, stop=threading.Event())
            for name in (one.name for one in (count.namespaces if count else [])):
                if chosen(name, math.inf) or not awaited(self._mount, name, SystemClock().wall()):
                    remove_empty_namespace(self._mount, name)
        return removed, freed

    def tidy(self) -> int:
        """Clear up after dead processes and empty the quarantine. Returns the bytes freed of the latter."""
        with faults(f"clearing up {self.path}"):
            reap(self._mount)
            return shrink(self._mount, 0, 0)

    def namespaces(self) -> list[str]:
        return namespaces(self._mount.root)
