"""Conversion of every floating type to float32 and back, with numpy alone."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstow.codec.shape import Array, KVShape
from kvstow.errors import UnsupportedError

_HIGHEST: Final = {
    "float16": np.float32(65504.0),
    "bfloat16": np.array([0x7F7F0000], np.uint32).view(np.float32)[0],
    "float32": np.finfo(np.float32).max,
}


def require_floats(name: str, shape: KVShape) -> None:
    """Raise ``UnsupportedError`` unless KV is of a floating type in a known layout, as lossy codecs
    need.
    """
    if not shape.known:
        raise UnsupportedError(f"codec {name}: the layout of the KV is not known; use lossless")
    if shape.dtype not in _HIGHEST:
        raise UnsupportedError(
            f"codec {name}: KV of one byte a number has nothing to give; use lossless"
        )


def widen(words: Array, dtype: str, out: Array) -> None:
    """Convert ``words`` (bits of ``dtype``) to float32, exactly."""
    if dtype == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, words)
        np.multiply(bits, 1 << 16, out=bits)
    elif dtype == "float16":
        np.copyto(out, words.view(np.float16))
    else:
        np.copyto(out, words.view(np.float32))


def narrow(values: Array, dtype: str, out: Array) -> None:
    """Round finite float32 ``values`` to the nearest bits of ``dtype``, never to infinity.

    ``values`` is overwritten.
    """
    highest = _HIGHEST[dtype]
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        # Ties go away from zero. No finite product of a codec reaches the last binade.
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
    elif dtype == "float16":
        np.clip(values, -highest, highest, out=values)
        np.copyto(out.view(np.float16), values, casting="same_kind")
    else:
        np.copyto(out.view(np.float32), values)
