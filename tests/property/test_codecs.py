"""Lossless is exact over every class of bit patterns; lossy codecs keep their bounds; no bytes break a decoder."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("backports.zstd")

from kvstow.codec.base import Codec
from kvstow.codec.lossless import Lossless
from kvstow.codec.quantized import MEAN_PARTS, RATES, Quantized
from kvstow.codec.raw import Raw
from kvstow.codec.scaled import fp8, int8
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError, UnsupportedError

LOSSY = [Quantized(rate) for rate in RATES] + [int8(), fp8()]
CODECS: list[Any] = [Raw(), Lossless(), *LOSSY]
LAYOUT = {
    "float32": (23, 8),
    "bfloat16": (7, 8),
    "float16": (10, 5),
}  # bits of mantissa, of exponent
BY_NAME = pytest.mark.parametrize(
    "codec", CODECS, ids=lambda codec: f"{codec.name}-{codec.kind.parameters.hex()}"
)
LOSSY_BY_NAME = pytest.mark.parametrize(
    "codec", LOSSY, ids=lambda codec: f"{codec.name}-{codec.kind.parameters.hex()}"
)


def encoded(codec: Codec, payload: bytes, shape: KVShape) -> bytes:
    codec.check(shape)
    out = memoryview(bytearray(b"\xee" * codec.max_encoded_bytes(shape)))
    return bytes(out[: codec.encode(memoryview(payload), shape, out)])


def decoded(codec: Codec, data: bytes, shape: KVShape) -> bytes:
    out = memoryview(bytearray(b"\xdd" * shape.nbytes))
    codec.decode(memoryview(data), shape, out)
    return bytes(out)


def draw_shape(rng: Random, dtype: str) -> KVShape:
    if rng.random() < 0.2:
        return KVShape.unknown(dtype, 8 * rng.randint(1, 40_000))
    order = "".join(rng.sample("khnc", 4))
    return KVShape(
        dtype,
        rng.randint(1, 5),
        rng.randint(1, 3),
        rng.randint(1, 2),
        rng.randint(1, 3),
        rng.choice((1, 7, 16, 64)),
        rng.choice((1, 8, 24)),
        order,
    )


def patterns(rng: Random, shape: KVShape) -> bytes:
    """Words of every class: ordinary, zeros of both signs, subnormals, infinities, NaNs with any payload, noise."""
    noise = np.frombuffer(rng.randbytes(shape.nbytes), shape.word).copy()
    if shape.dtype == "float8":
        return noise.tobytes()
    mantissa, exponent = LAYOUT[shape.dtype]
    low, top = (1 << mantissa) - 1, ((1 << exponent) - 1) << mantissa
    sign = noise & (1 << (mantissa + exponent))
    ordinary = sign | ((noise & low) + ((1 << (exponent - 1)) - 3 << mantissa))
    classes = [
        noise,
        sign,
        sign | (noise & low),
        sign | top,
        sign | top | (noise & low) | 1,
        ordinary,
        ordinary,
    ]
    choice = np.frombuffer(rng.randbytes(len(noise)), np.uint8) % len(classes)
    mixed = np.choose(choice, classes).astype(shape.word)
    return (classes[rng.randrange(7)].astype(shape.word) if rng.random() < 0.5 else mixed).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8"])
@pytest.mark.parametrize("seed", range(30))
def test_lossless_is_exact(dtype: str, seed: int) -> None:
    shape = draw_shape(rng := Random(f"{dtype}{seed}"), dtype)
    payload = patterns(rng, shape)
    assert decoded(Lossless(), encoded(Lossless(), payload, shape), shape) == payload


def test_lossless_is_exact_for_every_word_of_16_bits() -> None:
    shape = KVShape("bfloat16", 2, 1, 2, 2, 128, 64)
    payload = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert shape.nbytes == len(payload)
    assert decoded(Lossless(), encoded(Lossless(), payload, shape), shape) == payload


def to_float(data: bytes, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def from_float(values: Any, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return bytes(
            ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()
        )
    return bytes(values.astype(dtype).tobytes())


def normal(seed: int, shape: KVShape) -> Any:
    """A layer's channels with means and spreads of their own, K and V of different scale: [layers, *axes]."""
    generator = np.random.default_rng(seed)
    axes = (shape.layers, *shape.over("khc"))
    spread = generator.uniform(0.5, 2, axes) * np.array([3, 0.2][: shape.planes]).reshape(
        shape.over("k")
    )
    noise = generator.standard_normal((shape.layers, shape.blocks, *shape.page))
    return (noise * spread + 4 * spread * generator.standard_normal(axes)).astype(np.float32)


ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@LOSSY_BY_NAME
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("order", ["khnc", "hknc", "nkhc", "nhkc"])
def test_lossy_keeps_its_bound(codec: Any, dtype: str, order: str) -> None:
    shape = KVShape(dtype, 3, 2, 2, 2, 32, 16, order)
    payload = from_float(normal(7, shape), dtype)
    before = to_float(payload, dtype).reshape(shape.layers, shape.blocks, *shape.page)
    data = encoded(codec, payload, shape)
    after = to_float(decoded(codec, data, shape), dtype).reshape(before.shape)
    n, k = order.index("n") + 2, order.index("k") + 2
    if codec.name == "quantized":
        step = np.frombuffer(codec.kind.parameters, np.float32)[0]
        residual = before - before.mean(axis=(1, n), keepdims=True)
        sigma = np.sqrt(
            (residual**2).mean(axis=tuple(a for a in range(1, 6) if a != k), keepdims=True)
        )
        bound = sigma * step * (0.5 + 0.5 / MEAN_PARTS) * 1.05
    elif codec.name == "int8":
        bound = np.abs(before).max(axis=order.index("c") + 2, keepdims=True) * 0.004
    else:
        largest = np.abs(before).max(axis=tuple(a for a in range(1, 6) if a != k), keepdims=True)
        bound = np.maximum(np.abs(before) / 16, largest / 229_000)
    assert (np.abs(after - before) <= bound + np.abs(before) * ROUNDING[dtype]).all()
    assert (after != before).any()
    assert len(data) < len(payload)


@LOSSY_BY_NAME
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("seed", range(8))
def test_lossy_takes_any_bits(codec: Any, dtype: str, seed: int) -> None:
    shape = draw_shape(rng := Random(f"{dtype}{seed}"), dtype)
    if not shape.known:
        with pytest.raises(UnsupportedError, match="lossless"):
            codec.check(shape)
        return
    payload = patterns(rng, shape)
    back = decoded(codec, encoded(codec, payload, shape), shape)
    after, finite = to_float(back, dtype), np.isfinite(to_float(payload, dtype))
    assert (np.isfinite(after) == finite).all()
    assert np.array_equal(
        np.frombuffer(back, shape.word)[~finite], np.frombuffer(payload, shape.word)[~finite]
    )


@LOSSY_BY_NAME
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "scale", [0, 1e-45, 1e-40, 1e-38, 1e-30, 1e4, 6e4, 1e18, 1e19, 1e20, 1e30, 1e38, 3e38]
)
def test_finite_numbers_of_any_scale_stay_finite(codec: Any, dtype: str, scale: float) -> None:
    shape = KVShape(dtype, 3, 2, 2, 2, 32, 16)
    values = np.random.default_rng(11).uniform(-1.1, 1.1, shape.nbytes // shape.item) * scale
    values[: shape.layer_numbers] = scale  # a layer whose numbers are all alike
    with np.errstate(over="ignore"):
        highest = 65504 if dtype == "float16" else 3.38e38
        payload = from_float(values.clip(-highest, highest), dtype)
    assert np.isfinite(to_float(payload, dtype)).all()
    assert np.isfinite(to_float(decoded(codec, encoded(codec, payload, shape), shape), dtype)).all()


@LOSSY_BY_NAME
def test_lossy_refuses_one_byte_numbers(codec: Any) -> None:
    with pytest.raises(UnsupportedError, match=codec.name):
        codec.check(KVShape("float8", 1, 1, 2, 1, 16, 8))


def test_a_sink_is_kept_exactly() -> None:
    shape = KVShape("float32", 4, 2, 2, 2, 32, 16, "hknc")
    values = normal(3, shape)
    values[:, 0, :, :, 0] *= 0.05  # K and V of the first token, in every layer
    values[2, 1, 0, 0, 5, 3] = 1e5  # one number that no symbol expresses
    values[1, 1, :, :, 9] = np.nan
    after = to_float(
        decoded(Quantized(), encoded(Quantized(), values.tobytes(), shape), shape), "float32"
    )
    after = after.reshape(values.shape)
    assert np.array_equal(after[:, 0, :, :, 0], values[:, 0, :, :, 0])
    assert np.array_equal(after[2, 1, :, :, 5], values[2, 1, :, :, 5])
    assert np.isnan(after[1, 1, :, :, 9]).all()
    assert np.isfinite(after).sum() == np.isfinite(values).sum()


def sample(codec: Any) -> tuple[bytes, KVShape]:
    shape = KVShape("bfloat16", 3, 2, 2, 2, 16, 8)
    return encoded(codec, from_float(normal(5, shape), "bfloat16"), shape), shape


@BY_NAME
def test_other_lengths_and_other_shapes_are_refused(codec: Any) -> None:
    data, shape = sample(codec)
    for wrong in (b"", data[:-1], data + b"\0", data[:30], data[:64]):
        with pytest.raises(FrameError):
            decoded(codec, wrong, shape)
    other = KVShape("bfloat16", 3, 2, 2, 2, 16, 9)
    with pytest.raises(FrameError):
        decoded(codec, data, other)


def test_spans_of_another_rate_are_refused() -> None:
    data, shape = sample(Quantized("low"))
    with pytest.raises(FrameError):
        decoded(Quantized("high"), data, shape)


@BY_NAME
@pytest.mark.parametrize("seed", range(40))
def test_damage_is_refused_or_decodes_to_as_many_numbers(codec: Any, seed: int) -> None:
    data, shape = sample(codec)
    rng = Random(seed)
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        damaged[rng.randrange(len(damaged) if rng.random() < 0.5 else min(120, len(damaged)))] = (
            rng.randrange(256)
        )
    with suppress(FrameError):
        assert len(decoded(codec, bytes(damaged), shape)) == shape.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_frame(seed: int) -> None:
    _, shape = sample(Lossless())
    for codec in CODECS[1:]:
        with pytest.raises(FrameError):
            decoded(codec, Random(seed).randbytes(shape.nbytes), shape)
