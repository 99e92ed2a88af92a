"""A fake of ``rebel.rds``, EMULATED in host memory: no NPU can be had here. It keeps the rules that are known: whole
areas only, aligned; a transfer happens when its stream is left; the host's and the device's side of an area differ
until ``sync_to_device`` or ``mark_device_updated``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvstow.direct.rds import Area

ALIGN = 4096


class FakeArea:
    """Host and device side of a bound area. The host sees its own side, which may be stale."""

    def __init__(self, rds: FakeRds, size: int) -> None:
        self.address = (len(rds.areas) + 1) << 20
        self.size = size
        self.host = bytearray(size)
        self.device = bytearray(size)
        rds.areas[self.address] = self

    def put(self, data: bytes) -> None:
        assert len(data) == self.size
        self.host[:] = data

    def get(self) -> bytes:
        return bytes(self.host)


class FakeRds:
    """``api`` is what ``kvstow.direct.rds.load`` gives. ``fail``: every transfer does."""

    def __init__(self, nvme_bytes: int = 1 << 30) -> None:
        self.areas: dict[int, FakeArea] = {}
        self.left_bytes = nvme_bytes
        self.chunks: list[Any] = []
        self.fail: str | None = None
        self.after_transfer: Callable[[], None] = lambda: None
        rds = SimpleNamespace(
            Chunk=self._chunk,
            Stream=lambda device, node_id: _Stream(self),
            mark_device_updated=self._mark,
        )
        vmem = SimpleNamespace(
            sync_to_device=self._sync,
            get_device_buffers=lambda address: [_Buffer(self.areas[address])],
        )
        self.api = (rds, vmem)

    def area(self, size: int) -> Area:
        return FakeArea(self, size)

    def _sync(self, address: int) -> None:
        area = self.areas[address]
        area.device[:] = area.host

    def _mark(self, address: int) -> None:
        area = self.areas[address]
        area.host[:] = area.device

    def _chunk(self, *, size: int, device: int) -> Any:
        assert self.areas, "an area must be allocated before the first chunk"
        if size % ALIGN:
            raise ValueError("size")
        if size > self.left_bytes:
            raise RuntimeError("SYS_ENOSPC: no space for the chunk")
        self.left_bytes -= size
        self.chunks.append(_Chunk(size))
        return self.chunks[-1]


class _Buffer:
    def __init__(self, area: FakeArea) -> None:
        self.area = area
        self.size = area.size


class _Stream:
    def __init__(self, rds: FakeRds) -> None:
        self.rds = rds
        self.queued: list[Callable[[], None]] = []

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for move in self.queued if kind is None else ():
            if self.rds.fail is not None:
                raise RuntimeError(self.rds.fail)
            move()
            self.rds.after_transfer()


class _Chunk:
    def __init__(self, size: int) -> None:
        self.nvme = bytearray(size)
        self.closed = False

    def write(self, buf: _Buffer, *, file_offset: int, stream: _Stream) -> None:
        at = self._check(buf, file_offset)
        stream.queued.append(lambda: self.nvme.__setitem__(at, bytes(buf.area.device)))

    def read(self, buf: _Buffer, *, file_offset: int, stream: _Stream) -> None:
        at = self._check(buf, file_offset)
        stream.queued.append(lambda: buf.area.device.__setitem__(slice(None), self.nvme[at]))

    def _check(self, buf: _Buffer, offset: int) -> slice:
        if offset % ALIGN or buf.size % ALIGN or offset + buf.size > len(self.nvme):
            raise ValueError("misaligned, or past the chunk")
        return slice(offset, offset + buf.size)

    def close(self) -> None:
        self.closed = True
