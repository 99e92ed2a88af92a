"""Spans whose tables are in order and whose streams are not: refused, or decoded, within bounds. Each is seeded."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("backports.zstd")

from backports import zstd

from kvstow.codec import choose
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError, UnsupportedError

HEAD, GUARD = 64, 64
CASES = 400
AXES = [
    (3, 2, 2, 2, 16, 8, "hknc"),  # blocks are halved
    (4, 1, 2, 1, 33, 8, "khnc"),  # layers
    (1, 1, 1, 2, 64, 32, "nkhc"),  # tokens
    (1, 1, 1, 1, 7, 9, "khnc"),  # nothing
    (1, 1, 1, 1, 1, 1, "khnc"),
]
LENGTHS = (0, 4, 1 << 16, 1 << 32, 1 << 40, 1 << 63)


@lru_cache
def spans(name: str) -> list[tuple[KVShape, bytes]]:
    """Of every shape and type that the codec takes, with numbers to list and numbers to keep."""
    codec, found = choose.codec(name), []
    for dtype in ("bfloat16", "float16", "float32", "float8"):
        for axes in AXES:
            shape = KVShape(dtype, *axes)
            try:
                codec.check(shape)
            except UnsupportedError:
                continue
            generator = np.random.default_rng(1)
            numbers = generator.standard_normal(shape.nbytes // shape.item).astype(np.float32)
            numbers[generator.integers(0, len(numbers), len(numbers) // 500)] = 60_000
            bits = numbers.view(np.uint32) >> (8 * (4 - shape.item) if dtype != "float16" else 0)
            words = (
                numbers.astype(np.float16).view(np.uint16)
                if dtype == "float16"
                else bits.astype(shape.word)
            )
            out = memoryview(bytearray(codec.max_encoded_bytes(shape)))
            found.append(
                (shape, bytes(out[: codec.encode(memoryview(words.tobytes()), shape, out)]))
            )
    return found


def streams(span: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", span, 52)
    at, found = HEAD + 4 * count, []
    for length in struct.unpack_from(f"<{count}I", span, HEAD):
        at = -(-at // 8) * 8
        found.append(span[at : at + length])
        at += length
    return found


def whole(head: bytes, parts: list[bytes]) -> bytes:
    out = bytearray(head[:HEAD]) + struct.pack(f"<{len(parts)}I", *map(len, parts))
    for part in parts:
        out += bytes(-len(out) % 8) + part
    return bytes(out)


def hostile(rng: Random, stream: bytes) -> bytes:
    """Another stream: cut, lengthened, flipped, noise, and zstd frames of all kinds but the right one."""
    magic = b"\x28\xb5\x2f\xfd"
    flipped = bytearray(stream)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if flipped:
            flipped[rng.randrange(min(len(flipped), rng.choice((8, 1 << 30))))] ^= (
                1 << rng.randrange(8)
            )
    length = rng.choice(LENGTHS)
    choices: list[Callable[[], bytes]] = [
        lambda: bytes(flipped),
        lambda: stream[: rng.randrange(len(stream) + 1)],
        lambda: stream + rng.randbytes(5),
        lambda: b"",
        lambda: stream + stream,
        lambda: rng.randbytes(len(stream)),
        lambda: magic + rng.randbytes(len(stream)),
        lambda: zstd.compress(stream, 1),
        lambda: zstd.compress(bytes(min(length, 1 << 22)), 1),
        lambda: zstd.compress(rng.randbytes(2 * len(stream)), 1),
        lambda: zstd.compress(b""),
        lambda: (
            struct.pack("<II", 0x184D2A50, rng.choice((0, 4, 1 << 31))) + rng.randbytes(4)
        ),  # a frame to skip
        lambda: (
            magic
            + rng.choice((b"\xe0", b"\xc0\xf8", b"\x04\xf8"))
            + struct.pack("<Q", length)
            + rng.randbytes(9)
        ),
    ]
    return rng.choice(choices)()


def mutated(rng: Random, span: bytes) -> bytes:
    parts = streams(span)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        if rng.random() < 0.1:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at] = hostile(rng, parts[at])
    return whole(span, parts)


def test_what_takes_spans_apart_puts_them_together() -> None:
    for name in choose.NAMES[1:]:
        for _, span in spans(name):
            assert whole(span, streams(span)) == span


@pytest.mark.parametrize("name", choose.NAMES[1:])
def test_hostile_streams_are_refused_or_decoded_within_bounds(name: str) -> None:
    codec: Any = choose.codec(name)
    rng, refused = Random(name), 0
    tracemalloc.start()
    try:
        for _ in range(CASES):
            shape, span = rng.choice(spans(name))
            data = mutated(rng, span)
            out = bytearray(b"\xdd" * (shape.nbytes + 2 * GUARD))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            refused += 1
            with suppress(FrameError), warnings.catch_warnings():
                warnings.simplefilter("error")
                codec.decode(memoryview(data), shape, memoryview(out)[GUARD : GUARD + shape.nbytes])
                refused -= 1
            assert tracemalloc.get_traced_memory()[1] - before < 8 * shape.nbytes + len(data) + (
                128 << 10
            )
            assert out[:GUARD] == out[-GUARD:] == b"\xdd" * GUARD
    finally:
        tracemalloc.stop()
    assert CASES // 2 < refused < CASES
