"""Which bytes of a page are what, from the names of page layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstow.codec.shape import KVShape, shape_of

PAGE: dict[str, Any] = {
    "layers": 3,
    "blocks": 2,
    "block_tokens": 16,
    "heads": 4,
    "size": 8,
    "page_bytes": 2048,
}


@pytest.mark.parametrize(
    ("layout", "outside", "order"),
    [
        ("packed_heads.hnc", False, "hnkc"),  # a token's K, then its V
        ("packed_heads.hnc", True, "hknc"),  # as vLLM's CPU backend has it
        ("packed_heads.nhc", False, "nkhc"),
        ("kv_first.knhc", False, "knhc"),
        ("blocks_first.khnc", False, "khnc"),
        ("kv_pair.nhc", False, "knhc"),
    ],
)
def test_orders(layout: str, outside: bool, order: str) -> None:
    assert shape_of(layout, "bfloat16", planes_outside=outside, **PAGE) == KVShape(
        "bfloat16", 3, 2, 2, 4, 16, 8, order
    )


def test_mla_has_one_plane_and_no_heads() -> None:
    page = {**PAGE, "heads": 1, "size": 576, "page_bytes": 16 * 576 * 4}
    shape = shape_of("mla.nc", "float32", **page)
    assert (shape.planes, shape.heads, shape.order, shape.known) == (1, 1, "khnc", True)


@pytest.mark.parametrize(
    ("layout", "page_bytes"),
    [("kv_first.knhc", 2052), ("blocks_first.kr2nhc", 2048), ("new.zq", 2048)],
)
def test_what_is_not_explained_is_unknown(layout: str, page_bytes: int) -> None:
    shape = shape_of(layout, "float16", **{**PAGE, "page_bytes": page_bytes})
    assert not shape.known
    assert shape.nbytes == 3 * 2 * page_bytes


def test_views_of_a_layer() -> None:
    shape = KVShape("bfloat16", 1, 2, 2, 3, 4, 5, "hknc")
    layer = shape.layer(np.arange(shape.layer_numbers))
    assert layer.shape == (2, 3, 2, 4, 5)
    assert shape.axes("bn") == (0, 3)
    assert shape.over("khc") == (1, 3, 2, 1, 5)
    assert shape.channels == 30


def test_what_is_no_shape() -> None:
    good: dict[str, Any] = dict.fromkeys(
        ("layers", "blocks", "planes", "heads", "tokens", "size"), 1
    )
    good["dtype"] = "float16"
    KVShape(**good)
    for bad in ({"dtype": "int4"}, {"order": "khnn"}, {"tokens": 0}):
        with pytest.raises(ValueError):
            KVShape(**good | bad)
    with pytest.raises(ValueError):
        KVShape.unknown("float32", 6)


@pytest.mark.parametrize("order", ["khnc", "hknc", "nkhc", "hnkc", "cnkh", "nchk", "khcn"])
@pytest.mark.parametrize(("tokens", "size"), [(16, 8), (7, 5), (48, 2000), (1, 3)])
def test_rows_are_the_same_numbers(order: str, tokens: int, size: int) -> None:
    shape = KVShape("float32", 3, 2, 2, 3, tokens, size, order)
    generator = np.random.default_rng(1)
    layers = generator.integers(0, 100, (3, shape.blocks, *shape.page)).astype(np.float32)
    rows = layers.reshape(shape.rows(3))
    for letters in ("khc", "k", "h"):
        values = generator.integers(0, 100, (3, *shape.over(letters))).astype(np.float32)
        wanted = layers + np.broadcast_to(values, layers.shape)
        assert np.array_equal((rows + shape.tiled(values, letters)).reshape(layers.shape), wanted)
    summed = layers.sum(axis=tuple(axis + 1 for axis in shape.axes("bn")), keepdims=True)
    assert np.array_equal(shape.sum_tokens(rows), summed)
