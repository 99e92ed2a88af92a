"""Describes the numbers in a chunk's bytes, from the recognised pages and vLLM's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvstow.codec.shape import KVShape, shape_of
from kvstow.layout import ChunkLayout, GroupPages
from kvstow.vllm.groups import layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def kv_shapes(
    config: KVCacheConfig,
    layout: ChunkLayout,
    shards: Sequence[Sequence[GroupPages]],
    *,
    on_cpu: bool,
) -> list[list[KVShape]]:
    """Shape of each group's chunks on each shard.

    ``shards[s][g]`` are the pages that a rank of shard ``s`` recognised of group ``g``. ``on_cpu``
    says that vLLM's CPU attention keeps a head's K rows before its V rows. If layers differ, or
    their pages are not those of their specification, only the type of the numbers is known.
    """
    return [
        [
            _shape(list(specs.values()), pages[group], geometry.blocks_per_chunk, on_cpu)
            for pages in shards
        ]
        for group, (specs, geometry) in enumerate(
            zip(layer_specs(config), layout.groups, strict=True)
        )
    ]


def _shape(specs: Sequence[KVCacheSpec], pages: GroupPages, blocks: int, on_cpu: bool) -> KVShape:
    dtypes = {_DTYPES.get(getattr(spec, "dtype", torch.uint8), "float8") for spec in specs}
    heads = {(getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)) for spec in specs}
    forms = {(layer.layout, layer.page_bytes) for layer in pages.layers}
    if len(dtypes) > 1:
        return KVShape.unknown("float8", blocks * pages.block_bytes)
    [dtype] = dtypes
    if len(heads) > 1 or len(forms) > 1:
        return KVShape.unknown(dtype, blocks * pages.block_bytes)
    [(num_heads, size)], [(name, page_bytes)] = heads, forms
    return shape_of(
        name,
        dtype,
        layers=len(pages.layers),
        blocks=blocks,
        block_tokens=pages.block_tokens,
        heads=1 if name.startswith("mla") else num_heads,
        size=size,
        page_bytes=page_bytes,
        planes_outside=on_cpu,
    )
