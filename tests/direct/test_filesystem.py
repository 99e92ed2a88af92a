"""A filesystem of its own under direct storage, which fills up and freezes. Loop devices; skipped where none is to be
had."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstow.device.base import Transfer
from kvstow.errors import SettingsError
from tests.direct.rig import Rig, key, shuffled

BYTES = 32 << 20
LEFT_BYTES = 1 << 20


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))):
        pytest.skip("a filesystem of its own needs root, mkfs.ext4, mount and fsfreeze")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    image.write_bytes(b"")
    os.truncate(image, BYTES)
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    done = subprocess.run(
        ["mount", "-o", "loop", str(image), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no loop device can be mounted: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Writes to it hang, and can't be interrupted; reads do not."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)


def test_k7_a_filesystem_that_is_full(mounted: Path) -> None:
    """Too small is found out at the start. What others take later is not direct storage's: its own it has."""
    with pytest.raises(
        SettingsError, match=r"direct\.size: no [\d,]+ bytes .*set direct\.size lower"
    ):
        Rig(mounted / "kv", size=2 * BYTES)
    rig = Rig(mounted / "kv", size=8 << 20)
    room = os.statvfs(mounted)
    with (mounted / "others").open("wb") as others:
        os.posix_fallocate(others.fileno(), 0, room.f_bavail * room.f_frsize - LEFT_BYTES)
    chunks, targets = dict(enumerate(shuffled(16, 1))), dict(enumerate(shuffled(16, 2)))
    before = [{n: rank.bytes_of(blocks) for n, blocks in chunks.items()} for rank in rig.ranks]
    assert [end.failed for end in rig.store(chunks)] == [(), ()]
    assert [end.failed for end in rig.load(targets)] == [(), ()]
    for rank, bytes_of in zip(rig.ranks, before, strict=True):
        assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == bytes_of
    rig.close()
    again = Rig(mounted / "kv", size=8 << 20)
    assert again.found(*chunks) == list(chunks)
    again.close()


def test_a_filesystem_that_freezes(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that hang are given up; what they write later, when it thaws, is nobody's, and all goes on."""
    for limit in ("HUNG_S", "BACKGROUND_PAUSE_S"):
        monkeypatch.setattr(f"kvstow.direct.pipeline.{limit}", 0.2)
    rig = Rig(mounted / "kv", ranks=1, size=8 << 20)
    [rank] = rig.ranks
    assert rank.device is not None
    rig.store({1: (0, 1)})
    rig.settle()
    before = rank.bytes_of((2, 3))
    lease = rig.engine.reserve(key(2), b"", rig.layout.chunk_tokens)
    assert lease is not None
    with frozen(mounted):
        rank.device.copy_out(99, [Transfer(lease.place, [2, 3])])
        end = rank.wait(99)
        assert end.failed == (0,)
        assert "did not answer within" in str(end.error)
        rig.engine.failed(lease)
        lease.release()
    pause = threading.Event()
    for _ in range(1000):
        assert rank.device.finished() == []
        if not rank.device.hung:
            break
        pause.wait(0.01)
    assert not rank.device.hung
    assert [end.failed for end in rig.store({2: (2, 3)})] == [()]
    assert [end.failed for end in rig.load({1: (8, 9), 2: (10, 11)})] == [()]
    assert rank.bytes_of((10, 11)) == before
    rig.extents.check_integrity()
    rig.close()
