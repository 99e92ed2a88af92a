"""The arithmetic of transfers that all devices share: which bytes of a plane and of a span belong
together.

Payload of a shard's span: for each layer in order, for each block of the chunk in order, the
block's page, its planes concatenated. So block ``b`` of layer ``l`` is at ``span.offset +
blocks_per_chunk * prefix[l] + b * page[l]``, where ``prefix[l]`` is the sum of the pages of the
layers before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvstow.device.base import KVCache, KVSpec, Transfer
from kvstow.device.pages import Pages, recognise
from kvstow.errors import CopyError, UnsupportedError
from kvstow.layout import GroupPages


class Move(NamedTuple):
    """A checked transfer.

    ``ids`` are device block ids, ``first`` the index of the first of them inside the chunk,
    ``offset`` the span's byte offset in the pool.
    """

    group: int
    ids: tuple[int, ...]
    first: int
    offset: int
    blocks_per_chunk: int


class GroupPlan:
    """The recognised layers of one KV cache group.

    ``prefix_bytes[i]`` is the sum of the page bytes of the layers before layer ``i``.
    """

    def __init__(self, layers: Sequence[Pages]) -> None:
        self.layers = tuple(layers)
        self.num_blocks = layers[0].spec.num_blocks
        self.pages = GroupPages(layers[0].spec.block_tokens, tuple(page.layer for page in layers))
        self.block_bytes = self.pages.block_bytes
        self.prefix_bytes: list[int] = []
        at = 0
        for page in layers:
            self.prefix_bytes.append(at)
            at += page.layer.page_bytes


def plane_table(plan: GroupPlan) -> torch.Tensor:
    """Addresses of a group's planes: int64 ``[planes, 6]``, in payload order.

    Columns: address of block 0; bytes from one block to the next; bytes of the plane in one block;
    bytes of a whole page of its layer; bytes of the pages of the layers before it; offset of the
    plane inside its page.
    """
    rows = []
    for layer, prefix_bytes in zip(plan.layers, plan.prefix_bytes, strict=True):
        within = 0
        for plane in layer.planes:
            width = plane.shape[1]
            page_bytes = layer.layer.page_bytes
            rows.append(
                (plane.data_ptr(), plane.stride(0), width, page_bytes, prefix_bytes, within)
            )
            within += width
    return torch.tensor(rows, dtype=torch.int64)


def attach_groups(
    kv_caches: Mapping[str, KVCache],
    groups: Sequence[Mapping[str, KVSpec]],
    device_type: str,
    recognise: Callable[[str, object, KVSpec, str], Pages] = recognise,
) -> list[GroupPlan]:
    """Recognises every layer of every group.

    Raises ``UnsupportedError`` with the name of the layer or group.
    """
    plans = []
    for number, specs in enumerate(groups):
        if not specs:
            raise UnsupportedError(f"KV cache group {number} has no layers on this rank")
        missing = [name for name in specs if name not in kv_caches]
        if missing:
            raise UnsupportedError(
                f"KV cache group {number}: the engine gave no KV cache for layer {missing[0]}"
            )
        if len({(spec.block_tokens, spec.num_blocks) for spec in specs.values()}) > 1:
            raise UnsupportedError(
                f"KV cache group {number}: layers {', '.join(specs)} differ in block size or count"
            )
        plans.append(
            GroupPlan(
                [
                    recognise(name, kv_caches[name], spec, device_type)
                    for name, spec in specs.items()
                ]
            )
        )
    return plans


def check(
    transfer: Transfer, plans: Sequence[GroupPlan], pool_bytes: int, shard: int, *, load: bool
) -> Move:
    """Verifies that a transfer touches only its own pages and its own place.

    ``pool_bytes`` is the length of the mapped pool, 0 when none is mapped. Raises ``CopyError``.
    """
    kind, spans, _ = transfer.place
    if kind != "pool":
        raise CopyError(f"this device copies to and from the pool, not a {kind!r} place")
    if not 0 <= transfer.group < len(plans) or not 0 <= shard < len(spans):
        raise CopyError(
            f"no group {transfer.group}, or no shard {shard} in a place of {len(spans)} spans"
        )
    plan, span = plans[transfer.group], spans[shard]
    ids = tuple(transfer.block_ids)
    if span.offset < 0 or span.length <= 0 or span.offset + span.length > pool_bytes:
        raise CopyError(f"{span} is outside the pool of {pool_bytes} bytes")
    if span.length % plan.block_bytes:
        raise CopyError(
            f"{span} is no multiple of {plan.block_bytes} bytes, a block over all layers"
        )
    blocks_per_chunk = span.length // plan.block_bytes
    if transfer.first_block < 0 or transfer.first_block + len(ids) > blocks_per_chunk:
        raise CopyError(
            f"blocks {transfer.first_block} to +{len(ids)} of a chunk of {blocks_per_chunk}"
        )
    if ids and not (min(ids) >= 0 and max(ids) < plan.num_blocks):
        raise CopyError(
            f"block ids from {min(ids)} to {max(ids)}, the device has {plan.num_blocks} blocks"
        )
    if load and len(set(ids)) != len(ids):
        raise CopyError("a block would be loaded twice by one transfer")
    return Move(transfer.group, ids, transfer.first_block, span.offset, blocks_per_chunk)
