"""A real vLLM over direct storage (files): restored, killed and warm again, and recomputing what can't be read."""

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

from tests.e2e.direct_engine import CHUNK_TOKENS, DAMAGED, LENGTH, PROMPTS

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = LENGTH // CHUNK_TOKENS  # of a prompt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make test`"
)


def life(folder: Path) -> dict[str, Any]:
    out = folder / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.direct_engine", str(folder / "kv"), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith("KVSTOW_")},
    )
    assert done.returncode == -signal.SIGKILL, (done.stdout + done.stderr)[-6000:]
    seen: dict[str, Any] = json.loads(out.read_text())
    seen["log"] = done.stdout + done.stderr
    return seen


@functools.cache
def lives() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="kvstow-direct-"))
    return life(folder), life(folder)


def tokens(outputs: list[dict[str, Any]]) -> list[Any]:
    return [output["tokens"] for output in outputs]


def cached(outputs: list[dict[str, Any]]) -> list[int]:
    return [output["cached"] for output in outputs]


def test_the_second_request_is_restored_with_the_same_tokens() -> None:
    seen, _ = lives()
    assert cached(seen["first"]) == [0] * PROMPTS
    assert cached(seen["second"]) == [CHUNKS * CHUNK_TOKENS] * PROMPTS
    assert tokens(seen["second"]) == tokens(seen["first"])
    assert (seen["wrong_pages"], seen["leased"], seen["kind"]) == ([], 0, "Extents")
    assert seen["pages_loaded"] >= PROMPTS * CHUNKS
    assert seen["used"] == PROMPTS * CHUNKS
    assert seen["mode"] == "0o600"
    assert (
        f"Retrieved {CHUNKS * CHUNK_TOKENS} out of {CHUNKS * CHUNK_TOKENS} required tokens"
        in seen["log"]
    )
    assert "Direct storage: engine file" in seen["log"]
    assert {name for name in seen["counters"] if name.endswith("|memory")} == set()
    assert seen["counters"]["loaded_chunks|direct"] >= PROMPTS * CHUNKS


def test_a_killed_engine_is_warm_when_it_comes_back() -> None:
    first, second = lives()
    assert sum(cached(second["first"])) >= 0.99 * PROMPTS * CHUNKS * CHUNK_TOKENS
    assert tokens(second["first"]) == tokens(first["first"])


def test_a_read_that_fails_is_recomputed_under_the_policy_that_kvstow_sets() -> None:
    """The engine is started without ``kv_load_failure_policy``, whose default would fail the request."""
    first, second = lives()
    assert second["policy"] == "recompute"
    assert tokens(second["second"]) == tokens(first["first"])
    assert "direct storage (file) batched read failed" in second["log"]
    assert second["counters"]["failed_chunks|direct|load_copy"] == 1
    fresh = [n for n in range(PROMPTS) if n != DAMAGED]
    assert all(second["second"][n]["cached"] == CHUNKS * CHUNK_TOKENS for n in fresh)
    assert second["after"] == first["second"][DAMAGED], "stored anew, and restored"
