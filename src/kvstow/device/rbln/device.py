"""The RBLN device: whole blocks between the engine's pages and the pool, one batch for a chunk.

- A copy starts after everything that was queued on the compute stream at the call: a store after
  the kernels that fill the pages, a load after the last reader of the old content. A ticket is
  finished when its copies are; ``fence`` waits for them.
- On the device a copy touches one block of a layer, or its K or its V where those lie apart. These
  are contiguous tensors of the cache's own type; the pool is viewed in their shape. No strided
  view, index or reinterpretation on the device could send the copy through the host.

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
from kvstow.device.rbln.runtime import TorchRbln
from kvstow.device.tickets import FENCE_TIMEOUT_S, TicketDevice
from kvstow.errors import CopyError, UnsupportedError
from kvstow.layout import GroupPages
from kvstow.runtime import Clock, Executor

DEVICE_TYPE: Final = "rbln"


class RblnDevice(TicketDevice):
    """``Device`` over an RBLN NPU.

    ``block_axis`` is the axis that counts blocks in the KV of attention layers: 1 where vllm-rbln
    runs with ``use_custom_kernel``, else 0.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        block_axis: BlockAxis = 0,
        runtime: TorchRbln | None = None,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        super().__init__(executor, clock, fence_timeout_s)
        self._runtime = runtime or TorchRbln()
        self._recognise = partial(recognise, block_axis=block_axis)

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        """Takes the KV tensors, as ``Device.attach``.

        The number of blocks is read from the tensors, not from the specs.
        """
        self.fence()
        plans = attach_groups(kv_caches, groups, DEVICE_TYPE, self._recognise)
        for number, plan in enumerate(plans):
            counts = {layer.layer.name: layer.spec.num_blocks for layer in plan.layers}
            if len(set(counts.values())) > 1:
                raise UnsupportedError(
                    f"KV cache group {number}: its layers differ in number of blocks: {counts}"
                )
        self._plans = plans
        self._runtime.select_device(plans[0].layers[0].planes[0].device)
        return tuple(plan.pages for plan in plans)

    def map_device_pool(self, pool: torch.Tensor, shard: int) -> None:
        """Makes ``pool``, one dimension of uint8 in device memory, the pool from the next copy on.

        Copies then stay on the device; no byte passes the host. Raises ``UnsupportedError`` for
        another kind of tensor.
        """
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

    def _copy_context(self) -> Callable[[], AbstractContextManager[object]]:
        try:
            return partial(self._runtime.copy_context, self._runtime.record())
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
    """Yields each block (or its K or V) of a transfer with its place in the pool, in one shape and
    type.
    """
    for layer, prefix in zip(plan.layers, plan.prefix_bytes, strict=True):
        at = move.offset + move.blocks_per_chunk * prefix + move.first * layer.layer.page_bytes
        for block in move.ids:
            for plane in layer.planes:
                rows = plane.shape[0] // plan.num_blocks
                page = plane.narrow(0, block * rows, rows)
                yield page, pool[at : at + page.nbytes].view(page.dtype).view(page.shape)
                at += page.nbytes
