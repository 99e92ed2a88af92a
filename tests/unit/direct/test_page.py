"""An extent's header page: what it says, and that nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.direct.page import check_page, seal_page, tag_of
from kvstow.errors import FrameError
from kvstow.key import ChunkKey, Namespace

NAMESPACE = Namespace.from_fields({"made by": "page test"})
KEY = ChunkKey.build(NAMESPACE, 0, b"h" * 32)
TAG = tag_of(KEY, 7)
SUM = bytes(range(16))


@given(
    prefix=st.binary(min_size=1, max_size=64),
    generation=st.integers(0, 2**64 - 1),
    shard=st.integers(0, 2**32 - 1),
    length=st.integers(1, 2**62),
    checksum=st.none() | st.binary(min_size=16, max_size=16),
)
def test_round_trip(
    prefix: bytes, generation: int, shard: int, length: int, checksum: bytes | None
) -> None:
    tag = tag_of(ChunkKey.build(NAMESPACE, 3, prefix), generation)
    assert check_page(seal_page(tag, shard, length, checksum), tag, shard, length) == checksum


@pytest.mark.parametrize(
    ("tag", "shard", "length", "why"),
    [
        (tag_of(KEY, 8), 1, 100, "earlier filling"),
        (tag_of(ChunkKey.build(NAMESPACE, 0, b"i" * 32), 7), 1, 100, "another chunk"),
        (tag_of(ChunkKey.build(NAMESPACE, 1, b"h" * 32), 7), 1, 100, "another chunk"),
        (tag_of(ChunkKey.build(NAMESPACE, 0, b"h" * 31), 7), 1, 100, "another chunk"),
        (TAG, 2, 100, "shard 1, not of 2"),
        (TAG, 1, 101, "payload of 100 bytes, not of 101"),
    ],
)
def test_of_something_else(tag: bytes, shard: int, length: int, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        check_page(seal_page(TAG, 1, 100, SUM), tag, shard, length)


@given(bit=st.integers(0, 4096 * 8 - 1))
def test_a_flipped_bit(bit: int) -> None:
    page = bytearray(seal_page(TAG, 1, 100, SUM))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        check_page(bytes(page), TAG, 1, 100)


@pytest.mark.parametrize("page", [b"", bytes(4096), bytes(4095), seal_page(TAG, 1, 100, SUM)[:-1]])
def test_not_a_page(page: bytes) -> None:
    with pytest.raises(FrameError):
        check_page(page, TAG, 1, 100)


@pytest.mark.parametrize("length", [0, 99])
def test_a_key_that_does_not_fit(length: int) -> None:
    with pytest.raises(FrameError, match="a key of"):
        seal_page(bytes(8) + bytes(length), 0, 1, None)
