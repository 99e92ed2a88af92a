"""The lower tiers that settings ask for, the nearest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstow.build.codec import coders
from kvstow.build.disk import build_disk
from kvstow.build.mooncake import build_mooncake
from kvstow.build.objects import build_objects
from kvstow.build.plugins import build_plugins, plugin_names
from kvstow.build.redis import build_redis
from kvstow.errors import UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock
from kvstow.settings import Settings
from kvstow.tiers import Tier

if TYPE_CHECKING:
    from kvstow.codec.shape import KVShape


def asked_for(settings: Settings) -> Mapping[str, str]:
    """Tiers that keep KV after this process, and the setting that asks for each."""
    direct = settings.direct
    asked = {
        "direct": ("direct.path", direct.path if direct.engine in ("auto", "file") else None),
        "disk": ("disk.paths", settings.disk.paths),
        "redis": ("redis.url", settings.redis.url),
        "mooncake": ("mooncake.master", settings.mooncake.master),
        "objects": ("objects.url", settings.objects.url),
        **dict.fromkeys(plugin_names(settings), ("plugins.stores", True)),
    }
    return {tier: setting for tier, (setting, value) in asked.items() if value}


def lower_tiers(
    settings: Settings,
    layout: ChunkLayout,
    shapes: Sequence[Sequence[KVShape]],
    *,
    clock: Clock,
    metrics: Metrics,
    describe: Callable[[bytes], Mapping[str, object]],
    device: int,
    not_persistent: str | None,
    key: bytes | None,
    namespace: bytes | None = None,
    root: tuple[str, str] | None = None,
) -> list[Tier]:
    """``shapes[g][s]`` is what the KV of shard ``s`` of group ``g`` is; ``describe`` says for people what a namespace
    is; ``device``: which of this host's engines it is; ``not_persistent``: why this KV must not outlive the process,
    or None; ``key``: the integrity key; ``namespace``: its own; ``root``: where its block hashes begin, behind a digest
    of all else that KV depends on.

    Raises ``UnsupportedError`` where it must not and a tier would keep it, or a codec does not suit it,
    ``SettingsError`` where a tier's settings can't be used.
    """
    asked = asked_for(settings)
    for tier, setting in asked.items():
        if not_persistent is not None:
            raise UnsupportedError(
                f"{setting} is set, but this KV can't be kept in tier {tier}: {not_persistent}"
            )
    coder_of = coders(settings, list(asked), layout, shapes)
    built = (
        build_disk(
            settings,
            layout,
            clock=clock,
            metrics=metrics,
            describe=describe,
            device=device,
            key=key,
            namespace=namespace,
            root=root,
        ),
        build_redis(settings, layout, clock=clock, metrics=metrics, root=root),
        build_mooncake(settings, layout, clock=clock, metrics=metrics, root=root),
        build_objects(settings, layout, clock=clock, metrics=metrics, root=root),
        *build_plugins(settings, layout, clock=clock, metrics=metrics),
    )
    tiers = [tier for tier in built if tier is not None]
    for one in tiers:
        one.use(coder_of.get(one.name), key)
    return tiers
