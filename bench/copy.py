"""Pages to slots and back, through the CPU device, against memcpy of the same bytes.

Both sides run on one thread over the same working set (at least 256 MB): the device copies whole
chunks between shuffled blocks and slots, memcpy moves the same number of bytes in one call. Sides
alternate; medians count.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.table import Table

from bench.report import command
from kvstow.device.base import Transfer
from kvstow.device.cpu import CpuDevice
from kvstow.layout import HEADER_BYTES, Place, Span, align_up
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.kv_layouts import LAYOUTS, Shape

WORKING_SET_BYTES = 256 << 20
ROUNDS = 15
FIRST_ROUNDS_DROPPED = 1  # page faults and lazy set-up


class Case(NamedTuple):
    """A model's pages: ``layers`` of ``page_bytes``, ``blocks_per_chunk`` blocks in a chunk."""

    name: str
    layers: int
    tokens: int
    heads: int
    size: int
    blocks_per_chunk: int

    @property
    def page_bytes(self) -> int:
        return self.tokens * self.heads * self.size * 2 * 4  # K and V, float32


# The first is the demo's model (SmolLM2-135M, block 128) and gives the headline.
CASES = (
    Case("192KiB", layers=30, tokens=128, heads=3, size=64, blocks_per_chunk=1),
    Case("32KiB", layers=16, tokens=16, heads=4, size=64, blocks_per_chunk=8),
    Case("8KiB", layers=32, tokens=16, heads=1, size=64, blocks_per_chunk=8),
)


def measure(case: Case, rounds: int = ROUNDS, layout: str = "packed_lbhnc") -> dict[str, float]:
    """GB/s of both directions and of memcpy, and the two ratios, as medians over ``rounds``."""
    chunk_bytes = case.layers * case.page_bytes * case.blocks_per_chunk
    chunks = -(-WORKING_SET_BYTES // chunk_bytes)
    blocks = 2 * chunks * case.blocks_per_chunk
    built = LAYOUTS[layout](Shape(case.layers, blocks, case.tokens, case.heads, case.size))
    pitch = HEADER_BYTES + align_up(chunk_bytes)
    pool = memoryview(mmap.mmap(-1, chunks * pitch))
    ids = random.Random(0).sample(range(blocks), chunks * case.blocks_per_chunk)
    per = case.blocks_per_chunk
    transfers = [
        Transfer(
            Place("pool", (Span(i * pitch + HEADER_BYTES, chunk_bytes),)),
            ids[i * per : (i + 1) * per],
        )
        for i in range(chunks)
    ]
    device = CpuDevice(ThreadExecutor("copy"), SystemClock())
    device.attach(built.caches, [built.specs])
    device.map_pool(pool, 0)

    def copy(start: Callable[[int, list[Transfer]], None]) -> None:
        start(1, transfers)
        device.fence([1])
        [finished] = device.finished()
        assert not finished.failed, finished.error

    total = chunks * chunk_bytes
    source = torch.ones(total, dtype=torch.uint8)
    target = torch.ones(total, dtype=torch.uint8)
    sides: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), total),
        "out": lambda: copy(device.copy_out),
        "in": lambda: copy(device.copy_in),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + FIRST_ROUNDS_DROPPED):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    device.close()
    median = {
        name: statistics.median(times[FIRST_ROUNDS_DROPPED:]) for name, times in seconds.items()
    }
    result = {f"{name}_gb_s": total / took / 1e9 for name, took in median.items()}
    result |= {f"{name}_over_memcpy": median["memcpy"] / median[name] for name in ("out", "in")}
    return result | {"page_bytes": case.page_bytes, "working_set_bytes": total, "rounds": rounds}


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """``{"copy": {"out_over_memcpy": ..., "in_over_memcpy": ..., "by_page": {...}}}``."""
    by_page = {case.name: measure(case, rounds) for case in CASES}
    headline = by_page[CASES[0].name]
    return {"copy": {**headline, "by_page": by_page}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    view = Table(
        title="Pages ↔ slot against memcpy, one thread, shuffled blocks", title_justify="left"
    )
    for column in ("page", "memcpy GB/s", "out GB/s", "in GB/s", "out / memcpy", "in / memcpy"):
        view.add_column(column, justify="right")
    for name, row in result["copy"]["by_page"].items():
        keys = ("memcpy_gb_s", "out_gb_s", "in_gb_s", "out_over_memcpy", "in_over_memcpy")
        view.add_row(name, *(f"{row[key]:.2f}" for key in keys))
    return view


def main() -> None:
    command(__doc__, "copy", ROUNDS, run, table)


if __name__ == "__main__":
    main()
