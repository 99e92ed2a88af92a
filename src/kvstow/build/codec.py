"""The codec of each lower tier, from settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.settings import Settings
from kvstow.settings.sections.codec import RAW

if TYPE_CHECKING:
    from kvstow.codec.frames import FrameCoder
    from kvstow.codec.shape import KVShape

EXTRA = ("numpy", "backports")  # what the extra installs


def codec_names(settings: Settings, tiers: Collection[str]) -> dict[str, str] | None:
    """Each tier's codec; None: none can be had, nor is any wanted.

    Raises ``SettingsError`` where a codec's libraries are not installed.
    """
    coded = [tier for tier in tiers if hasattr(getattr(settings, tier, None), "codec")]
    names = dict.fromkeys(tiers, RAW) | {tier: getattr(settings, tier).codec for tier in coded}
    try:
        import_module("kvstow.codec.choose")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        for tier, name in names.items():
            if name != RAW:
                raise SettingsError(
                    f"{tier}.codec is {name}, and its libraries aren't installed: pip install 'kvstow[codec]'"
                ) from error
        return None
    return names


def coders(
    settings: Settings,
    tiers: Sequence[str],
    layout: ChunkLayout,
    shapes: Sequence[Sequence[KVShape]],
) -> Mapping[str, FrameCoder | None]:
    """Of each tier, by its section's name; a raw one has one too, to read what was coded when the setting was another.
    ``shapes[g][s]`` is what the KV of shard ``s`` of group ``g`` is.

    Raises what ``codec_names`` does, ``UnsupportedError`` where a codec does not suit the KV.
    """
    names = codec_names(settings, tiers)
    return (
        dict.fromkeys(tiers)
        if names is None
        else {t: _coder(t, name, layout, shapes) for t, name in names.items()}
    )


def _coder(
    tier: str, name: str, layout: ChunkLayout, shapes: Sequence[Sequence[KVShape]]
) -> FrameCoder:
    from kvstow.codec import choose
    from kvstow.codec.frames import FrameCoder

    try:
        return FrameCoder(choose.codec(name), layout, shapes, choose.known)
    except UnsupportedError as error:
        raise UnsupportedError(f"{tier}.codec {name}: {error}") from error
