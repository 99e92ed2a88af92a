"""The media ``rds``: RBLN Direct Storage, between device memory and NVMe without passing the host.

The public facts about ``rebel.rds``: a ``Chunk`` is space on NVMe. A transfer moves whole bound
areas. ``sync_to_device`` must precede a write and ``mark_device_updated`` must follow a read;
without them stale bytes are used silently. A tensor must be allocated before the first ``Chunk``. A
``Chunk`` can't be opened again, so nothing outlives the process. Each slot has a ``Chunk`` of its
own, made when the slot is first filled: no size is needed beforehand, and where NVMe is full that
one filling fails.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from xxhash import xxh3_128_digest

from kvstow.direct.base import Extent
from kvstow.direct.page import check_page, seal_page
from kvstow.errors import CopyError, FrameError, UnsupportedError
from kvstow.layout import ALIGN, HEADER_BYTES, align_up

logger = logging.getLogger("kvstow")

SCRUB_INTERVAL_SLOTS: Final = 64  # one slot in as many carries a checksum and is scrubbed


class Area(Protocol):
    """A bound area of device memory."""

    @property
    def address(self) -> int: ...

    def put(self, data: bytes) -> None:
        """Copies ``data``, as many bytes as the area has, from host memory."""
        ...

    def get(self) -> bytes:
        """Copies the area into host memory."""
        ...


class Staged(Protocol):
    """A staging area: one bound area for the header page, one for the payload."""

    @property
    def page(self) -> Area: ...

    @property
    def payload(self) -> Area: ...


def load() -> tuple[Any, Any]:
    """Imports ``rebel.rds`` and ``rebel._C.vmem``.

    Raises ``UnsupportedError`` with what is missing.
    """
    try:
        rds: Any = importlib.import_module("rebel.rds")
        vmem: Any = importlib.import_module("rebel._C").vmem
    except (ImportError, AttributeError, OSError) as error:
        raise UnsupportedError(f"rebel.rds can't be imported: {error}") from error
    try:
        if not rds.is_available():
            raise UnsupportedError(
                "rebel.rds.is_available() is false: see rebellions-rds-binding.service"
            )
        if rds.query_available_device_count() < 1:
            raise UnsupportedError("rebel.rds finds no device bound for direct storage")
    except RuntimeError as error:
        raise UnsupportedError(f"rebel.rds does not answer: {error}") from error
    return rds, vmem


class RdsMedia:
    """``Media`` over RDS. Not thread-safe: its executor has one thread.

    ``api`` is the result of ``load``; ``staged`` are the areas, allocated before this object.
    """

    name = "RDS"

    def __init__(
        self,
        api: tuple[Any, Any],
        device: int,
        shard: int,
        staged: Sequence[Staged],
        extent_bytes: int,
        scrub_interval_slots: int = SCRUB_INTERVAL_SLOTS,
    ) -> None:
        self.areas = len(staged)
        self._rds, self._vmem = api
        self._device = device
        self._shard = shard
        self._staged = staged
        self._extent_bytes = extent_bytes
        self._scrub_interval_slots = scrub_interval_slots
        self._chunks: dict[int, Any] = {}
        self._checksummed: dict[int, Extent] = {}  # in the order in which they are scrubbed

    def write(self, area: int, extent: Extent) -> None:
        slot, staged = self._slot(extent), self._staged[area]
        checksum = None
        self._checksummed.pop(slot, None)
        if slot % self._scrub_interval_slots == 0:
            checksum = xxh3_128_digest(staged.payload.get()[: extent.length])
        staged.page.put(seal_page(extent.tag, self._shard, extent.length, checksum))
        try:
            chunk = self._chunk(slot)
            with self._rds.Stream(device=self._device, node_id=0) as stream:
                self._move(chunk.write, staged.page, 0, stream, sync=True)
                self._move(chunk.write, staged.payload, HEADER_BYTES, stream, sync=True)
        except (RuntimeError, ValueError) as error:
            raise CopyError(str(error)) from error
        if checksum is not None:
            self._checksummed[slot] = extent

    def read(self, area: int, extent: Extent) -> None:
        self._read(area, extent)

    def probe(self, area: int, extent: Extent) -> None:
        """Reads like ``read``, and makes the slot's chunk first, since that call may be the one that hung."""
        try:
            self._chunk(self._slot(extent))
        except (RuntimeError, ValueError) as error:
            raise CopyError(str(error)) from error
        self._read(area, extent)

    def _read(self, area: int, extent: Extent) -> bytes | None:
        """Reads like ``read``. Returns the payload's checksum, or None where it has none."""
        slot, staged = self._slot(extent), self._staged[area]
        chunk = self._chunks.get(slot)
        if chunk is None:
            raise FrameError("nothing was written there")
        try:
            checksum = self._read_page(chunk, staged, extent)
            with self._rds.Stream(device=self._device, node_id=0) as stream:
                self._move(chunk.read, staged.payload, HEADER_BYTES, stream)
            self._rds.mark_device_updated(staged.payload.address)
            self._read_page(chunk, staged, extent)
        except (RuntimeError, ValueError) as error:
            raise CopyError(str(error)) from error
        return checksum

    def scrub(self, area: int) -> None:
        """Checks the payload of the next checksummed slot, through the host."""
        if not self._checksummed:
            return
        slot = next(iter(self._checksummed))
        extent = self._checksummed[slot] = self._checksummed.pop(slot)
        try:
            checksum = self._read(area, extent)
            intact = xxh3_128_digest(self._staged[area].payload.get()[: extent.length]) == checksum
        except FrameError:
            intact = False
        if not intact:
            del self._checksummed[slot]
            logger.error(
                "RDS scrub: a chunk is not what was written to NVMe. It is a miss from now on"
            )
            self._chunks.pop(slot).close()

    def _read_page(self, chunk: Any, staged: Staged, extent: Extent) -> bytes | None:
        with self._rds.Stream(device=self._device, node_id=0) as stream:
            self._move(chunk.read, staged.page, 0, stream)
        self._rds.mark_device_updated(staged.page.address)
        return check_page(staged.page.get(), extent.tag, self._shard, extent.length)

    def _move(self, move: Any, area: Area, offset: int, stream: Any, *, sync: bool = False) -> None:
        """Moves all buffers of an area, one behind the other from byte ``offset`` of the chunk."""
        if sync:
            self._vmem.sync_to_device(area.address)
        buffers = self._vmem.get_device_buffers(area.address)
        if not buffers:
            raise CopyError("a staging area is not bound to device memory")
        for buffer in buffers:
            if buffer.size % ALIGN or offset % ALIGN:
                raise CopyError(f"misaligned: {buffer.size} bytes at {offset}")
            move(buffer, file_offset=offset, stream=stream)
            offset += buffer.size

    def _slot(self, extent: Extent) -> int:
        slot, rest = divmod(extent.offset, self._extent_bytes)
        if rest or HEADER_BYTES + align_up(extent.length) > self._extent_bytes:
            raise CopyError(f"misaligned: a payload of {extent.length} bytes at {extent.offset}")
        return slot

    def _chunk(self, slot: int) -> Any:
        if slot not in self._chunks:
            self._chunks[slot] = self._rds.Chunk(size=self._extent_bytes, device=self._device)
        return self._chunks[slot]

    def close(self) -> None:
        while self._chunks:
            self._chunks.popitem()[1].close()
