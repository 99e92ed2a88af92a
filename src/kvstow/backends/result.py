"""Results of ``kvstow doctor``'s checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

MAX_FOUND: Final = 400  # characters of another program's message that a result shows


class Status(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "could not check"


class Result(NamedTuple):
    """A check's name, its outcome, what it found, and what to do about it (empty if nothing)."""

    check: str
    status: Status
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Result]]


class PlannedCheck(NamedTuple):
    """A check that has not run yet. ``limit_s`` bounds its run, in seconds."""

    name: str
    limit_s: float
    run: Check


def ok(check: str, found: str) -> Result:
    """A result without a problem."""
    return Result(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Result:
    """A problem with which kvstow works, less well."""
    return Result(check, Status.WARNING, found, fix)


def failed(check: str, found: str, fix: str) -> Result:
    """A problem with which kvstow does not work."""
    return Result(check, Status.FAILED, found, fix)


def unknown(check: str, found: str, fix: str = "") -> Result:
    """A check that could not be made."""
    return Result(check, Status.UNKNOWN, found, fix)
