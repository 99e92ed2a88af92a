"""A worker's device over direct storage.

Another device copies between pages and staging; ``kvstow.direct`` moves staging to and from
extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvstow import build
from kvstow.device.base import Device, Finished, KVCache, KVSpec, Transfer
from kvstow.direct.base import Extent, Media, Staging
from kvstow.direct.geometry import DirectRef
from kvstow.direct.pipeline import CopyEnd, Pipeline
from kvstow.direct.rds import RdsMedia
from kvstow.direct.rds import load as load_rds
from kvstow.errors import FailurePolicyError, UnsupportedError
from kvstow.layout import HEADER_BYTES, GroupPages, Place, Span
from kvstow.runtime import Clock, Executor, SystemClock, ThreadExecutor


class _Mover:
    """Copies between pages and staging with a device."""

    def __init__(self, inner: Device, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging

    def start(self, ticket: int, item: Transfer, area: int, *, load: bool, length: int) -> None:
        place = Place("pool", (Span(self._staging.select_area(area), length),))
        copy = self._inner.copy_in if load else self._inner.copy_out
        copy(ticket, [Transfer(place, item.block_ids, item.first_block, item.group)])

    def ended(self) -> Iterable[CopyEnd]:
        return [
            CopyEnd(
                end.ticket,
                (end.error or "the copy failed") if end.failed else None,
                end.moved_bytes,
            )
            for end in self._inner.finished()
        ]

    def fence(self, tickets: Sequence[int]) -> None:
        self._inner.fence(tickets)


class DirectDevice:
    """A ``Device`` whose places are extents.

    Args:
        inner: Copies between pages and ``staging``.
        media: Reads and writes extents.
        staging: Where ``inner`` finds the areas of ``media``.
        executor: Runs the calls of ``media``; closed with this device.
        shard: Index of this rank's span in a place.
        strict: A failed transfer raises ``FailurePolicyError``.
    """

    def __init__(
        self,
        inner: Device,
        media: Media,
        staging: Staging,
        executor: Executor,
        clock: Clock,
        *,
        shard: int = 0,
        strict: bool = False,
    ) -> None:
        self._inner = inner
        self._pipeline: Pipeline[Transfer] = Pipeline(
            media, _Mover(inner, staging), executor, clock
        )
        self._shard = shard
        self._name = media.name
        self._strict = strict
        self._refused: list[Finished] = []

    @property
    def hung(self) -> bool:
        """Whether NVMe has stopped answering; it is given no work while it has."""
        return self._pipeline.hung

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        self._pipeline.drain()
        return self._inner.attach(kv_caches, groups)

    def map_pool(self, pool: memoryview, shard: int) -> None:
        raise UnsupportedError("direct storage has no host pool")

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=False)

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self._start(ticket, transfers, load=True)

    def _start(self, ticket: int, transfers: Sequence[Transfer], *, load: bool) -> None:
        if not transfers or any(
            t.place.kind != "direct" or self._shard >= len(t.place.spans) for t in transfers
        ):
            why = f"no extent of shard {self._shard}" if transfers else None
            self._refused.append(Finished(ticket, tuple(range(len(transfers))), why, 0, 0.0))
            return
        items: list[tuple[Transfer, Extent]] = []
        for one in transfers:
            # The caller's lists of block ids grow while the copy waits its turn.
            item = Transfer(one.place, tuple(one.block_ids), one.first_block, one.group)
            span = one.place.spans[self._shard]
            items.append((item, Extent(span.offset, span.length, one.place.tag)))
        self._pipeline.submit(ticket, items, load=load)

    def finished(self) -> list[Finished]:
        """Raises ``FailurePolicyError`` for a failed transfer if the device is ``strict``."""
        ended, self._refused = self._refused, []
        for end in self._pipeline.ended():
            error = end.error
            if end.io_failed:
                keys = "" if end.load else f" for {end.io_failed} keys"
                verb = "read" if end.load else "write"
                error = f"{self._name} batched {verb} failed{keys}: {end.error}"
                if self._strict:
                    raise FailurePolicyError(f"{error} (direct.failure_policy is raise)")
            ended.append(Finished(end.ticket, end.failed, error, end.moved_bytes, end.seconds))
        return ended

    def fence(self, tickets: Sequence[int]) -> None:
        self._pipeline.fence(tickets)

    def close(self) -> None:
        self._pipeline.close()
        self._inner.close()


def open_direct(inner: Device, ref: DirectRef, shard: int, kv_device: torch.device) -> DirectDevice:
    """Opens a rank's direct storage as the scheduler's side has chosen it.

    Raises ``UnsupportedError`` where the rank's device cannot run it.
    """
    staging: Staging
    media: Media
    if ref.engine == "rds":
        from kvstow.device.rbln.staging import DeviceStaging

        api = load_rds()
        npu: Any = inner
        if kv_device.type != "rbln" or not hasattr(npu, "map_device_pool"):
            raise UnsupportedError(
                f"direct.engine rds serves RBLN NPUs, and KV is on {kv_device.type!r}"
            )
        payload_bytes = ref.geometry.extent_bytes[shard] - HEADER_BYTES
        pools = DeviceStaging(npu, kv_device, ref.areas(shard), payload_bytes)
        staging = pools
        media = RdsMedia(
            api, kv_device.index or 0, shard, pools.areas, ref.geometry.extent_bytes[shard]
        )
    else:
        file = build.file_media(ref, shard)
        staging = file
        media = file
        inner.map_pool(file.memory, 0)
    return DirectDevice(
        inner,
        media,
        staging,
        ThreadExecutor("direct", threads=ref.threads),
        SystemClock(),
        shard=shard,
        strict=ref.failure_policy == "raise",
    )
