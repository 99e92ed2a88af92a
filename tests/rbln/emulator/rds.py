"""``rebel.rds`` and ``rebel._C.vmem``, emulated over one file: the rules that are known from public code, enforced.

Offsets and sizes are multiples of 4,096; a transfer moves a whole bound area; what a stream was given happens when it
is drained. A transfer moves the device side of an area (see native/memory.hpp) and tells nobody.
"""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch

from tests.rbln.emulator.torch_rbln import native

ALIGN: Final = 4096


class RdsError(RuntimeError):
    """What the drive says when it fails."""


class Buffer(NamedTuple):
    """A bound area."""

    ptr: int
    size: int


class Operation(NamedTuple):
    write: bool
    buffer: Buffer
    offset: int  # in the file


class Drive:
    """The emulated NVMe: a preallocated file. ``fail`` makes every later transfer fail with this text."""

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT
        try:
            self.fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError:  # a file system without direct I/O
            self.fd, self.direct = os.open(path, flags, 0o600), False
        os.posix_fallocate(self.fd, 0, size)
        self.size = size
        self.fail: str | None = None
        self.transfers = {"read": 0, "write": 0}
        self._used = 0
        self._next_id = 1
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[int, int]:
        """An id and an offset for a chunk of ``size`` bytes."""
        if size <= 0 or size % ALIGN:
            raise ValueError(f"size must be a positive multiple of {ALIGN}")
        with self._lock:
            if self._used + size > self.size:
                raise RdsError("SYS_ENOSPC: no space for the chunk")
            offset, chunk_id = self._used, self._next_id
            self._used += size
            self._next_id += 1
        return chunk_id, offset

    def run(self, operation: Operation) -> None:
        if self.fail is not None:
            raise RdsError(self.fail)
        self.transfers["write" if operation.write else "read"] += 1
        native().transfer(operation.write, self.fd, operation.buffer.ptr, operation.offset)

    def close(self) -> None:
        os.close(self.fd)


def modules(drive: Drive) -> dict[str, types.ModuleType]:
    """``rebel.rds`` and ``rebel._C``, with their classes over ``drive``."""

    class Stream:
        def __init__(self, device: int = 0, node_id: int = 0) -> None:
            self.device, self.node_id = device, node_id
            self.queued: list[Operation] = []

        def __enter__(self) -> Self:
            return self

        def __exit__(self, kind: object, error: object, trace: object) -> None:
            if kind is None:
                self.synchronize()

        def synchronize(self) -> None:
            queued, self.queued = self.queued, []
            for operation in queued:
                drive.run(operation)

    class Chunk:
        def __init__(self, size: int, device: int = 0) -> None:
            self.chunk_id, self._offset = drive.take(size)
            self.size, self.device = size, device
            self._open = True

        def _queue(self, write: bool, buf: Buffer, file_offset: int, stream: Stream | None) -> None:
            if not self._open:
                raise RdsError("unknown chunk_id")
            if file_offset % ALIGN or buf.size % ALIGN:
                raise ValueError(f"file_offset and buffer size must be multiples of {ALIGN}")
            if not buf.size or buf.size != native().bound_bytes(buf.ptr):
                raise ValueError("a transfer moves a whole bound area")
            if file_offset < 0 or file_offset + buf.size > self.size:
                raise ValueError("the transfer ends past the chunk")
            on = stream or Stream()
            on.queued.append(Operation(write, buf, self._offset + file_offset))
            if stream is None:
                on.synchronize()

        def write(self, buf: Buffer, file_offset: int = 0, stream: Stream | None = None) -> None:
            self._queue(True, buf, file_offset, stream)

        def read(self, buf: Buffer, file_offset: int = 0, stream: Stream | None = None) -> None:
            self._queue(False, buf, file_offset, stream)

        def close(self) -> None:
            self._open = False

    def get_device_buffers(vaddr: int) -> list[Buffer]:
        size = native().bound_bytes(vaddr)
        return [Buffer(vaddr, size)] if size else []  # never bound: there is nothing behind it

    def allocate_and_bind_single_device(device: int, nbytes: int, node_id: int) -> int:
        address = int(native().allocate(nbytes))
        native().bind(address)
        return address

    def sync_to_device(vaddr: int) -> None:
        torch.rbln.synchronize()  # type: ignore[attr-defined]
        native().sync_to_device(vaddr)

    rds, core = types.ModuleType("rebel.rds", "EMULATED"), types.ModuleType("rebel._C", "EMULATED")
    debug = types.SimpleNamespace(
        allocate_and_bind_single_device=allocate_and_bind_single_device,
        free=lambda vaddr: native().release(vaddr),
    )
    vmem = types.SimpleNamespace(
        get_device_buffers=get_device_buffers, sync_to_device=sync_to_device, debug=debug
    )
    parts: dict[str, Any] = {
        "EMULATED": True,
        "Chunk": Chunk,
        "Stream": Stream,
        "Buffer": Buffer,
        "RdsError": RdsError,
        "mark_device_updated": lambda ptr: native().mark_device_updated(ptr),
        "is_available": lambda: True,
        "query_available_device_count": lambda: int(native().device_count()),
        "drive": drive,
    }
    rds.__dict__.update(parts)
    core.__dict__.update(EMULATED=True, vmem=vmem)
    return {"rebel.rds": rds, "rebel._C": core}
