"""Room in a data directory: reserving it for a write, and evicting what is in its way."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from kvstow.backends.disk.bad_files import BadFiles
from kvstow.backends.disk.index import ChunkIndex
from kvstow.backends.disk.mount import MountedDirectory
from kvstow.backends.disk.quarantine import shrink
from kvstow.backends.disk.remove import remove_chunk

MAX_ROUNDS: Final = 64  # of evicting and reserving again, while others reserve what was freed
MAX_VICTIMS: Final = 4096  # evicted in one round; files that others removed already free nothing


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """``size_bytes`` is the most that the directory holds, whoever writes to it.

    ``min_free_bytes`` stays free on its filesystem, whoever fills it.
    """

    size_bytes: int
    min_free_bytes: int = 0


class Room:
    """Keeps a data directory within ``limits``. Thread-safe."""

    def __init__(self, limits: VolumeLimits, index: ChunkIndex, bad: BadFiles) -> None:
        self._limits = limits
        self._index = index
        self._bad = bad

    def reserve(self, mount: MountedDirectory, size: int) -> bool:
        """Reserve ``size`` bytes for a file, evicting what it takes.

        Returns False if there is no room.
        """
        if mount.ledger.rounded(size) > self._limits.size_bytes:
            return False
        for _ in range(MAX_ROUNDS):
            lacking = 0
            if self._limits.min_free_bytes:
                lacking = self._limits.min_free_bytes + size - mount.free_bytes()
            if lacking <= 0:
                lacking_in_ledger = mount.ledger.reserve(size, self._limits.size_bytes)
                if lacking_in_ledger is None:
                    return False
                if lacking_in_ledger == 0:
                    return True
                lacking = lacking_in_ledger
            if not self._evict(mount, lacking + self._ahead_bytes(mount)):
                return False
        return False

    def remove(
        self, mount: MountedDirectory, namespace: bytes, digest: bytes, known_bytes: int | None
    ) -> int:
        """Unlink a chunk's file, whose removal has begun in the index.

        Returns the bytes that this frees, at most ``known_bytes`` where they are known. Raises
        ``OSError``.
        """
        try:
            freed = remove_chunk(mount, namespace, digest, known_bytes)
            self._bad.discard(digest)
            return freed
        finally:
            self._index.end_removal(digest)

    def delete(self, mount: MountedDirectory, namespace: bytes, digest: bytes) -> None:
        """Remove a chunk's file, if it is there. Raises ``OSError``."""
        epoch = mount.ledger.epoch
        known_bytes = self._index.begin_removal(digest)
        freed = self.remove(mount, namespace, digest, known_bytes)
        mount.ledger.remove(freed, epoch, self._ahead_bytes(mount))

    def shrink_to_limit(
        self, mount: MountedDirectory, used_bytes: int, stop: threading.Event
    ) -> None:
        """Evict what is above the limit, in small steps: other processes shrink the directory too,
        and each step tells them what it has removed."""
        limit_bytes = self._limits.size_bytes
        step = 1 + self._ahead_bytes(mount)
        for _ in range(limit_bytes, used_bytes, step):
            if stop.is_set() or (mount.ledger.report().used_bytes or 0) <= limit_bytes:
                return
            self._evict(mount, step)

    def _evict(self, mount: MountedDirectory, wanted: int) -> int:
        """Remove what the policy chooses, quarantined files when it has nothing more.

        Returns the bytes freed.
        """
        freed = 0
        epoch = mount.ledger.epoch
        try:
            for _ in range(MAX_VICTIMS):
                victim = self._index.victim() if freed < wanted else None
                if victim is None:
                    break
                freed += self.remove(mount, *victim)
        finally:
            mount.ledger.remove(freed, epoch, freed + self._ahead_bytes(mount))
        return freed or shrink(mount, 0, 0)

    def _ahead_bytes(self, mount: MountedDirectory) -> int:
        return mount.ledger.ahead_bytes(self._limits.size_bytes)
