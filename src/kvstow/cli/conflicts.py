"""What vLLM's start would refuse of settings that are each right, as far as that needs no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from kvstow.errors import SettingsError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.runtime import run_within
from kvstow.settings import Effective, check_disk

LIMIT_S: Final = 10.0  # of a check, which may look at a file


def conflicts(effective: Effective) -> Iterator[SettingsError]:
    """One of each part at most, the settings' sources named."""
    from kvstow import build  # not at the top: the command line starts without the tiers

    settings = effective.settings
    least = ChunkLayout((GroupLayout(1, 1, (1,)),))
    checks: dict[str, Callable[[], object]] = {
        "disk": lambda: check_disk(settings, 0),
        "plugins": lambda: build.asked_for(settings),
        "codec": lambda: build.codec_names(settings, build.asked_for(settings)),
        "direct": lambda: build.check_direct(settings),
        "direct.path": lambda: settings.direct.engine == "file" and build.direct.choose(settings),
        "integrity_key_file": lambda: build.integrity_key(settings),
        "redis": lambda: settings.redis.url and build.redis_options(settings),
        "objects": lambda: settings.objects.url and build.objects_options(settings),
        "mooncake": lambda: settings.mooncake.master and build.mooncake_options(settings, least),
    }
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
