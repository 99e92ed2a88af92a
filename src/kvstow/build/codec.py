"""The coder of each lower tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvstow.errors import SettingsError, UnsupportedError
from kvstow.fields.codec import RAW
from kvstow.layout import ChunkLayout

if TYPE_CHECKING:
    from kvstow.codec.frames import FrameCoder
    from kvstow.codec.shape import KVShape

EXTRA: Final = ("numpy", "backports")  # packages that kvstow[codec] installs


def check_codecs(codecs: Mapping[str, str]) -> bool:
    """Returns whether the codecs' libraries are installed. ``codecs`` maps tiers to names of codecs.

    Raises ``SettingsError`` where they are not, and a codec needs them.
    """
    try:
        import_module("kvstow.codec.choose")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        for tier, name in codecs.items():
            if name != RAW:
                raise SettingsError(
                    f"{tier}.codec is {name}, and its libraries aren't installed: "
                    "pip install 'kvstow[codec]'"
                ) from error
        return False
    return True


def coders(
    codecs: Mapping[str, str], layout: ChunkLayout, shapes: Sequence[Sequence[KVShape]]
) -> Mapping[str, FrameCoder | None]:
    """Makes the coder of each tier in ``codecs``, which maps tiers to names of codecs.

    A tier with codec ``raw`` has a coder too, to read what was coded under another setting. None: the libraries are
    not installed. ``shapes[g][s]`` describes the KV of shard ``s`` of group ``g``.

    Raises what ``check_codecs`` raises, and ``UnsupportedError`` where a codec does not suit the KV.
    """
    if not check_codecs(codecs):
        return dict.fromkeys(codecs)
    return {tier: _coder(tier, name, layout, shapes) for tier, name in codecs.items()}


def _coder(
    tier: str, name: str, layout: ChunkLayout, shapes: Sequence[Sequence[KVShape]]
) -> FrameCoder:
    from kvstow.codec import choose
    from kvstow.codec.frames import FrameCoder

    try:
        return FrameCoder(choose.codec(name), layout, shapes, choose.known)
    except UnsupportedError as error:
        raise UnsupportedError(f"{tier}.codec {name}: {error}") from error
