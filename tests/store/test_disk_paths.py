"""Several directories of which one dies, and comes back."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.disk import DiskStore
from kvstow.backends.disk.health import MAX_FAILURES, RETRY_S
from kvstow.errors import StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.store.disks import CHUNK, MIB, disk, file_of, holds, put, tmpfs
from tests.unit.rig import FRAME_BYTES, Rig, hit, key, keys

MANY = range(24)


class Two:
    """A store over a directory that stays and one that is mounted, with chunks in both."""

    def __init__(self, tmp_path: Path, dying: Path) -> None:
        self.clock = ManualClock()
        self.paths = [tmp_path / "stays", dying]
        self.store = disk(*self.paths, clock=self.clock)
        assert all(put(self.store, make_key(i), i) for i in MANY)
        self.dying = [i for i in MANY if file_of(dying, make_key(i)).exists()]
        self.staying = [i for i in MANY if i not in self.dying]
        assert len(self.dying) >= 4
        assert len(self.staying) >= 4

    def read_all(self) -> list[bool]:
        """One batch of all keys, such as a prompt's."""
        buffers = [memoryview(bytearray(CHUNK)) for _ in MANY]
        outcomes = self.store.read(
            [(make_key(i), buffer) for i, buffer in zip(MANY, buffers, strict=True)]
        )
        for i, outcome in enumerate(outcomes):
            assert outcome is MISSING or (
                outcome == Done(CHUNK) and buffers[i] == value_of(i, CHUNK)
            )
        return [outcome is not MISSING for outcome in outcomes]

    def recover(self) -> None:
        self.clock.advance(RETRY_S)
        self.store.maintain()


def detach(path: Path) -> None:
    """As ``umount -l`` does: what is open stays open, the path leads elsewhere."""
    assert os.system(f"umount -l {path}") == 0


@contextmanager
def remounted(path: Path) -> Iterator[tuple[Path, Path]]:
    """A tmpfs at ``path``, kept alive by a second mount of it, so that it can vanish and come back."""
    with tmpfs(path, "8m"):
        keeper = path.with_name("keeper")
        keeper.mkdir()
        assert os.system(f"mount --bind {path} {keeper}") == 0
        try:
            yield path, keeper
        finally:
            detach(keeper)


def test_a_mount_that_vanishes_costs_its_own_chunks_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with remounted(tmp_path / "mount") as (path, keeper):
        two = Two(tmp_path, path)
        detach(path)
        two.store.maintain()  # notices that the path leads elsewhere
        expected = [i in two.staying for i in MANY]
        with caplog.at_level(logging.WARNING, "kvstow"):
            for _ in range(5):
                assert two.read_all() == expected
            assert two.store.contains([make_key(i) for i in MANY]) == expected
        assert two.store.report().paths_down == 1
        assert write_one(two.store, make_key(two.dying[0]), value_of(0, CHUNK)) is REJECTED
        assert not any(path.iterdir()), "written below the mount point"
        two.recover()
        assert two.store.report().paths_down == 1, "it is not back"
        assert os.system(f"mount --bind {keeper} {path}") == 0
        two.store.maintain()
        assert two.store.report().paths_down == 1, "not tried again so soon"
        with caplog.at_level(logging.WARNING, "kvstow"):
            two.recover()
        assert two.store.report().paths_down == 0
        assert two.read_all() == [True] * len(MANY)
        said = [
            record.getMessage() for record in caplog.records if "Disk path" in record.getMessage()
        ]
        assert [line.split(", its")[0] for line in said] == [
            f"Disk path {path} is out of use",
            f"Disk path {path} is in use again",
        ]
        two.store.close()


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Two, Path]:
    """The second directory is moved away, and something that is no directory is in its place."""
    two = Two(tmp_path, tmp_path / "goes")
    away = tmp_path / "away"
    two.paths[1].rename(away)
    two.paths[1].write_text("in the way")
    two.store.maintain()
    return two, away


def test_a_directory_moved_away_and_back(moved: tuple[Two, Path]) -> None:
    two, away = moved
    expected = [i in two.staying for i in MANY]
    for _ in range(MAX_FAILURES):
        assert two.read_all() == expected
    two.paths[1].unlink()
    away.rename(two.paths[1])
    assert two.read_all() == expected, "out of use it is not asked"
    two.recover()
    assert two.read_all() == [True] * len(MANY)
    assert put(two.store, make_key(1000 + two.dying[0]), 5)


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_directory_is_in_use_again_when_it_has_room_for_a_chunk_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, direct: bool
) -> None:
    """Others fill it. An empty file, which a trial without direct I/O made, has room on any disk."""
    with tmpfs(tmp_path / "mount", "8m") as path, caplog.at_level(logging.WARNING, "kvstow"):
        clock = ManualClock()
        store = disk(tmp_path / "stays", path, clock=clock, direct=direct)
        store.scan()
        filler = path / "of others"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(CHUNK))
        os.truncate(filler, filler.stat().st_size - CHUNK // 2)
        theirs = [i for i in range(100) if make_key(i).digest()[-4] % 2]
        for i in theirs[:MAX_FAILURES]:
            assert write_one(store, make_key(i), value_of(i, CHUNK)) is REJECTED
        assert store.report().paths_down == 1
        for _ in range(3):
            clock.advance(RETRY_S)
            store.maintain()
            assert store.report().paths_down == 1, "half a chunk's room is not enough"
        filler.unlink()
        clock.advance(RETRY_S)
        store.maintain()
        assert store.report().paths_down == 0
        assert put(store, make_key(theirs[0]), 0)
        store.close()
        assert len([record for record in caplog.records if "Disk path" in record.getMessage()]) == 2


def test_every_operation_goes_on_around_it(moved: tuple[Two, Path]) -> None:
    two, _ = moved
    gone = make_key(two.dying[0])
    for _ in range(MAX_FAILURES + 1):
        assert read_one(two.store, gone, CHUNK)[0] is MISSING
        assert write_one(two.store, gone, value_of(0, CHUNK)) is REJECTED
        two.store.delete([gone])
        two.store.set_aside([gone])
    alive = make_key(two.staying[0])
    two.store.set_aside([gone, alive])
    assert two.store.contains([alive]) == [False]
    assert put(two.store, alive, two.staying[0])
    assert two.store.report().paths_down == 1


def test_when_none_works_the_store_fails_and_its_breaker_sees_it(moved: tuple[Two, Path]) -> None:
    two, away = moved
    two.paths[0].rename(two.paths[0].with_name("also away"))
    two.paths[0].write_text("in the way")
    two.store.maintain()
    with pytest.raises(StoreUnavailable):
        two.store.contains([make_key(2000 + i) for i in MANY])
    assert two.store.report().paths_down == 2
    two.paths[1].unlink()
    away.rename(two.paths[1])
    assert holds(two.store, make_key(two.dying[0]), two.dying[0]), (
        "all are asked, so no trial need come first"
    )
    assert two.store.report().paths_down == 1


def test_a_store_pinned_to_a_directory_that_dies_fails_as_a_whole(tmp_path: Path) -> None:
    two = disk(tmp_path / "a", tmp_path / "b", volume=1, clock=ManualClock())
    put(two, make_key(0), 0)
    (tmp_path / "b").rename(tmp_path / "away")
    (tmp_path / "b").write_text("in the way")
    two.maintain()
    for _ in range(2 * MAX_FAILURES):
        with pytest.raises(StoreUnavailable):
            two.read([(make_key(0), memoryview(bytearray(CHUNK)))])
    assert two.report().paths_down == 0


# --- through the engine ---------------------------------------------------------------------------------------------


def over(store: DiskStore, **rig: int) -> Rig:
    return Rig(inners=[store], **rig)  # type: ignore[list-item, arg-type]


def test_the_tier_serves_on_with_a_dead_path_and_its_breaker_stays_closed(tmp_path: Path) -> None:
    rig = over(store := disk(tmp_path / "a", tmp_path / "b", clock=ManualClock()), slots=64)
    rig.put(*MANY)
    rig.settle()
    alive = [i for i in MANY if file_of(tmp_path / "a", key(i)).exists()]
    assert 0 < len(alive) < len(MANY)
    (tmp_path / "b").rename(tmp_path / "away")
    (tmp_path / "b").write_text("in the way")
    store.maintain()
    rig.engine.reset()
    for number, i in enumerate([*MANY] * 3):
        rig.fetch(f"r{number}", i)
        rig.settle()
        assert rig.fetch(f"r{number}", i) == hit(1) if i in alive else rig.found(i) == 0
        rig.engine.forget(f"r{number}")
    assert rig.tiers[0].usable
    assert rig.gauge("tier_state|t0") == 0
    assert store.report().paths_down == 1
    rig.engine.reset()
    rig.put(*range(100, 110))
    rig.settle()
    stored = {i for i in range(100, 110) if file_of(tmp_path / "a", key(i)).exists()}
    assert set(rig.engine.missing(keys(*range(100, 110)))) == set()
    rig.engine.reset()
    assert {100 + i for i in rig.engine.missing(keys(*range(100, 110)))} == set(
        range(100, 110)
    ) - stored
    rig.assert_idle()


def test_i8_what_is_offered_a_second_time_is_written_and_nothing_else(tmp_path: Path) -> None:
    """Nine of ten prompts come once. Memory holds eight chunks, so that what comes back is offered again."""
    store = disk(tmp_path, size_bytes=64 * MIB, admission="second_sight", clock=ManualClock())
    rig = over(store, slots=8)
    prompts = [1000 + n if n % 10 else n // 10 % 4 for n in range(200)]
    served = [ask(rig, prompt) for prompt in prompts]
    repeated = [served[n] for n in range(0, 200, 10)]
    assert repeated == [False] * 8 + [True] * 12, "computed twice, served from then on"
    assert sum(served) == 12
    assert rig.counter("stored_bytes", tier="t0") == 4 * FRAME_BYTES < 0.2 * 188 * FRAME_BYTES
    assert len(list(tmp_path.rglob("*.kv"))) == 4
    rig.assert_idle()


def test_i8_offered_again_without_having_been_asked_for(tmp_path: Path) -> None:
    """As of a chunk that stayed in the device's own cache: no lookup says that the tier lacks it."""
    rig = over(
        disk(tmp_path, size_bytes=64 * MIB, admission="second_sight", clock=ManualClock()), slots=4
    )
    for offered in range(3):
        assert rig.engine.missing(keys(1)) == ([0] if offered < 2 else []), f"{offered} offers"
        if offered < 2:
            rig.put(1)
            rig.settle()
        rig.put(*range(100 + 10 * offered, 104 + 10 * offered))  # memory drops it
        rig.settle()
    assert file_of(tmp_path, key(1)).exists()


def ask(rig: Rig, prompt: int) -> bool:
    """A prompt of one chunk: restored (True), or computed and stored."""
    rig.fetch("r", prompt)
    rig.settle()
    restored = rig.fetch("r", prompt) == hit(1)
    rig.engine.forget("r")
    if rig.engine.missing(keys(prompt)):
        rig.put(prompt)
        rig.settle()
    return restored


def test_a_directory_that_refuses_every_write_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = Two(tmp_path, tmp_path / "full")
    real = os.pwritev

    def full(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(two.paths[1])):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, *arguments)

    new = [i for i in range(100, 200) if make_key(i).digest()[-4] % 2]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "kvstow"):
        patch.setattr(os, "pwritev", full)
        for i in new[:MAX_FAILURES]:
            assert write_one(two.store, make_key(i), value_of(i, CHUNK)) is REJECTED
            assert two.read_all() == [True] * len(MANY), "reads go on, and say nothing of writes"
        assert two.store.report().paths_down == 1
        assert two.read_all() == [True] * len(MANY)
        two.store.delete([make_key(two.dying[0])])
        assert two.store.contains([make_key(two.dying[0])]) == [False]
        patch.setattr(os, "pwritev", real)
        assert write_one(two.store, make_key(new[0]), b"not tried yet") is REJECTED
    two.recover()
    assert two.store.report().paths_down == 0
    assert put(two.store, make_key(new[0]), 0)
    assert [r.getMessage().split(" (")[0].split(": ")[0] for r in caplog.records] == [
        f"A write failed in {two.paths[1]}",
        f"Disk path {two.paths[1]} is not written, it is still read",
        f"Disk path {two.paths[1]} is written again",
    ]
