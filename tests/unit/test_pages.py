"""Layouts are recognised by name, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstow.device.base import KVSpec
from kvstow.device.pages import Pages, recognise
from kvstow.errors import UnsupportedError
from kvstow.testing.kv_layouts import LAYOUTS, Shape

NB, BS, H, D = 10, 16, 3, 8
PAGE = 2 * BS * H * D * 4
SPEC = KVSpec(NB, BS, H, D, 4, PAGE)


def cut(cache: object, spec: KVSpec = SPEC) -> Pages:
    return recognise("layer", cache, spec, "cpu")


def strided(size: tuple[int, ...], order: str, axes: str) -> torch.Tensor:
    """A tensor of ``size`` whose axes ``axes`` lie in memory in ``order``."""
    by_axis = dict(zip(axes, size, strict=True))
    return torch.zeros([by_axis[axis] for axis in order]).permute(
        [order.index(axis) for axis in axes]
    )


@pytest.mark.parametrize(
    ("layout", "name", "planes"),
    [
        ("kv_first", "kv_first.knhc", 2),
        ("kv_first_heads", "kv_first.khnc", 2),
        ("kv_first_permuted", "kv_first.khnc", 2),
        ("blocks_first", "blocks_first.knhc", 1),
        ("blocks_first_heads", "blocks_first.khnc", 1),
        ("kv_pair", "kv_pair.nhc", 2),
        ("mla", "mla.nc", 1),
        ("mla_lbnhc", "mla.nc", 1),
        ("packed_lbhnc", "packed_heads.hnc", 1),
        ("packed_lbhnc_padded", "packed_heads.hnc", 1),
        ("packed_lbhnc_ragged", "packed_heads.hnc", 1),
        ("packed_lbnhc", "packed_heads.nhc", 1),
        ("packed_lhbnc", "packed_heads.hnc", 2),
        ("packed_blhnc", "packed_heads.hnc", 1),
        ("packed_blnhc", "packed_heads.nhc", 1),
        ("packed_bhlnc", "packed_heads.hnc", 2),
    ],
)
def test_a4_known_layouts_by_name(layout: str, name: str, planes: int) -> None:
    built = LAYOUTS[layout](Shape())
    for layer, cache in built.caches.items():
        pages = recognise(layer, cache, built.specs[layer], "cpu")
        assert pages.layer.layout == name
        assert len(pages.planes) == planes
        assert (
            sum(plane.shape[1] for plane in pages.planes)
            == pages.layer.page_bytes
            == built.specs[layer].page_bytes
        )
        assert all(plane.shape[0] == 12 and plane.stride(1) == 1 for plane in pages.planes)


def test_every_layout_of_the_kit_is_named_here() -> None:
    [marker] = [
        mark for mark in test_a4_known_layouts_by_name.pytestmark if mark.name == "parametrize"
    ]
    assert {case[0] for case in marker.args[1]} == set(LAYOUTS)


def test_planes_are_the_engines_memory() -> None:
    cache = torch.zeros(2, NB, BS, H, D)
    pages = cut(cache)
    pages.planes[1][4].fill_(0x3F)
    assert cache[1, 4].ne(0).all()
    assert cache.count_nonzero() == BS * H * D


def test_kernel_blocks_count_only_where_they_change_the_bytes() -> None:
    """Heads-major kernel blocks interleave otherwise than an engine block; tokens-major ones do not."""
    heads_major = torch.zeros(NB * 4, H, BS // 4, 2 * D)
    tokens_major = torch.zeros(NB * 4, BS // 4, H, 2 * D).transpose(1, 2)
    assert cut(heads_major).layer.layout == "packed_heads.r4hnc"
    assert cut(tokens_major).layer.layout == "packed_heads.nhc"
    assert cut(torch.zeros(NB * 2, H, BS // 2, 2 * D)).layer.layout == "packed_heads.r2hnc"


def test_a4_two_blocks_are_told_apart_by_the_spec() -> None:
    """[2, 7, ...] is K/V first on a device of 7 blocks, and [7, 2, ...] is not."""
    assert (
        cut(torch.zeros(2, 7, BS, H, D), replace(SPEC, num_blocks=7)).layer.layout
        == "kv_first.knhc"
    )
    assert (
        cut(torch.zeros(7, 2, BS, H, D), replace(SPEC, num_blocks=7)).layer.layout
        == "blocks_first.knhc"
    )


def test_a4_what_the_spec_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"it could be blocks_first\.\w+ or kv_first\.\w+"):
        cut(torch.zeros(2, 2, BS, H, D), replace(SPEC, num_blocks=2))


def test_heads_equal_to_tokens_is_no_ambiguity_because_the_bytes_are_the_same() -> None:
    spec = KVSpec(NB, 4, 4, D, 4, 2 * 4 * 4 * D * 4)
    assert len(cut(torch.zeros(2, NB, 4, 4, D), spec).planes) == 2


def test_o5_content_of_another_size_is_known_by_the_pages_bytes() -> None:
    """K and V of different sizes, and latents that carry their scales (656 bytes where the latent has 576)."""
    assert cut(
        torch.zeros(NB, H, BS, D + 5), replace(SPEC, page_bytes=BS * H * (D + 5) * 4)
    ).layer.page_bytes
    latent = KVSpec(NB, 64, 1, 576, 1, 64 * 656, mla=True)
    assert cut(torch.zeros(NB, 1, 64, 656, dtype=torch.uint8), latent).layer.page_bytes == 64 * 656


def test_padding_that_the_engine_counts_is_left_out() -> None:
    spec = replace(SPEC, page_bytes=PAGE + 512)
    flat = torch.zeros(NB * (PAGE + 512) // 4)
    cache = flat.as_strided((NB, H, BS, 2 * D), ((PAGE + 512) // 4, BS * 2 * D, 2 * D, 1))
    assert cut(cache, spec).layer.page_bytes == PAGE
    with pytest.raises(UnsupportedError, match="a page has"):
        cut(torch.zeros(NB, H, BS, 2 * D), spec)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (torch.zeros(NB, H, BS, 2 * D, device="meta"), "on 'meta'"),
        (torch.zeros(NB, H, BS, 2 * D, dtype=torch.int32), "dtype torch.int32"),
        (torch.zeros(NB, H, BS, 2 * D, dtype=torch.float16), "2 bytes, not 4"),
        (torch.zeros(NB, H, BS, 2 * D).to_sparse(), "strided"),
        (torch.zeros(NB, H, 2 * D, BS).transpose(2, 3), "not contiguous"),
        (torch.zeros(NB, H, BS, 4 * D)[..., ::2], "not contiguous"),
        (torch.zeros(NB, H, BS, 2 * D + 1)[..., : 2 * D], "not contiguous"),
        (torch.zeros(1, H, BS, 2 * D).expand(NB, -1, -1, -1), "overlap"),
        (
            torch.zeros(NB * H * BS * 2 * D).as_strided(
                (NB, H, BS, 2 * D), (D, BS * 2 * D, 2 * D, 1)
            ),
            "overlap",
        ),
        (torch.zeros(NB + 1, H, BS, 2 * D), "none of the known"),
        (torch.zeros(NB, H, BS, D), "none of the known"),
        (torch.zeros(NB, BS, H, 2 * D), "none of the known"),
        (torch.zeros(NB, BS, 2 * H * D), "none of the known"),
        (torch.zeros(0), "none of the known"),
        (torch.tensor(1.0), "none of the known"),
        ([torch.zeros(NB, BS, H, D)] * 3, "3 tensors"),
        ((torch.zeros(NB, BS, H, D), None), "NoneType is no tensor"),
        (
            (torch.zeros(NB, BS, H, D), torch.zeros(NB, H, BS, D).transpose(1, 2)),
            "differ in memory order",
        ),
        ({"k": torch.zeros(NB, BS, H, D)}, "dict is no tensor"),
        (None, "NoneType"),
    ],
)
def test_o7_anything_else_is_refused_by_name(cache: object, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"layer layer: .*{reason}.*Known forms: kv_first"):
        cut(cache)


def test_mla_is_never_read_as_heads() -> None:
    """A latent of one head and a packed page of one head have the same shape; the spec says which it is."""
    latent = KVSpec(NB, BS, 1, 2 * D, 4, BS * 2 * D * 4, mla=True)
    assert cut(torch.zeros(NB, 1, BS, 2 * D), latent).layer.layout == "mla.nc"
    heads = KVSpec(NB, BS, 1, D, 4, BS * 2 * D * 4)
    assert cut(torch.zeros(NB, 1, BS, 2 * D), heads).layer.layout == "packed_heads.nc"
    with pytest.raises(UnsupportedError):
        cut(torch.zeros(NB, BS, 2 * D), heads)


@pytest.mark.parametrize("order", ["bhnc", "bnhc", "hbnc"])
def test_every_block_is_in_exactly_one_row_of_each_plane(order: str) -> None:
    """The planes of all blocks together are the tensor's memory, each byte once."""
    cache = strided((NB, H, BS, 2 * D), order, "bhnc")
    for block in range(NB):
        cache.zero_()
        for plane in cut(cache).planes:
            plane[block].fill_(1)
        filled = cache.view(torch.int32).ne(0)
        assert filled[block].all()
        assert filled.count_nonzero() == H * BS * 2 * D
