"""Damaged, foreign, swapped and stale bytes under direct storage: each is a miss, and is found to be one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstow.device.base import Transfer
from kvstow.direct.geometry import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstow.direct.table import MAX_GENERATION, record
from kvstow.direct.volume import FILE_NAME, open_extents
from kvstow.errors import CopyError, SettingsError, UnsupportedError
from kvstow.key import Namespace
from kvstow.layout import Place, Span
from kvstow.vllm.direct import open_direct
from tests.direct.rig import Rig, key, shuffled

CHUNKS = dict(enumerate(shuffled(8, 1)))
TARGETS = dict(enumerate(shuffled(8, 2)))


def file_of(path: Path, shard: int) -> Path:
    return path / FILE_NAME.format(engine=0, shard=shard)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def slot_of(rig: Rig, number: int) -> int:
    return rig.engine.index._resident[key(number)]


def extent(rig: Rig, shard: int, slot: int) -> int:
    geometry = rig.ref.geometry
    return geometry.offsets[shard] + slot * geometry.extent_bytes[shard]


@pytest.mark.parametrize("at", [0, 9, 17, 30, 40, 4050, 4090, 4096, 4096 + 5000])
def test_a_flipped_bit_in_an_extent(tmp_path: Path, at: int) -> None:
    rig = Rig(tmp_path)
    rig.store(CHUNKS)
    before = rig.ranks[1].bytes_of(CHUNKS[3])
    flip(file_of(tmp_path, 1), extent(rig, 1, slot_of(rig, 4)) + at)
    ends = rig.load(TARGETS)
    assert [end.failed for end in ends] == [(), (4,)]
    assert "batched read failed" in str(ends[1].error)
    assert rig.ranks[1].bytes_of(TARGETS[3]) == before
    assert rig.found(*CHUNKS) == [0, 1, 2, 3, 5, 6, 7], "the damaged chunk is a miss from now on"
    rig.store({4: CHUNKS[4]})
    assert [end.failed for end in rig.load(TARGETS)] == [(), ()]
    rig.close()


def test_a12_files_swapped_between_ranks_while_the_engine_runs(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(CHUNKS)
    one, two = (file_of(tmp_path, shard) for shard in (0, 1))
    sizes = rig.ref.geometry.extent_bytes
    assert sizes[0] == sizes[1]
    for number in CHUNKS:
        at = [extent(rig, shard, slot_of(rig, number)) for shard in (0, 1)]
        parts = [
            path.read_bytes()[offset : offset + sizes[0]]
            for path, offset in zip((one, two), at, strict=True)
        ]
        for path, offset, part in zip((one, two), at, reversed(parts), strict=True):
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(part)
    ends = rig.load(TARGETS)
    assert [end.failed for end in ends] == [tuple(CHUNKS)] * 2
    assert "the extent of shard 1, not of 0" in str(ends[0].error)
    assert rig.found(*CHUNKS) == []
    rig.close()


def test_files_swapped_before_a_start_begin_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(CHUNKS)
    rig.close()
    one, two = (file_of(tmp_path, shard) for shard in (0, 1))
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    again = Rig(tmp_path)
    assert again.found(*CHUNKS) == []
    again.store(CHUNKS)
    assert [end.failed for end in again.load(TARGETS)] == [(), ()]
    again.close()


def test_an_extent_of_an_earlier_filling_of_the_same_key(tmp_path: Path) -> None:
    """Its header page and checksum are good, and its generation is not."""
    rig = Rig(tmp_path, ranks=1, max_chunks=4)
    rig.store({1: (0, 1)})
    path, at = file_of(tmp_path, 0), extent(rig, 0, slot_of(rig, 1))
    size = rig.ref.geometry.extent_bytes[0]
    old = path.read_bytes()[at : at + size]
    for number in (2, 3, 4, 5):  # makes room of slot by slot, 1 first
        rig.store({number: (2, 3)})
    rig.store({1: (4, 5)})
    assert slot_of(rig, 1) != slot_of(rig, 3)
    with path.open("r+b") as file:
        file.seek(extent(rig, 0, slot_of(rig, 1)))
        file.write(old)
    [end] = rig.load({1: (8, 9)})
    assert end.failed == (0,)
    assert "an earlier filling's" in str(end.error)
    rig.close()


def _truncate(path: Path) -> None:
    os.truncate(path, SUPERBLOCK_BYTES + 100)


def _records(path: Path) -> None:
    for slot in range(8):
        flip(path, SUPERBLOCK_BYTES + slot * RECORD_BYTES + 3 + slot * 9)


def _superblock(path: Path) -> None:
    flip(path, 40)


@pytest.mark.parametrize("harm", [_truncate, _records])
def test_harm_to_a_file_before_a_start_is_misses(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    rig = Rig(tmp_path)
    rig.store(CHUNKS)
    rig.close()
    harm(file_of(tmp_path, 0))
    again = Rig(tmp_path)
    assert again.found(*CHUNKS) == []
    again.store(CHUNKS)
    assert [end.failed for end in again.load(TARGETS)] == [(), ()]
    again.close()


def test_a_superblock_that_is_not_ours_is_refused_without_consent(tmp_path: Path) -> None:
    Rig(tmp_path).close()
    _superblock(file_of(tmp_path, 1))
    with pytest.raises(SettingsError, match=r"holds something that isn't kvstow's.*direct\.format"):
        Rig(tmp_path)
    Rig(tmp_path, format=True).close()


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"dear diary" * 1000)
    both, mode = tuple(map(str, files)), files[0].stat().st_mode & 0o777
    with pytest.raises(SettingsError, match="isn't kvstow's"):
        Rig(None, path=both)
    assert all(file.read_bytes() == b"dear diary" * 1000 for file in files)
    assert files[0].stat().st_mode & 0o777 == mode
    Rig(None, path=both, format=True).close()
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_a_second_engine_on_the_same_files_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(SettingsError, match="in use by another engine"):
        Rig(tmp_path)
    rig.close()
    Rig(tmp_path).close()


def test_another_geometry_starts_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(CHUNKS)
    rig.close()
    again = Rig(tmp_path, size=6 << 20)
    assert again.found(*CHUNKS) == []
    again.close()


def test_no_room_for_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvstow.direct.volume.os.posix_fallocate", full)
    with pytest.raises(
        SettingsError, match=r"direct\.size: no [\d,]+ bytes for .*set direct\.size lower"
    ):
        Rig(tmp_path)
    assert file_of(tmp_path, 0).stat().st_size == SUPERBLOCK_BYTES, (
        "what could be had is given back"
    )
    monkeypatch.undo()
    Rig(tmp_path).close()


def test_more_than_the_filesystem_has(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"direct\.size: no"):
        Rig(tmp_path, size=1 << 50)


@pytest.mark.parametrize("move", ["read", "write"])
def test_a8_an_error_of_the_device(tmp_path: Path, move: str) -> None:
    rig = Rig(tmp_path, ranks=1)
    assert rig.ranks[0].device is not None
    media = rig.ranks[0].device._pipeline._media
    bad = extent(rig, 0, 0)

    def failing(real: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def io(fd: int, views: Sequence[memoryview], offset: int) -> int:
            if offset == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, views, offset)

        return io

    if move == "write":
        media._pwritev = failing(media._pwritev)  # type: ignore[attr-defined]
    else:
        media._preadv = failing(media._preadv)  # type: ignore[attr-defined]
    [end] = rig.store(CHUNKS)
    if move == "read":
        assert end.failed == ()
        [end] = rig.load(TARGETS)
    assert len(end.failed) == 1
    assert f"direct storage (file) batched {move} failed" in str(end.error)
    assert "Input/output error" in str(end.error)
    assert len(rig.found(*CHUNKS)) == 7
    rig.extents.check_integrity()
    assert rig.extents._free[0] == 0, "the slot that failed is the last to be used again"
    rig.close()


def test_a_short_read_is_a_miss(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ranks=1)
    rig.store(CHUNKS)
    os.truncate(file_of(tmp_path, 0), extent(rig, 0, 3) + 8192)
    [end] = rig.load(TARGETS)
    assert len(end.failed) == 5
    assert "were read" in str(end.error)
    assert len(rig.found(*CHUNKS)) == 3
    rig.close()


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "diary").touch()
    file_of(tmp_path, 0).symlink_to(tmp_path / "diary")
    with pytest.raises(SettingsError, match="can't be opened: Too many levels"):
        Rig(tmp_path)
    file_of(tmp_path, 0).unlink()
    os.mkfifo(file_of(tmp_path, 0))
    with pytest.raises(SettingsError, match="neither a file nor a block device"):
        Rig(tmp_path)


def test_one_file_for_two_ranks_under_two_names(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SettingsError, match="each rank needs a file or block device of its own"):
        Rig(None, path=(str(tmp_path / "a"), str(tmp_path / "b")))
    (tmp_path / "b").unlink()
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(SettingsError, match="is in use by another engine"):
        Rig(None, path=(str(tmp_path / "a"), str(tmp_path / "b")))


def test_files_that_are_removed_while_the_engine_runs(tmp_path: Path) -> None:
    """It goes on with what it has open; the next start finds nothing."""
    rig = Rig(tmp_path)
    rig.store(dict(list(CHUNKS.items())[:4]))
    for shard in (0, 1):
        file_of(tmp_path, shard).unlink()
    rig.store(dict(list(CHUNKS.items())[4:]))
    assert [end.failed for end in rig.load(TARGETS)] == [(), ()]
    rig.close()
    again = Rig(tmp_path)
    assert again.found(*CHUNKS) == []
    again.close()


def test_another_model_s_chunks_are_not_found_and_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, max_chunks=8)
    rig.store(CHUNKS)
    rig.close()
    monkeypatch.setattr(
        "tests.direct.rig.NAMESPACE", Namespace.from_fields({"made by": "another model"})
    )
    other = Rig(tmp_path, max_chunks=8)
    assert other.extents.free == 0
    assert other.found(*CHUNKS) == []
    other.store(CHUNKS)
    assert other.found(*CHUNKS) == list(CHUNKS)
    assert [end.failed for end in other.load(TARGETS)] == [(), ()]
    other.close()


def test_a_table_copied_from_another_set_promises_what_reads_do_not_confirm(tmp_path: Path) -> None:
    rig, twin = Rig(tmp_path / "a"), Rig(tmp_path / "b")
    rig.store(CHUNKS)
    rig.close(), twin.close()
    size = rig.ref.geometry.offsets[0] - SUPERBLOCK_BYTES
    with (
        file_of(tmp_path / "a", 0).open("rb") as theirs,
        file_of(tmp_path / "b", 0).open("r+b") as ours,
    ):
        theirs.seek(SUPERBLOCK_BYTES), ours.seek(SUPERBLOCK_BYTES)
        ours.write(theirs.read(size))
    again = Rig(tmp_path / "b")
    assert again.found(*CHUNKS) == list(CHUNKS)
    ends = again.load(TARGETS)
    assert [end.failed for end in ends] == [tuple(CHUNKS)] * 2
    assert again.found(*CHUNKS) == []
    again.close()


def test_a_generation_at_the_end_of_its_range(tmp_path: Path) -> None:
    """A record that says so is whole: somebody wrote it. The engine counts on."""
    rig = Rig(tmp_path)
    rig.close()
    with file_of(tmp_path, 0).open("r+b") as file:
        file.seek(SUPERBLOCK_BYTES)
        file.write(record(key(1), (1 << 64) - 1) + record(key(2), MAX_GENERATION - 1))
    again = Rig(tmp_path)
    assert again.found(1, 2) == [2]
    others = {n: CHUNKS[n] for n in (0, 1, 3)}
    again.store(others)
    assert [end.failed for end in again.load(others)] == [(), ()]
    again.close()


@pytest.mark.parametrize("at", ["start", "worker"])
def test_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    real = os.open
    rig = Rig(tmp_path / "there")
    monkeypatch.setattr("kvstow.direct.volume.os.open", refusing)
    if at == "start":
        with pytest.raises(SettingsError, match="can't be used: no direct I/O on this filesystem"):
            Rig(tmp_path / "new")
    else:
        with pytest.raises(UnsupportedError, match="can't be opened for direct I/O"):
            open_direct(rig.ranks[0].inner, rig.ref, 0, torch.device("cpu"))
    monkeypatch.undo()
    rig.close()


def test_a_disk_that_dies_altogether(tmp_path: Path) -> None:
    """Every call fails, at once: nothing is found any more, nothing waits, and it comes back with the disk."""
    rig = Rig(tmp_path, ranks=1)
    rig.store(CHUNKS)
    assert rig.ranks[0].device is not None
    media = rig.ranks[0].device._pipeline._media
    real = media._preadv, media._pwritev  # type: ignore[attr-defined]

    def dead(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    media._preadv = media._pwritev = dead  # type: ignore[attr-defined]
    assert rig.load(TARGETS)[0].failed == tuple(CHUNKS)
    assert rig.found(*CHUNKS) == []
    assert rig.store({9: (0, 1)})[0].failed == (0,)
    media._preadv, media._pwritev = real  # type: ignore[attr-defined]
    rig.store({9: (0, 1)})
    assert rig.load({9: (4, 5)})[0].failed == ()
    rig.extents.check_integrity()
    rig.close()


def test_failure_policy_raise_ends_the_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ranks=1, failure_policy="raise")
    rig.store(CHUNKS)
    flip(file_of(tmp_path, 0), extent(rig, 0, slot_of(rig, 2)) + 5000)
    with pytest.raises(CopyError, match=r"batched read failed.*direct\.failure_policy is raise"):
        rig.load(TARGETS)


def test_a_worker_that_sees_other_files_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for ref, why in (
        (replace(rig.ref, set_id=bytes(16)), "isn't shard 1 of the set"),
        (replace(rig.ref, paths=rig.ref.paths[::-1]), "isn't shard 1 of the set"),
        (
            replace(rig.ref, paths=("/nowhere/a", "/nowhere/b")),
            "can't be opened for direct I/O: No such file",
        ),
        (replace(rig.ref, engine="rds"), "rebel.rds can't be imported|serves RBLN NPUs"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            open_direct(rig.ranks[1].inner, ref, 1, torch.device("cpu"))
    rig.close()


def test_a_file_that_is_replaced_while_a_worker_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at is the file that will be used, whatever has its path by then."""
    rig = Rig(tmp_path, ranks=1)
    path = file_of(tmp_path, 0)
    path.rename(tmp_path / "ours")
    path.write_bytes(b"dear diary" * 1000)
    opened: list[int] = []

    def open_then_replace(name: str, flags: int) -> int:
        opened.append(real(name, flags))
        (tmp_path / "ours").rename(name)
        return opened[-1]

    real = os.open
    monkeypatch.setattr("kvstow.direct.volume.os.open", open_then_replace)
    with pytest.raises(UnsupportedError, match="isn't shard 0 of the set"):
        open_extents(str(path), rig.ref.set_id, rig.ref.geometry, 0)
    monkeypatch.undo()
    assert not os.path.exists(f"/proc/self/fd/{opened[0]}")
    rig.close()


def test_places_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ranks=1)
    [rank] = rig.ranks
    assert rank.device is not None
    with pytest.raises(UnsupportedError, match="no host pool"):
        rank.device.map_pool(memoryview(b""), 0)
    rank.device.copy_in(7, [Transfer(Place("pool", (Span(0, 4096),)), [1])])
    rank.device.copy_out(8, [])
    ends = rank.device.finished()
    assert [(end.ticket, end.failed) for end in ends] == [(7, (0,)), (8, ())]
    rig.close()
