"""Direct storage from end to end over the emulated RDS: slots, extents, copies on the device."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvstow.device.base import Device
from kvstow.device.rbln.device import RblnDevice
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.kv_layouts import Built, Shape
from tests.direct.rig import BLOCKS, BLOCKS_PER_CHUNK, Rank, Rig, shuffled
from tests.rbln import emulator, layouts


class RblnRank(Rank):
    torch_device = "rbln"

    def build(self, shape: Shape) -> Built:
        return layouts.blocks_first(Shape(blocks=shape.blocks, device="rbln"))

    def make_device(self) -> Device:
        return RblnDevice(ThreadExecutor("copy"), SystemClock())


class RblnRig(Rig):
    make_rank: ClassVar[type[Rank]] = RblnRank


@pytest.fixture(autouse=True)
def healthy(drive: emulator.Drive) -> None:
    drive.fail = None


def rds(ranks: int = 1, **direct: object) -> Rig:
    return RblnRig(None, ranks, engine="rds", staging_size=ranks * (1 << 20), **direct)


def test_round_trips_under_shuffled_blocks(drive: emulator.Drive) -> None:
    rig = rds(ranks=2)
    assert rig.ref.engine == "rds"
    count = BLOCKS // BLOCKS_PER_CHUNK // 2
    chunks = dict(enumerate(shuffled(count, 1)))
    targets = dict(enumerate(shuffled(count, 2)))
    before = [{n: rank.bytes_of(blocks) for n, blocks in chunks.items()} for rank in rig.ranks]
    assert [(end.failed, end.error) for end in rig.store(chunks)] == [((), None)] * 2
    assert [(end.failed, end.error) for end in rig.load(targets)] == [((), None)] * 2
    for rank, bytes_of in zip(rig.ranks, before, strict=True):
        assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == bytes_of
    rig.close()


def test_failures_say_what_users_are_told_to_look_for(drive: emulator.Drive) -> None:
    rig = rds()
    rig.store({1: (0, 1)})
    drive.fail = "SYS_EIO: emulated"
    [end] = rig.store({2: (2, 3)})
    assert end.failed == (0,)
    assert "RDS batched write failed for 1 keys" in str(end.error)
    [end] = rig.load({1: (4, 5)})
    assert end.failed == (0,)
    assert "RDS batched read failed" in str(end.error)
    assert rig.found(1, 2) == []
    drive.fail = None
    rig.close()


def test_a_full_drive_makes_room(drive: emulator.Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rds(size=None)
    room = 3 * rig.ref.geometry.extent_bytes[0]
    monkeypatch.setattr(drive, "size", drive._used + room)
    blocks = shuffled(8, 5)
    rig.store(dict(enumerate(blocks[:3])))
    [end] = rig.store({3: blocks[3]})
    assert "RDS batched write failed for 1 keys: CopyError: SYS_ENOSPC" in str(end.error)
    [end] = rig.store({3: blocks[3]})
    assert end.failed == ()
    assert rig.found(*range(4)) == [1, 2, 3]
    rig.close()
