"""``size`` is a promise: over processes, restarts, old namespaces, quarantine; and what a full disk does."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done, Store
from kvstow.errors import StoreUnavailable
from kvstow.key import Namespace
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.store.disks import (
    CHUNK,
    KIB,
    MIB,
    disk,
    ext4,
    file_of,
    holds,
    keys_held,
    on_disk,
    put,
    remount,
    temporaries,
    tmpfs,
)


def test_i1_the_limit_holds_for_all_stores_of_a_directory_and_over_restarts(tmp_path: Path) -> None:
    limit, rng = 4 * MIB, random.Random(1)
    for _ in range(3):
        stores = [disk(tmp_path, size_bytes=limit) for _ in range(4)]
        for store in stores:
            store.scan()
        for _ in range(60):
            store = rng.choice(stores)
            key = rng.randrange(10_000)
            put(store, make_key(key), key)
            assert on_disk(tmp_path) <= limit + CHUNK
        for store in stores:
            store.close()
    assert on_disk(tmp_path) > limit // 2


def test_i2_the_size_alone_is_enforced_and_eviction_is_by_recency(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=10 * CHUNK)
    held = [i for i in range(30) if put(store, make_key(i), i) and holds(store, make_key(0), 0)]
    assert held == list(range(30)), "0 is used all the time, so it stays"
    kept = keys_held(store, [make_key(i) for i in range(30)])
    assert kept[0] == 0
    assert kept[1:] == list(range(31 - len(kept), 30))
    assert [i for i in range(30) if holds(store, make_key(i), i)] == kept


def test_j3_a_restarted_store_knows_what_is_there(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=20 * CHUNK)
    for i in range(10):
        put(store, make_key(i), i)
    used = store.used_bytes
    store.close()
    store = disk(tmp_path, size_bytes=20 * CHUNK)
    assert store.used_bytes == used
    [count] = store.scan()
    assert count is not None
    assert count.bytes == store.used_bytes
    assert used is not None
    assert used - 8 * KIB <= count.bytes <= used


def test_recency_outlives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    store = disk(tmp_path, size_bytes=12 * CHUNK, clock=clock)
    for i in range(6):
        put(store, make_key(i), i)
        os.utime(file_of(tmp_path, make_key(i)), (clock.wall(), clock.wall()))
        clock.advance(100)
    assert holds(store, make_key(0), 0)
    store.close()
    store = disk(tmp_path, size_bytes=12 * CHUNK, clock=clock)
    store.scan()
    for i in range(6, 12):
        assert put(store, make_key(i), i)
    kept = keys_held(store, [make_key(i) for i in range(12)])
    assert 0 in kept
    assert 1 not in kept


def test_a_clock_set_back_by_a_day_costs_a_restart_s_recency_at_most(tmp_path: Path) -> None:
    clock, size = ManualClock(wall_s=time.time()), 12 * CHUNK
    store = disk(tmp_path, size_bytes=size, clock=clock)
    assert all(put(store, make_key(i), i) for i in range(6))
    clock._wall_s -= 86_400
    assert holds(store, make_key(0), 0)
    assert all(put(store, make_key(i), i) for i in range(6, 12))
    kept = keys_held(store, [make_key(i) for i in range(12)])
    assert {0, 11} <= set(kept), "in this process what was used last stays"
    assert 1 not in kept
    for _ in range(2):
        assert on_disk(tmp_path) <= (store.used_bytes or 0) <= size
        assert all(
            holds(store, make_key(i), i) for i in keys_held(store, [make_key(i) for i in range(12)])
        )
        store.close()
        store = disk(tmp_path, size_bytes=size, clock=clock)
        store.scan()
        assert len(keys_held(store, [make_key(i) for i in range(12)])) == len(kept)
        assert put(store, make_key(1), 1)
        store.delete([make_key(1)])
        kept = keys_held(store, [make_key(i) for i in range(12)])


def test_a_smaller_size_shrinks_the_directory(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=64 * CHUNK)
    for i in range(40):
        put(store, make_key(i), i)
    store.close()
    store = disk(tmp_path, size_bytes=16 * CHUNK)
    store.scan()
    assert on_disk(tmp_path) <= 16 * CHUNK
    assert keys_held(store, [make_key(i) for i in range(40)])


def test_old_namespaces_age_out(tmp_path: Path) -> None:
    old = Namespace.from_fields({"model": "old"})
    store = disk(tmp_path, size_bytes=20 * CHUNK)
    for i in range(15):
        put(store, make_key(i, namespace=old), i)
        os.utime(file_of(tmp_path, make_key(i, namespace=old)), (1e9, 1e9))
    store.close()
    store = disk(tmp_path, size_bytes=20 * CHUNK)
    store.scan()
    for i in range(15):
        assert put(store, make_key(i), i)
    assert keys_held(store, [make_key(i) for i in range(15)]) == list(range(15))
    assert len(keys_held(store, [make_key(i, namespace=old) for i in range(15)])) < 5


def test_j2_what_is_not_ours_is_never_touched_nor_counted(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=8 * CHUNK)
    put(store, make_key(0), 0)
    chunk = file_of(tmp_path, make_key(0))
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "tmp" / "theirs",
        tmp_path / "quarantine" / "evidence",
        tmp_path / "other" / "a" / "b" / chunk.name,
        chunk.with_name("cache.safetensors"),
        chunk.with_name(chunk.name + ".bak"),
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * CHUNK)
    store.close()
    store = disk(tmp_path, size_bytes=8 * CHUNK)
    store.scan()
    used = store.used_bytes
    assert used is not None
    assert used < 3 * CHUNK
    for i in range(1, 40):
        assert put(store, make_key(i), i)
        store.set_aside([make_key(i)])
    store.delete([make_key(i) for i in range(40)])
    store.scan()
    store.close()
    assert all(path.read_bytes() == b"x" * CHUNK for path in foreign)


def test_i3_files_that_vanish_at_any_moment_are_misses(tmp_path: Path) -> None:
    store, other = disk(tmp_path, size_bytes=16 * CHUNK), disk(tmp_path, size_bytes=16 * CHUNK)
    rng, stop = random.Random(3), threading.Event()
    errors: list[BaseException] = []

    def remove() -> None:
        mine = random.Random(4)
        while not stop.is_set():
            file_of(tmp_path, make_key(mine.randrange(24))).unlink(missing_ok=True)
            other.delete([make_key(mine.randrange(24))])

    def guarded() -> None:
        try:
            remove()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        hits = 0
        for _ in range(1500):
            i = rng.randrange(24)
            put(store, make_key(i), i)
            hits += holds(store, make_key(i), i)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert hits


def test_a_store_that_knows_no_victims_refuses_until_it_has_scanned(tmp_path: Path) -> None:
    one = disk(tmp_path, size_bytes=10 * CHUNK)
    late = disk(tmp_path, size_bytes=10 * CHUNK)
    for i in range(20):
        put(one, make_key(i), i)
    assert write_one(late, make_key(99), value_of(99, CHUNK)) is REJECTED
    late.scan()
    assert put(late, make_key(99), 99)


def test_a_value_larger_than_the_size_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = disk(tmp_path, size_bytes=8 * CHUNK)
    put(store, make_key(0), 0)
    assert write_one(store, make_key(1), bytes(9 * CHUNK)) is REJECTED
    assert holds(store, make_key(0), 0)


def test_the_size_is_split_over_the_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    store = disk(*paths, size_bytes=32 * CHUNK)
    for i in range(100):
        put(store, make_key(i), i)
    sizes = [on_disk(path) for path in paths]
    assert all(8 * CHUNK < size <= 16 * CHUNK for size in sizes)


def test_a_pinned_store_uses_its_path_only(tmp_path: Path) -> None:
    store = disk(tmp_path / "a", tmp_path / "b", volume=3)
    for i in range(10):
        put(store, make_key(i), i)
    assert not list((tmp_path / "a").rglob("*.kv"))
    assert len(list((tmp_path / "b").rglob("*.kv"))) == 10


# --- a real small filesystem ---------------------------------------------------------------------------------------


def test_a_disk_filled_to_the_last_byte_fails_cleanly_and_recovers(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "full", "2m") as path:
        store = disk(path, size_bytes=64 * MIB)
        put(store, make_key(0), 0)
        filler = path / "theirs"
        fill(filler)
        with pytest.raises(StoreUnavailable, match="No space"):
            write_one(store, make_key(1), value_of(1, CHUNK))
        assert temporaries(path) == []
        assert holds(store, make_key(0), 0)
        assert store.contains([make_key(0), make_key(1)]) == [True, False]
        used = store.used_bytes
        filler.unlink()
        assert put(store, make_key(1), 1)
        assert used is not None
        assert used + CHUNK <= (store.used_bytes or 0) <= used + CHUNK + 12 * KIB
        store.close()


def test_the_free_space_floor_gives_room_back(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "floor", "4m") as path:
        store = disk(path, size_bytes=64 * MIB, min_free_bytes=MIB)

        def free() -> int:
            return os.statvfs(path).f_bavail * os.statvfs(path).f_frsize

        for i in range(100):
            assert put(store, make_key(i), i)
            assert free() >= MIB
        (path / "theirs").write_bytes(bytes(free() - 100 * KIB))
        assert put(store, make_key(200), 200)
        assert free() >= MIB
        store.delete([make_key(i) for i in range(201)])
        (path / "more").write_bytes(bytes(free() - MIB - CHUNK - CHUNK // 2))
        assert put(store, make_key(300), 300)
        assert put(store, make_key(301), 301)
        assert keys_held(store, [make_key(300), make_key(301)]) == [1]
        (path / "most").write_bytes(bytes(CHUNK))
        assert write_one(store, make_key(302), value_of(302, CHUNK)) is REJECTED
        assert temporaries(path) == []
        store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_directory_made_read_only_and_back(tmp_path: Path, direct: bool) -> None:
    with tmpfs(tmp_path / "ro", "8m") as path:
        store = disk(path, direct=direct)
        put(store, make_key(0), 0)
        put(store, make_key(1), 1)
        remount(path, "ro")
        assert holds(store, make_key(0), 0)
        with pytest.raises(StoreUnavailable, match="Read-only"):
            put(store, make_key(2), 2)
        with pytest.raises(StoreUnavailable):
            store.delete([make_key(0)])
        store.set_aside([make_key(1)])
        assert read_one(store, make_key(1), CHUNK)[0] is MISSING, "bad, though it can't be moved"
        assert store.contains([make_key(1)]) == [False]
        remount(path, "rw")
        assert put(store, make_key(2), 2)
        store.delete([make_key(0)])
        assert not holds(store, make_key(0), 0)
        store.close()


def test_on_ext4_the_limit_holds_with_its_directories(tmp_path: Path) -> None:
    with ext4(tmp_path, 32 * MIB) as path:
        store = disk(path, size_bytes=8 * MIB)
        for i in range(400):
            assert put(store, make_key(i), i)
            assert on_disk(path) - on_disk(path / "lost+found") <= 8 * MIB + CHUNK
        before = store.used_bytes
        [count] = store.scan()
        assert count is not None
        assert store.used_bytes == count.bytes
        assert before is not None
        assert abs(count.bytes - before) < MIB
        store.close()


def test_a_filesystem_gone_from_its_mount_point_is_not_written_below(tmp_path: Path) -> None:
    below = tmp_path / "mount"
    with tmpfs(below, "8m") as path:
        store = disk(path)
        put(store, make_key(0), 0)
    assert not any(below.iterdir())
    for i in range(3):
        write_quietly(store, i)
    for i in range(3):
        write_quietly(store, i)
    assert not any(below.iterdir()), "written to the directory under the mount point"
    with tmpfs(below, "8m") as path:
        assert isinstance(path, Path)
    store.close()


def write_quietly(store: Store, i: int) -> None:
    with suppress(StoreUnavailable):
        assert write_one(store, make_key(i), value_of(i, CHUNK)) in (Done(CHUNK), REJECTED)


def fill(path: Path) -> None:
    """To the last byte."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4 * KIB)):
            pass
    assert os.statvfs(path).f_bavail == 0


def test_i1_what_is_removed_is_said_within_bounds_and_by_the_next_round(tmp_path: Path) -> None:
    """The page hears of removals together: to others there is less room than there is, never more."""
    clock = ManualClock()
    one, other = (
        disk(tmp_path, size_bytes=1024 * MIB, clock=clock),
        disk(tmp_path, size_bytes=1024 * MIB, clock=clock),
    )
    one.maintain()  # the first scan is done, and the next round due in 10 s
    assert all(put(one, make_key(i), i) for i in range(100))
    held = other.used_bytes or 0
    removed = 0
    for i in range(80):
        one.delete([make_key(i)])
        removed += CHUNK
        seen = other.used_bytes or 0
        assert held - removed <= seen <= held - removed + 4 * MIB, "1/256 of the size may be unsaid"
    assert (other.used_bytes or 0) > held - removed
    clock.advance(10.0)
    one.maintain()
    said = other.used_bytes or 0
    assert said < held - removed + CHUNK, "what was published and reserved ahead is said too"
    for store in (one, other):
        store.close()
