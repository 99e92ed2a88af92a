"""What others say is one line of the log."""

from __future__ import annotations

import logging

import pytest

from kvstow.vllm.start import log_like_vllm


def test_request_ids_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log_like_vllm()
    logger = logging.getLogger("kvstow")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, logger="kvstow"):
        logger.warning("Stored %d tokens, request %s", 3, "a\nERROR \x1b[31m 100%s é")
    assert caplog.records[-1].getMessage() == "Stored 3 tokens, request a\\nERROR \\x1b[31m 100%s é"
