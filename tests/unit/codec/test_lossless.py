"""Pairs of exponents, the list of those that do not fit, and forged ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("backports.zstd")

from kvstow.codec.lossless import Lossless
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError

SHAPE = KVShape("bfloat16", 2, 2, 2, 2, 64, 16, "hknc")
NUMBERS = SHAPE.nbytes // 2


def words(odd_ones: int, shape: KVShape = SHAPE) -> np.ndarray:
    """Normal numbers, of which some are far smaller or larger."""
    generator = np.random.default_rng(1)
    numbers = generator.standard_normal(shape.nbytes // 2).astype(np.float32)
    numbers[np.abs(numbers) < 0.01] = 1
    at = generator.choice(len(numbers), odd_ones, replace=False)
    numbers[at] = np.where(generator.random(odd_ones) < 0.5, np.float32(1e-6), np.float32(1e4))
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def encoded(data: np.ndarray, shape: KVShape = SHAPE) -> bytearray:
    codec = Lossless()
    out = memoryview(bytearray(codec.max_encoded_bytes(shape)))
    return bytearray(out[: codec.encode(memoryview(data.tobytes()), shape, out)])


def decoded(data: bytes | bytearray, shape: KVShape = SHAPE) -> np.ndarray:
    out = bytearray(b"\xdd" * shape.nbytes)
    Lossless().decode(memoryview(data), shape, memoryview(out))
    return np.frombuffer(out, np.uint16)


@pytest.mark.parametrize(("odd_ones", "paired"), [(0, 1), (1, 1), (NUMBERS // 256, 1), (NUMBERS // 256 + 1, 0)])
def test_numbers_that_do_not_fit_are_listed_or_too_many(odd_ones: int, paired: int) -> None:
    data = encoded(before := words(odd_ones))
    assert data[-1] == paired, "the last stream says which segments have pairs"
    assert np.array_equal(decoded(data), before)
    assert len(data) < SHAPE.nbytes * (0.72 if paired else 0.75)


def test_an_odd_count_has_no_pairs() -> None:
    shape = KVShape("bfloat16", 3, 1, 1, 1, 7, 9)
    data = encoded(before := words(0, shape), shape)
    assert data[-1] == 0
    assert np.array_equal(decoded(data, shape), before)
    data[-1] = 1
    with pytest.raises(FrameError):
        decoded(data, shape)


@pytest.mark.parametrize("place", [0, 7, 8, NUMBERS // 2, NUMBERS - 1])
def test_wherever_it_is(place: int) -> None:
    before = words(0)
    before[place] = 0x7F81  # a NaN
    assert np.array_equal(decoded(encoded(before)), before)


def test_a_list_that_cannot_be() -> None:
    data = encoded(words(5))
    lengths = [struct.unpack_from("<I", data, 64 + 4 * i)[0] for i in range(6)]
    assert lengths[2:4] == [20, 10], "places, numbers"
    places = 64 + 4 * 6 + sum(lengths[:2])
    for at, value in (
        (places, struct.pack("<I", NUMBERS)),
        (places, struct.pack("<I", 2**32 - 1)),
        (len(data) - 1, b"\2"),  # neither pairs nor none
        (len(data) - 1, b"\0"),  # a list without pairs
        (64 + 8, struct.pack("<II", 18, 12)),
        (64 + 8, struct.pack("<II", 24, 6)),
    ):
        forged = data[:]
        forged[at : at + len(value)] = value
        with pytest.raises(FrameError):
            decoded(forged)


@pytest.mark.parametrize("place", [-1, -2, -3])
def test_the_last_numbers_of_an_uneven_count_are_listed_too(place: int) -> None:
    """The search goes by eights; what is left over is searched for itself."""
    shape = KVShape("bfloat16", 1, 1, 1, 1, 257, 2)
    assert shape.nbytes // 2 % 8 == 2
    before = words(0, shape)
    before[place] = 0x7F7F  # near the largest number
    data = encoded(before, shape)
    assert data[-1] == 1
    assert np.array_equal(decoded(data, shape), before)
