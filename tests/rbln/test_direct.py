"""Direct storage over RDS on the emulated device, its copies on the device included. Emulated: no NPU, no NVMe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from kvstow import build
from kvstow.device.base import Device
from kvstow.device.rbln.device import RblnDevice
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.settings import Direct, Settings
from kvstow.testing.kv_layouts import Built, Shape
from tests.direct.rig import BLOCKS, BLOCKS_PER_CHUNK, Rank, Rig, shuffled
from tests.rbln import emulator, layouts


class RblnRank(Rank):
    torch_device = "rbln"

    def build(self, shape: Shape) -> Built:
        return layouts.blocks_first(Shape(blocks=shape.blocks, device="rbln"))

    def make_device(self) -> Device:
        return RblnDevice(ThreadExecutor("copy"), SystemClock(), block_axis=0)


class RblnRig(Rig):
    make_rank: ClassVar[type[Rank]] = RblnRank


@pytest.fixture
def drive(drive: emulator.Drive) -> Iterator[emulator.Drive]:
    drive.fail = None
    yield drive
    drive.fail = None


def rds(ranks: int = 1, **direct: object) -> Rig:
    return RblnRig(None, ranks, engine="rds", staging_size=ranks * (1 << 20), **direct)


def test_emulated_round_trips_under_shuffled_blocks(drive: emulator.Drive) -> None:
    rig = rds(ranks=2)
    assert rig.ref.engine == "rds"
    count = BLOCKS // BLOCKS_PER_CHUNK // 2
    chunks, targets = dict(enumerate(shuffled(count, 1))), dict(enumerate(shuffled(count, 2)))
    before = [{n: rank.bytes_of(blocks) for n, blocks in chunks.items()} for rank in rig.ranks]
    assert [(end.failed, end.error) for end in rig.store(chunks)] == [((), None)] * 2
    assert [(end.failed, end.error) for end in rig.load(targets)] == [((), None)] * 2
    for rank, bytes_of in zip(rig.ranks, before, strict=True):
        assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == bytes_of
    rig.close()


def test_emulated_payloads_do_not_pass_the_host(drive: emulator.Drive) -> None:
    rig = rds()
    chunks = {n: blocks for n, blocks in enumerate(shuffled(9, 3)) if n}  # slot 0 is the sample that is checked
    rig.store({0: (0, 1)})
    rig.store(chunks)
    emulator.reset_counters()
    rig.load({n: blocks for n, blocks in enumerate(shuffled(9, 4)) if n})
    copies = emulator.copies()
    pages = len(chunks) * 2  # each header page is looked at before and after
    assert copies["d2h.bytes"] == pages * 4096
    assert copies.get("h2d.bytes", 0) == 0
    assert copies.get("d2d.strided", 0) == 0
    rig.close()


def test_emulated_failures_say_what_users_are_told_to_look_for(drive: emulator.Drive) -> None:
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
    rig.close()


def test_emulated_drive_that_is_full_makes_room(drive: emulator.Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rds(size=None)
    monkeypatch.setattr(drive, "size", drive._used + 3 * rig.ref.geometry.extent_bytes[0])
    blocks = shuffled(8, 5)
    rig.store(dict(enumerate(blocks[:3])))
    [end] = rig.store({3: blocks[3]})
    assert "RDS batched write failed for 1 keys: CopyError: SYS_ENOSPC" in str(end.error)
    [end] = rig.store({3: blocks[3]})
    assert end.failed == ()
    assert rig.found(*range(4)) == [1, 2, 3]
    rig.close()


def test_auto_takes_rds_where_there_is_one(drive: emulator.Drive) -> None:
    from kvstow.build.direct import choose

    assert choose(Settings(direct=Direct(engine="auto", path=("/nvme",)))) == "rds"
    assert build.load_rds()
