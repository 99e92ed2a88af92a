"""The KV layouts of vllm-rbln 0.12, by name.

Each layer is one contiguous tensor; axes are named as in ``kvstow.device.pages``. The engine's
configuration says which axis counts blocks, and the shape is checked against it: a shape ``[2, 2,
...]`` fits both. The number of blocks is read from the tensor, because the engine may allocate
again with another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from kvstow.device.base import KVSpec
from kvstow.device.pages import Pages, check_tensor, refuse
from kvstow.layout import LayerPages

BlockAxis: TypeAlias = Literal[0, 1]

KNOWN: Final = (
    "rbln_blocks_first [blocks, 2, heads, 1, tokens, size], with use_custom_kernel rbln_kv_first "
    "[2, blocks, heads, 1, tokens, size], rbln_mla [blocks, tokens, latent], rbln_scale [blocks, tokens]"
)


class _Layout(NamedTuple):
    name: str
    planes: tuple[torch.Tensor, ...]


def recognise(
    name: str, cache: object, spec: KVSpec, device_type: str, block_axis: BlockAxis
) -> Pages:
    """Recognises the layout of layer ``name`` and cuts it into planes.

    A plane has the cache's own type. Its first axis counts kernel blocks; a block's rows are
    contiguous. Raises ``UnsupportedError`` for what is not exactly one of the known layouts.
    """
    tensor = _check_tensor(name, cache, spec, device_type)
    blocks, rest = divmod(tensor.nbytes, spec.page_bytes)
    if rest or not blocks:
        raise refuse(
            name, tensor, spec, f"its {tensor.nbytes} bytes are no whole number of blocks", KNOWN
        )
    spec = replace(spec, num_blocks=blocks)
    if spec.mla:
        found = _latent(name, tensor, spec)
    else:
        found = _heads(name, tensor, spec, block_axis)
    return Pages(LayerPages(name, spec.page_bytes, found.name), spec, found.planes)


def _check_tensor(name: str, cache: object, spec: KVSpec, device_type: str) -> torch.Tensor:
    if isinstance(cache, torch.Tensor) and cache.device.type == "meta":
        reason = (
            "its KV is inside the compiled model, where no connector can reach it. Set "
            "VLLM_RBLN_USE_DEVICE_TENSOR=1"
        )
        raise refuse(name, cache, spec, reason, KNOWN)
    tensor = check_tensor(name, cache, spec, device_type, KNOWN)
    if not tensor.is_contiguous():
        raise refuse(name, cache, spec, "it is not contiguous", KNOWN)
    return tensor


def _split(tensor: torch.Tensor, spec: KVSpec, token_axis: int) -> int:
    """Counts kernel blocks in a block of the engine. 0: the tokens do not divide."""
    tokens = tensor.shape[token_axis] if token_axis < tensor.dim() else 0
    return spec.block_tokens // tokens if tokens and spec.block_tokens % tokens == 0 else 0


def _latent(name: str, tensor: torch.Tensor, spec: KVSpec) -> _Layout:
    split = _split(tensor, spec, 1)
    kernel = (spec.num_blocks * split, spec.block_tokens // max(1, split))
    if split and tuple(tensor.shape) == (*kernel, spec.head_size):
        return _Layout("rbln_mla.nc", (tensor,))
    if split and spec.head_size == 1 and tuple(tensor.shape) == kernel:
        return _Layout("rbln_scale.n", (tensor,))
    raise refuse(
        name, tensor, spec, "the shape is not that of a latent or of an indexer's scale", KNOWN
    )


def _heads(name: str, tensor: torch.Tensor, spec: KVSpec, block_axis: BlockAxis) -> _Layout:
    split = _split(tensor, spec, 4)
    part = (spec.num_kv_heads, 1, spec.block_tokens // max(1, split), spec.head_size)
    shapes = {0: (spec.num_blocks * split, 2, *part), 1: (2, spec.num_blocks * split, *part)}
    if not split or tuple(tensor.shape) != shapes[block_axis]:
        reason = f"with use_custom_kernel={block_axis == 1} its blocks should be counted by axis {block_axis}"
        if split and tuple(tensor.shape) == shapes[1 - block_axis]:
            reason += f", they are by axis {1 - block_axis}"
        raise refuse(name, tensor, spec, reason, KNOWN)
    kernel = f"r{split}" if split > 1 else ""
    if block_axis == 0:
        return _Layout(f"rbln_blocks_first.{kernel}khnc", (tensor,))
    return _Layout(f"rbln_kv_first.k{kernel}hnc", (tensor[0], tensor[1]))
