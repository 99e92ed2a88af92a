"""A codec by the name that settings and the command line use."""

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
    """``quantized`` alone is its middle rate. Raises ``SettingsError`` for a name that is none."""
    match name.split(":"):
        case ["raw"]:
            return Raw()
        case ["lossless"]:
            return Lossless()
        case ["fp8"]:
            return fp8()
        case ["int8"]:
            return int8()
        case ["quantized"]:
            return Quantized()
        case ["quantized", rate] if rate in RATES:
            return Quantized(rate)
    raise SettingsError(f"codec {name!r} is none of {', '.join(NAMES)}")


def known(kind: Kind) -> Codec | None:
    """The codec that reads what a frame says it is. None: there is none here."""
    return _by_kind().get(kind)


@cache
def _by_kind() -> Mapping[Kind, Codec]:
    return {one.kind: one for one in map(codec, NAMES) if one.kind.codec_id}
