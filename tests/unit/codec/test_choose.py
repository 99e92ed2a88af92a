"""Codecs by name, and their speed as the benchmark measures it, without a model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("backports.zstd")
pytest.importorskip("torch")

from bench.codec_effect import speed
from kvstow.codec.choose import NAMES, codec
from kvstow.codec.shape import KVShape
from kvstow.errors import SettingsError


def test_every_name() -> None:
    found = [codec(name) for name in NAMES]
    assert [c.name for c in found] == [name.split(":")[0] for name in NAMES]
    assert len({c.kind for c in found}) == len(NAMES)
    assert codec("quantized").kind == codec("quantized:middle").kind
    assert [c.lossy for c in found] == [False, False] + [True] * 5


@pytest.mark.parametrize("name", ["", "zstd", "quantized:best", "lossless:1", "raw:"])
def test_other_names(name: str) -> None:
    with pytest.raises(SettingsError, match="quantized:middle"):
        codec(name)


def test_what_speed_measures() -> None:
    shape = KVShape("bfloat16", 2, 1, 2, 1, 32, 16)
    numbers = np.random.default_rng(1).standard_normal(2048).astype(np.float32)
    payload = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    found = speed(codec("raw"), [payload.tobytes()], shape, rounds=1)
    assert found.ratio == 1
    assert found.zstd1_ratio > 1
    assert min(found) > 0
