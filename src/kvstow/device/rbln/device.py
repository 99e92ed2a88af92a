"""The RBLN device: whole contiguous blocks, a chunk's in one batch, straight between the engine's pages and the pool.

- A copy starts after everything that was queued on the compute stream at the call: out after the kernels that fill the
  pages, in after the last reader of the old content. A ticket is finished when its copies are, and ``fence`` waits.
- On the device a copy's end is one block of a layer, or its K or V where those are apart: contiguous, of the cache's
  own shape and type. What the pool has to look like is arranged on the host's side. So there is no strided view, no
  index and no operator that could take a detour through the host, and nothing is reinterpreted on the device.

Not run on an NPU: its tests run on an emulated device, ``tests/rbln``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import torch

from kvstow.device.base import KVCache, KVSpec
from kvstow.device.plan import GroupPlan, Move, attach_groups
from kvstow.device.rbln.layouts import BlockAxis, recognise
from kvstow.device.rbln.runtime import Runtime, TorchRbln
from kvstow.device.tickets import FENCE_TIMEOUT_S, TicketDevice
from kvstow.errors import CopyError, UnsupportedError
from kvstow.layout import GroupPages
from kvstow.runtime import Clock, Executor

DEVICE_TYPE: Final = "rbln"


class RblnDevice(TicketDevice):
    """``Device`` over an RBLN NPU. ``block_axis`` is the axis that counts blocks in the KV of attention layers: 1 where
    vllm-rbln runs with ``use_custom_kernel``, else 0."""

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        block_axis: BlockAxis = 0,
        runtime: Runtime | None = None,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        super().__init__(executor, clock, fence_timeout_s)
        self._runtime = runtime or TorchRbln()
        self._recognise = partial(recognise, block_axis=block_axis)

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        """As the contract says. The number of blocks is the tensors' own, whatever the specs say."""
        self.fence()
        plans = attach_groups(kv_caches, groups, DEVICE_TYPE, self._recognise)
        for number, plan in enumerate(plans):
            counts = {layer.layer.name: layer.spec.num_blocks for layer in plan.layers}
            if len(set(counts.values())) > 1:
                raise UnsupportedError(
                    f"KV cache group {number}: its layers differ in number of blocks: {counts}"
                )
        self._plans = plans
        self._runtime.use(plans[0].layers[0].planes[0].device)
        return tuple(plan.pages for plan in plans)

    def map_device_pool(self, pool: torch.Tensor, shard: int) -> None:
        """From the next copy on the pool is this, in the device's own memory: a one-dimensional uint8 tensor, to which
        direct storage has access. Copies then stay on the device, and no byte passes the host."""
        if (
            pool.dtype != torch.uint8
            or pool.dim() != 1
            or not pool.is_contiguous()
            or pool.device.type != DEVICE_TYPE
        ):
            raise UnsupportedError(
                f"a pool on the device is one dimension of uint8, not {pool.dtype} {pool.shape}"
            )
        self._pool, self._shard = pool, shard

    def _around(self) -> Callable[[], AbstractContextManager[object]]:
        try:
            return partial(self._runtime.copying, self._runtime.now())
        except RuntimeError as error:
            raise CopyError(f"the NPU failed: {error}") from error

    def _copy(self, pool: torch.Tensor, move: Move, *, load: bool) -> int:
        plan = self._plans[move.group]
        if move.ids:
            pages, places = map(list, zip(*_pairs(plan, move, pool), strict=True))
            self._runtime.copy(*((pages, places) if load else (places, pages)))
        return len(move.ids) * plan.block_bytes


def _pairs(
    plan: GroupPlan, move: Move, pool: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block, or part of it, of a transfer and its place in the pool: contiguous, of the same shape and type."""
    for layer, prefix in zip(plan.layers, plan.prefix_bytes, strict=True):
        at = move.offset + move.blocks_per_chunk * prefix + move.first * layer.layer.page_bytes
        for block in move.ids:
            for plane in layer.planes:
                rows = plane.shape[0] // plan.num_blocks
                page = plane.narrow(0, block * rows, rows)
                yield page, pool[at : at + page.nbytes].view(page.dtype).view(page.shape)
                at += page.nbytes
