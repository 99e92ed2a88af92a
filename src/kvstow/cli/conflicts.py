"""What vLLM's start would refuse of settings that are each right, as far as that needs no engine."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.errors import SettingsError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.settings import Effective, check_disk


def conflicts(effective: Effective) -> Iterator[SettingsError]:
    """One of each part, the settings' sources named."""
    from kvstow import build  # not at the top: the command line starts without the tiers

    settings = effective.settings
    least = ChunkLayout((GroupLayout(1, 1, (1,)),))
    checks = (
        lambda: check_disk(settings, 0),
        lambda: build.asked_for(settings),
        lambda: build.check_direct(settings),
        lambda: settings.direct.engine == "file" and build.direct.choose(settings),
        lambda: build.integrity_key(settings),
        lambda: settings.redis.url and build.redis_options(settings),
        lambda: settings.objects.url and build.objects_options(settings),
        lambda: settings.mooncake.master and build.mooncake_options(settings, least),
    )
    said: set[str] = set()
    for check in checks:
        try:
            with effective.named():
                check()
        except SettingsError as error:
            if str(error) not in said:
                said.add(str(error))
                yield error
