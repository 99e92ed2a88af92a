"""Byte geometry of a chunk: payload, frame and alignment; per-group, per-shard and per-layer spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

ALIGN: Final = 4096
HEADER_BYTES: Final = 4096
AUTO_FRAME_BYTES: Final = 4 << 20
AUTO_MAX_TOKENS: Final = 128


def align_up(length: int, to: int = ALIGN) -> int:
    """The smallest multiple of ``to`` that is at least ``length``."""
    return -(-length // to) * to


class Span(NamedTuple):
    """``length`` payload bytes at byte ``offset`` of a place's address space (both in bytes)."""

    offset: int
    length: int


class Place(NamedTuple):
    """What a worker copies pages to and from: one chunk's payload, a span per distinct shard.

    ``kind`` says whose address space the offsets are in: ``"pool"`` is the shared host pool, ``"direct"`` an
    extent of direct storage. Nothing outside the owner assumes that spans are adjacent or of equal length.
    """

    kind: Literal["pool", "direct"]
    spans: tuple[Span, ...]
    tag: bytes = b""  # of an extent: which filling of it this is


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages as the device recognised them."""

    name: str
    page_bytes: int
    layout: str  # the recognised KV layout's name, which enters the namespace


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One KV cache group on one rank. Payload of a chunk's shard: layers in this order, each its blocks in order."""

    block_tokens: int
    layers: tuple[LayerPages, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True)
class GroupLayout:
    """Geometry of one group's chunks over all ranks.

    ``shard_block_bytes[s]`` is the size of one block over all layers of distinct shard ``s``. Ranks that hold
    identical bytes (MLA latents, fewer KV heads than ranks) name the same shard.
    """

    block_tokens: int
    blocks_per_chunk: int
    shard_block_bytes: tuple[int, ...]

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @cached_property
    def payload_lengths(self) -> tuple[int, ...]:
        """Payload bytes of each shard's span, without padding."""
        return tuple(b * self.blocks_per_chunk for b in self.shard_block_bytes)

    @cached_property
    def frame_bytes(self) -> int:
        """Header page plus every span padded to ``ALIGN``."""
        return HEADER_BYTES + sum(align_up(n) for n in self.payload_lengths)

    def spans(self, frame_offset: int = 0) -> tuple[Span, ...]:
        """Span of each shard for a frame that starts at ``frame_offset``; the header page comes first."""
        spans: list[Span] = []
        at = frame_offset + HEADER_BYTES
        for length in self.payload_lengths:
            spans.append(Span(at, length))
            at += align_up(length)
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Geometry of every group's chunks. All groups share one ``chunk_tokens``."""

    groups: tuple[GroupLayout, ...]

    @property
    def chunk_tokens(self) -> int:
        return self.groups[0].chunk_tokens

    @property
    def max_frame_bytes(self) -> int:
        return max(group.frame_bytes for group in self.groups)


def auto_chunk_tokens(block_tokens: int, block_bytes: Sequence[int]) -> int:
    """``chunk_size: auto``: the smallest multiple of ``block_tokens`` whose frame over all groups and shards
    (``block_bytes``: bytes of one block of each) is at least 4 MiB, but at most ``max(block_tokens, 128)``.
    """
    most = max(block_tokens, AUTO_MAX_TOKENS // block_tokens * block_tokens)
    blocks = 1
    while blocks * block_tokens < most:
        if HEADER_BYTES + sum(align_up(b * blocks) for b in block_bytes) >= AUTO_FRAME_BYTES:
            break
        blocks += 1
    return blocks * block_tokens
