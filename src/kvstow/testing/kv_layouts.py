"""KV caches in every layout that kvstow recognises, for the device suite and the benchmarks.

Each function returns the tensors that an engine would register for ``layers`` layers, and their
specs. It also gives each block's bytes by plain indexing of the engine's tensor: an oracle that
shares nothing with the code that cuts pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kvstow.device.base import KVSpec

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry of a group of layers."""

    layers: int = 2
    blocks: int = 12
    tokens: int = 16
    heads: int = 2
    size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kernel_blocks: int = 1  # kernel blocks in an engine block


@dataclass(frozen=True, slots=True)
class Built:
    """The tensors that an engine registers.

    ``block(name, b)`` returns views of block ``b`` of layer ``name``, in logical order.
    """

    caches: dict[str, Cache]
    specs: dict[str, KVSpec]
    block: Callable[[str, int], list[torch.Tensor]]


def fill(built: Built, seed: int) -> None:
    """Fill all blocks with random bytes, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    for cache in built.caches.values():
        for tensor in cache if isinstance(cache, tuple) else (cache,):
            size = [*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size()]
            noise = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            tensor.view(torch.uint8).copy_(noise)


def block_bytes(built: Built, name: str, block: int) -> bytes:
    """A block's bytes in logical order."""
    parts = [
        part.contiguous().view(torch.uint8).cpu().flatten() for part in built.block(name, block)
    ]
    return b"".join(bytes(part.tolist()) for part in parts)


def _spec(shape: Shape, *, latent: bool = False) -> KVSpec:
    item = shape.dtype.itemsize
    per_token = shape.size * item if latent else 2 * shape.heads * shape.size * item
    heads = 1 if latent else shape.heads
    return KVSpec(
        shape.blocks, shape.tokens, heads, shape.size, item, shape.tokens * per_token, mla=latent
    )


def _raw(shape: Shape, *dims: int) -> torch.Tensor:
    """A zeroed tensor of the shape's dtype.

    It is made as bytes, since ``zeros`` lacks some dtypes.
    """
    count = shape.dtype.itemsize
    for dim in dims:
        count *= dim
    return torch.zeros(count, dtype=torch.uint8, device=shape.device).view(shape.dtype).view(dims)


def _separate(
    shape: Shape,
    make: Callable[[], Cache],
    block: Callable[[Cache, int], list[torch.Tensor]],
    *,
    latent: bool = False,
) -> Built:
    caches = {f"layers.{i}.attn": make() for i in range(shape.layers)}
    specs = dict.fromkeys(caches, _spec(shape, latent=latent))
    return Built(caches, specs, lambda name, b: block(caches[name], b))


def _dim(axis: int) -> Callable[[Cache, int], list[torch.Tensor]]:
    def block(cache: Cache, b: int) -> list[torch.Tensor]:
        assert isinstance(cache, torch.Tensor)
        return [cache.select(axis, b)]

    return block


def kv_first(shape: Shape) -> Built:
    """[2, blocks, tokens, heads, size]."""
    return _separate(
        shape, lambda: _raw(shape, 2, shape.blocks, shape.tokens, shape.heads, shape.size), _dim(1)
    )


def kv_first_heads(shape: Shape) -> Built:
    """[2, blocks, heads, tokens, size]."""
    return _separate(
        shape, lambda: _raw(shape, 2, shape.blocks, shape.heads, shape.tokens, shape.size), _dim(1)
    )


def kv_first_permuted(shape: Shape) -> Built:
    """[2, blocks, tokens, heads, size] in shape, heads-major in memory."""
    return _separate(
        shape,
        lambda: _raw(shape, 2, shape.blocks, shape.heads, shape.tokens, shape.size).transpose(2, 3),
        _dim(1),
    )


def blocks_first(shape: Shape) -> Built:
    """[blocks, 2, tokens, heads, size]."""
    return _separate(
        shape, lambda: _raw(shape, shape.blocks, 2, shape.tokens, shape.heads, shape.size), _dim(0)
    )


def blocks_first_heads(shape: Shape) -> Built:
    """[blocks, 2, heads, tokens, size]."""
    return _separate(
        shape, lambda: _raw(shape, shape.blocks, 2, shape.heads, shape.tokens, shape.size), _dim(0)
    )


def kv_pair(shape: Shape) -> Built:
    """A tuple (K, V), each [blocks, tokens, heads, size]."""

    def make() -> Cache:
        dims = (shape.blocks, shape.tokens, shape.heads, shape.size)
        return _raw(shape, *dims), _raw(shape, *dims)

    return _separate(shape, make, lambda cache, b: [part[b] for part in cache])


def mla(shape: Shape) -> Built:
    """[blocks, tokens, latent]."""
    return _separate(
        shape, lambda: _raw(shape, shape.blocks, shape.tokens, shape.size), _dim(0), latent=True
    )


def _packed(
    order: str, gap: int = 0, *, layer_gap: int = 0, latent: bool = False
) -> Callable[[Shape], Built]:
    """vLLM's own allocation: one storage for all layers, each a [blocks, heads, tokens, content]
    view of it.

    ``order`` is the memory order of layers, blocks, heads, tokens and content. ``gap`` unused bytes
    follow each block, ``layer_gap`` each layer.
    """

    def make(shape: Shape) -> Built:
        split = shape.kernel_blocks
        item = shape.dtype.itemsize
        sizes = {"L": shape.layers, "B": shape.blocks * split, "H": 1 if latent else shape.heads}
        sizes |= {"N": shape.tokens // split, "C": shape.size if latent else 2 * shape.size}
        strides = {}
        stride = 1
        for axis in reversed(order):
            strides[axis] = stride
            stride *= sizes[axis]
            if axis == order[order.index("B") + 1]:
                stride += gap // item
            if axis == order[order.index("L") + 1]:
                stride += layer_gap // item
        flat = _raw(shape, stride)
        axes = "LBHNC"
        views = flat.as_strided([sizes[axis] for axis in axes], [strides[axis] for axis in axes])
        caches: dict[str, Cache] = {f"layers.{i}.attn": views[i] for i in range(shape.layers)}

        def block(name: str, b: int) -> list[torch.Tensor]:
            cache = caches[name]
            assert isinstance(cache, torch.Tensor)
            return [cache[b * split : (b + 1) * split]]

        return Built(caches, dict.fromkeys(caches, _spec(shape, latent=latent)), block)

    return make


LAYOUTS: Final[dict[str, Callable[[Shape], Built]]] = {
    "kv_first": kv_first,
    "kv_first_heads": kv_first_heads,
    "kv_first_permuted": kv_first_permuted,
    "blocks_first": blocks_first,
    "blocks_first_heads": blocks_first_heads,
    "kv_pair": kv_pair,
    "mla": mla,
    "mla_lbnhc": _packed("LBNHC", latent=True),
    **{
        f"packed_{order.lower()}": _packed(order)
        for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
    "packed_lbhnc_padded": _packed("LBHNC", gap=192),
    "packed_lbhnc_ragged": _packed("LBHNC", layer_gap=64),
}
