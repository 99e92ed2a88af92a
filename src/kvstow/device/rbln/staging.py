"""Staging areas of direct storage in an NPU's memory.

Each area is bound, so that RDS can reach it, and is a device pool of one slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvstow.device.rbln.device import RblnDevice
from kvstow.errors import UnsupportedError
from kvstow.layout import HEADER_BYTES


class BoundArea:
    """An allocation in device memory that RDS can reach.

    Raises ``UnsupportedError`` where torch-rbln can't bind memory.
    """

    def __init__(self, size_bytes: int, device: torch.device, rbln: Any) -> None:
        # an inference tensor made here could not be written on another thread
        with torch.inference_mode(False):
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


class DeviceStaging:
    """``count`` staging areas on ``device``, each for one payload of at most ``payload_bytes``.

    ``inner`` is the device that copies between them and the engine's pages.
    """

    def __init__(
        self, inner: RblnDevice, device: torch.device, count: int, payload_bytes: int
    ) -> None:
        rbln: Any = getattr(torch, "rbln", None)
        self._inner = inner
        self.areas = [
            StagedArea(
                BoundArea(HEADER_BYTES, device, rbln), BoundArea(payload_bytes, device, rbln)
            )
            for _ in range(count)
        ]

    def select_area(self, area: int) -> int:
        """Makes ``area`` the device's pool from the next copy on.

        Returns its payload's offset there.
        """
        self._inner.map_device_pool(self.areas[area].payload.tensor, 0)
        return 0
