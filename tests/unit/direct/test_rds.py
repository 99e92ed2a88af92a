"""The engine ``rds`` over an emulated ``rebel.rds``: what is shown here is emulated."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvstow.direct.base import Extent
from kvstow.direct.page import tag_of
from kvstow.direct.rds import RdsMedia, load
from kvstow.errors import CopyError, FrameError, UnsupportedError
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ALIGN, HEADER_BYTES
from tests.unit.direct.fake_rds import FakeArea, FakeRds

PAYLOAD = 3 * ALIGN
LENGTH = PAYLOAD - 100
EXTENT = HEADER_BYTES + PAYLOAD
NAMESPACE = Namespace.from_fields({"made by": "rds test"})


def tag(number: int, generation: int = 1) -> bytes:
    return tag_of(ChunkKey.build(NAMESPACE, 0, number.to_bytes(32, "little")), generation)


def at(slot: int, number: int, generation: int = 1) -> Extent:
    return Extent(slot * EXTENT, LENGTH, tag(number, generation))


class Rig:
    def __init__(self, scrub_interval_slots: int = 64, **fake: int) -> None:
        self.rds = FakeRds(**fake)
        self.staged = [
            SimpleNamespace(
                page=FakeArea(self.rds, HEADER_BYTES), payload=FakeArea(self.rds, PAYLOAD)
            )
            for _ in range(2)
        ]
        self.media = RdsMedia(self.rds.api, 0, 1, self.staged, EXTENT, scrub_interval_slots)

    def fill(self, area: int) -> bytes:
        """As the device does: its side alone changes, and host reads go there."""
        payload = self.staged[area].payload
        payload.host[:] = payload.device[:] = os.urandom(PAYLOAD)
        return bytes(payload.host)


def test_round_trips() -> None:
    rig = Rig()
    payloads = {}
    for slot in range(5):
        payloads[slot] = rig.fill(slot % 2)
        rig.media.write(slot % 2, at(slot, slot))
    assert len(rig.rds.chunks) == 5
    for slot in (3, 0, 4, 1, 2):
        rig.media.read(1, at(slot, slot))
        assert bytes(rig.staged[1].payload.host) == payloads[slot], (
            "stale without mark_device_updated"
        )
    rig.media.close()
    assert all(chunk.closed for chunk in rig.rds.chunks)


def test_a_slot_filled_again_keeps_its_chunk() -> None:
    rig = Rig()
    rig.fill(0)
    rig.media.write(0, at(3, 1))
    rig.media.write(0, at(3, 2, generation=2))
    assert len(rig.rds.chunks) == 1
    rig.media.read(0, at(3, 2, generation=2))
    with pytest.raises(FrameError, match="another chunk's"):
        rig.media.read(0, at(3, 1))


def test_what_was_never_written() -> None:
    with pytest.raises(FrameError, match="nothing was written"):
        Rig().media.read(0, at(1, 1))


@pytest.mark.parametrize("filled", [True, False])
def test_a_probe_asks_nvme_even_for_a_slot_never_filled(filled: bool) -> None:
    rig, transfers = Rig(), []
    if filled:
        rig.media.write(0, at(1, 1))
    rig.rds.after_transfer = lambda: transfers.append(1)
    with pytest.raises(FrameError, match="never written" if not filled else "another chunk's"):
        rig.media.probe(0, at(1, 2))
    assert transfers
    rig.rds.fail = "SYS_EIO"
    with pytest.raises(CopyError, match="SYS_EIO"):
        rig.media.probe(0, at(1, 2))
    rig.rds.left_bytes = 0
    with pytest.raises(CopyError, match="SYS_ENOSPC"):
        rig.media.probe(0, at(2, 2))


def test_nvme_that_is_full() -> None:
    rig = Rig(nvme_bytes=2 * EXTENT)
    rig.media.write(0, at(0, 0))
    rig.media.write(0, at(1, 1))
    with pytest.raises(CopyError, match="SYS_ENOSPC"):
        rig.media.write(0, at(2, 2))
    rig.media.write(0, at(0, 2, generation=2))


def test_a_failing_transfer() -> None:
    rig = Rig()
    rig.media.write(0, at(0, 0))
    rig.rds.fail = "SYS_EIO"
    with pytest.raises(CopyError, match="SYS_EIO"):
        rig.media.read(0, at(0, 0))
    with pytest.raises(CopyError, match="SYS_EIO"):
        rig.media.write(0, at(1, 1))


def test_a_slot_overwritten_while_it_is_read() -> None:
    rig = Rig()
    rig.fill(0)
    rig.media.write(0, at(1, 1))
    [chunk] = rig.rds.chunks
    other = Rig()
    other.media.write(0, at(1, 2, generation=2))
    transfers = []

    def overwrite() -> None:
        transfers.append(1)
        if len(transfers) == 2:  # the header page, and then the payload, have been read
            chunk.nvme[:] = other.rds.chunks[0].nvme

    rig.rds.after_transfer = overwrite
    with pytest.raises(FrameError, match="another chunk's"):
        rig.media.read(0, at(1, 1))


@pytest.mark.parametrize("at_byte", [40, HEADER_BYTES + 77])
@pytest.mark.parametrize(("slot", "checked"), [(0, True), (4, True), (5, False)])
def test_a_sample_of_chunks_is_scrubbed(
    slot: int, checked: bool, at_byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(scrub_interval_slots=4)
    rig.fill(0)
    rig.media.write(0, at(slot, 1))
    rig.media.scrub(1)
    rig.media.read(1, at(slot, 1))
    assert caplog.text == ""
    rig.rds.chunks[0].nvme[at_byte] ^= 1
    rig.media.scrub(1)
    assert ("not what was written" in caplog.text) is checked
    if checked:
        with pytest.raises(FrameError, match="nothing was written there"):
            rig.media.read(1, at(slot, 1))
        assert rig.rds.chunks[0].closed
        rig.media.write(0, at(slot, 1, generation=2))
        rig.media.read(1, at(slot, 1, generation=2))
    elif at_byte > HEADER_BYTES:
        rig.media.read(1, at(slot, 1))


def test_scrubs_go_round() -> None:
    rig = Rig(scrub_interval_slots=2)
    for slot in range(6):
        rig.fill(0)
        rig.media.write(0, at(slot, slot))
    rig.fill(0)
    rig.media.write(0, at(2, 9, generation=2))
    rig.media.write(0, at(3, 10, generation=2))
    bad = [rig.rds.chunks[slot] for slot in (0, 2, 4)]
    for chunk in bad:
        chunk.nvme[HEADER_BYTES + 5] ^= 1
    for count in (1, 2, 3):
        rig.media.scrub(0)
        assert sum(chunk.closed for chunk in bad) == count
    rig.media.scrub(0)


def test_a_scrub_that_can_not_read_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for the chunk will."""
    rig = Rig(scrub_interval_slots=1)
    rig.media.write(0, at(0, 0))
    rig.rds.fail = "SYS_EIO"
    for _ in range(2):
        with pytest.raises(CopyError):
            rig.media.scrub(1)
    assert caplog.text == ""
    rig.rds.fail = None
    rig.media.scrub(1)
    rig.media.read(1, at(0, 0))


@pytest.mark.parametrize("extent", [Extent(100, LENGTH, tag(1)), Extent(0, PAYLOAD + 1, tag(1))])
def test_misaligned(extent: Extent) -> None:
    rig = Rig()
    with pytest.raises(CopyError, match="misaligned"):
        rig.media.write(0, extent)
    with pytest.raises(CopyError, match="misaligned"):
        rig.media.read(0, extent)


@pytest.mark.parametrize(
    ("available", "devices", "why"),
    [(False, 1, "is_available"), (True, 0, "no device"), (None, 0, "can't be imported")],
)
def test_load_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, available: bool | None, devices: int, why: str
) -> None:
    for name in ("rebel", "rebel.rds", "rebel._C"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    if available is not None:
        rds, core = ModuleType("rebel.rds"), ModuleType("rebel._C")
        rds.is_available, rds.query_available_device_count = lambda: available, lambda: devices  # type: ignore[attr-defined]
        core.vmem = object()  # type: ignore[attr-defined]
        for module in (ModuleType("rebel"), rds, core):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UnsupportedError, match=why):
        load()
