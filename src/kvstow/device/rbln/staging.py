"""Staging areas of direct storage in an NPU's memory: each is bound, so that RDS can reach it, and a pool by itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from kvstow.errors import UnsupportedError
from kvstow.layout import HEADER_BYTES


class BoundArea:
    """Device memory of its own, which direct storage can reach."""

    def __init__(self, size_bytes: int, device: torch.device, rbln: Any) -> None:
        with torch.inference_mode(
            False
        ):  # an inference tensor made here could not be written on another thread
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        if not hasattr(rbln, "bind_device_memory"):
            raise UnsupportedError(
                "direct.engine rds needs torch.rbln.bind_device_memory: update torch-rbln"
            )
        rbln.bind_device_memory(self.tensor)
        self.address = self.tensor.data_ptr()

    def put(self, data: bytes) -> None:
        self.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def get(self) -> bytes:
        return bytes(self.tensor.cpu().numpy().tobytes())


class StagedArea(NamedTuple):
    page: BoundArea
    payload: BoundArea


class DevicePools(Protocol):
    """A device that can have a pool in its own memory."""

    def map_device_pool(self, pool: torch.Tensor, shard: int) -> None: ...


class DeviceStaging:
    """``count`` areas for payloads of at most ``payload_bytes``, for ``inner``, whose KV is on ``device``."""

    def __init__(
        self, inner: DevicePools, device: torch.device, count: int, payload_bytes: int
    ) -> None:
        rbln: Any = getattr(torch, "rbln", None)
        self._inner = inner
        self.areas = [
            StagedArea(
                BoundArea(HEADER_BYTES, device, rbln), BoundArea(payload_bytes, device, rbln)
            )
            for _ in range(count)
        ]

    def use(self, area: int) -> int:
        """From the next copy on the device's pool is what has this area; its payload begins at the returned byte."""
        self._inner.map_device_pool(self.areas[area].payload.tensor, 0)
        return 0
