"""KV-like payloads of two shards, their layout, and tiers' coders."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvstow import frame
from kvstow.codec import choose
from kvstow.codec.frames import FrameCoder
from kvstow.codec.shape import KVShape
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout

SHAPES = [[KVShape("bfloat16", 2, 2, 2, heads, 32, 32, "hnkc") for heads in (2, 1)]]
LAYOUT = ChunkLayout((GroupLayout(32, 2, tuple(shape.nbytes // 2 for shape in SHAPES[0])),))
GROUP = LAYOUT.groups[0]
FRAME_BYTES = LAYOUT.max_frame_bytes
TOKENS = LAYOUT.chunk_tokens
NAMESPACE = Namespace.from_fields({"made by": "kv"})
CODED = [name for name in choose.NAMES if name != "raw"]


def key(i: int) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, i.to_bytes(32, "little"))


def coder(name: str) -> FrameCoder:
    return FrameCoder(choose.codec(name), LAYOUT, SHAPES, choose.known)


@lru_cache(maxsize=256)
def payload(seed: int) -> tuple[bytes, ...]:
    """Each shard's, such as a model computes: channels with means and spreads of their own."""
    generator = np.random.default_rng(seed)
    spans = []
    for shape in SHAPES[0]:
        axes = (shape.layers, *shape.over("khc"))
        values = generator.standard_normal(
            (shape.layers, shape.blocks, *shape.page)
        ) * generator.uniform(0.5, 2, axes)
        values += 2 * generator.standard_normal(axes)
        spans.append((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return tuple(spans)


def filled(slot: memoryview, seed: int) -> None:
    for span, data in zip(GROUP.spans(), payload(seed), strict=True):
        slot[span.offset : span.offset + span.length] = data


def sealed(seed: int, integrity_key: bytes | None = None, **options: Any) -> memoryview:
    """The raw frame of chunk ``seed``."""
    slot = memoryview(bytearray(FRAME_BYTES))
    filled(slot, seed)
    frame.seal(
        slot, key(seed), GROUP, TOKENS, b"parent", 1.0, integrity_key=integrity_key, **options
    )
    return slot


def spans_of(slot: memoryview) -> tuple[bytes, ...]:
    return tuple(bytes(slot[span.offset : span.offset + span.length]) for span in GROUP.spans())


def near(got: tuple[bytes, ...], seed: int) -> bool:
    """Whether these are the numbers of chunk ``seed``, give or take what a lossy codec may take."""
    worst = 0.0
    for mine, theirs in zip(got, payload(seed), strict=True):
        a, b = (
            (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            for data in (mine, theirs)
        )
        worst = max(worst, float(np.abs(a - b).max()))
    return worst < 1.5
