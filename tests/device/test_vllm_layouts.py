"""The views that vLLM itself makes, in each of its layouts, are recognised and cut into the right bytes."""

from __future__ import annotations

import pytest
import torch

from kvstow.device.base import KVSpec
from kvstow.device.pages import recognise

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
pytestmark = pytest.mark.contract

BLOCKS, LAYERS = 6, 3
HEADS = {"num_kv_heads": 3, "head_size": 64, "dtype": torch.float32}
SPECS = {
    "full": lambda: interface.FullAttentionSpec(block_size=32, **HEADS),
    "k and v of different sizes": lambda: interface.FullAttentionSpec(
        block_size=32, head_size_v=32, **HEADS
    ),
    "fp8": lambda: interface.FullAttentionSpec(block_size=32, **(HEADS | {"dtype": torch.uint8})),
    "mla": lambda: interface.MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32
    ),
}


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("kind", SPECS)
def test_a4_vllms_own_views(kind: str, layout: str, kernel_blocks: int) -> None:
    order, spec = interface.KVCacheLayout[layout], SPECS[kind]()
    page, heads = spec.page_size_bytes, spec.num_heads
    layer_stride, block_stride = {
        "LHBNC": (BLOCKS * page, page // heads),
        "BHLNC": (page // heads, LAYERS * page),
    }.get(layout, (page, LAYERS * page) if order.is_block_outermost else (BLOCKS * page, page))
    if kernel_blocks > 1 and block_stride != page:
        pytest.skip("vLLM does not split these")
    raw = torch.zeros(BLOCKS * LAYERS * page, dtype=torch.int8)
    tensor = interface.KVCacheTensor(
        size=len(raw),
        layers=[str(i) for i in range(LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    views = interface.create_kv_cache_views(
        raw, spec, BLOCKS, order, tensor, kernel_block_size=spec.block_size // kernel_blocks
    )
    latent = isinstance(spec, interface.MLAAttentionSpec)
    said = KVSpec(
        BLOCKS,
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.dtype.itemsize,
        page,
        mla=latent,
    )
    for view in views:
        pages = recognise("layer", view, said, "cpu")
        assert pages.layer.page_bytes == page
        tokens_major = layout in ("LBNHC", "BLNHC")
        inside = (
            "nc" if latent else "nhc" if tokens_major else "hnc" if kernel_blocks == 1 else "r2hnc"
        )
        assert pages.layer.layout == f"{'mla' if latent else 'packed_heads'}.{inside}"
        raw.zero_()
        for plane in pages.planes:
            plane[4].fill_(1)
        block = view[4 * kernel_blocks : 5 * kernel_blocks]
        assert bool((block.contiguous().view(torch.uint8) == 1).all())
        assert int(raw.sum(dtype=torch.int64)) == page
