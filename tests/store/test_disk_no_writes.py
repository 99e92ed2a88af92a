"""A disk that refuses every write, and can be read."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.disk import DiskStore
from kvstow.errors import StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, value_of, write_one
from kvstow.tiers import TierLimits
from tests.store.disks import CHUNK, disk, holds, put, remount, tmpfs
from tests.unit.rig import Rig, hit, keys

CHANGES = ("pwrite", "pwritev", "mkdir", "link", "rename", "unlink", "rmdir", "utime")


@contextmanager
def no_writes(code: int) -> Iterator[None]:
    """Every call that changes a file or directory fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    real = os.open

    def open_only(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            refuse()
        return real(path, flags, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, refuse)
        patch.setattr(os, "open", open_only)
        patch.setattr("kvstow.backends.disk.files.rename_new", refuse)
        yield


def fill(store: DiskStore, count: int = 5) -> None:
    assert all(put(store, make_key(i), i) for i in range(count))


def refuses(store: DiskStore, i: int) -> None:
    with pytest.raises(StoreUnavailable):
        write_one(store, make_key(i), value_of(i, CHUNK))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("size_mib", [64, 1 << 20])
def test_what_a_disk_holds_is_read_while_every_write_fails(
    tmp_path: Path, code: int, size_mib: int
) -> None:
    store = disk(tmp_path, size_bytes=size_mib << 20, clock=ManualClock())
    fill(store)
    with no_writes(code):
        for i in range(100, 200):
            refuses(store, i)
            assert holds(store, make_key(i % 5), i % 5)
            assert store.contains([make_key(1), make_key(i)]) == [True, False]
            if i % 10 == 0:
                store.maintain()
    store.maintain()
    assert put(store, make_key(100), 100)
    assert all(holds(store, make_key(i), i) for i in (*range(5), 100))


def test_what_a_read_only_filesystem_holds_is_read(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "mount", "8m") as path:
        store = disk(path, clock=ManualClock())
        fill(store)
        remount(path, "ro")
        for i in range(100, 110):
            refuses(store, i)
            store.maintain()
            assert holds(store, make_key(i % 5), i % 5)
        remount(path, "rw")
        assert put(store, make_key(100), 100)
        store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_tier_on_such_a_disk_says_so_and_serves_what_it_has(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = disk(tmp_path, clock=ManualClock())
    rig = Rig(inners=[store], slots=32, limits=TierLimits())  # type: ignore[list-item]
    rig.put(*range(5))
    rig.settle()
    rig.engine.reset()
    with no_writes(code), caplog.at_level(logging.WARNING, "kvstow"):
        for first in (100, 200, 300):
            numbers = range(first, first + 3)
            rig.fetch(f"r{first}", *numbers)
            rig.settle()
            rig.engine.forget(f"r{first}")
            assert rig.engine.missing(keys(*numbers)) == [0, 1, 2]
            rig.put(*numbers)
            rig.settle()
            assert "Tier t0: a write failed" in caplog.text, "said at the first"
        assert rig.gauge("tier_state|t0") == 2
        assert "Tier t0 is not written, it is still read" in caplog.text
        rig.fetch("again", *range(5))
        rig.settle()
        assert rig.fetch("again", *range(5)) == hit(5)
    assert caplog.text.count("a write failed") == 1
