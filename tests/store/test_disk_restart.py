"""What a restart finds, what it clears up, and what a damaged ledger costs."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvstow.backends.base import REJECTED
from kvstow.backends.disk import ledger, names
from kvstow.backends.disk.index import ChunkFile
from kvstow.backends.disk.maintenance import SCAN_EVERY_S
from kvstow.backends.disk.mount import attach
from kvstow.backends.disk.room import VolumeLimits
from kvstow.backends.disk.volume import DiskVolume
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, value_of, write_one
from tests.store.disks import (
    CHUNK,
    KIB,
    MIB,
    disk,
    file_of,
    holds,
    keys_held,
    on_disk,
    put,
    temporaries,
    tmpfs,
)

KEYS = [make_key(i) for i in range(100)]


def test_j1_everything_stored_is_found_after_a_restart(tmp_path: Path) -> None:
    store = disk(tmp_path)
    for i, key in enumerate(KEYS):
        assert put(store, key, i)
    del store  # never closed
    store = disk(tmp_path)
    assert all(store.contains(KEYS)), "before any scan"
    assert all(holds(store, key, i) for i, key in enumerate(KEYS))
    [count] = store.scan()
    assert count is not None
    assert [namespace.chunks for namespace in count.namespaces] == [100]
    assert write_one(store, KEYS[3], b"again") is REJECTED


def test_what_is_there_is_told_once_of_each_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow")
    clock, paths = ManualClock(), (tmp_path / "a", tmp_path / "b")
    store = disk(*paths, clock=clock)
    assert all(put(store, key, i) for i, key in enumerate(KEYS))
    store.close()
    assert caplog.messages == []
    store = disk(*paths, clock=clock, size_bytes=64 * MIB)
    for _ in range(3):
        clock.advance(SCAN_EVERY_S)
        store.maintain()
    for path, message in zip(paths, caplog.messages, strict=True):
        chunks = len(list(path.rglob("*.kv")))
        assert message.startswith(f"Disk tier: {path} held {chunks} chunks (")
        assert message.endswith("MB) at the start, at most 32MiB")
    store.close()


def test_what_the_scan_has_not_reached_is_served_meanwhile(tmp_path: Path) -> None:
    store = disk(tmp_path)
    for i, key in enumerate(KEYS):
        put(store, key, i)
    volume = DiskVolume(
        str(tmp_path),
        VolumeLimits(64 * MIB),
        _Order(),
        SystemClock(),
        describe=lambda _: {},
        admit=lambda _: True,
    )
    during: list[bool] = []

    class Asking(threading.Event):
        """Looked at between two directories: the place of everything else that goes on during a scan."""

        def is_set(self) -> bool:
            key = KEYS[len(during) % 100]
            buffer = memoryview(bytearray(CHUNK))
            during.append(volume.contains(bytes(key.namespace), key.digest()))
            during.append(volume.read(bytes(key.namespace), key.digest(), buffer) is not None)
            return False

    assert volume.scan(Asking()) is not None
    assert len(during) == 512
    assert all(during)


class _Order:
    """A policy that keeps all."""

    def insert(self, key: bytes, size: int = 1) -> None: ...
    def touch(self, key: bytes) -> None: ...
    def remove(self, key: bytes) -> None: ...
    def victim(self, evictable: object) -> None: ...


def test_a_scan_stops_when_told(tmp_path: Path) -> None:
    store = disk(tmp_path)
    put(store, KEYS[0], 0)
    store.close()
    assert store.scan() == [None]


def test_several_stores_see_each_other(tmp_path: Path) -> None:
    one, other = disk(tmp_path), disk(tmp_path)
    assert put(one, KEYS[0], 0)
    assert other.contains(KEYS[:2]) == [True, False]
    assert holds(other, KEYS[0], 0)
    other.delete(KEYS[:1])
    assert not holds(one, KEYS[0], 0)
    assert one.contains(KEYS[:1]) == [False]
    assert put(one, KEYS[0], 5)
    assert holds(other, KEYS[0], 5)


def test_a_scan_forgets_what_others_removed_and_keeps_what_came_meanwhile(tmp_path: Path) -> None:
    store = disk(tmp_path)
    for i in range(10):
        put(store, KEYS[i], i)
    for i in range(5):
        file_of(tmp_path, KEYS[i]).unlink()
    store.scan()
    assert keys_held(store, KEYS[:10]) == [5, 6, 7, 8, 9]
    index = store._volumes[0]._index
    assert len(index) == 5
    index.begin_scan()
    index.add(bytes(KEYS[50].namespace), [ChunkFile(KEYS[50].digest(), CHUNK, 0.0)])
    index.end_scan(complete=True)
    assert len(index) == 1


def test_temporaries_and_reservations_of_the_dead_are_reclaimed_those_of_the_living_not(
    tmp_path: Path,
) -> None:
    living, mount = disk(tmp_path), attach(str(tmp_path))
    assert mount.ledger.reserve(5 * CHUNK, 64 * MIB) == 0
    (tmp_path / mount.temporary()).write_bytes(bytes(CHUNK))
    reserved = living.used_bytes
    kept = disk(tmp_path)
    assert len(temporaries(tmp_path)) == 1
    assert kept.used_bytes == reserved
    del mount  # as a kill does: the lock goes, nothing else
    again = disk(tmp_path)
    assert temporaries(tmp_path) == []
    assert len(os.listdir(tmp_path / "run")) == 3
    assert again.used_bytes == reserved, "until it is known what became of it"
    again.scan()
    assert reserved is not None
    assert again.used_bytes is not None
    assert again.used_bytes <= reserved - 5 * CHUNK


def test_a_published_file_whose_writer_died_before_saying_so_is_counted(tmp_path: Path) -> None:
    store = disk(tmp_path)
    put(store, KEYS[0], 0)
    before = store.used_bytes
    mount = attach(str(tmp_path))
    mount.ledger.reserve(CHUNK, 64 * MIB)
    path = tmp_path / names.chunk_path(bytes(KEYS[1].namespace), KEYS[1].digest())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value_of(1, CHUNK))
    path.chmod(0o600)
    del mount
    store.scan()
    assert before is not None
    assert store.used_bytes is not None
    assert before + CHUNK - 8 * KIB <= store.used_bytes <= before + CHUNK + 8 * KIB
    assert holds(store, KEYS[1], 1)


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"KVSTOWL1" + b"\xff" * 4088, b"short"])
def test_a_damaged_ledger_refuses_writes_until_a_scan_has_counted(
    tmp_path: Path, damage: bytes
) -> None:
    store = disk(tmp_path, size_bytes=64 * CHUNK)
    for i in range(10):
        put(store, KEYS[i], i)
    used = store.used_bytes
    store.close()
    (tmp_path / "ledger").write_bytes(damage)
    store = disk(tmp_path, size_bytes=64 * CHUNK)
    assert store.used_bytes is None
    assert write_one(store, KEYS[50], value_of(50, CHUNK)) is REJECTED
    assert all(holds(store, KEYS[i], i) for i in range(10))
    store.scan()
    assert used is not None
    assert abs((store.used_bytes or 0) - used) <= 8 * KIB
    assert put(store, KEYS[50], 50)


def test_a_ledger_removed_under_a_live_store_is_made_anew(tmp_path: Path) -> None:
    store = disk(tmp_path)
    put(store, KEYS[0], 0)
    (tmp_path / "ledger").unlink()
    with pytest.raises(StoreUnavailable, match="removed"):
        put(store, KEYS[1], 1)
    assert holds(store, KEYS[0], 0)
    assert write_one(store, KEYS[1], b"x") is REJECTED
    store.scan()
    assert put(store, KEYS[1], 1)


def test_a_wiped_directory_is_filled_again(tmp_path: Path) -> None:
    root = tmp_path / "d"
    store = disk(root)
    put(store, KEYS[0], 0)
    shutil.rmtree(root)
    for _ in range(2):
        try:
            put(store, KEYS[1], 1)
        except StoreUnavailable:
            continue
    store.scan()
    assert put(store, KEYS[2], 2)
    assert holds(store, KEYS[2], 2)
    assert root.is_dir()


def test_a_bare_mount_point_is_not_taken_for_the_directory(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "m", "8m") as path:
        before = attach(str(path))
    with pytest.raises(StoreUnavailable, match="another filesystem"):
        attach(str(tmp_path / "m"), previous=before)
    assert not any((tmp_path / "m").iterdir())


def test_the_background_thread_scans_and_reaps(tmp_path: Path) -> None:
    first = disk(tmp_path)
    for i in range(20):
        put(first, KEYS[i], i)
    first.close()
    store = disk(tmp_path)
    executor = ThreadExecutor("disk-background")
    store.start(executor)
    index = store._volumes[0]._index
    assert _wait(lambda: len(index) == 20)
    store.close()
    assert executor.close(30.0)


def test_the_background_scrub_sets_aside_and_counts(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def check(digest: bytes, _: int, __: object) -> bool:
        seen.append(digest)
        return digest != KEYS[3].digest()

    store = disk(tmp_path, check=check, scrub_bytes_s=64 * MIB)
    for i in range(8):
        put(store, KEYS[i], i)
    executor = ThreadExecutor("disk-background")
    store.start(executor)
    assert _wait(lambda: len(seen) == 8 and len(os.listdir(tmp_path / "quarantine")) == 1)
    store.close()
    assert executor.close(30.0)
    assert store.report().corrupt == 1
    assert store.report().corrupt == 0


def _wait(condition: object) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():  # type: ignore[operator]
            return True
        pause.wait(0.01)
    return False


def test_too_many_processes_are_refused_by_name(tmp_path: Path) -> None:
    mount = attach(str(tmp_path))
    with mount.ledger.page() as book:
        for i in range(ledger.MAX_PROCESSES):
            book.reserved[i.to_bytes(16, "big")] = 0
            if len(book.reserved) == ledger.MAX_PROCESSES:
                break
    with pytest.raises(UnsupportedError, match="processes share"):
        attach(str(tmp_path))


def test_a_closed_store_leaves_no_trace_of_itself(tmp_path: Path) -> None:
    for _ in range(3):
        store = disk(tmp_path)
        put(store, KEYS[0], 0)
        store.close()
    assert os.listdir(tmp_path / "run") == []
    assert temporaries(tmp_path) == []
    assert on_disk(tmp_path) < 3 * CHUNK


@pytest.mark.parametrize("work", ["scan", "reap"])
def test_background_work_that_ends_by_an_unforeseen_error_is_logged_counted_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, work: str
) -> None:
    monkeypatch.setattr("kvstow.backends.disk.maintenance.RESTART_S", 0.01)
    monkeypatch.setattr("kvstow.backends.disk.maintenance.TICK_S", 0.01)
    monkeypatch.setattr("kvstow.backends.disk.maintenance.REAP_EVERY_S", 0.0)
    real = getattr(DiskVolume, work)
    failures = 2
    went_on = threading.Event()

    def flawed(self: DiskVolume, *arguments: object) -> object:
        nonlocal failures
        if failures:
            failures -= 1
            raise ValueError("nobody foresaw this")
        went_on.set()
        return real(self, *arguments)

    store = disk(tmp_path)
    monkeypatch.setattr(DiskVolume, work, flawed)
    with caplog.at_level(logging.ERROR, "kvstow"):
        executor = ThreadExecutor("maintenance")
        store.start(executor)
        assert went_on.wait(30)
        store.close()
        assert executor.close(30)
    assert [(r.getMessage(), r.exc_info is not None) for r in caplog.records] == [
        (
            f"Background work in {tmp_path} ended by an unforeseen error, it starts again in "
            "0.01 s: ValueError('nobody foresaw this')",
            first,
        )
        for first in (True, False)
    ]
    assert store.report().maintenance_failures == 2
    assert store.report().maintenance_failures == 0


def test_background_work_that_the_directory_refuses_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    store = disk(tmp_path, clock=ManualClock())
    with caplog.at_level(logging.WARNING, "kvstow"), monkeypatch.context() as patch:
        patch.setattr("kvstow.backends.disk.volume.scan", refuse)
        for _ in range(3):
            store.maintain()
    assert [r.getMessage() for r in caplog.records] == [
        f"Background work in {tmp_path} failed (more failures of this kind are not logged): "
        f"scanning in {tmp_path}: [Errno 5] broken"
    ]
    assert store.report().maintenance_failures == 0
