"""Marks by directory: what a test needs is where it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
E2E_TIMEOUT_S = 900  # several starts of a real vLLM on a busy two-core machine
MARKS = {"e2e": "e2e", "engine_contract": "contract", "cuda": "cuda"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(ROOT).parts[0]
        if directory in MARKS:
            item.add_marker(MARKS[directory])
        if directory == "e2e" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
