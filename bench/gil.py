"""What the disk tier's threads cost the thread that they share the interpreter with.

A victim does fixed Python work, of the kind a scheduler's step is: while the tier writes, reads, verifies and deletes
4 MiB chunks flat out on threads of the same process, and while another process does the same at the rate that the
first reached: as fast as it can, it would move more, because it need not wait for the victim's lock. Two cores and one
disk are shared either way, so the ratio of the two times is what the threads take through the interpreter's lock.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.disk import GROUP, Frames, open_store
from bench.report import OUT, finish, options
from kvstow import frame
from kvstow.runtime import ThreadExecutor
from kvstow.store.base import Done

THREADS: Final = 2
CHUNKS: Final = 32
REQUESTS: Final = 2000
STEPS: Final = 120  # of the victim in one run: some 0.25 s
RUNS: Final = 4  # in a measurement, of which the fastest counts: whatever else the machine does only adds
ROUNDS: Final = 15


def victim() -> float:
    """Seconds that ``STEPS`` scheduler-like steps take: dicts, lists and small objects, nothing that blocks."""
    began = time.perf_counter()
    for step in range(STEPS):
        running = {f"request-{i}": [i, i * 7 % 128, step] for i in range(REQUESTS)}
        budget = 0
        for name, state in running.items():
            state[1] += 1
            budget += state[1] if state[0] % 3 else len(name)
        sorted(running, key=lambda name: running[name][1])
    return time.perf_counter() - began


class Load:
    """Writes and reads on ``THREADS`` threads until stopped: flat out, or ``bytes_s`` in all."""

    def __init__(self, root: Path, bytes_s: float | None = None) -> None:
        self._pause_s = 0.0 if bytes_s is None else THREADS * 2 * GROUP.frame_bytes / bytes_s
        self._frames = Frames()
        self._store = open_store(root)
        self._stop = threading.Event()
        self._moved = [0] * THREADS
        self._executor = ThreadExecutor("gil", threads=THREADS)
        for which in range(THREADS):
            self._executor.submit(partial(self._loop, which), self._ended)

    @staticmethod
    def _ended(_: None, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def _loop(self, which: int) -> None:
        slot, store = self._frames.slots[which], self._store
        keys = [self._frames.key(which * CHUNKS + i) for i in range(CHUNKS)]
        store.delete(keys)
        due = time.perf_counter()
        while not self._stop.is_set():
            for chunk, key in enumerate(keys):
                if self._pause_s:
                    due = max(due + self._pause_s, time.perf_counter() - self._pause_s)
                    self._stop.wait(max(0.0, due - time.perf_counter()))
                self._frames.seal(which * CHUNKS + chunk, slot)
                assert store.write([(key, [slot])]) == [Done(len(slot))]
                assert store.read([(key, slot)]) == [Done(len(slot))]
                frame.check(slot, len(slot), key, GROUP)
                store.delete([key])
                self._moved[which] += 2 * len(slot)
                if self._stop.is_set():
                    break

    @property
    def moved_bytes(self) -> int:
        return sum(self._moved)

    def close(self) -> None:
        self._stop.set()
        while self._executor.outstanding:
            self._executor.wait(60.0)
            self._executor.poll()
        self._executor.close(10.0)
        self._store.close()


@contextmanager
def inside(root: Path, bytes_s: float | None = None) -> Iterator[Callable[[], int]]:
    """The load in this process. Yields what says how many bytes it has moved."""
    load = Load(root, bytes_s)
    try:
        yield lambda: load.moved_bytes
    finally:
        load.close()


@contextmanager
def outside(root: Path, bytes_s: float) -> Iterator[Callable[[], int]]:
    """The load in another process."""
    command = [sys.executable, "-m", "bench.gil", "--load", str(root), "--rate", str(bytes_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    asked, told = process.stdin, process.stdout

    def moved() -> int:
        asked.write("\n")
        asked.flush()
        return int(told.readline())

    try:
        moved()
        yield moved
    finally:
        asked.close()
        process.wait()
        told.close()


def serve(root: Path, bytes_s: float) -> None:
    """The other process: says what it has moved for each line that comes, until none does."""
    load = Load(root, bytes_s)
    for _ in sys.stdin:
        print(load.moved_bytes, flush=True)
    load.close()


def run(rounds: int = ROUNDS, folder: Path = OUT) -> dict[str, Any]:
    """``{"gil": {"victim_slowdown": ..., ...}}``: medians; the slow-down is a median of ratios within a round."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {"alone": [], "inside": [], "outside": []}
    rates: dict[str, list[float]] = {"inside": [], "outside": []}

    def measure(name: str, moved: Callable[[], int]) -> None:
        victim()
        before, began = moved(), time.perf_counter()
        seconds[name].append(min(victim() for _ in range(RUNS)))
        rates[name].append((moved() - before) / 1e9 / (time.perf_counter() - began))

    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-gil-") as root:
        victim()
        for _ in range(rounds):
            seconds["alone"].append(min(victim() for _ in range(RUNS)))
            with inside(Path(root)) as moved:
                measure("inside", moved)
            with outside(Path(root), rates["inside"][-1] * 1e9) as moved:
                measure("outside", moved)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    result = {f"{name}_s": took for name, took in median.items()}
    result |= {f"{name}_io_gb_s": statistics.median(rate) for name, rate in rates.items()}
    pairs = zip(seconds["inside"], seconds["outside"], strict=True)
    result["victim_slowdown"] = statistics.median(inside / outside for inside, outside in pairs)
    return {"gil": {**result, "threads": THREADS, "rounds": rounds}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    gil = result["gil"]
    view = Table(title=f"Fixed Python work beside {gil['threads']} threads of disk I/O", title_justify="left")
    for column in ("I/O", "work s", "I/O GB/s"):
        view.add_column(column, justify="right")
    view.add_row("none", f"{gil['alone_s']:.3f}", "")
    for name, where in (("outside", "in another process"), ("inside", "in the same process")):
        view.add_row(where, f"{gil[f'{name}_s']:.3f}", f"{gil[f'{name}_io_gb_s']:.2f}")
    view.add_row("same / other", f"{gil['victim_slowdown']:.3f}", "")
    return view


def main() -> None:
    parser = options(__doc__, ROUNDS, OUT / "bench_gil.json", OUT)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        serve(arguments.load, arguments.rate)
        return
    result = run(arguments.rounds, arguments.folder)
    finish(result, table(result), arguments.out)


if __name__ == "__main__":
    main()
