"""SIGKILL at random moments of an engine over direct storage: after each restart every read is exact or a miss."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.crash.direct_writer import KEYS, SLOTS, Node

ROOT = Path(__file__).parents[2]


def rounds(path: Path, count: int) -> list[int]:
    """Of each round, how many chunks the next start found, all of them read."""
    rng, pause = random.Random(11), threading.Event()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    there: list[int] = []
    for seed in range(count):
        command = [sys.executable, "-m", "tests.crash.direct_writer", str(path), str(seed)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                if seed % 5:  # else it may be killed while it formats or opens its files
                    assert process.stdout.readline().startswith("ready")
                pause.wait(rng.uniform(0.02, 0.3))
            finally:
                process.kill()
            assert "wrong" not in process.stdout.read()
        there.append(check(path))
    return there


def check(path: Path) -> int:
    node = Node(str(path))
    try:
        outcomes = [node.load(i) for i in range(KEYS)]
        assert False not in outcomes
        node.extents.check_integrity()
        return outcomes.count(True)
    finally:
        for media in node.media:
            media.close()
        node.engine.close(5.0)


@pytest.mark.timeout(300)
def test_twelve_rounds_of_sigkill(tmp_path: Path) -> None:
    there = rounds(tmp_path, 12)
    assert max(there) >= SLOTS * 3 // 4, "what was stored is found again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_rounds_of_sigkill(tmp_path: Path) -> None:
    assert max(rounds(tmp_path, 200)) >= SLOTS * 3 // 4
