"""Names, permissions, what replaces a file under a live store, and what readers see."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.disk import files, names
from kvstow.key import ChunkKey, Namespace
from kvstow.testing.store_suite import NAMESPACE, make_key, read_one, value_of, write_one
from tests.store.disks import CHUNK, disk, file_of, holds, put, temporaries


def test_i6_l4_names_are_digests_whatever_the_key_says(tmp_path: Path) -> None:
    hostile = ["../../x", "..", "/etc/passwd", "m" * 200, "s" * 128, "a\0b", "a\nb", "тест", ""]
    spaces = [
        Namespace.from_fields({"model": model, "salt": salt})
        for model in hostile
        for salt in hostile
    ]
    keys = [
        ChunkKey.build(namespace, 0, prefix)
        for namespace in spaces
        for prefix in (b"../x", b"/" * 64)
    ]
    root = tmp_path / "d"
    store = disk(root)
    for i, key in enumerate(keys):
        assert put(store, key, i, 8)
    assert all(holds(store, key, i, 8) for i, key in enumerate(keys))
    store.close()
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    paths = [p for p in root.rglob("*") if p.suffix == ".kv"]
    assert len(paths) == len(keys)
    for path in root.rglob("*"):
        assert len(path.name) <= 255
        assert path.resolve().is_relative_to(root.resolve())
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_namespace_says_what_it_is(tmp_path: Path) -> None:
    store = disk(
        tmp_path, describe=lambda namespace: {"model": "tiny", "parent": namespace[:2].hex()}
    )
    put(store, make_key(0), 0)
    put(store, make_key(1), 1)
    about = json.loads((tmp_path / NAMESPACE.hex() / "namespace.json").read_text())
    assert about["namespace"] == NAMESPACE.hex()
    assert about["model"] == "tiny"
    assert about["parent"] == NAMESPACE[:2].hex()
    assert about["created"] > 0


def _cut(path: Path) -> None:
    os.truncate(path, CHUNK // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize(("damage", "length"), [(_cut, CHUNK // 2), (_empty, 0)])
def test_a_truncated_file_says_how_short_it_is(
    tmp_path: Path, damage: Callable[[Path], None], length: int
) -> None:
    store = disk(tmp_path)
    put(store, make_key(0), 0)
    damage(file_of(tmp_path, make_key(0)))
    assert read_one(store, make_key(0), CHUNK)[0] == Done(length)


def _symlink(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(value_of(0, CHUNK))
    path.unlink()
    path.symlink_to("elsewhere")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _full_directory(path: Path) -> None:
    _directory(path)
    (path / "theirs").write_text("kept")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize("replace", [_symlink, _dangling, _directory, _full_directory, _fifo])
@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_no_file_is_a_miss_set_aside_and_storable_anew(
    tmp_path: Path, replace: Callable[[Path], None], first: str, direct: bool
) -> None:
    store, key = disk(tmp_path, direct=direct), make_key(0)
    put(store, key, 0)
    replace(file_of(tmp_path, key))
    if first == "read":
        assert read_one(store, key, CHUNK)[0] is MISSING
        assert store.contains([key]) == [False]
    assert put(store, key, 0)
    assert holds(store, key, 0)
    [aside] = list((tmp_path / "quarantine").iterdir())
    if replace is _full_directory:
        assert (aside / "theirs").read_text() == "kept"


def test_a_file_of_another_user_is_a_miss(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    store, key = disk(tmp_path), make_key(0)
    put(store, key, 0)
    os.chown(file_of(tmp_path, key), 12345, 12345)
    assert read_one(store, key, CHUNK)[0] is MISSING
    assert put(store, key, 0)
    assert holds(store, key, 0)


def test_quarantine_makes_a_miss_that_can_be_stored_anew(tmp_path: Path) -> None:
    store, key = disk(tmp_path), make_key(0)
    put(store, key, 0)
    store.set_aside([key, make_key(1)])
    assert store.contains([key]) == [False]
    assert read_one(store, key, CHUNK)[0] is MISSING
    assert put(store, key, 0)
    assert len(os.listdir(tmp_path / "quarantine")) == 1


def test_the_quarantine_is_bounded_and_counted(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=64 * CHUNK)
    for i in range(50):
        assert put(store, make_key(i), i)
        store.set_aside([make_key(i)])
    kept = list((tmp_path / "quarantine").iterdir())
    assert len(kept) == 2, "a 32nd of the size"
    used = store.used_bytes
    assert used is not None
    assert used >= 2 * CHUNK
    [count] = store.scan()
    assert count is not None
    assert count.quarantined_bytes == 2 * CHUNK
    assert store.used_bytes == count.bytes <= used


def test_i4_sixteen_stores_write_the_same_fifty_keys(tmp_path: Path) -> None:
    stores = [disk(tmp_path) for _ in range(16)]
    won = [0] * 50
    lock = threading.Lock()

    def work(store: int) -> None:
        for i in range(50):
            if put(stores[store], make_key(i), i):
                with lock:
                    won[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1] * 50
    assert all(holds(store, make_key(i), i) for store in stores for i in range(50))
    assert temporaries(tmp_path) == []


def test_i5_direct_io_refused_after_the_probe_goes_on_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = disk(tmp_path)
    buffers = _aligned(2 * CHUNK)
    buffers[:CHUNK] = value_of(0, CHUNK)
    refused = 0

    def refusing(real: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, parts: Any, at: int) -> int:
            nonlocal refused
            if is_direct(fd):
                refused += 1
                raise OSError(22, "Invalid argument")
            return real(fd, parts, at)

        return move

    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev))
    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    for i in range(3):
        assert store.write([(make_key(i), [buffers[:CHUNK]])]) == [Done(CHUNK)]
        assert store.read([(make_key(i), buffers[CHUNK:])]) == [Done(CHUNK)]
        assert buffers[CHUNK:] == value_of(0, CHUNK)
    assert refused == 1, "asked once"
    assert caplog.text.count("buffered from here on") == 1


def test_direct_io_is_used_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not files.direct_works(files.open_directory(str(tmp_path)), "probe"):
        pytest.skip("no direct I/O on this filesystem")
    used: list[int] = []
    real = os.pwritev, os.preadv
    note = lambda fd: used.append(fd) if is_direct(fd) else None  # noqa: E731
    store = disk(tmp_path)
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: (note(fd), real[0](fd, parts, at))[1])
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: (note(fd), real[1](fd, parts, at))[1])
    page = _aligned(2 * CHUNK)
    page[:] = value_of(3, 2 * CHUNK)
    assert store.write([(make_key(0), [page[:4096], page[4096:CHUNK]])]) == [Done(CHUNK)]
    assert store.read([(make_key(0), page[CHUNK:])]) == [Done(CHUNK)]
    assert page[:CHUNK] == page[CHUNK:]
    assert len(used) == 2
    store.write([(make_key(1), [page[1:CHUNK]])])
    store.read([(make_key(0), page[512 : CHUNK + 512])])
    assert len(used) == 2, "what is not aligned went direct"


def test_a_file_whose_length_is_odd_is_read_buffered(tmp_path: Path) -> None:
    store, page = disk(tmp_path), _aligned(2 * CHUNK)
    assert put(store, make_key(0), 0, CHUNK - 100)
    assert store.read([(make_key(0), page[:CHUNK])]) == [Done(CHUNK - 100)]
    assert page[: CHUNK - 100] == value_of(0, CHUNK - 100)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_filesystem_that_only_links_publishes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(files, "_renameat2", refuse)
    store, other = disk(tmp_path), disk(tmp_path)
    assert all(put(store, make_key(i), i) for i in range(5))
    assert write_one(other, make_key(0), value_of(1, CHUNK)) is REJECTED
    assert all(holds(other, make_key(i), i) for i in range(5))
    assert temporaries(tmp_path) == []


def test_a_name_is_given_once(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files.rename_new(root, "a", "c")
    with pytest.raises(FileExistsError):
        files.rename_new(root, "b", "c")
    with pytest.raises(FileNotFoundError):
        files.rename_new(root, "a", "d")
    os.close(root)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "b", "c": "a"}


def test_i7_partly_moved_calls_are_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real[0](fd, [parts[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real[1](fd, [parts[0][:777]], at))
    store = disk(tmp_path, direct=False)
    data = memoryview(value_of(5, 10_000))
    assert store.write([(make_key(0), [data[:5], data[5:5], data[5:]])]) == [Done(10_000)]
    assert read_one(store, make_key(0), 10_000) == (Done(10_000), bytes(data))


def test_a_direct_transfer_that_stops_at_an_odd_place_is_finished_buffered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, page = disk(tmp_path), _aligned(2 * CHUNK)
    real = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: min(1000, real[0](fd, parts, at)))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: min(1000, real[1](fd, parts, at)))
    page[:CHUNK] = value_of(3, CHUNK)
    assert store.write([(make_key(0), [page[:CHUNK]])]) == [Done(CHUNK)]
    assert store.read([(make_key(0), page[CHUNK:])]) == [Done(CHUNK)]
    assert page[CHUNK:] == value_of(3, CHUNK)
    assert "buffered from here on" not in caplog.text, "the filesystem refused nothing"


@pytest.mark.parametrize("below", [0, 1, 2])
def test_directories_that_another_process_removes_while_they_are_made_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: int
) -> None:
    """Its scan finds a namespace without chunks."""
    store, removed = disk(tmp_path), removing(monkeypatch, below)
    assert put(store, make_key(0), 0)
    assert len(removed) == 3
    assert holds(store, make_key(0), 0)


def test_a_namespace_that_another_process_removes_while_it_is_introduced_is_introduced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, removed = disk(tmp_path), removing(monkeypatch, 0)
    store.register_namespace(make_key(0).namespace, "root")
    assert len(removed) == 3
    assert (tmp_path / make_key(0).namespace.hex() / "namespace.json").exists()
    assert not caplog.records


def removing(monkeypatch: pytest.MonkeyPatch, below: int) -> list[str]:
    """From now on the first three directories that are made ``below`` others are gone at once. Fills in which."""
    mkdir, removed = os.mkdir, list[str]()

    def racing(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        if path.count("/") == below and len(removed) < 3:
            removed.append(path)
            os.rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", racing)
    return removed


def test_a_rejected_write_leaves_nothing(tmp_path: Path) -> None:
    one, other = disk(tmp_path), disk(tmp_path)
    put(one, make_key(0), 0)
    used = one.used_bytes
    assert write_one(other, make_key(0), value_of(1, CHUNK)) is REJECTED
    assert temporaries(tmp_path) == []
    assert one.used_bytes == used
    assert holds(other, make_key(0), 0)


def test_names_are_recognised_only_if_they_are_ours() -> None:
    digest = "0f" * 32
    assert names.digest_of(f"{digest}.kv") == bytes.fromhex(digest)
    for foreign in (
        f"{digest}.kv2",
        f"{digest.upper()}.kv",
        "x.kv",
        f"x{digest}.kv",
        f"{digest}.kv\n",
        digest,
    ):
        assert names.digest_of(foreign) is None
    assert names.owner_of_temporary(f"{'ab' * 16}-12") == "ab" * 16
    assert names.owner_of_temporary("mine-12") is None
    assert not names.is_namespace("tmp")


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _aligned(size: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(-1, size))
