"""Whole frames through every codec, and frames that somebody made up."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

pytest.importorskip("backports.zstd")

from kvstow import frame
from kvstow.codec import choose
from kvstow.codec.container import Kind
from kvstow.codec.frames import FrameCoder
from kvstow.codec.shape import DTYPES, KVShape
from kvstow.errors import FrameError, UnsupportedError
from kvstow.layout import HEADER_BYTES, ChunkLayout, GroupLayout
from tests.unit.codec.kv import (
    CODED,
    FRAME_BYTES,
    GROUP,
    LAYOUT,
    SHAPES,
    TOKENS,
    coder,
    key,
    near,
    payload,
    sealed,
    spans_of,
)

KEY = b"k" * 32


def refuses(name: str, shape: KVShape) -> bool:
    try:
        choose.codec(name).check(shape)
    except UnsupportedError:
        return True
    return False


def coded(name: str, seed: int, integrity_key: bytes | None = None) -> memoryview:
    return memoryview(bytearray(coder(name).encode(sealed(seed, integrity_key), integrity_key)))


def restored(
    data: memoryview, name: str = "raw", seed: int = 1, integrity_key: bytes | None = None
) -> memoryview:
    """As a tier does: into a slot, checked, decoded."""
    slot = memoryview(bytearray(b"\xaa" * FRAME_BYTES))
    slot[: len(data)] = data
    header = frame.check(slot, len(data), key(seed), GROUP, coded=True, integrity_key=integrity_key)
    coder(name).decode(slot, header)
    return slot


@pytest.mark.parametrize("integrity_key", [None, KEY])
@pytest.mark.parametrize("name", CODED)
def test_there_and_back(name: str, integrity_key: bytes | None) -> None:
    data = coded(name, 1, integrity_key)
    assert len(data) < 0.8 * FRAME_BYTES
    assert len(data) % 4096 == 0
    header = frame.check(data, len(data), key(1), GROUP, coded=True, integrity_key=integrity_key)
    codec = choose.codec(name)
    assert (header.codec_id, header.lossy) == (codec.kind.codec_id, codec.lossy)
    assert header.codec_parameters == bytes([codec.kind.version]) + codec.kind.parameters
    assert (header.parent, header.tokens, header.created) == (b"parent", TOKENS, 1.0)
    slot = restored(data, integrity_key=integrity_key)
    assert near(spans_of(slot), 1)
    assert (spans_of(slot) == payload(1)) == (not codec.lossy)
    assert bytes(slot[:HEADER_BYTES]) == bytes(HEADER_BYTES), (
        "no header that says something else stays in the slot"
    )
    with pytest.raises(FrameError, match="not raw"):
        frame.check(
            data, len(data), key(1), replace(GROUP, shard_block_bytes=(len(data) - 4096 >> 1,))
        )


@pytest.mark.parametrize("reader", ["raw", *CODED])
@pytest.mark.parametrize("writer", CODED)
def test_any_codec_reads_what_any_other_wrote(writer: str, reader: str) -> None:
    assert near(spans_of(restored(coded(writer, 2), reader, 2)), 2)


def test_threads_of_a_coder_have_a_buffer_each_and_use_it_again() -> None:
    one = coder("lossless")
    first = one.encode(sealed(1), None)
    again = bytes(first)
    assert bytes(one.encode(sealed(1), None)) == again
    other = one.encode(sealed(2), None)
    assert other.obj is first.obj, "one buffer a thread"


def test_what_coding_does_not_shorten_stays_a_raw_frame() -> None:
    slot = memoryview(bytearray(FRAME_BYTES))
    rng = Random(1)
    for span in GROUP.spans():
        slot[span.offset : span.offset + span.length] = rng.randbytes(span.length)
    frame.seal(slot, key(1), GROUP, TOKENS, b"", 0.0)
    assert coder("lossless").encode(slot, None) is slot


def test_a_codec_that_does_not_suit_the_kv_is_refused_by_name() -> None:
    bytes_of = [[KVShape.unknown("bfloat16", shape.nbytes) for shape in SHAPES[0]]]
    FrameCoder(choose.codec("lossless"), LAYOUT, bytes_of, choose.known)
    with pytest.raises(UnsupportedError, match=r"quantized.*lossless"):
        FrameCoder(choose.codec("quantized"), LAYOUT, bytes_of, choose.known)
    with pytest.raises(ValueError):
        FrameCoder(choose.codec("raw"), LAYOUT, [[SHAPES[0][0]] * 2], choose.known)


def test_kinds_that_are_known() -> None:
    assert all(choose.known(choose.codec(name).kind) is not None for name in CODED)
    lossless = choose.codec("lossless").kind
    for other in (
        lossless._replace(version=9),
        lossless._replace(parameters=b"x"),
        Kind(77, 1),
        Kind(0, 0),
    ):
        assert choose.known(other) is None


# --- made up ---


def forged(data: memoryview, **changes: Any) -> memoryview:
    """The same payload behind another header, with checksums that match."""
    header = frame.parse_header(data[:HEADER_BYTES])._replace(**changes)
    whole = memoryview(bytearray(header.frame_length))
    copied = min(len(whole), len(data))
    whole[:copied] = data[:copied]
    checksum = frame.PayloadChecksum()
    for span in header.spans:
        checksum.update(whole[span.offset : span.offset + span.length])
    frame.write_header(whole, header, checksum, None)
    return whole


@pytest.mark.parametrize("name", CODED)
def test_every_damaged_byte_of_a_header_and_every_shorter_frame_is_a_frame_error(name: str) -> None:
    data = coded(name, 1)
    for at in range(0, HEADER_BYTES, 7):
        damaged = memoryview(bytearray(data))
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FrameError):
            restored(damaged)
    for length in (0, 1, 4095, 4096, 4097, len(data) - 4096, len(data) - 1):
        with pytest.raises(FrameError):
            restored(data[:length])
    with pytest.raises(FrameError):
        restored(memoryview(bytes(data) + bytes(4096)))


@pytest.mark.parametrize("name", CODED)
def test_headers_that_do_not_fit_the_layout_or_the_codec_are_frame_errors(name: str) -> None:
    data = coded(name, 1)
    header = frame.parse_header(data[:HEADER_BYTES])
    one, two = header.spans
    other = next(n for n in CODED if choose.codec(n).kind.codec_id != header.codec_id)
    kind = choose.codec(other).kind
    for changes in (
        {"codec_id": 0},
        {"codec_id": 77},
        {"codec_parameters": b""},
        {"codec_parameters": header.codec_parameters + b"\0"},
        {"codec_parameters": b"\x09" + header.codec_parameters[1:]},
        {"codec_id": kind.codec_id, "codec_parameters": bytes([kind.version]) + kind.parameters},
        {"raw_length": header.raw_length - 1},
        {"raw_length": 1 << 61},
        {"tokens": TOKENS + 1},
        {"spans": (one,)},
        {"spans": frame.frame_spans((one.length, two.length, 5))},
        {"spans": frame.frame_spans((one.length + 4096, two.length))},
        {"spans": frame.frame_spans((two.length, one.length))},
        {"spans": (one, two._replace(shard=0))},
        {"spans": (one._replace(offset=8192), two._replace(offset=two.offset + 8192))},
        {"spans": frame.frame_spans((one.length - 1, two.length))},
        {"key": key(2)},
    ):
        with pytest.raises(FrameError):
            restored(forged(data, **changes))


def test_a_lossy_frame_that_calls_itself_exact_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="says that it is exact"):
        restored(forged(coded("quantized", 1), lossy=False))


REFUSED = [
    (name, shape)
    for name in CODED
    for shape in (
        *(KVShape(dtype, 2, 2, 2, 2, 32, 32, "hnkc") for dtype in DTYPES),
        *(KVShape.unknown(dtype, 16384) for dtype in DTYPES),
    )
    if refuses(name, shape)
]


@pytest.mark.parametrize(("name", "shape"), REFUSED)
def test_a_frame_of_a_codec_that_refuses_this_kv_is_a_frame_error(
    name: str, shape: KVShape
) -> None:
    """Whoever can write to a tier may name any codec; what the codec would do with such KV is nobody's business."""
    layout = ChunkLayout((GroupLayout(64, 1, (shape.nbytes,)),))
    group, codec = layout.groups[0], choose.codec(name)
    raw = memoryview(bytearray(layout.max_frame_bytes))
    frame.seal(raw, key(1), group, 64, b"", 0.0)
    parameters = bytes([codec.kind.version]) + codec.kind.parameters
    data = forged(raw, lossy=codec.lossy, codec_id=codec.kind.codec_id, codec_parameters=parameters)
    reader = FrameCoder(choose.codec("lossless"), layout, [[shape]], choose.known)
    slot = memoryview(bytearray(layout.max_frame_bytes))
    slot[: len(data)] = data
    header = frame.check(slot, len(data), key(1), group, coded=True)
    with pytest.raises(FrameError, match=r"can't have made.*use lossless"):
        reader.decode(slot, header)


def test_every_lossy_codec_refuses_bytes_and_what_is_not_known() -> None:
    lossy = {name for name in CODED if choose.codec(name).lossy}
    assert {name for name, _ in REFUSED} == lossy
    assert len(REFUSED) == len(lossy) * 5


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("seed", range(25))
def test_forged_payloads_are_frame_errors_or_as_many_numbers(name: str, seed: int) -> None:
    """Checksums match: whoever can write to a tier without an integrity key can compute them."""
    data, rng = coded(name, 1), Random(f"{name}{seed}")
    header = frame.parse_header(data[:HEADER_BYTES])
    span = rng.choice(header.spans)
    for _ in range(rng.choice((1, 1, 2, 40))):
        near_start = rng.random() < 0.6
        at = span.offset + rng.randrange(140 if near_start else span.length)
        if rng.random() < 0.3:
            struct.pack_into(
                "<I",
                data,
                min(at, span.offset + span.length - 4),
                rng.choice((0, 1, 2**31, 2**32 - 1)),
            )
        else:
            data[at] = rng.randrange(256)
    with suppress(FrameError):
        slot = restored(forged(data))
        assert len(slot) == FRAME_BYTES


def test_with_a_key_nothing_forged_is_decoded() -> None:
    data = coded("lossless", 1, KEY)
    for wrong in (forged(data), coded("lossless", 1), coded("lossless", 1, b"x" * 32)):
        with pytest.raises(FrameError, match=r"MAC|keyed"):
            restored(wrong, integrity_key=KEY)
