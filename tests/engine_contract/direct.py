"""Direct storage for the stack: its files are in memory, its threads are the test's."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import Any

from kvstow.direct.extents import Extents
from kvstow.direct.file import FileMedia
from kvstow.direct.geometry import DirectRef, Geometry
from kvstow.layout import ChunkLayout
from kvstow.runtime import Clock
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.vllm.direct import DirectDevice


def direct_places(
    areas: int, slots: int, layout: ChunkLayout, clock: Clock
) -> tuple[Extents, DirectRef]:
    geometry = Geometry.with_files(layout, slots)
    staging = areas * max(geometry.extent_bytes)
    return Extents(geometry, layout, clock, preallocated=True), DirectRef(
        "file", geometry, staging, 1, "ignore"
    )


class MemoryDisk:
    """A file in memory.

    ``chance``: of a call to fail, to be short, or to leave a flipped bit behind.
    """

    def __init__(self, size: int, rng: random.Random, chance: float) -> None:
        self.data = bytearray(size)
        self.faults = 0
        self._rng = rng
        self._chance = chance

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        view = views[0]
        view[:] = self.data[offset : offset + len(view)]
        return self._perhaps(view)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        view = memoryview(self.data)[offset : offset + len(views[0])]
        view[:] = views[0]
        return self._perhaps(view)

    def _perhaps(self, view: memoryview) -> int:
        if self._rng.random() >= self._chance:
            return len(view)
        self.faults += 1
        kind = self._rng.randrange(3)
        if kind == 0:
            raise OSError(errno.EIO, "by request")
        if kind == 1:
            return len(view) - 512
        view[self._rng.randrange(len(view))] ^= 1 << self._rng.randrange(8)
        return len(view)


def opener(
    clock: ManualClock,
    executors: list[ManualExecutor],
    disks: list[MemoryDisk],
    rng: random.Random,
    chance: float,
) -> Callable[..., DirectDevice]:
    """In place of ``kvstow.vllm.worker.open_direct``. Shards share a disk between ranks."""
    by_shard: dict[int, MemoryDisk] = {}

    def open_direct(inner: Any, ref: DirectRef, shard: int, _: object) -> DirectDevice:
        executor = ManualExecutor(clock, run_in_wait=True)
        executors.append(executor)
        if shard not in by_shard:
            by_shard[shard] = MemoryDisk(ref.geometry.file_bytes(shard), rng, chance)
            disks.append(by_shard[shard])
        disk = by_shard[shard]
        io = (disk.read, disk.write)
        media = FileMedia(-1, shard, ref.areas(shard), ref.geometry.extent_bytes[shard], io=io)
        inner.map_pool(media.memory, 0)
        return DirectDevice(inner, media, media, executor, clock, shard=shard)

    return open_direct
