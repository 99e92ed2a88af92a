"""vLLM's scheduler says a lot at every start; and each test here builds many."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet_vllm() -> None:
    pytest.importorskip("vllm")
    for name in ("vllm", "kvstow"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
