"""KV caches as vllm-rbln 0.12 allocates them, for the device suite: a contiguous tensor a layer, int8 seen as the KV's
type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvstow.device.base import KVSpec
from kvstow.testing.kv_layouts import Built, Cache, Shape


def _raw(shape: Shape, *dims: int) -> torch.Tensor:
    count = shape.dtype.itemsize
    for dim in dims:
        count *= dim
    return torch.zeros(count, dtype=torch.int8, device=shape.device).view(shape.dtype).view(dims)


def _built(
    shape: Shape,
    spec: KVSpec,
    dims: tuple[int, ...],
    block: Callable[[Cache, int], list[torch.Tensor]],
) -> Built:
    caches: dict[str, Cache] = {f"layers.{i}.attn": _raw(shape, *dims) for i in range(shape.layers)}
    return Built(caches, dict.fromkeys(caches, spec), lambda name, b: block(caches[name], b))


def _attention(shape: Shape) -> tuple[KVSpec, tuple[int, ...]]:
    page = 2 * shape.heads * shape.tokens * shape.size * shape.dtype.itemsize
    spec = KVSpec(shape.blocks, shape.tokens, shape.heads, shape.size, shape.dtype.itemsize, page)
    return spec, (shape.heads, 1, shape.tokens // shape.kernel_blocks, shape.size)


def blocks_first(shape: Shape) -> Built:
    """[blocks, 2, heads, 1, tokens, size]."""
    spec, part = _attention(shape)
    split = shape.kernel_blocks

    def block(cache: Cache, b: int) -> list[torch.Tensor]:
        assert isinstance(cache, torch.Tensor)
        return [cache[b * split : (b + 1) * split]]

    return _built(shape, spec, (shape.blocks * split, 2, *part), block)


def kv_first(shape: Shape) -> Built:
    """[2, blocks, heads, 1, tokens, size]."""
    spec, part = _attention(shape)
    split = shape.kernel_blocks

    def block(cache: Cache, b: int) -> list[torch.Tensor]:
        assert isinstance(cache, torch.Tensor)
        return [cache[0, b * split : (b + 1) * split], cache[1, b * split : (b + 1) * split]]

    return _built(shape, spec, (2, shape.blocks * split, *part), block)


def mla(shape: Shape) -> Built:
    """[blocks, tokens, latent]."""
    page = shape.tokens * shape.size * shape.dtype.itemsize
    spec = KVSpec(shape.blocks, shape.tokens, 1, shape.size, shape.dtype.itemsize, page, mla=True)

    def block(cache: Cache, b: int) -> list[torch.Tensor]:
        assert isinstance(cache, torch.Tensor)
        return [cache[b]]

    return _built(shape, spec, (shape.blocks, shape.tokens, shape.size), block)


def scale(shape: Shape) -> Built:
    """[blocks, tokens], an indexer's."""
    page = shape.tokens * shape.dtype.itemsize
    spec = KVSpec(shape.blocks, shape.tokens, 1, 1, shape.dtype.itemsize, page, mla=True)

    def block(cache: Cache, b: int) -> list[torch.Tensor]:
        assert isinstance(cache, torch.Tensor)
        return [cache[b]]

    return _built(shape, spec, (shape.blocks, shape.tokens), block)
