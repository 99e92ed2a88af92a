"""Direct storage's engine `rds` over the emulated one: the RBLN device's pages to NVMe and back without the host."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstow.device.base import Transfer
from kvstow.device.rbln.device import RblnDevice
from kvstow.device.rbln.staging import DeviceStaging
from kvstow.direct import rds as media
from kvstow.direct.base import Extent
from kvstow.errors import FrameError
from kvstow.layout import HEADER_BYTES, Place, Span, align_up
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.kv_layouts import Built, Shape, block_bytes, fill
from tests.rbln import emulator, layouts

TAG = b"t" * 32


class Rig:
    """A device over three layers, one staging area, and the media with ``api``."""

    def __init__(self, api: tuple[Any, Any]) -> None:
        self.built: Built = layouts.blocks_first(
            Shape(layers=3, blocks=6, tokens=64, device="rbln")
        )
        fill(self.built, seed=4)
        self.device = RblnDevice(ThreadExecutor("copy"), SystemClock())
        [pages] = self.device.attach(self.built.caches, [self.built.specs])
        self.length = pages.block_bytes
        self.staging = DeviceStaging(self.device, torch.device("rbln", 0), 1, align_up(self.length))
        [self.area] = self.staging.areas
        size = HEADER_BYTES + align_up(self.length)
        self.media = media.RdsMedia(
            api, 0, 0, [self.area], size, scrub_interval_slots=1 << 30
        )  # payloads are not checked by sample
        self.extent = Extent(
            size, self.length, TAG
        )  # the second slot: the first one's payload is always sampled
        self.tickets = 0

    def copy(self, block: int, *, load: bool) -> None:
        start = self.device.copy_in if load else self.device.copy_out
        self.tickets += 1
        start(
            self.tickets,
            [Transfer(Place("pool", (Span(self.staging.select_area(0), self.length),)), [block])],
        )
        self.device.fence([self.tickets])
        assert [ended.failed for ended in self.device.finished()] == [()]

    def there_and_back(self, source: int, target: int) -> bool:
        """Whether ``target`` then has ``source``'s bytes. In between the staging area is used for something else."""
        expected = [block_bytes(self.built, name, source) for name in self.built.specs]
        self.copy(source, load=False)
        self.media.write(0, self.extent)
        self.area.payload.put(b"\x11" * self.area.payload.tensor.nbytes)
        sys.modules["rebel._C"].vmem.sync_to_device(self.area.payload.address)  # type: ignore[attr-defined]
        self.media.read(0, self.extent)
        self.copy(target, load=True)
        return [block_bytes(self.built, name, target) for name in self.built.specs] == expected

    def close(self) -> None:
        self.media.close()
        self.device.close()


@pytest.fixture
def api(drive: emulator.Drive) -> tuple[Any, Any]:
    drive.fail = None
    return media.load()


def without(api: tuple[Any, Any], name: str, *, size: int) -> tuple[Any, Any]:
    """The same, but ``name`` is forgotten for areas of ``size`` bytes."""
    rds, vmem = api
    original = getattr(rds if hasattr(rds, name) else vmem, name)

    def sometimes(address: int) -> None:
        [buffer] = vmem.get_device_buffers(address)
        if buffer.size != size:
            original(address)

    parts = [SimpleNamespace(**{**vars(part), name: sometimes}) for part in api]
    return parts[0], parts[1]


def test_a_block_goes_to_nvme_and_back_without_the_host(api: tuple[Any, Any]) -> None:
    rig = Rig(api)
    emulator.reset_counters()
    assert rig.there_and_back(4, 1)
    moved = {name: value for name, value in emulator.copies().items() if name.endswith(".strided")}
    assert moved == {}
    rig.close()


@pytest.mark.parametrize("name", ["sync_to_device", "mark_device_updated"])
def test_what_is_forgotten_for_a_payload_gives_wrong_bytes(api: tuple[Any, Any], name: str) -> None:
    """That the product's own calls are what makes the test above pass."""
    size = align_up(layouts_page_bytes())
    rig = Rig(without(api, name, size=size))
    assert not rig.there_and_back(4, 1)
    rig.close()


@pytest.mark.parametrize("name", ["sync_to_device", "mark_device_updated"])
def test_what_is_forgotten_for_a_header_page_is_noticed(api: tuple[Any, Any], name: str) -> None:
    rig = Rig(without(api, name, size=HEADER_BYTES))
    rig.copy(4, load=False)
    rig.media.write(0, rig.extent)
    rig.area.page.put(b"\x33" * HEADER_BYTES)
    with pytest.raises(FrameError):
        rig.media.read(0, rig.extent)
    rig.close()


def layouts_page_bytes() -> int:
    """Bytes of a block over the rig's three layers."""
    spec = next(
        iter(
            layouts.blocks_first(Shape(layers=1, blocks=1, tokens=64, device="rbln")).specs.values()
        )
    )
    return 3 * spec.page_bytes
