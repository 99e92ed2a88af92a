"""Checks settings that are each valid but can't be used together, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from kvstow.errors import SettingsError
from kvstow.runtime import run_within
from kvstow.settings import Effective

LIMIT_S: Final = 10.0  # of a check, which may look at a file


def conflicts(effective: Effective) -> Iterator[SettingsError]:
    """Yields one error of each part at most, the settings' sources named."""
    from kvstow import build  # not at the top: the command line starts without the tiers

    settings = effective.settings

    def check_codecs() -> None:
        build.asked_for(settings)  # the plug-ins' names
        build.check_codecs({each.name: each.codec for each in build.configured_backends(settings)})

    checks: dict[str, Callable[[], object]] = {
        "codec": check_codecs,
        "direct": lambda: build.check_direct(settings),
        "direct.path": lambda: settings.direct.engine == "file" and build.direct.choose(settings),
        "integrity_key_file": lambda: build.integrity_key(settings),
    }
    for name, backend, section, _ in build.configured_backends(settings):
        checks[name] = partial(backend.check, section, 0)
    said: set[str] = set()
    for name, check in checks.items():
        error = _error(name, partial(_named, effective, check))
        if error is not None and str(error) not in said:
            said.add(str(error))
            yield error


def _named(effective: Effective, check: Callable[[], object]) -> None:
    with effective.named():
        check()


def _error(name: str, check: Callable[[], None]) -> SettingsError | None:
    ended = run_within(name, check, LIMIT_S)
    if ended is None:
        return SettingsError(
            f"{name}: no answer within {LIMIT_S:g} s: a file or directory that it names hangs"
        )
    error = ended[1]
    if error is None or isinstance(error, SettingsError):
        return error
    raise error
