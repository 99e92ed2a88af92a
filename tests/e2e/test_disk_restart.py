"""A real vLLM that is killed and started again over the same directory, and over one that was damaged meanwhile."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.disk_engine import CHUNK_TOKENS, LENGTH, PROMPTS

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = PROMPTS * (LENGTH // CHUNK_TOKENS)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
]


def life(folder: Path, damage: str = "none") -> dict[str, Any]:
    out = folder / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.disk_engine", str(folder / "kv"), str(out), damage],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith("KVSTOW_")},
    )
    assert done.returncode == -signal.SIGKILL, (done.stdout + done.stderr)[-6000:]
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


@functools.cache
def lives() -> tuple[dict[str, Any], ...]:
    folder = Path(tempfile.mkdtemp(prefix="kvstow-disk-"))
    return life(folder), life(folder), life(folder, "damage")


def tokens(seen: dict[str, Any]) -> list[Any]:
    return [output["tokens"] for output in seen["outputs"]]


def cached(seen: dict[str, Any]) -> int:
    return sum(output["cached"] for output in seen["outputs"])


def test_every_chunk_is_on_disk_when_an_idle_engine_is_killed() -> None:
    assert lives()[0]["files"] == CHUNKS
    assert cached(lives()[0]) == 0


def test_a_restarted_engine_hits_all_that_was_stored_and_says_the_same() -> None:
    first, second, _ = lives()
    assert tokens(second) == tokens(first)
    assert cached(second) >= 0.99 * CHUNKS * CHUNK_TOKENS
    assert second["files"] == CHUNKS, "nothing is written twice"


def test_h6_damaged_files_are_misses_outputs_stay_and_they_are_stored_anew() -> None:
    first, _, third = lives()
    assert tokens(third) == tokens(first)
    assert third["harmed"] == 7
    assert cached(third) < CHUNKS * CHUNK_TOKENS
    corrupt = sum(value for name, value in third["counters"].items() if "corrupt_chunks" in name)
    assert corrupt == 3, "flipped, truncated, emptied; what is no file is simply missing"
    assert third["files"] == CHUNKS
