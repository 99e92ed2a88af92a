"""The engine ``file`` over memory: alignment, short transfers, checks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
import torch

from kvstow.direct.base import Extent
from kvstow.direct.file import FileMedia
from kvstow.direct.page import tag_of
from kvstow.errors import CopyError, FrameError, SettingsError
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ALIGN, HEADER_BYTES

AREA = HEADER_BYTES + 4 * ALIGN
LENGTH = 3 * ALIGN + 17
TAG = tag_of(ChunkKey.build(Namespace.from_fields({"made by": "file test"}), 0, b"p" * 32), 5)


class Disk:
    """A file in memory, which moves at most ``most`` bytes a call and remembers the calls."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.data = bytearray(64 * AREA)
        self.most = most
        self.calls: list[tuple[int, int]] = []

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        part = views[0][: self.most]
        self.calls.append((offset, len(part)))
        self.data[offset : offset + len(part)] = part
        return len(part)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        part = self.data[offset : offset + min(len(views[0]), self.most)]
        self.calls.append((offset, len(part)))
        views[0][: len(part)] = part
        return len(part)


def media(disk: Disk, areas: int = 3, shard: int = 0) -> FileMedia:
    return FileMedia(-1, shard, areas, AREA, io=(disk.read, disk.write))


def fill(media: FileMedia, area: int) -> bytes:
    data = os.urandom(LENGTH)
    at = media.select_area(area)
    media.memory[at : at + LENGTH] = data
    return data


@pytest.mark.parametrize("most", [1 << 30, ALIGN, 2 * ALIGN])
def test_round_trip_in_as_many_calls_as_it_takes(most: int) -> None:
    disk = Disk(most)
    subject = media(disk)
    data = fill(subject, 1)
    subject.write(1, Extent(2 * AREA, LENGTH, TAG))
    subject.read(2, Extent(2 * AREA, LENGTH, TAG))
    at = subject.select_area(2)
    assert bytes(subject.memory[at : at + LENGTH]) == data
    assert all(offset % ALIGN == 0 and size % ALIGN == 0 for offset, size in disk.calls)
    assert sum(size for _, size in disk.calls) == 2 * (HEADER_BYTES + 4 * ALIGN)


def test_what_is_not_payload_is_written_as_zeros() -> None:
    disk = Disk()
    subject = media(disk)
    fill(subject, 0)
    subject.memory[HEADER_BYTES + LENGTH : AREA] = b"\xa5" * (AREA - HEADER_BYTES - LENGTH)
    subject.write(0, Extent(AREA, LENGTH, TAG))
    assert not any(disk.data[AREA + HEADER_BYTES + LENGTH : 2 * AREA])


@pytest.mark.parametrize("offset", [1, 512, ALIGN - 1, ALIGN + 512, -ALIGN, 0])
def test_i5_misaligned_offsets_are_refused_before_the_kernel_sees_them(offset: int) -> None:
    """A kernel may let them pass. 0 is the superblock's."""
    disk = Disk()
    subject = media(disk)
    for move in (subject.write, subject.read):
        with pytest.raises(CopyError, match="misaligned"):
            move(0, Extent(offset, LENGTH, TAG))
    assert disk.calls == []


def test_misaligned_memory_is_refused() -> None:
    subject = media(Disk())
    subject._address += 16
    with pytest.raises(CopyError, match="misaligned"):
        subject.write(0, Extent(AREA, LENGTH, TAG))


@pytest.mark.parametrize(
    ("area", "length"), [(3, LENGTH), (-1, LENGTH), (0, AREA), (0, 0), (0, -1)]
)
def test_outside_the_staging(area: int, length: int) -> None:
    disk = Disk()
    with pytest.raises(CopyError):
        media(disk).write(area, Extent(AREA, length, TAG))
    assert disk.calls == []


@pytest.mark.parametrize("most", [0, 100, ALIGN + 512])
def test_short_transfers_fail(most: int) -> None:
    disk = Disk()
    subject = media(disk)
    fill(subject, 0)
    subject.write(0, Extent(AREA, LENGTH, TAG))
    disk.most = most
    with pytest.raises(CopyError, match=r"only \d+ of"):
        subject.read(1, Extent(AREA, LENGTH, TAG))
    with pytest.raises(CopyError, match=r"only \d+ of"):
        subject.write(0, Extent(AREA, LENGTH, TAG))


def test_a_payload_that_changed() -> None:
    disk = Disk()
    subject = media(disk)
    fill(subject, 0)
    subject.write(0, Extent(AREA, LENGTH, TAG))
    disk.data[AREA + HEADER_BYTES + 5] ^= 1
    with pytest.raises(FrameError, match="checksum does not match"):
        subject.read(1, Extent(AREA, LENGTH, TAG))


def test_another_rank_s_extent() -> None:
    disk = Disk()
    fill(media(disk), 0)
    media(disk, shard=1).write(0, Extent(AREA, LENGTH, TAG))
    with pytest.raises(FrameError, match="shard 1, not of 0"):
        media(disk).read(0, Extent(AREA, LENGTH, TAG))


def test_no_memory_for_the_staging_names_the_setting_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "memfd_create", none)
    fd = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(SettingsError, match=r"direct\.staging_size: no .* bytes of memory"):
        FileMedia(fd, 0, 3, AREA)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_device_that_has_the_staging_keeps_it() -> None:
    """The pipeline closes the media before the device is closed, and a tensor keeps no hold of the memory's views."""
    subject = media(Disk())
    tensor = torch.frombuffer(subject.memory, dtype=torch.uint8)
    tensor[:] = 7
    subject.close()
    assert len(subject.memory) == len(tensor)
    assert int(tensor.sum()) == 7 * len(tensor)
