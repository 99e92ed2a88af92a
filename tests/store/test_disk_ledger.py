"""The ledger is never below what is on disk, however removals, counts and failing writes of its page meet."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.disk import files, quarantine, room
from kvstow.backends.disk import mount as mounts
from kvstow.backends.disk.ledger import PAGE_BYTES, LedgerGone
from kvstow.backends.disk.maintenance import REAP_EVERY_S, SCAN_AGAIN_S
from kvstow.backends.disk.mount import attach
from kvstow.backends.disk.store import DiskStore
from kvstow.cli.data_directory import DataDirectory
from kvstow.errors import StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key
from tests.store.disks import CHUNK, MIB, disk, file_of, holds, on_disk, put, temporaries

SIZE = 1024 * MIB  # so that 4 MiB of removals may be unsaid


def pair(path: Path, chunks: int = 20) -> tuple[DiskStore, DiskStore]:
    """Two stores of a directory; the first has written, and said so."""
    one, other = disk(path, size_bytes=SIZE), disk(path, size_bytes=SIZE)
    assert all(put(one, make_key(i), i) for i in range(chunks))
    assert one.used_bytes is not None
    return one, other


def counted(store: DiskStore) -> int:
    [count] = store.scan()
    assert count is not None
    return count.bytes


def used(store: DiskStore) -> int:
    return store.used_bytes or 0


def test_i1_removals_that_another_count_has_noticed_are_not_taken_off_again(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    before = used(other)
    one.delete([make_key(i) for i in range(10)])
    assert used(other) == before, "unsaid"
    there = counted(other)
    assert there <= before - 10 * CHUNK
    assert used(one) == there, "one says now what the count knew"
    one.delete([make_key(10)])
    assert used(one) == there - CHUNK, "later removals count"
    assert used(one) == counted(other) >= on_disk(tmp_path)


def test_i1_removals_behind_the_back_of_a_count_stay_until_the_next(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    mount = attach(str(tmp_path))
    before = mount.ledger.report()
    there = counted(other)
    one.delete([make_key(i) for i in range(10)])
    mount.ledger.reconcile(before, there)
    assert used(one) == there
    assert there - 10 * CHUNK == counted(other) == used(one)
    mount.detach()


def _by_delete(store: DiskStore) -> None:
    store.delete([make_key(0)])


def _by_eviction(store: DiskStore) -> None:
    store._volumes[0]._room._evict(store._volumes[0].access.attach(), 1)


def _from_quarantine(store: DiskStore) -> None:
    mount = store._volumes[0].access.attach()
    quarantine.shrink(mount, 0, 0)


@pytest.mark.parametrize(
    ("remove", "module", "name"),
    [
        (_by_delete, room, "remove_chunk"),
        (_by_eviction, room, "remove_chunk"),
        (_from_quarantine, quarantine, "_drop"),
    ],
)
def test_i1_a_count_between_a_removal_and_its_entry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[DiskStore], None],
    module: Any,
    name: str,
) -> None:
    """Another thread of the same process reads the page meanwhile."""
    one, other = pair(tmp_path)
    one.set_aside([make_key(19)])
    real, there = getattr(module, name), 0

    def slow(*arguments: Any) -> int:
        nonlocal there
        freed: int = real(*arguments)
        there = counted(other)
        assert used(one) == there
        return freed

    monkeypatch.setattr(module, name, slow)
    remove(one)
    assert there
    assert used(one) == there


def test_clearing_up_that_fails_forgets_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[str]:
        raise OSError(errno.EIO, "broken")

    one, _ = pair(tmp_path)
    before = used(one)
    one.delete([make_key(0)])
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "_list", broken)
        with pytest.raises(StoreUnavailable):
            one._volumes[0].reap()
    assert used(one) == before - CHUNK


def test_shrinking_is_said_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start with a smaller size than before shrink the directory once, not each."""
    one, other = pair(tmp_path, 128)
    one.close()
    smaller = disk(tmp_path, size_bytes=2 * MIB)
    real, removed = room.remove_chunk, 0

    def slow(*arguments: Any) -> int:
        nonlocal removed
        removed += 1
        if removed == 64:
            counted(other)
            assert used(smaller) >= on_disk(tmp_path)
        return real(*arguments)

    monkeypatch.setattr(room, "remove_chunk", slow)
    smaller.scan()
    kept = on_disk(tmp_path)
    assert 2 * MIB - 3 * CHUNK <= kept <= 2 * MIB
    assert kept <= used(smaller) <= kept + CHUNK


@pytest.mark.parametrize("failing", [OSError(errno.EIO, "broken"), PAGE_BYTES - 1])
def test_nothing_is_taken_from_a_reservation_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: OSError | int
) -> None:
    def fail(*_: object) -> int:
        if isinstance(failing, OSError):
            raise failing
        return failing

    ledger = attach(str(tmp_path)).ledger
    monkeypatch.setattr(os, "pwrite", fail)
    for _ in range(2):
        with pytest.raises(LedgerGone):
            ledger.reserve(CHUNK, SIZE)


def test_a_name_given_by_link_is_published_though_the_temporary_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    def stuck(path: str, **options: Any) -> None:
        raise OSError(errno.EIO, "broken", path)

    store = disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_renameat2", refuse)
        patch.setattr(os, "unlink", stuck)
        assert put(store, make_key(0), 0)
    assert holds(store, make_key(0), 0)
    assert used(store) >= counted(store) > CHUNK
    assert len(temporaries(tmp_path)) == 2, "namespace.json's too"
    store.close()
    disk(tmp_path).close()
    assert temporaries(tmp_path) == []


def test_a_libc_without_renameat2_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    spec = importlib.util.spec_from_file_location("files_of_an_old_libc", files.__file__)
    assert spec is not None
    assert spec.loader is not None
    old = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(old)
    (tmp_path / "a").write_text("a")
    root = os.open(tmp_path, os.O_RDONLY)
    old.rename_new(root, "a", "b")
    with pytest.raises(FileExistsError):
        old.rename_new(root, "b", "b")
    os.close(root)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("how", ["read and set aside", "deleted", "evicted"])
def test_i1_a_file_that_grew_gives_back_no_more_than_it_took(tmp_path: Path, how: str) -> None:
    """2 GiB and more, of which nothing is on disk: as a damaged filesystem says."""
    size = 100 * CHUNK
    store = disk(tmp_path, size_bytes=size)
    keys = [make_key(i) for i in range(300)]
    assert all(put(store, keys[i], i) for i in range(50))
    os.truncate(file_of(tmp_path, keys[0]), (1 << 31) + PAGE_BYTES)
    if how == "read and set aside":
        assert not holds(store, keys[0], 0)
        store.set_aside([keys[0]])
    elif how == "deleted":
        store.delete([keys[0]])
    written = [put(store, keys[i], i) for i in range(50, 300)]
    assert not file_of(tmp_path, keys[0]).exists()
    assert all(written)
    assert on_disk(tmp_path) <= used(store) <= size
    store.close()


@pytest.mark.parametrize("directory", ["tmp", "quarantine", "run", "a namespace", "ledger"])
def test_i3_what_is_removed_under_a_live_store_is_made_anew(tmp_path: Path, directory: str) -> None:
    store = disk(tmp_path)
    assert put(store, make_key(0), 0)
    path = tmp_path / (
        bytes(make_key(0).namespace).hex() if directory == "a namespace" else directory
    )
    (shutil.rmtree if path.is_dir() else os.unlink)(path)
    with suppress(StoreUnavailable):
        put(store, make_key(1), 1)
    store.maintain()
    assert put(store, make_key(2), 2)
    store.set_aside([make_key(2)])
    assert not holds(store, make_key(2), 2)
    assert put(store, make_key(2), 2)
    assert on_disk(tmp_path) <= used(store)
    store.close()


def die(path: Path) -> None:
    """Leave what a process leaves that is killed while it writes a chunk, and after it has removed one."""
    mount = attach(str(path))
    assert mount.ledger.reserve(CHUNK, SIZE) == 0
    os.unlink(file_of(path, make_key(0)))


def test_what_a_killed_process_held_is_counted_soon(tmp_path: Path) -> None:
    clock = ManualClock()
    store = disk(tmp_path, size_bytes=SIZE, clock=clock)
    assert all(put(store, make_key(i), i) for i in range(5))
    store.maintain()
    die(tmp_path)
    assert used(store) >= on_disk(tmp_path) + 2 * CHUNK
    clock.advance(REAP_EVERY_S)
    store.maintain()
    clock.advance(SCAN_AGAIN_S)
    store.maintain()
    assert used(store) == on_disk(tmp_path)
    store.close()


def test_what_a_killed_process_held_is_counted_by_the_command_that_clears_up(
    tmp_path: Path,
) -> None:
    store = disk(tmp_path, size_bytes=SIZE)
    assert all(put(store, make_key(i), i) for i in range(5))
    assert used(store) >= on_disk(tmp_path)
    die(tmp_path)
    DataDirectory(str(tmp_path)).close()
    assert used(store) == on_disk(tmp_path)
    store.close()


def test_an_eviction_that_fails_midway_says_what_it_has_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = pair(tmp_path)
    before = used(store)
    real, calls = room.remove_chunk, 0

    def second_fails(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "broken")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(room, "remove_chunk", second_fails)
        with pytest.raises(OSError, match="broken"):
            store._volumes[0]._room._evict(store._volumes[0].access.attach(), 3 * CHUNK)
    assert used(store) == before - CHUNK


@pytest.mark.parametrize("look", ["contains", "write", "scan"])
@pytest.mark.parametrize("remove", [_by_delete, _by_eviction])
def test_a_look_while_a_chunk_is_removed_does_not_bring_it_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[DiskStore], None],
    look: str,
) -> None:
    store = disk(tmp_path, size_bytes=SIZE)
    key = make_key(0)
    assert put(store, key, 0)
    real = room.remove_chunk

    def slow(*arguments: Any) -> int:
        if look == "contains":
            assert store.contains([key]) == [False]
        elif look == "write":
            assert not put(store, key, 0)
        else:
            store.scan()
        return real(*arguments)

    monkeypatch.setattr(room, "remove_chunk", slow)
    remove(store)
    assert store.contains([key]) == [False]
    assert put(store, key, 0)
    assert holds(store, key, 0)
    assert not os.listdir(tmp_path / "quarantine")
