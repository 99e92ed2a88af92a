"""The CPU device: pages in ordinary memory, copied on one worker thread.

The engine's own thread starts copies and never waits for one. ``kvstow.device.page_copy`` has the
copies themselves; a chunk is one call, which holds the interpreter lock only at its ends.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np
import torch

from kvstow.device.base import KVCache, KVSpec
from kvstow.device.page_copy import Int64s, PageCopies, choose
from kvstow.device.plan import Move, attach_groups, plane_table
from kvstow.device.tickets import FENCE_TIMEOUT_S, TicketDevice
from kvstow.layout import GroupPages
from kvstow.pool.hostmem import populate
from kvstow.runtime import Clock, Executor, rest

POPULATE_BYTES: Final = 8 << 20  # 4 ms
POPULATE_AT_ONCE_BYTES: Final = 256 << 20  # the first slots, which the first requests fill
POPULATE_SHARE: Final = 0.1  # of one core: the host of a virtual machine may have to find each page


class CpuDevice(TicketDevice):
    """``Device`` over ordinary memory.

    The worker calls ``copy_out`` after the forward pass has returned, and ``copy_in`` before anyone
    reads the blocks. On a CPU no other ordering is needed; ``fence`` waits for the copies.

    ``toucher`` touches the pool's memory for the first time, in the background; the device closes
    it. None: the first copies touch it. ``copies`` are the copies to use; None: the faster ones for
    these pages, found by a measurement of 0.1 s in ``attach``.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        toucher: Executor | None = None,
        copies: PageCopies | None = None,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        super().__init__(executor, clock, fence_timeout_s)
        self._toucher = toucher
        self._fixed_copies = copies
        self._copies: list[PageCopies] = []
        self._planes: list[Int64s] = []
        self._stop_touching = threading.Event()

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        self.fence()
        self._plans = attach_groups(kv_caches, groups, "cpu")
        self._planes = [plane_table(plan).numpy() for plan in self._plans]
        self._copies = [self._copies_for(planes) for planes in self._planes]
        return tuple(plan.pages for plan in self._plans)

    def _copies_for(self, planes: Int64s) -> PageCopies:
        if self._fixed_copies is not None:
            return self._fixed_copies
        most_common_width = statistics.mode(planes[:, 2].tolist())
        return choose(most_common_width, self._clock)

    def map_pool(self, pool: memoryview, shard: int) -> None:
        super().map_pool(pool, shard)
        if self._toucher is not None:
            self._toucher.submit(lambda: self._touch(pool), lambda _, error: None)

    def _touch(self, pool: memoryview) -> None:
        """Maps the pool's pages: the first at once, the rest at ``POPULATE_SHARE`` of a core.

        The first touch of a page costs 6 to 13 times as much as copying it.
        """
        for offset in range(0, len(pool), POPULATE_BYTES):
            if self._stop_touching.is_set():
                return
            began_s = self._clock.monotonic()
            populate(pool, offset, min(POPULATE_BYTES, len(pool) - offset))
            if offset >= POPULATE_AT_ONCE_BYTES:
                rest(self._stop_touching, self._clock.monotonic() - began_s, POPULATE_SHARE)

    def _copy_context(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def _copy(self, pool: torch.Tensor, move: Move, *, load: bool) -> int:
        copies = self._copies[move.group]
        copy = copies.load if load else copies.store
        block_ids = np.array(move.ids, dtype=np.int64)
        place = pool.data_ptr() + move.offset
        copy(self._planes[move.group], block_ids, place, move.blocks_per_chunk, move.first, load)
        return len(move.ids) * self._plans[move.group].block_bytes

    def close(self) -> None:
        self._stop_touching.set()
        if self._toucher is not None:
            self._toucher.close(self._fence_timeout_s)
        super().close()
        self._planes = []
        self._copies = []
