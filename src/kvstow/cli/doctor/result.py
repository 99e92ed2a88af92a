"""Runs checks so that they can neither hang nor raise."""

from __future__ import annotations

from typing import Final

from kvstow.backends.result import MAX_FOUND, Check, Result, failed, unknown
from kvstow.errors import SettingsError
from kvstow.runtime import run_within

CORRECT: Final = "correct the setting in the file or variable that it is from, then run this again"


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
