"""vLLM's scheduler says a lot at every start; and each test here builds many."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """While a test here runs, not longer: tests elsewhere read kvstow's log."""
    pytest.importorskip("vllm")
    loggers = [logging.getLogger(name) for name in ("vllm", "kvstow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
