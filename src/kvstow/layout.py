"""Byte geometry of a chunk: the spans of its shards, its frame, and their alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

ALIGN: Final = 4096
HEADER_BYTES: Final = 4096
AUTO_FRAME_BYTES: Final = 4 << 20
MIN_CHUNKS: Final = 4  # the least that a tier holds: one filled, one loaded, one sealed, one to hit
AUTO_MAX_TOKENS: Final = 128


def align_up(length: int, to: int = ALIGN) -> int:
    """The smallest multiple of ``to`` that is at least ``length``."""
    return -(-length // to) * to


class Span(NamedTuple):
    """``length`` payload bytes at byte ``offset`` of a place's address space."""

    offset: int
    length: int


class Place(NamedTuple):
    """Where a worker copies one chunk's pages to and from, with one span for each distinct shard.

    ``kind`` names the address space of the offsets: ``"pool"`` is the shared host pool, ``"direct"``
    an extent of direct storage. Only its owner may assume that spans are adjacent or equally long.
    """

    kind: Literal["pool", "direct"]
    spans: tuple[Span, ...]
    tag: bytes = b""  # tells the fillings of one extent apart


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages as the device recognised them."""

    name: str
    page_bytes: int
    layout: str  # the recognised KV layout's name, which enters the namespace


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One KV cache group on one rank.

    The payload of a chunk's shard is its layers in this order, and each layer's blocks in order.
    """

    block_tokens: int
    layers: tuple[LayerPages, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True)
class GroupLayout:
    """Geometry of one group's chunks over all ranks.

    ``shard_block_bytes[s]`` is the size of one block over all layers of distinct shard ``s``. Ranks
    that hold identical bytes share a shard: MLA latents, or fewer KV heads than ranks.
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
        """Bytes of the header page and of every span, padded to ``ALIGN``."""
        return HEADER_BYTES + sum(align_up(n) for n in self.payload_lengths)

    def spans(self, frame_offset: int = 0) -> tuple[Span, ...]:
        """Span of each shard in a frame whose header page starts at ``frame_offset``."""
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
    """Tokens in a chunk with ``chunk_size: auto``.

    It is the smallest multiple of ``block_tokens`` whose frame is at least 4 MiB, and at most
    ``max(block_tokens, 128)``. ``block_bytes`` holds the bytes of one block of each group and shard.
    """
    most = max(block_tokens, AUTO_MAX_TOKENS // block_tokens * block_tokens)
    blocks = 1
    while blocks * block_tokens < most:
        if HEADER_BYTES + sum(align_up(b * blocks) for b in block_bytes) >= AUTO_FRAME_BYTES:
            break
        blocks += 1
    return blocks * block_tokens
