"""What others say is one line of the log."""

from __future__ import annotations

import logging

import pytest

from kvstow.vllm.start import log_like_vllm
from kvstow.vllm.worker import MAX_ERRORS
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape


def test_request_ids_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log_like_vllm()
    logger = logging.getLogger("kvstow")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, logger="kvstow"):
        logger.warning("Stored %d tokens, request %s", 3, "a\nERROR \x1b[31m 100%s é")
    assert caplog.records[-1].getMessage() == "Stored 3 tokens, request a\\nERROR \\x1b[31m 100%s é"


def test_a_device_that_always_fails_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Copies fail in every step.

    Of each rank a few lines a minute say so, in its log and in the scheduler's.
    """
    sim = Sim(Shape(tp=2, batched_tokens=256), fails=lambda load, transfers: range(len(transfers)))

    def said(minutes: int) -> list[str]:
        caplog.clear()
        for i in range(60 * minutes):
            sim.serve(f"r{sim.stack.clock.monotonic()}", prompt(40, i))
            sim.stack.clock.advance(1.0)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    with caplog.at_level(logging.ERROR, logger="kvstow"):
        logging.getLogger("kvstow").propagate = True
        lines = said(1)
        assert (
            sum(line.startswith("A worker reports: store of request") for line in lines)
            >= 2 * MAX_ERRORS
        )
        assert len(lines) <= 4 * (MAX_ERRORS + 1)
        assert len(said(10)) >= 9 * 4 * MAX_ERRORS - 4 * MAX_ERRORS, (
            "it is said again while it goes on"
        )
    assert sim.stack.counter("failed_chunks") >= 600
    sim.close()
