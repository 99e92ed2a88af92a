"""Each scenario is run once a session, in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_process import told_once

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0


def _run(name: str, folder: Path) -> Any:
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.scenarios", name, str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("KVSTOW_")},
    )
    if done.returncode:
        raise AssertionError(
            f"scenario {name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}"
        )
    return json.loads(result.read_text())


@functools.cache
def _story(name: str) -> Callable[[], Any]:
    return told_once(name, lambda folder: _run(name, folder))


@pytest.fixture
def scenario() -> Callable[[str], Any]:
    """Result of a scenario of ``tests/e2e/scenarios.py``; skips where vLLM isn't installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run this with `make test`")
    return lambda name: _story(name)()
