"""Which directories are asked, by a clock that only moves when told."""

from __future__ import annotations

import logging

import pytest

from kvstow.backends.disk.health import FAILURES, RETRY_S, Health
from kvstow.testing.manual import ManualClock

ERROR = OSError("gone")


def fail(health: Health, which: int, times: int = FAILURES) -> list[bool]:
    return [health.failed(which, ERROR) for _ in range(times)]


def test_faults_in_a_row_put_one_out_of_use_and_are_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(["/a", "/b"], ManualClock())
    assert fail(health, 0, FAILURES - 1) == [False] * (FAILURES - 1)
    health.worked(0)
    assert fail(health, 0, FAILURES - 1) == [False] * (FAILURES - 1)
    assert health.asks(0)
    assert fail(health, 0, 5) == [False] * 5
    assert (health.asks(0), health.works(0), health.asks(1), health.down) == (False, False, True, 1)
    health.worked(0)
    assert (health.asks(0), health.down) == (True, 0)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "Disk path /a is out of use, its chunks are misses: gone",
        "Disk path /a is in use again",
    ]


def test_the_last_one_that_worked_is_asked_and_its_faults_are_the_stores() -> None:
    health = Health(["/a", "/b"], ManualClock())
    fail(health, 0)
    assert fail(health, 1) == [False] * (FAILURES - 1) + [True]
    assert health.asks(0)
    assert health.asks(1)
    assert fail(health, 0, 1) == [True]
    health.worked(1)
    assert (health.asks(0), health.asks(1), health.down) == (False, True, 1)
    assert fail(health, 0, 1) == [False]


def test_one_alone_is_always_asked() -> None:
    health = Health(["/a"], ManualClock())
    assert fail(health, 0, 10) == [True] * 10
    assert health.asks(0)
    assert health.works(0)
    assert health.down == 0


def test_trials_are_far_between() -> None:
    clock = ManualClock()
    health = Health(["/a", "/b"], clock)
    assert not health.due(0)
    fail(health, 0)
    assert not health.due(0)
    clock.advance(RETRY_S)
    assert not health.due(1)
    assert health.due(0)
    assert not health.due(0)
    clock.advance(RETRY_S)
    assert health.due(0)
