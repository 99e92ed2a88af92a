"""Results of checks, and the runner of checks that may hang or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from kvstow.errors import SettingsError
from kvstow.runtime import run_within

MAX_FOUND: Final = 400  # characters of another program's message
CORRECT: Final = "correct the setting in the file or variable that it is from, then run this again"


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


def bounded(name: str, check: Check, limit_s: float) -> list[Result]:
    """Runs ``check`` on a thread of its own, which is abandoned after ``limit_s``. Returns its
    results.

    A check that takes longer has failed: what hangs the doctor hangs the tier. An exception is a
    result, too.
    """
    ended = run_within("doctor", lambda: list(check()), limit_s)
    if ended is None:
        return [
            failed(name, f"no answer within {limit_s:g} s: it hangs", "see why before vLLM uses it")
        ]
    value, error = ended
    if isinstance(error, SettingsError):  # another check reports it
        return [unknown(name, "not looked at: its settings are wrong", CORRECT)]
    if value is None:
        return [unknown(name, f"could not check: {type(error).__name__}: {error}"[:MAX_FOUND])]
    return value
