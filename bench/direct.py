"""Direct storage on files against raw I/O: the same file, the same I/O size and depth, sides
alternating, medians.

Raw is preadv or pwritev with O_DIRECT between aligned memory and the file's extents, and nothing
else. Direct storage is what ``bench.disk`` measures of the disk tier: between staging and extents,
checksums and header pages included; ``disk_*_cpu_s_per_gb`` are that bench's in the same run. The
extents that are read were written in the same round; direct I/O has no cache to be cold.

``pages_*`` are a worker's whole path, copies between staging and the engine's pages included, with
threads fed by a loop like the engine's. The disk tier's path has such copies too, between the pool
and the pages, which its bench does not count either.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

import bench.disk
from bench.report import OUT, command
from kvstow import build
from kvstow.cache import Cache
from kvstow.device.base import KVSpec, Transfer
from kvstow.device.cpu import CpuDevice
from kvstow.direct.base import Extent, Media
from kvstow.direct.geometry import DirectRef
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.hostmem import populate
from kvstow.pool.slots import Lease
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.settings import DirectSettings, Settings
from kvstow.vllm.direct import DirectDevice, open_direct

CHUNKS: Final = 64
DEPTH: Final = 4
ROUNDS: Final = 15
FIRST_ROUNDS_DROPPED: Final = 1  # extents are allocated, not yet written
BLOCK_TOKENS: Final = 32
LAYERS: Final = 32
# 8 KV heads of 128 in bfloat16, 32 tokens, K and V: an 8B model's 4 MiB a block
PAGE_BYTES: Final = 128 << 10
DISK_ROUNDS: Final = 5
POLL_S: Final = 0.0005  # as often as an idle engine's loop comes by

NAMESPACE: Final = Namespace.from_fields({"made by": "bench"})


class Subject:
    """An engine over direct storage with one worker, its chunks in shuffled blocks."""

    def __init__(self, folder: Path) -> None:
        caches, specs = {}, {}
        for layer in range(LAYERS):
            caches[f"layer.{layer}"] = torch.zeros(
                (CHUNKS, 2, 8, BLOCK_TOKENS, 128), dtype=torch.bfloat16
            ).random_()
            specs[f"layer.{layer}"] = KVSpec(CHUNKS, BLOCK_TOKENS, 8, 128, 2, PAGE_BYTES)
        inner = CpuDevice(ThreadExecutor("copy"), SystemClock())
        [pages] = inner.attach(caches, [specs])
        self.layout = ChunkLayout((GroupLayout(BLOCK_TOKENS, 1, (pages.block_bytes,)),))
        size = (CHUNKS + 1) * (self.layout.max_frame_bytes + 4096)
        settings = Settings(
            direct=DirectSettings(engine="file", path=(str(folder),), size=size, threads=DEPTH)
        )
        self.ref: DirectRef
        self.engine: Cache
        _, self.ref, self.engine = build.build_direct(
            settings,
            self.layout,
            ranks=1,
            engine=0,
            not_persistent=None,
            clock=SystemClock(),
            metrics=Metrics(),
        )
        self.device: DirectDevice = open_direct(inner, self.ref, 0, torch.device("cpu"))
        self.blocks = torch.randperm(CHUNKS).tolist()
        self._ticket = 0

    @property
    def extent_bytes(self) -> int:
        return self.ref.geometry.extent_bytes[0]

    def keys(self) -> list[ChunkKey]:
        return [ChunkKey.build(NAMESPACE, 0, i.to_bytes(32, "little")) for i in range(CHUNKS)]

    def write(self) -> tuple[float, float]:
        self.engine.reset()
        reserved = [self.engine.reserve(key, b"", BLOCK_TOKENS) for key in self.keys()]
        leases = [lease for lease in reserved if lease is not None]
        took = self._run(leases, load=False)
        for lease in leases:
            self.engine.commit(lease)
            lease.release()
        return took

    def read(self) -> tuple[float, float]:
        leases = self.engine.hold("bench", self.keys())
        took = self._run(leases, load=True)
        for lease in leases:
            lease.release()
        return took

    def _run(self, leases: Sequence[Lease], *, load: bool) -> tuple[float, float]:
        assert len(leases) == CHUNKS
        transfers = [
            Transfer(lease.place, [block]) for lease, block in zip(leases, self.blocks, strict=True)
        ]
        self._ticket += 1
        began, cpu = time.perf_counter(), time.process_time()
        (self.device.copy_in if load else self.device.copy_out)(self._ticket, transfers)
        while not (ended := self.device.finished()):
            time.sleep(POLL_S)
        took = time.perf_counter() - began, time.process_time() - cpu
        assert ended[0].failed == (), ended[0].error
        return took

    def close(self) -> None:
        self.device.close()
        self.engine.close(5.0)


def raw_works(subject: Subject, fd: int) -> dict[str, bench.disk.Work]:
    """The same extents, without anything around the call."""
    first, size = subject.ref.geometry.offsets[0], subject.extent_bytes

    def move(io: Callable[[int, list[memoryview], int], int], chunk: int, slot: memoryview) -> None:
        assert io(fd, [slot], first + chunk * size) == size

    return {"read": partial(move, os.preadv), "write": partial(move, os.pwritev)}


def media_works(
    media: Media, leases: Sequence[Lease], slots: Sequence[memoryview]
) -> dict[str, bench.disk.Work]:
    """The media ``file`` without the pages.

    Each thread of the pool has a staging area, given by its slot.
    """
    areas = {id(slot): area for area, slot in enumerate(slots)}
    places = [lease.place for lease in leases]

    def move(io: Callable[[int, Extent], None], chunk: int, slot: memoryview) -> None:
        place = places[chunk]
        io(areas[id(slot)], Extent(*place.spans[0], place.tag))

    return {"read": partial(move, media.read), "write": partial(move, media.write)}


def measure(folder: Path, rounds: int) -> dict[str, float]:
    subject = Subject(folder)
    fd = os.open(subject.ref.paths[0], os.O_RDWR | os.O_DIRECT)
    media = build.file_media(subject.ref, 0)
    populate(media.memory, 0, len(media.memory))
    frames = bench.disk.Frames(media.areas)
    assert len(frames.slots[0]) == subject.extent_bytes
    pool, raw = bench.disk.Pool(frames.slots), raw_works(subject, fd)

    def direct(what: str) -> tuple[float, float]:
        leases = subject.engine.hold("bench", subject.keys())
        took = pool.run(media_works(media, leases, frames.slots)[what])
        for lease in leases:
            lease.release()
        return took

    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "raw_write": partial(pool.run, raw["write"]),
        "direct_write": partial(direct, "write"),
        "pages_write": subject.write,
        "raw_read": partial(pool.run, raw["read"]),
        "direct_read": partial(direct, "read"),
        "pages_read": subject.read,
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    subject.write()
    for round_ in range(rounds + FIRST_ROUNDS_DROPPED):
        for what in ("write", "read"):
            if what == "read":
                subject.write()  # the others left noise in the extents
            for name in bench.disk.rotated(
                (f"raw_{what}", f"direct_{what}", f"pages_{what}"), round_
            ):
                took[name].append(sides[name]())
    os.close(fd)
    media.close()
    subject.close()
    gigabytes = CHUNKS * subject.extent_bytes / 1e9
    result: dict[str, float] = {}
    kept = {name: times[FIRST_ROUNDS_DROPPED:] for name, times in took.items()}
    for name, times in kept.items():
        result[f"{name}_gb_s"] = gigabytes / statistics.median(wall for wall, _ in times)
        result[f"{name}_cpu_s_per_gb"] = statistics.median(cpu for _, cpu in times) / gigabytes
    for what in ("read", "write"):
        for ratio, name in ((f"{what}_over_raw", "direct"), (f"pages_{what}_over_raw", "pages")):
            pairs = zip(kept[f"raw_{what}"], kept[f"{name}_{what}"], strict=True)
            result[ratio] = statistics.median(theirs / ours for (theirs, _), (ours, _) in pairs)
    return result


def run(rounds: int = ROUNDS, folder: Path = OUT) -> dict[str, Any]:
    """``{"direct":

    {"read_over_raw": ..., "write_over_raw": ..., ...}}``, measured in a new directory in
    ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-direct-") as root:
        result = measure(Path(root) / "direct", rounds)
        disk = Path(root) / "disk"
        disk.mkdir()
        beside = bench.disk.measure(disk, min(rounds, DISK_ROUNDS))
    for what in ("read", "write"):
        result[f"disk_{what}_cpu_s_per_gb"] = beside[f"tier_{what}_cpu_s_per_gb"]
    shape = {"chunk_bytes": LAYERS * PAGE_BYTES, "chunks": CHUNKS, "depth": DEPTH, "rounds": rounds}
    return {"direct": {**result, **shape}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    direct = result["direct"]
    title = f"Chunks of {direct['chunk_bytes'] >> 20} MiB, {direct['depth']} at a time"
    view = Table(title=title, title_justify="left")
    for column in ("", "read GB/s", "CPU s/GB", "write GB/s", "CPU s/GB"):
        view.add_column(column, justify="right")
    for name in ("raw", "direct", "pages"):
        cells = (
            direct[f"{name}_{what}_{unit}"]
            for what in ("read", "write")
            for unit in ("gb_s", "cpu_s_per_gb")
        )
        view.add_row(name, *(f"{cell:.2f}" for cell in cells))
    cpu = [f"{direct[f'disk_{what}_cpu_s_per_gb']:.2f}" for what in ("read", "write")]
    view.add_row("disk tier", "", cpu[0], "", cpu[1])
    for name, row in (("", "direct / raw"), ("pages_", "pages / raw")):
        ratios = [f"{direct[f'{name}{what}_over_raw']:.2f}" for what in ("read", "write")]
        view.add_row(row, ratios[0], "", ratios[1], "")
    return view


def main() -> None:
    command(__doc__, "direct", ROUNDS, run, table, folder=OUT)


if __name__ == "__main__":
    main()
