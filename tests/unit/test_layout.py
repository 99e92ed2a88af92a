import pytest

from kvstow.layout import (
    ALIGN,
    HEADER_BYTES,
    ChunkLayout,
    GroupLayout,
    Span,
    align_up,
    auto_chunk_tokens,
)


@pytest.mark.parametrize(("length", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_align_up(length: int, aligned: int) -> None:
    assert align_up(length) == aligned


def test_a_frame_is_a_header_page_and_a_padded_span_a_shard() -> None:
    group = GroupLayout(block_tokens=16, blocks_per_chunk=2, shard_block_bytes=(2048, 2049))
    assert group.chunk_tokens == 32
    assert group.payload_lengths == (4096, 4098)
    assert group.spans() == (Span(HEADER_BYTES, 4096), Span(HEADER_BYTES + 4096, 4098))
    assert group.frame_bytes == HEADER_BYTES + 4096 + 8192


@pytest.mark.parametrize("offset", [0, 4096, 20480])
def test_spans_are_aligned_apart_and_inside_the_frame(offset: int) -> None:
    group = GroupLayout(block_tokens=1, blocks_per_chunk=3, shard_block_bytes=(1, 1365, 4096, 5000))
    end = offset + HEADER_BYTES
    for span, length in zip(group.spans(offset), group.payload_lengths, strict=True):
        assert span.offset % ALIGN == 0
        assert span.offset >= end
        assert span.length == length
        end = span.offset + length
    assert end <= offset + group.frame_bytes


def test_the_largest_group_sets_the_frame() -> None:
    small, large = GroupLayout(16, 2, (100,)), GroupLayout(32, 1, (9000,))
    layout = ChunkLayout((small, large))
    assert layout.chunk_tokens == 32
    assert layout.max_frame_bytes == large.frame_bytes


@pytest.mark.parametrize(
    ("block_tokens", "block_bytes", "tokens"),
    [
        (16, [2 << 20], 32),  # an 8B model: 128 KiB a token
        (16, [4 << 20], 16),  # one block is enough
        (128, [23040 * 2 * 128], 128),  # SmolLM2 in float32: one block
        (16, [1 << 10], 128),  # never above 128 tokens
        (48, [1], 96),  # a multiple of the block below 128
        (1024, [1], 1024),  # a block above 128 tokens
        (16, [1 << 20, 1 << 20], 32),  # over all groups and shards
    ],
)
def test_auto_chunk_tokens(block_tokens: int, block_bytes: list[int], tokens: int) -> None:
    assert auto_chunk_tokens(block_tokens, block_bytes) == tokens
