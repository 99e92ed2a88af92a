"""Layouts of KV: recognised by configuration and shape together, anything else refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvstow.device.base import KVSpec
from kvstow.device.rbln.layouts import BlockAxis, recognise
from kvstow.errors import UnsupportedError
from kvstow.testing.kv_layouts import Shape
from tests.rbln import layouts

NAME = "model.layers.3.self_attn.attn"
SHAPE = Shape(layers=1, blocks=6, tokens=64, heads=4, size=8, dtype=torch.bfloat16, device="rbln")


def built(make: Any, **changes: Any) -> tuple[torch.Tensor, KVSpec]:
    made = make(replace(SHAPE, **changes))
    [(name, cache)] = made.caches.items()
    return cache, made.specs[name]


@pytest.mark.parametrize(
    ("make", "axis", "split", "layout"),
    [
        (layouts.blocks_first, 0, 1, "rbln_blocks_first.khnc"),
        (layouts.blocks_first, 0, 4, "rbln_blocks_first.r4khnc"),
        (layouts.kv_first, 1, 1, "rbln_kv_first.khnc"),
        (layouts.kv_first, 1, 4, "rbln_kv_first.kr4hnc"),
        (layouts.mla, 0, 1, "rbln_mla.nc"),
        (layouts.mla, 1, 1, "rbln_mla.nc"),  # whatever the kernel
        (layouts.scale, 0, 1, "rbln_scale.n"),
    ],
)
def test_known_layouts_have_a_name_of_their_own(
    make: Any, axis: BlockAxis, split: int, layout: str
) -> None:
    cache, spec = built(make, kernel_blocks=split)
    pages = recognise(NAME, cache, spec, "rbln", axis)
    assert pages.layer.layout == layout
    assert pages.layer.page_bytes == spec.page_bytes
    assert sum(plane.nbytes for plane in pages.planes) == cache.nbytes
    assert all(plane.is_contiguous() and plane.shape[0] == 6 * split for plane in pages.planes)


@pytest.mark.parametrize("axis", [0, 1])
def test_two_blocks_are_read_as_the_configuration_says(axis: BlockAxis) -> None:
    """[2, 2, ...] has the shape of both forms."""
    cache, spec = built(layouts.kv_first if axis else layouts.blocks_first, blocks=2)
    assert tuple(cache.shape[:2]) == (2, 2)
    assert len(recognise(NAME, cache, spec, "rbln", axis).planes) == 1 + axis


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_that_contradicts_the_configuration_is_refused(axis: BlockAxis) -> None:
    cache, spec = built(layouts.blocks_first if axis else layouts.kv_first)
    with pytest.raises(
        UnsupportedError,
        match=rf"{NAME}.*use_custom_kernel={axis == 1}.*they are by axis {1 - axis}",
    ):
        recognise(NAME, cache, spec, "rbln", axis)


def test_the_number_of_blocks_is_the_tensors_own() -> None:
    cache, spec = built(layouts.blocks_first)
    assert recognise(NAME, cache, replace(spec, num_blocks=999), "rbln", 0).spec.num_blocks == 6


@pytest.mark.parametrize("make", [layouts.blocks_first, layouts.mla])
def test_o7_meta_tensors_are_refused_with_the_variable_to_set(make: Any) -> None:
    cache, spec = built(make, device="meta")
    with pytest.raises(UnsupportedError, match=rf"{NAME}.*VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        recognise(NAME, cache, spec, "rbln", 0)


def test_o7_what_is_not_one_of_them_is_refused_by_name() -> None:
    cache, spec = built(layouts.blocks_first)
    latent, of_latent = built(layouts.mla)
    wrong: list[tuple[object, KVSpec]] = [
        ((cache, cache), spec),
        (None, spec),
        (cache.cpu(), spec),
        (cache.transpose(0, 1), spec),
        (cache[:, :, :2], spec),  # other heads
        (cache.view(6, 2, 4, 1, 8, 64), spec),  # tokens and size swapped
        (cache.view(6, 2, 4, 64, 8), spec),  # vLLM's own, without the axis of length 1
        (cache.view(torch.int8), spec),
        (cache, replace(spec, page_bytes=spec.page_bytes + 2)),
        (cache[:0], spec),
        (latent, replace(of_latent, mla=False)),
        (latent.view(6, 8, 64), of_latent),
        (latent.view(6, 64 * 8), of_latent),
    ]
    for value, of in wrong:
        with pytest.raises(UnsupportedError, match=rf"{NAME}.*Known forms.*rbln_scale"):
            recognise(NAME, value, of, "rbln", 0)
