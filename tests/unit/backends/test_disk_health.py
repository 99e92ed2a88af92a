"""Which directories are asked, by a clock that only moves when told."""

from __future__ import annotations

import logging

import pytest

from kvstow.backends.disk.health import MAX_FAILURES, RETRY_S, FaultKind, Health
from kvstow.testing.manual import ManualClock

ERROR = OSError("gone")
READ, WRITE, HANG = FaultKind.READ, FaultKind.WRITE, FaultKind.HANG


def fail(
    health: Health, which: int, times: int = MAX_FAILURES, kind: FaultKind = READ
) -> list[bool]:
    return [health.failed(which, kind, ERROR) for _ in range(times)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_faults_in_a_row_put_one_out_of_use_and_are_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(["/a", "/b"], ManualClock())
    assert fail(health, 0, MAX_FAILURES - 1) == [False] * (MAX_FAILURES - 1)
    health.worked(0, READ)
    assert fail(health, 0, MAX_FAILURES - 1) == [False] * (MAX_FAILURES - 1)
    assert health.may_read(0)
    assert fail(health, 0, 5) == [False] * 5
    assert (health.may_read(0), health.may_write(0), health.readable(0)) == (False, False, False)
    assert (health.may_read(1), health.may_write(1), health.down) == (True, True, 1)
    health.worked(0, READ)
    assert (health.may_read(0), health.may_write(0), health.down) == (True, True, 0)
    assert said(caplog) == [
        "A read failed in /a (more failures of this kind are not logged): gone",
        "Disk path /a is out of use, its chunks are misses: gone",
        "Disk path /a is in use again",
    ]


def test_one_that_cannot_be_written_is_read_and_reads_say_nothing_of_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(["/a", "/b"], ManualClock())
    for _ in range(MAX_FAILURES):
        health.worked(0, READ)
        assert not health.failed(0, WRITE, ERROR)
    health.worked(0, READ)
    assert (health.may_read(0), health.may_write(0), health.may_write(1)) == (True, False, True)
    assert health.down == 1
    health.worked(0, WRITE)
    assert (health.may_write(0), health.down) == (True, 0)
    assert said(caplog) == [
        "A write failed in /a (more failures of this kind are not logged): gone",
        "Disk path /a is not written, it is still read: gone",
        "Disk path /a is written again",
    ]


def test_when_none_can_be_written_it_is_the_stores_fault() -> None:
    health = Health(["/a", "/b"], ManualClock())
    fail(health, 0)
    assert fail(health, 1, kind=WRITE) == [False] * (MAX_FAILURES - 1) + [True]
    assert health.may_write(0)
    assert health.may_write(1)
    assert not health.may_read(0)


def test_a_hang_is_over_when_a_call_returns_whatever_else_failed() -> None:
    health = Health(["/a", "/b"], ManualClock())
    health.failed(0, HANG, ERROR, at_once=True)
    fail(health, 0)
    assert health.down == 1
    health.worked(0, HANG)
    assert not health.readable(0)
    health.worked(0, READ)
    assert health.readable(0)


def test_the_last_one_that_worked_is_asked_and_its_faults_are_the_stores() -> None:
    health = Health(["/a", "/b"], ManualClock())
    fail(health, 0)
    assert fail(health, 1) == [False] * (MAX_FAILURES - 1) + [True]
    assert health.may_read(0)
    assert health.may_read(1)
    assert fail(health, 0, 1) == [True]
    health.worked(1, READ)
    assert (health.may_read(0), health.may_read(1), health.down) == (False, True, 1)
    assert fail(health, 0, 1) == [False]


def test_one_alone_is_always_asked() -> None:
    health = Health(["/a"], ManualClock())
    for kind in FaultKind:
        assert fail(health, 0, 10, kind) == [True] * 10
    assert health.may_read(0)
    assert health.may_write(0)
    assert health.down == 0


def test_trials_are_far_between() -> None:
    clock = ManualClock()
    health = Health(["/a", "/b"], clock)
    assert not health.due(0, READ)
    fail(health, 0)
    assert not health.due(0, READ)
    clock.advance(RETRY_S)
    assert not health.due(1, READ)
    assert not health.due(0, WRITE)
    assert health.due(0, READ)
    assert not health.due(0, READ)
    clock.advance(RETRY_S)
    assert health.due(0, READ)
