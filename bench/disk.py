"""The disk tier against raw I/O: the same files, the same I/O size and depth, sides alternating,
medians.

Reading, both sides read the same cold files: raw is open, preadv, close; the tier also finds the
file, checks that it is one, and verifies the frame's checksum. Writing, both make new files: raw is
open, pwritev, close; the tier also keeps the directory's size limit and publishes atomically. Raw
is the faster of direct and buffered I/O.

A buffered write has only reached memory when it returns; to compare it, the flush that ends it is
in its time. Its rate without the flush is shown as "cached": it holds until the dirty pages' limit
is reached, not longer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.report import OUT, command
from kvstow import frame
from kvstow.backends.base import Done
from kvstow.backends.disk import DiskOptions, DiskStore
from kvstow.backends.disk.names import chunk_path
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import GroupLayout
from kvstow.pool.hostmem import HostMemory
from kvstow.pool.policy.lru import LRU
from kvstow.runtime import SystemClock, ThreadExecutor

CHUNK_BYTES: Final = 4 << 20
CHUNKS: Final = 64
DEPTH: Final = 4
ROUNDS: Final = 15
FIRST_ROUNDS_DROPPED: Final = 1  # directories made, files' extents read
GROUP: Final = GroupLayout(32, 1, (CHUNK_BYTES,))
NAMESPACE: Final = Namespace.from_fields({"made by": "bench"})

Work = Callable[[int, memoryview], None]  # chunk, slot


class Frames:
    """A slot for each chunk, in memory such as the pool's, and a sealed frame of any chunk on
    demand.
    """

    def __init__(self, slots: int = CHUNKS) -> None:
        self._host = HostMemory.anonymous(slots * GROUP.frame_bytes, "bench")
        self._host.reserve(0, slots * GROUP.frame_bytes)
        self.memory = self._host.view
        self.slots = [
            self.memory[i * GROUP.frame_bytes :][: GROUP.frame_bytes] for i in range(slots)
        ]
        for slot in self.slots:
            slot[:] = os.urandom(4096) * (GROUP.frame_bytes // 4096)

    @staticmethod
    def key(chunk: int) -> ChunkKey:
        return ChunkKey.build(NAMESPACE, 0, chunk.to_bytes(32, "little"))

    def seal(self, chunk: int, slot: memoryview) -> None:
        frame.seal(slot, self.key(chunk), GROUP, 32, b"", 0.0)


class Pool:
    """``DEPTH`` threads that take the chunks in turn, and the slot that has not been used for
    longest: of as many slots as in a pool, none is still in the processor's cache."""

    def __init__(self, slots: Sequence[memoryview]) -> None:
        self._slots = deque(slots)
        self._executor = ThreadExecutor("bench", threads=DEPTH)

    def run(self, work: Work, chunks: int = CHUNKS) -> tuple[float, float]:
        """Wall and CPU seconds of ``work`` on every chunk; of threads of this process."""
        left = iter(range(chunks))
        faults: list[BaseException] = []

        def ended(_: None, error: BaseException | None) -> None:
            if error is not None:
                faults.append(error)

        def take() -> None:
            for chunk in left:  # one step of an iterator over a range is atomic
                slot = self._slots.popleft()
                work(chunk, slot)
                self._slots.append(slot)

        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(DEPTH):
            self._executor.submit(take, ended)
        while self._executor.outstanding:
            self._executor.wait(60.0)
            self._executor.poll()
        took = time.perf_counter() - began, time.process_time() - cpu
        if faults:
            raise faults[0]
        return took


def cold(paths: Sequence[Path]) -> None:
    """Put the files' pages out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def open_store(root: Path) -> DiskStore:
    return DiskStore([str(root)], DiskOptions(1 << 40), order=LRU, clock=SystemClock())


def sides(root: Path, frames: Frames, store: DiskStore) -> dict[str, Work]:
    """Each side's work on one chunk. Reading sides find the chunks that ``tier_write`` wrote."""
    raw = root / "raw"
    raw.mkdir()

    def path(chunk: int) -> Path:
        return root / "tier" / chunk_path(NAMESPACE, frames.key(chunk).digest())

    def raw_read(flags: int) -> Work:
        def work(chunk: int, slot: memoryview) -> None:
            with opened(path(chunk), os.O_RDONLY | flags) as fd:
                assert os.preadv(fd, [slot], 0) == len(slot)

        return work

    def raw_write(flags: int) -> Work:
        def work(chunk: int, slot: memoryview) -> None:
            with opened(raw / str(chunk), os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags) as fd:
                assert os.pwritev(fd, [slot], 0) == len(slot)

        return work

    def tier_read(chunk: int, slot: memoryview) -> None:
        key = frames.key(chunk)
        assert store.read([(key, slot)]) == [Done(len(slot))]
        frame.check(slot, len(slot), key, GROUP)

    def tier_write(chunk: int, slot: memoryview) -> None:
        assert store.write([(frames.key(chunk), [slot])]) == [Done(len(slot))]

    return {
        "raw_direct_read": raw_read(os.O_DIRECT),
        "raw_buffered_read": raw_read(0),
        "tier_read": tier_read,
        "raw_direct_write": raw_write(os.O_DIRECT),
        "raw_buffered_write": raw_write(0),
        "tier_write": tier_write,
    }


def measure(root: Path, rounds: int) -> dict[str, float]:
    """GB/s and CPU seconds per GB of every side, and the tier's share of the faster raw one."""
    frames = Frames()
    store, pool = open_store(root / "tier"), Pool(frames.slots)
    works = sides(root, frames, store)
    keys = [frames.key(chunk) for chunk in range(CHUNKS)]
    files = [root / "tier" / chunk_path(NAMESPACE, key.digest()) for key in keys]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    flushed: list[float] = []
    for round_ in range(rounds + FIRST_ROUNDS_DROPPED):
        store.delete(keys)
        for name in rotated(("tier_write", "raw_direct_write", "raw_buffered_write"), round_):
            for path in (root / "raw").iterdir():
                path.unlink()
            os.sync()
            took[name].append(pool.run(works[name]))
            if name == "raw_buffered_write":
                began = time.perf_counter()
                os.sync()
                flushed.append(took[name][-1][0] + time.perf_counter() - began)
        store.delete(keys)
        for chunk in range(CHUNKS):  # a frame of its own in each file, for its check
            frames.seal(chunk, frames.slots[0])
            works["tier_write"](chunk, frames.slots[0])
        for name in rotated(("tier_read", "raw_direct_read", "raw_buffered_read"), round_):
            cold(files)
            took[name].append(pool.run(works[name]))
    store.close()
    cached = took["raw_buffered_write"]
    took["raw_cached_write"], took["raw_buffered_write"] = (
        cached,
        [(wall, cpu) for wall, (_, cpu) in zip(flushed, cached, strict=True)],
    )
    return summary({name: times[FIRST_ROUNDS_DROPPED:] for name, times in took.items()})


def summary(took: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Medians of wall and CPU seconds in each round; the tier's share of the raw side whose median
    is the faster, as a median of ratios within a round: what the disk does in one round it does to
    both."""
    gigabytes = CHUNKS * GROUP.frame_bytes / 1e9
    result: dict[str, float] = {}
    for name, times in took.items():
        result[f"{name}_gb_s"] = gigabytes / statistics.median(wall for wall, _ in times)
        if name != "raw_cached_write":
            result[f"{name}_cpu_s_per_gb"] = statistics.median(cpu for _, cpu in times) / gigabytes
    for what in ("read", "write"):
        raw = max(
            (f"raw_{kind}_{what}" for kind in ("direct", "buffered")),
            key=lambda name: result[f"{name}_gb_s"],
        )
        pairs = zip(took[raw], took[f"tier_{what}"], strict=True)
        result[f"{what}_over_raw"] = statistics.median(
            theirs / ours for (theirs, _), (ours, _) in pairs
        )
    return result


def rotated(names: Sequence[str], by: int) -> Sequence[str]:
    """No side is always the first after a pause, or always behind the same other one."""
    return [*names[by % len(names) :], *names[: by % len(names)]]


def run(rounds: int = ROUNDS, folder: Path = OUT) -> dict[str, Any]:
    """``{"disk": {"read_over_raw":

    ..., "write_over_raw": ..., ...}}``, measured in a new directory in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-disk-") as root:
        shape = {
            "chunk_bytes": GROUP.frame_bytes,
            "chunks": CHUNKS,
            "depth": DEPTH,
            "rounds": rounds,
        }
        return {"disk": {**measure(Path(root), rounds), **shape}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    disk = result["disk"]
    title = f"Chunks of {disk['chunk_bytes'] >> 20} MiB, {disk['depth']} at a time, cold"
    view = Table(title=title, title_justify="left")
    for column in ("", "read GB/s", "CPU s/GB", "write GB/s", "CPU s/GB"):
        view.add_column(column, justify="right")
    for name in ("raw_direct", "raw_buffered", "tier"):
        cells = (
            disk[f"{name}_{what}_{unit}"]
            for what in ("read", "write")
            for unit in ("gb_s", "cpu_s_per_gb")
        )
        view.add_row(name.replace("_", " "), *(f"{cell:.2f}" for cell in cells))
    view.add_row("raw cached", "", "", f"{disk['raw_cached_write_gb_s']:.2f}", "")
    view.add_row(
        "tier / raw", f"{disk['read_over_raw']:.2f}", "", f"{disk['write_over_raw']:.2f}", ""
    )
    return view


def main() -> None:
    command(__doc__, "disk", ROUNDS, run, table, folder=OUT)


if __name__ == "__main__":
    main()
