"""Codecs by the names that settings use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from kvstow.codec.base import Codec
from kvstow.codec.container import Kind
from kvstow.codec.lossless import Lossless
from kvstow.codec.quantized import RATES, Quantized
from kvstow.codec.raw import Raw
from kvstow.codec.scaled import fp8, int8
from kvstow.errors import SettingsError

NAMES: Final = ("raw", "lossless", "fp8", "int8", *(f"quantized:{rate}" for rate in RATES))


def codec(name: str) -> Codec:
    """Returns the codec of a name. ``quantized`` alone is its middle rate.

    Raises ``SettingsError`` for another name.
    """
    found = _by_name().get(name)
    if found is None:
        raise SettingsError(f"codec {name!r} is none of {', '.join(NAMES)}")
    return found


def known(kind: Kind) -> Codec | None:
    """Returns the codec that decodes frames of a kind, or None if this version has none."""
    return _by_kind().get(kind)


@cache
def _by_name() -> Mapping[str, Codec]:
    codecs: list[Codec] = [Raw(), Lossless(), fp8(), int8()]
    found = {one.name: one for one in codecs}
    found["quantized"] = Quantized()
    for rate in RATES:
        found[f"quantized:{rate}"] = Quantized(rate)
    return found


@cache
def _by_kind() -> Mapping[Kind, Codec]:
    return {one.kind: one for one in _by_name().values() if one.kind.codec_id}
