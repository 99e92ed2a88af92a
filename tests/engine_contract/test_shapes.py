"""What the KV's bytes are, from vLLM's own specifications and the pages that a device recognised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface

from kvstow.codec.shape import KVShape
from kvstow.layout import ChunkLayout, GroupLayout, GroupPages, LayerPages
from kvstow.vllm.shapes import kv_shapes
from tests.engine_contract.stack import SAVES_ON_EMPTY

pytestmark = pytest.mark.contract

NAMES = ("a", "b", "c")


def shapes(
    spec: Any, layout: str, *, on_cpu: bool = False, page_bytes: int | None = None
) -> list[list[KVShape]]:
    page = page_bytes or spec.page_size_bytes
    layers = tuple(LayerPages(name, page, layout) for name in NAMES)
    pages = GroupPages(spec.block_size, layers)
    groups, more = [interface.KVCacheGroupSpec(list(NAMES), spec)], {}
    if SAVES_ON_EMPTY:
        more["hash_block_size"] = spec.block_size
    config = interface.KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **more
    )
    chunks = ChunkLayout((GroupLayout(spec.block_size, 2, (pages.block_bytes,) * 2),))
    return kv_shapes(config, chunks, [(pages,), (pages,)], on_cpu=on_cpu)


def full(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return interface.FullAttentionSpec(
        block_size=16, num_kv_heads=3, head_size=8, dtype=dtype, **more
    )


@pytest.mark.parametrize(
    ("layout", "on_cpu", "order"),
    [
        ("packed_heads.hnc", False, "hnkc"),
        ("packed_heads.hnc", True, "hknc"),
        ("packed_heads.nhc", False, "nkhc"),
        ("kv_first.knhc", False, "knhc"),
    ],
)
def test_pages_that_are_known(layout: str, on_cpu: bool, order: str) -> None:
    [[one, two]] = shapes(full(), layout, on_cpu=on_cpu)
    assert one == two == KVShape("bfloat16", 3, 2, 2, 3, 16, 8, order)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.uint8, "float8"),
        (torch.int8, "float8"),
    ],
)
def test_types(dtype: torch.dtype, name: str) -> None:
    [[one, _]] = shapes(full(dtype), "packed_heads.hnc")
    assert one.dtype == name


def test_latents() -> None:
    spec = interface.MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16
    )
    [[one, _]] = shapes(spec, "mla.nc", on_cpu=True)
    assert one == KVShape("bfloat16", 3, 2, 1, 1, 16, 72, "khnc")


def test_pages_with_more_in_them_are_bytes_of_a_type() -> None:
    """K and V of different sizes, scales, padding: whatever is not what the specification comes to."""
    for page in (full().page_size_bytes + 64, full().page_size_bytes - 2):
        [[one, _]] = shapes(full(), "packed_heads.hnc", page_bytes=page)
        assert (one.known, one.dtype, one.nbytes) == (False, "bfloat16", 3 * 2 * page)
    [[one, _]] = shapes(full(), "blocks_first.kr2nhc")
    assert not one.known
