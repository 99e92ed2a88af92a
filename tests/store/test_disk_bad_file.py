"""One file, or one directory of files, that gives an error: it costs its own chunks, and is replaced."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, Done
from kvstow.backends.disk import DiskStore
from kvstow.backends.disk.check import Read
from kvstow.backends.disk.volume import MAX_UNREADABLE_IN_A_ROW
from kvstow.cli.data_directory import DataDirectory
from kvstow.errors import StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, value_of, write_one
from tests.store.disks import CHUNK, disk, file_of, holds, put
from tests.unit.rig import Rig, hit, key, keys

FILE_ERRORS = [errno.EIO, errno.EACCES, errno.EPERM, errno.EBADMSG, errno.ESTALE]


class BrokenFiles:
    """Makes calls of ``os`` that concern chosen files fail. ``opened`` names the files whose opening was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: Callable[[str], bool] = lambda _: False
        self.code = errno.EIO
        self.calls = {"open", "preadv", "stat"}
        self.opened: list[str] = []
        for name in ("open", "preadv", "stat"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any, **named: Any) -> Any:
            path = first if isinstance(first, str) else ""
            if isinstance(first, int):
                path = os.readlink(f"/proc/self/fd/{first}")
            if name == "open":
                self.opened.append(path)
            if name in self.calls and self.broken(path):
                raise OSError(self.code, os.strerror(self.code), path)
            return real(first, *arguments, **named)

        return call


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> BrokenFiles:
    return BrokenFiles(monkeypatch)


def named(*numbers: int) -> Callable[[str], bool]:
    digests = [make_key(i).digest().hex() for i in numbers]
    return lambda path: any(path.endswith(f"{digest}.kv") for digest in digests)


def read_all(store: DiskStore, count: int) -> list[bool]:
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(count)]
    outcomes = store.read([(make_key(i), buffer) for i, buffer in enumerate(buffers)])
    for i, outcome in enumerate(outcomes):
        assert outcome is MISSING or (outcome == Done(CHUNK) and buffers[i] == value_of(i, CHUNK))
    return [outcome is not MISSING for outcome in outcomes]


@pytest.mark.parametrize("code", FILE_ERRORS)
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("paths", [1, 2])
def test_a_file_that_cannot_be_read_is_a_miss_asked_once_and_replaced(
    tmp_path: Path, files: BrokenFiles, code: int, call: str, paths: int
) -> None:
    store = disk(*(tmp_path / str(i) for i in range(paths)))
    assert all(put(store, make_key(i), i) for i in range(5))
    files.broken, files.code, files.calls = named(2), code, {call}
    assert read_all(store, 5) == [True, True, False, True, True]
    assert store.contains([make_key(i) for i in range(5)]) == [True, True, False, True, True]
    files.opened.clear()
    assert read_all(store, 5) == [True, True, False, True, True]
    assert not any(map(named(2), files.opened)), "it was opened again"
    files.broken = lambda _: False
    assert read_all(store, 5) == [True, True, False, True, True], "a miss until it is replaced"
    assert put(store, make_key(2), 2)
    assert read_all(store, 5) == [True] * 5
    assert store.report().paths_down == 0


@pytest.mark.parametrize("code", FILE_ERRORS)
def test_a_file_that_cannot_be_looked_at_costs_the_look_up_nothing_else(
    tmp_path: Path, files: BrokenFiles, code: int
) -> None:
    first = disk(tmp_path)
    assert all(put(first, make_key(i), i) for i in range(5))
    store = disk(tmp_path)  # it knows no file yet
    files.broken, files.code, files.calls = named(2), code, {"stat"}
    assert store.contains([make_key(i) for i in range(5)]) == [True, True, False, True, True]


def test_a_scan_does_not_make_a_bad_file_findable(tmp_path: Path, files: BrokenFiles) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(3))
    files.broken, files.calls = named(1), {"open"}
    assert read_all(store, 3) == [True, False, True]
    store.scan()
    assert store.contains([make_key(i) for i in range(3)]) == [True, False, True]


def test_a_bad_file_that_is_evicted_can_be_stored_anew(tmp_path: Path, files: BrokenFiles) -> None:
    store = disk(tmp_path, size_bytes=16 * CHUNK)
    assert put(store, make_key(0), 0)
    files.broken, files.calls = named(0), {"open"}
    assert not holds(store, make_key(0), 0)
    assert all(put(store, make_key(i), i) for i in range(1, 40))
    files.broken = lambda _: False
    assert not file_of(tmp_path, make_key(0)).exists()
    assert put(store, make_key(0), 0)
    assert holds(store, make_key(0), 0)


def test_the_first_error_of_a_kind_is_logged_and_no_other(
    tmp_path: Path, files: BrokenFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(5))
    files.broken, files.calls = named(1, 2, 3), {"open"}
    with caplog.at_level(logging.WARNING, "kvstow"):
        assert read_all(store, 5) == [True, False, False, False, True]
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"A chunk's file in {tmp_path} can't be read")
    assert "Input/output error" in message


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_this_process_lacks_is_not_the_files_fault(
    tmp_path: Path, files: BrokenFiles, code: int
) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(3))
    files.broken, files.code, files.calls = named(1), code, {"open"}
    with pytest.raises(StoreUnavailable):
        read_all(store, 3)
    files.broken = lambda _: False
    assert read_all(store, 3) == [True] * 3


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_directory_that_cannot_be_read_at_all_is_the_stores_fault(
    tmp_path: Path, files: BrokenFiles, call: str
) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(3))
    files.broken, files.calls = (lambda path: path != str(tmp_path)), {call}
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            read_all(store, 3)
    files.broken = lambda _: False
    assert read_all(store, 3) == [True] * 3


def test_many_bad_files_in_a_row_are_the_directorys_fault(
    tmp_path: Path, files: BrokenFiles
) -> None:
    store, many = disk(tmp_path), MAX_UNREADABLE_IN_A_ROW + 4
    assert all(put(store, make_key(i), i) for i in range(many))
    files.broken, files.calls = (lambda path: path.endswith(".kv")), {"open"}
    with pytest.raises(StoreUnavailable):
        read_all(store, many)


def test_a_prompt_whose_third_chunk_is_bad_gets_two_and_the_third_is_stored_anew(
    tmp_path: Path, files: BrokenFiles
) -> None:
    store = disk(tmp_path, clock=ManualClock())
    rig = Rig(inners=[store], slots=16)  # type: ignore[list-item]
    rig.put(*range(5))
    rig.settle()
    rig.engine.reset()
    bad = key(2).digest().hex()
    files.broken, files.calls = (lambda path: path.endswith(f"{bad}.kv")), {"open"}
    for owner in ("first", "second"):
        rig.fetch(owner, *range(5))
        rig.settle()
        assert rig.fetch(owner, *range(5)) == hit(2)
        rig.engine.forget(owner)
    assert rig.tiers[0].usable
    assert rig.engine.missing(keys(*range(5))) == [2]
    rig.put(2)
    rig.settle()
    files.broken = lambda _: False
    rig.engine.reset()
    rig.fetch("third", *range(5))
    rig.settle()
    assert rig.fetch("third", *range(5)) == hit(5)


def test_a_chunk_whose_read_failed_with_its_batch_is_offered_again(tmp_path: Path) -> None:
    """Whatever store it is: what could not be read is not taken to be there."""
    from kvstow.testing.faults import unavailable

    rig = Rig(slots=16)
    rig.put(*range(3))
    rig.settle()
    rig.engine.reset()
    rig.stores[0].faults = [unavailable("read")]
    rig.fetch("r", *range(3))
    rig.settle()
    rig.engine.forget("r")
    assert rig.engine.missing(keys(*range(3))) == [0, 1, 2]


def test_bad_files_are_remembered_up_to_a_bound(
    tmp_path: Path, files: BrokenFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.backends.disk.bad_files.MAX_BAD_FILES", 2)
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(4))
    files.broken, files.calls = named(0, 1, 2), {"open"}
    assert read_all(store, 4) == [False, False, False, True]
    files.opened.clear()
    read_all(store, 4)
    tried = [i for i in range(3) if any(map(named(i), files.opened))]
    assert tried, "one of three was forgotten"
    assert write_one(store, make_key(3), value_of(3, CHUNK)) != Done(CHUNK)


def test_the_scrub_goes_on_behind_a_file_that_cannot_be_read(
    tmp_path: Path, files: BrokenFiles
) -> None:
    seen: list[bytes] = []

    def check(digest: bytes, length: int, read: Read) -> bool:
        seen.append(digest)
        return True

    store = disk(tmp_path, scrub_bytes_s=1 << 30, check=check, clock=ManualClock())
    assert all(put(store, make_key(i), i) for i in range(5))
    files.broken, files.calls = named(2), {"open"}
    store.maintain()
    assert sorted(seen) == sorted(make_key(i).digest() for i in (0, 1, 3, 4))
    assert store.contains([make_key(i) for i in range(5)]) == [True, True, False, True, True]
    assert file_of(tmp_path, make_key(2)).exists()


def test_verify_counts_a_file_that_cannot_be_read_as_bad(
    tmp_path: Path, files: BrokenFiles
) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(3))
    files.broken, files.calls = named(1), {"open"}
    with closing(DataDirectory(str(tmp_path))) as directory:
        results = list(directory.verify(lambda *_: True, set_aside=True))
    assert {(one.digest, one.good) for one in results} == {
        (make_key(i).digest(), i != 1) for i in range(3)
    }
    assert not file_of(tmp_path, make_key(1)).exists()


def in_the_directory_of(i: int) -> Callable[[str], bool]:
    """Paths that concern the directory of files that chunk ``i`` is in."""
    digest = make_key(i).digest().hex()
    directory = f"{digest[0]}/{digest[1]}"
    return lambda path: path.endswith(directory) or f"/{directory}/" in path


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_directory_of_files_that_cannot_be_read_stops_no_scan(
    tmp_path: Path, files: BrokenFiles, code: int
) -> None:
    first = disk(tmp_path, size_bytes=16 * CHUNK)
    assert all(put(first, make_key(i), i) for i in range(10))
    first.close()
    lost = [i for i in range(10) if in_the_directory_of(4)(f"/{file_of(tmp_path, make_key(i))}")]
    store = disk(tmp_path, size_bytes=16 * CHUNK)
    files.broken, files.code, files.calls = in_the_directory_of(4), code, {"open"}
    assert store.scan() != [None]
    used = store.used_bytes
    assert used is not None
    assert used >= 10 * CHUNK, "what can't be counted is not forgotten"
    written = [put(store, make_key(i), i) for i in range(100, 150)]
    assert sum(written) >= 45, "the others are found, and evicted"
    assert all(file_of(tmp_path, make_key(i)).exists() for i in lost)
    files.broken = lambda _: False
    store.scan()
    assert store.used_bytes is not None
    assert store.used_bytes <= 16 * CHUNK


def test_a_scan_of_a_directory_that_cannot_be_read_at_all_fails(
    tmp_path: Path, files: BrokenFiles
) -> None:
    store = disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(60))
    files.broken, files.calls = (lambda path: len(path.split("/")) == 3), {"open"}
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        store.scan()
    files.broken = lambda _: False
    assert all(store.contains([make_key(i) for i in range(60)]))


def test_the_scrub_goes_on_behind_a_directory_that_cannot_be_read(
    tmp_path: Path, files: BrokenFiles
) -> None:
    seen: list[bytes] = []

    def check(digest: bytes, length: int, read: Read) -> bool:
        seen.append(digest)
        return True

    store = disk(tmp_path, scrub_bytes_s=1 << 30, check=check, clock=ManualClock())
    assert all(put(store, make_key(i), i) for i in range(20))
    store.maintain()
    assert len(seen) == 20
    seen.clear()
    files.broken, files.calls = in_the_directory_of(2), {"open"}
    for _ in range(2):  # the end of a round, and the next
        store.maintain()
    there = [
        i for i in range(20) if not in_the_directory_of(2)(f"/{file_of(tmp_path, make_key(i))}")
    ]
    assert set(seen) == {make_key(i).digest() for i in there}
