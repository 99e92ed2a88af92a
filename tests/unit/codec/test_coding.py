"""Entropy coding, number conversion, and fp8 against torch's own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("backports.zstd")

from kvstow.codec import entropy
from kvstow.codec.entropy import Packer, unpack, worth_packing
from kvstow.codec.numbers import narrow, widen
from kvstow.codec.scaled import _E4M3
from kvstow.errors import FrameError


def skewed(length: int) -> np.ndarray:
    return np.random.default_rng(1).normal(120, 2, length).astype(np.uint8)


@pytest.mark.parametrize("length", [1, 12, 300_000])
def test_packed_and_stored(length: int) -> None:
    symbols, packer = skewed(length), Packer()
    for _ in range(2):  # a compressor is used again
        data = packer.pack(symbols)
        back = unpack(memoryview(symbols.tobytes() if data is None else data), length)
        assert np.array_equal(back, symbols)
    assert (data is None) == (length < 200)


def test_as_short_as_entropy_coding_is() -> None:
    symbols = skewed(262_144)
    share = np.bincount(symbols) / len(symbols)
    bits = -(share[share > 0] * np.log2(share[share > 0])).sum()
    data = Packer().pack(symbols)
    assert data is not None
    assert len(data) * 8 < len(symbols) * bits * 1.04


def test_an_old_or_new_zstd_without_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "_HUFFMAN", {**entropy._HUFFMAN, 123_456: 1})
    entropy._options.cache_clear()
    try:
        data = Packer().pack(skewed(10_000))
    finally:
        entropy._options.cache_clear()
    assert data is not None
    assert np.array_equal(unpack(memoryview(data), 10_000), skewed(10_000))


def test_longer_and_shorter_than_said() -> None:
    data = Packer().pack(skewed(10_000))
    assert data is not None
    for length in (9_999, 10_001, 1):
        with pytest.raises(FrameError):
            unpack(memoryview(data), length)
    for cut in (data[:-1], data + data, data[:10], b""):
        with pytest.raises(FrameError):
            unpack(memoryview(cut), 10_000)


def test_what_is_worth_packing() -> None:
    assert worth_packing(skewed(50_000))
    assert worth_packing(np.zeros(10, np.uint8))
    assert not worth_packing(np.random.default_rng(2).integers(0, 256, 50_000).astype(np.uint8))


def test_bfloat16_and_back() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[(words & 0x7F80) != 0x7F80]  # finite
    values = np.empty(len(words), np.float32)
    widen(words, "bfloat16", values)
    back = np.empty_like(words)
    narrow(values.copy(), "bfloat16", back)
    assert np.array_equal(back, words)


def test_float16_never_becomes_infinite() -> None:
    out = np.empty(2, np.uint16)
    narrow(np.array([70_000, -1e9], np.float32), "float16", out)
    assert out.view(np.float16).tolist() == [65504, -65504]


def test_e4m3_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3).normal(0, 30, 100_000).clip(-448, 448)
    values = np.concatenate(
        [random, random * 2.0**-10, [0, -0.0, 448, -448, 2.0**-9, 2.0**-10]]
    ).astype(np.float32)
    symbols, back = np.empty(len(values), np.uint8), np.empty(len(values), np.float32)
    _E4M3().symbols(values.copy(), symbols)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert np.array_equal(symbols, theirs.view(torch.uint8).numpy())
    _E4M3().values(symbols, back)
    assert np.array_equal(back, theirs.float().numpy())
