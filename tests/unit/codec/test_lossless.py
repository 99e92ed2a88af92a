"""Pairs of exponents, the list of those that do not fit, and forged ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("backports.zstd")

from backports import zstd

from kvstow.codec.lossless import _BASE_BELOW_MEAN, Lossless, _find_bases
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


@pytest.mark.parametrize(
    ("odd_ones", "paired"), [(0, 1), (1, 1), (NUMBERS // 256, 1), (NUMBERS // 256 + 1, 0)]
)
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


def streams(data: bytearray, count: int) -> list[tuple[int, int]]:
    """Where they begin, and their lengths."""
    at, found = 64 + 4 * count, []
    for i in range(count):
        (length,) = struct.unpack_from("<I", data, 64 + 4 * i)
        found.append((-(-at // 8) * 8, length))
        at = found[-1][0] + length
    assert at == len(data)
    return found


def test_a_list_that_cannot_be() -> None:
    data = encoded(words(5))
    (_, _), (_, _), (places, length), (_, exact_length), *_ = streams(data, 6)
    assert (length, exact_length) == (20, 20), "pairs, both numbers of each"
    for at, value in (
        (places, struct.pack("<I", NUMBERS // 2)),
        (places, struct.pack("<I", 2**32 - 1)),
        (len(data) - 1, b"\2"),  # neither nibbles nor bytes
        (len(data) - 1, b"\0"),  # a list without nibbles
        (64 + 8, struct.pack("<I", 21)),  # the next begins where it did
        (64 + 8, struct.pack("<I", 24)),
        (64 + 8, struct.pack("<I", 16)),
    ):
        forged = data[:]
        forged[at : at + len(value)] = value
        with pytest.raises(FrameError):
            decoded(forged)


def test_fewer_bytes_than_there_are_uncoded_symbols() -> None:
    data = encoded(words(0))
    (first, _), (second, _), *_ = streams(data, 6)
    pairs = NUMBERS // 2
    frame = zstd.compress(bytes(pairs - pairs // 6), 1)
    assert len(frame) < pairs // 6
    forged = data[:first] + frame + bytes(-(first + len(frame)) % 8) + data[second:]
    struct.pack_into("<I", forged, 64, len(frame))
    assert streams(forged, 6)
    with pytest.raises(FrameError, match="symbols in"):
        decoded(forged)


def test_gaps_between_streams_say_nothing_of_what_the_buffer_had() -> None:
    out = memoryview(bytearray(b"\xee" * Lossless().max_encoded_bytes(SHAPE)))
    data = bytearray(out[: Lossless().encode(memoryview(words(5).tobytes()), SHAPE, out)])
    ends = [begin + length for begin, length in streams(data, 6)]
    gaps = [data[end:begin] for end, (begin, _) in zip(ends, streams(data, 6)[1:], strict=False)]
    assert any(gaps)
    assert not any(map(any, gaps))


@pytest.mark.parametrize("place", [-1, -2, -3])
def test_the_last_pairs_of_an_uneven_count_are_listed_too(place: int) -> None:
    """The search goes by fours; what is left over is searched for itself."""
    shape = KVShape("bfloat16", 1, 1, 1, 1, 386, 1)
    assert shape.nbytes // 4 % 4 == 1
    before = words(0, shape)
    before[place] = 0x7F7F  # near the largest number
    data = encoded(before, shape)
    assert data[-1] == 1
    assert np.array_equal(decoded(data, shape), before)


@pytest.mark.parametrize("order", ["khnc", "hknc", "nkhc", "hnkc", "cnkh", "khcn"])
@pytest.mark.parametrize(
    ("layers", "blocks", "tokens"), [(4, 1, 33), (3, 2, 33), (3, 1, 66), (2, 48, 16)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_channels_of_any_scale_are_paired_whatever_is_halved(
    dtype: str, order: str, layers: int, blocks: int, tokens: int
) -> None:
    """Each channel has another exponent; only what is counted from its own base fits 4 bits."""
    shape = KVShape(dtype, layers, blocks, 2, 2, tokens, 8, order)
    generator = np.random.default_rng(1)
    scales = np.exp2(generator.integers(-60, 60, (layers, *shape.over("khc"))))
    numbers = generator.uniform(1, 4, (layers, blocks, *shape.page)) * scales
    before = numbers.astype(np.float32).view(np.uint32)
    if dtype == "bfloat16":
        before = (before >> 16).astype(np.uint16)
    data = encoded(before, shape)
    assert data[-1] == 1
    out = bytearray(shape.nbytes)
    Lossless().decode(memoryview(data), shape, memoryview(out))
    assert bytes(out) == before.tobytes()
    assert len(data) < shape.nbytes * (0.72 if dtype == "bfloat16" else 0.9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_where_no_axis_has_two_halves_bytes_are_coded(dtype: str) -> None:
    shape = KVShape(dtype, 3, 1, 1, 1, 7, 81)
    before = np.random.default_rng(1).integers(0, 3, shape.nbytes, np.uint8)
    data = encoded(before, shape)
    assert data[-1] == 0
    assert len(data) < 0.5 * shape.nbytes
    out = bytearray(shape.nbytes)
    Lossless().decode(memoryview(data), shape, memoryview(out))
    assert bytes(out) == before.tobytes()
    data[-1] = 1
    with pytest.raises(FrameError):
        Lossless().decode(memoryview(data), shape, memoryview(out))


@pytest.mark.parametrize("order", ["khnc", "nkhc", "cnkh"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 48, 63, 64, 65, 1000])
def test_references_of_chunks_of_any_length(blocks: int, tokens: int, order: str) -> None:
    """The sum over more than 257 tokens would not fit."""
    shape = KVShape("bfloat16", 2, blocks, 1, 2, tokens, 3, order)
    exponents = np.random.default_rng(1).integers(200, 256, (2, *shape.over("khc")), np.uint16)
    words = np.broadcast_to(exponents << 7, (2, blocks, *shape.page)).copy().reshape(2, -1)
    bases = np.zeros(exponents.shape, np.uint8)
    _find_bases(words, shape, bases)
    assert np.array_equal(bases, exponents - _BASE_BELOW_MEAN)
