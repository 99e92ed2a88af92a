"""What the disk tier's threads cost the thread that they share the interpreter with.

A victim does fixed Python work, of the kind a scheduler's step is: while the tier writes, reads,
verifies and deletes 4 MiB chunks flat out on threads of the same process, and while another process
does the same at the rate that the first reached: as fast as it can, it would move more, because it
need not wait for the victim's lock. The two take turns of half a second. Two cores and one disk are
shared either way, so the ratio of the two times is what the threads take through the interpreter's
lock.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from random import random
from typing import Any, Final

from rich.table import Table

from bench.disk import DEPTH, GROUP, Frames, open_store
from bench.report import OUT, finish, options
from kvstow import frame
from kvstow.backends.base import Done
from kvstow.runtime import ThreadExecutor

THREADS: Final = 2
MOST_THREADS: Final = DEPTH
CHUNKS: Final = 32
REST_S: Final = 0.05  # until the last calls have ended
REQUESTS: Final = 2000
STEPS: Final = 120  # of the victim in one run: some 0.25 s
RUNS: Final = (
    3  # in a measurement, of which the fastest counts: whatever else the machine does only adds
)
ROUNDS: Final = 24  # short ones: what else the machine does changes from second to second


def victim() -> float:
    """Times ``STEPS`` scheduler-like steps: dicts, lists and small objects, nothing that blocks.

    Returns seconds.
    """
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
    """Writes and reads on ``threads`` threads, as fast as they can or at a rate of ``bytes_s`` in all."""

    def __init__(self, root: Path, threads: int) -> None:
        self._threads = threads
        self._pause_s = 0.0
        self._frames = Frames(threads)
        self._store = open_store(root)
        self._go = threading.Event()
        self._stop = threading.Event()
        self._moved = [0] * threads
        self._executor = ThreadExecutor("gil", threads=threads)
        for which in range(threads):
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
        for chunk, key in cycle(enumerate(keys)):
            self._go.wait()
            if self._pause_s:
                due = max(due + self._pause_s, time.perf_counter() - random() * self._pause_s)
                self._stop.wait(max(0.0, due - time.perf_counter()))
            if self._stop.is_set():
                break
            if not self._go.is_set():
                continue
            self._frames.seal(which * CHUNKS + chunk, slot)
            assert store.write([(key, [slot])]) == [Done(len(slot))]
            assert store.read([(key, slot)]) == [Done(len(slot))]
            frame.check(slot, len(slot), key, GROUP)
            store.delete([key])
            self._moved[which] += 2 * len(slot)

    def set(self, bytes_s: float) -> int:
        """Sets the rate in bytes a second; 0 pauses, infinity is no limit. Returns the bytes moved so far."""
        self._pause_s = self._threads * 2 * GROUP.frame_bytes / bytes_s if bytes_s else 0.0
        (self._go.set if bytes_s else self._go.clear)()
        return sum(self._moved)

    def close(self) -> None:
        self._stop.set()
        self._go.set()
        while self._executor.outstanding:
            self._executor.wait(60.0)
            self._executor.poll()
        self._executor.close(10.0)
        self._store.close()


@contextmanager
def inside(root: Path, threads: int) -> Iterator[Callable[[float], int]]:
    """The load in this process, halted. Yields its ``set``."""
    load = Load(root, threads)
    try:
        yield load.set
    finally:
        load.close()


@contextmanager
def outside(root: Path, threads: int) -> Iterator[Callable[[float], int]]:
    """The load in another process, halted. Yields its ``set``."""
    command = [sys.executable, "-m", "bench.gil", "--load", str(root), "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    asked, told = process.stdin, process.stdout

    def set_(bytes_s: float) -> int:
        asked.write(f"{bytes_s}\n")
        asked.flush()
        return int(told.readline())

    try:
        yield set_
    finally:
        asked.close()
        process.wait()
        told.close()


def serve(root: Path, threads: int) -> None:
    """Runs the load in the other process.

    Sets the rate from each line of its input and prints the bytes moved so far, until the input ends.
    """
    load = Load(root, threads)
    for line in sys.stdin:
        print(load.set(float(line)), flush=True)
    load.close()


def run(rounds: int = ROUNDS, folder: Path = OUT, threads: int = THREADS) -> dict[str, Any]:
    """Returns ``{"gil": {"victim_slowdown": ..., ...}}``.

    Figures are medians; the slow-down is a median of ratios within a round.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {"alone": [], "inside": [], "outside": []}
    rates: dict[str, list[float]] = {"inside": [], "outside": []}

    def measure(name: str, set_: Callable[[float], int], bytes_s: float) -> None:
        set_(bytes_s)
        victim()
        before, began = set_(bytes_s), time.perf_counter()
        seconds[name].append(min(victim() for _ in range(RUNS)))
        rates[name].append((set_(0.0) - before) / 1e9 / (time.perf_counter() - began))
        time.sleep(REST_S)

    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-gil-") as root:
        victim()
        with (
            inside(Path(root, "in"), threads) as here,
            outside(Path(root, "out"), threads) as there,
        ):
            for _ in range(rounds):
                seconds["alone"].append(min(victim() for _ in range(RUNS)))
                measure("inside", here, math.inf)
                measure("outside", there, statistics.fmean(rates["inside"]) * 1e9)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    result = {f"{name}_s": took for name, took in median.items()}
    result |= {f"{name}_io_gb_s": statistics.fmean(rate) for name, rate in rates.items()}
    pairs = zip(seconds["inside"], seconds["outside"], strict=True)
    result["victim_slowdown"] = statistics.median(inside / outside for inside, outside in pairs)
    return {"gil": {**result, "threads": threads, "rounds": rounds}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    gil = result["gil"]
    view = Table(
        title=f"Fixed Python work beside {gil['threads']} threads of disk I/O", title_justify="left"
    )
    for column in ("I/O", "work s", "I/O GB/s"):
        view.add_column(column, justify="right")
    view.add_row("none", f"{gil['alone_s']:.3f}", "")
    for name, where in (("outside", "in another process"), ("inside", "in the same process")):
        view.add_row(where, f"{gil[f'{name}_s']:.3f}", f"{gil[f'{name}_io_gb_s']:.2f}")
    view.add_row("same / other", f"{gil['victim_slowdown']:.3f}", "")
    return view


def main() -> None:
    parser = options(__doc__, ROUNDS, OUT / "bench_gil.json", OUT)
    parser.add_argument("--threads", type=int, default=THREADS, choices=range(1, MOST_THREADS + 1))
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        serve(arguments.load, arguments.threads)
        return
    result = run(arguments.rounds, arguments.folder, arguments.threads)
    finish(result, table(result), arguments.out)


if __name__ == "__main__":
    main()
