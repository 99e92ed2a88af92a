"""The codec of each lower tier, from settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.settings import Settings
from kvstow.settings.sections.codec import RAW
from kvstow.tier import Coder

if TYPE_CHECKING:
    from kvstow.codec.shape import KVShape

EXTRA = ("numpy", "backports")  # what the extra installs


def coders(
    settings: Settings, tiers: Sequence[str], layout: ChunkLayout, shapes: Sequence[Sequence[KVShape]]
) -> Mapping[str, Coder | None]:
    """Of each tier, by its section's name. ``shapes[g][s]`` is what the KV of shard ``s`` of group ``g`` is.

    Raises ``SettingsError`` where a codec's libraries are not installed, ``UnsupportedError`` where it does not suit
    the KV.
    """
    coded = [tier for tier in tiers if hasattr(getattr(settings, tier, None), "codec")]
    names = dict.fromkeys(tiers, RAW) | {tier: getattr(settings, tier).codec for tier in coded}
    return {tier: _coder(tier, name, layout, shapes) for tier, name in names.items()}


def _coder(tier: str, name: str, layout: ChunkLayout, shapes: Sequence[Sequence[KVShape]]) -> Coder | None:
    """A raw tier has one too, to read what was coded when the setting was another; None: it can't."""
    try:
        from kvstow.codec import choose
        from kvstow.codec.frames import FrameCoder
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        if name == RAW:
            return None
        raise SettingsError(
            f"{tier}.codec is {name}, and its libraries aren't installed: pip install 'kvstow[codec]'"
        ) from error
    try:
        return FrameCoder(choose.codec(name), layout, shapes, choose.known)
    except UnsupportedError as error:
        raise UnsupportedError(f"{tier}.codec {name}: {error}") from error
