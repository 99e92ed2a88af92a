"""The disk store and the shipped kit; then what the kit can't ask: files, faults, sharing, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstow.backends.base import Store
from kvstow.backends.disk import DiskOptions, DiskStore
from kvstow.pool.policy.lru import LRU
from kvstow.runtime import SystemClock
from kvstow.testing.store_suite import StoreSuite


def disk(*paths: Path, size_bytes: int = 256 << 20, **options: Any) -> DiskStore:
    return DiskStore(
        [str(p) for p in paths], DiskOptions(size_bytes, **options), order=LRU, clock=SystemClock()
    )


class TestDirect(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return disk(tmp_path / "d")


class TestBuffered(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return disk(tmp_path / "d", direct=False)


class TestSeveralPaths(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return disk(*(tmp_path / str(i) for i in range(3)))


class TestPinnedToOneOfSeveral(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return disk(*(tmp_path / str(i) for i in range(3)), volume=1)
