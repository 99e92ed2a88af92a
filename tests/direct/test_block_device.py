"""Raw block devices: used whole, and only with consent. Loop devices; skipped where none can be made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.errors import SettingsError
from tests.direct.rig import Rig, shuffled

BYTES = 8 << 20


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    made: list[str] = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).write_bytes(bytes(BYTES))
            done = subprocess.run(
                ["losetup", "--find", "--show", str(tmp_path / name)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"no loop device: {done.stderr}")
            made.append(done.stdout.strip())
        yield tuple(made)
    finally:
        for device in made:
            subprocess.run(
                ["blockdev", "--setrw", device], check=False
            )  # a loop device keeps it beyond its file
            subprocess.run(["losetup", "--detach", device], check=False)


def test_whole_devices_with_consent(devices: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"holds something that isn't kvstow's.*direct\.format"):
        Rig(None, path=devices, size=None)
    rig = Rig(None, path=devices, size=None, format=True)
    extent = rig.ref.geometry.extent_bytes[0]
    assert 0.9 * BYTES < rig.extents.slots * extent <= BYTES
    chunks = dict(enumerate(shuffled(8, 1)))
    before = rig.ranks[1].bytes_of(chunks[5])
    rig.store(chunks)
    rig.close()
    again = Rig(None, path=devices, size=None)
    assert again.found(*chunks) == list(chunks), (
        "ours now: no consent is needed, and nothing is lost"
    )
    targets = dict(enumerate(shuffled(8, 2)))
    assert [end.failed for end in again.load(targets)] == [(), ()]
    assert again.ranks[1].bytes_of(targets[5]) == before
    with pytest.raises(SettingsError, match=r"in use by another engine|Device or resource busy"):
        Rig(None, path=devices, size=None)
    again.close()


def test_a_device_that_is_read_only(devices: tuple[str, ...]) -> None:
    subprocess.run(["blockdev", "--setro", devices[1]], check=True)
    with pytest.raises(
        SettingsError, match=rf"{devices[1]} can't be (used|opened): .*not permitted"
    ):
        Rig(None, path=devices, size=None, format=True)
    subprocess.run(["blockdev", "--setrw", devices[1]], check=True)
    Rig(None, path=devices, size=None, format=True).close()


def test_a_device_that_becomes_read_only(devices: tuple[str, ...]) -> None:
    """What is there is read on; stores fail and are misses; the table says so once."""
    rig = Rig(None, path=devices, size=None, format=True)
    rig.store({1: (0, 1), 2: (2, 3)})
    rig.settle()
    for device in devices:
        subprocess.run(["blockdev", "--setro", device], check=True)
    ends = rig.store({3: (4, 5)})
    assert [end.failed for end in rig.load({1: (8, 9), 2: (10, 11)})] == [(), ()]
    if any(
        end.failed for end in ends
    ):  # a kernel may let a descriptor that was there before write on
        assert rig.found(1, 2, 3) == [1, 2]
    rig.settle()
    for device in devices:
        subprocess.run(["blockdev", "--setrw", device], check=True)
    rig.close()


def test_a_device_that_is_too_small(devices: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"direct\.size asks for"):
        Rig(None, path=devices, size=4 * BYTES, format=True)
