"""What a check says, and checks that can neither hang nor raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from kvstow.errors import SettingsError
from kvstow.runtime import run_within

MAX_FOUND: Final = 400  # characters of what somebody else's message may add
CORRECT: Final = "correct the setting in the file or variable that it is from, then run this again"


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "could not check"


class Result(NamedTuple):
    """``found`` is what is so, ``fix`` what to do about it, empty where nothing is."""

    check: str
    status: Status
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Result]]


def ok(check: str, found: str) -> Result:
    return Result(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Result:
    return Result(check, Status.WARNING, found, fix)


def failed(check: str, found: str, fix: str) -> Result:
    return Result(check, Status.FAILED, found, fix)


def unknown(check: str, found: str, fix: str = "") -> Result:
    return Result(check, Status.UNKNOWN, found, fix)


def bounded(name: str, check: Check, limit_s: float) -> list[Result]:
    """The results of ``check``, on a thread of its own that is left behind when it takes longer than ``limit_s``: what
    hangs the doctor hangs the tier. Whatever it raises is a result too."""
    ended = run_within("doctor", lambda: list(check()), limit_s)
    if ended is None:
        return [
            failed(name, f"no answer within {limit_s:g} s: it hangs", "see why before vLLM uses it")
        ]
    value, error = ended
    if isinstance(error, SettingsError):  # what is wrong with them is a result already
        return [unknown(name, "not looked at: its settings are wrong", CORRECT)]
    if value is None:
        return [unknown(name, f"could not check: {type(error).__name__}: {error}"[:MAX_FOUND])]
    return value
