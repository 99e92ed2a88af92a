"""SIGKILL at random moments, four processes on one directory; and what is promised of the directory afterwards."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvstow.backends.base import Done
from tests.crash.disk_writer import CHUNK, KEYS, NAMESPACES, key_of, open_store, value_of, wrong
from tests.store.disks import on_disk, temporaries

PROCESSES = 4
SIZE_BYTES = 200 * CHUNK
ROOT = Path(__file__).parents[2]


def start(path: Path, seed: int, *role: str, size_bytes: int = SIZE_BYTES) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.crash.disk_writer",
        str(path),
        str(size_bytes),
        str(seed),
        *role,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with process.stdout:
        return process.stdout.read()


def rounds(path: Path, count: int) -> int:
    """Returns how many chunks were there, exact, after the last round.

    Of the four processes one to four are killed in a round; the others go on beside the restarted ones.
    """
    rng, buffer = random.Random(7), memoryview(mmap.mmap(-1, CHUNK))
    running: list[subprocess.Popen[str]] = []
    seed = exact = 0
    pause = threading.Event()
    try:
        for _ in range(count):
            new = [start(path, seed + i) for i in range(PROCESSES - len(running))]
            seed += len(new)
            running += new
            for process in new[:-1]:  # the last may be killed while it opens its store
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            pause.wait(rng.uniform(0.02, 0.3))
            dying = [
                running.pop(rng.randrange(len(running)))
                for _ in range(rng.randrange(1, PROCESSES + 1))
            ]
            for process in dying:
                process.kill()
            dead = [said(process) for process in dying if process.wait() or True]
            assert not [
                line for text in dead for line in text.splitlines() if line.startswith("wrong")
            ]
            assert stopped_usage(path, running) <= SIZE_BYTES + PROCESSES * CHUNK
            exact = check(path, buffer, alone=not running)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return exact


def stopped_usage(path: Path, running: list[subprocess.Popen[str]]) -> int:
    """What is on disk while nobody moves: a walk would count a file twice that is renamed on its way."""
    for process in running:
        process.send_signal(signal.SIGSTOP)
    for process in running:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    usage = on_disk(path)
    for process in running:
        process.send_signal(signal.SIGCONT)
    return usage


def check(path: Path, buffer: memoryview, *, alone: bool) -> int:
    """``alone``: nobody else lives. Returns how many chunks there are."""
    store = open_store(str(path), SIZE_BYTES)
    try:
        if alone:
            assert temporaries(path) == [], "a temporary file older than the restart"
            assert len(os.listdir(path / "run")) == 1
        assert not [i for i in range(KEYS) if wrong(store, i, buffer)]
        [count] = store.scan()
        assert count is not None
        if alone:
            assert on_disk(path) <= SIZE_BYTES
            assert store.used_bytes is not None
            assert on_disk(path) <= store.used_bytes <= SIZE_BYTES
        return sum(namespace.chunks for namespace in count.namespaces)
    finally:
        store.close()


def damage(path: Path, rng: random.Random) -> None:
    """What somebody with a shell might do to the directory while it is in use."""
    with suppress(OSError):
        match rng.randrange(7):
            case 0:
                os.unlink(path / "ledger")
            case 1:
                os.truncate(path / "ledger", rng.choice((0, 100)))
            case 2:
                (path / "ledger").write_bytes(rng.randbytes(4096))
            case 3:
                shutil.rmtree(path / rng.choice(("tmp", "quarantine", "run")))
            case 4:
                shutil.rmtree(path / NAMESPACES[rng.randrange(2)].hex() / f"{rng.randrange(16):x}")
            case 5:
                shutil.rmtree(path / NAMESPACES[rng.randrange(2)].hex())
            case 6:
                (path / "run" / rng.choice(os.listdir(path / "run"))).unlink()


@pytest.mark.timeout(300)
def test_i7_killed_beside_an_operator_while_somebody_damages_the_directory(tmp_path: Path) -> None:
    """Two sizes, scans and counts that are killed at any moment, a ledger that goes, directories too: every read is
    exact or a miss, the larger size holds, and who is left works on."""
    rng, pause, seed = random.Random(11), threading.Event(), 0
    buffer = memoryview(mmap.mmap(-1, CHUNK))
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range(8):
            operator = start(tmp_path, seed, "operator")
            new = [operator]
            while len(running) < PROCESSES:
                seed += 1
                new.append(start(tmp_path, seed, "beset", size_bytes=SIZE_BYTES // (1 + seed % 2)))
                running.append(new[-1])
            for process in new:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for _ in range(6):
                pause.wait(rng.uniform(0.02, 0.1))
                damage(tmp_path, rng)
            dying = [
                operator,
                *(
                    running.pop(rng.randrange(len(running)))
                    for _ in range(rng.randrange(1, PROCESSES))
                ),
            ]
            for process in dying:
                process.kill()
            dead = [said(process) for process in dying if process.wait() or True]
            assert not [
                line for text in dead for line in text.splitlines() if line.startswith("wrong")
            ]
            assert stopped_usage(tmp_path, running) <= SIZE_BYTES + PROCESSES * CHUNK
    finally:
        for process in running:
            process.kill()
            process.wait()
    check(tmp_path, buffer, alone=True)
    store = open_store(str(tmp_path), SIZE_BYTES)
    store.scan()
    buffer[:] = value_of(1)
    store.delete([key_of(1)])
    assert store.write([(key_of(1), [buffer])]) == [Done(CHUNK)]
    store.close()


@pytest.mark.timeout(300)
def test_i7_twenty_rounds_of_sigkill(tmp_path: Path) -> None:
    assert rounds(tmp_path, 20) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_rounds_of_sigkill(tmp_path: Path) -> None:
    assert rounds(tmp_path, 200) > 0
