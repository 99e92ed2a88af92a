"""The scrub, the admission, and corrupt frames through a real tier."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from kvstow import frame
from kvstow.backends.base import REJECTED, Done
from kvstow.backends.disk import DiskStore
from kvstow.backends.disk.admission import SecondSight
from kvstow.backends.disk.check import Read, frame_check
from kvstow.backends.disk.mount import attach
from kvstow.backends.disk.scrub import Scrub
from kvstow.errors import FrameError
from kvstow.key import ChunkKey
from kvstow.layout import GroupLayout
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.store.disks import CHUNK, disk, file_of, holds, keys_held, no_error, put

GROUP = GroupLayout(16, 1, (10_000,))
KEYS = [make_key(i) for i in range(40)]


def sealed(key: ChunkKey, integrity_key: bytes | None = None) -> bytes:
    whole = bytearray(value_of(3, GROUP.frame_bytes))
    frame.seal(memoryview(whole), key, GROUP, 16, b"", 0.0, integrity_key=integrity_key)
    return bytes(whole)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def filled(path: Path, integrity_key: bytes | None = None) -> DiskStore:
    store = disk(path)
    for key in KEYS:
        assert write_one(store, key, sealed(key, integrity_key)) == Done(GROUP.frame_bytes)
    return store


@pytest.mark.parametrize("at", [0, 50, 2020, 4095, 4096, 9_999])
def test_h6_a_flipped_byte_is_found_set_aside_and_storable_anew(tmp_path: Path, at: int) -> None:
    store, key = filled(tmp_path), KEYS[7]
    flip(file_of(tmp_path, key), at)
    buffer = memoryview(bytearray(GROUP.frame_bytes))
    [outcome] = store.read([(key, buffer)])
    assert outcome == Done(GROUP.frame_bytes)
    with pytest.raises(FrameError):
        frame.check(buffer, GROUP.frame_bytes, key, GROUP)
    store.set_aside([key])
    assert keys_held(store, KEYS) == [i for i in range(40) if i != 7]
    assert write_one(store, key, sealed(key)) == Done(GROUP.frame_bytes)
    assert read_one(store, key, GROUP.frame_bytes)[1] == sealed(key)


@pytest.mark.parametrize("integrity_key", [None, b"k" * 32])
def test_a_round_of_the_scrub_sets_aside_what_is_bad_and_only_that(
    tmp_path: Path, integrity_key: bytes | None
) -> None:
    store = filled(tmp_path, integrity_key)
    mtimes = [file_of(tmp_path, key).stat().st_mtime_ns for key in KEYS]
    flip(file_of(tmp_path, KEYS[3]), 5000)
    os.truncate(file_of(tmp_path, KEYS[4]), 4096)
    os.truncate(file_of(tmp_path, KEYS[5]), 0)
    os.replace(
        file_of(tmp_path, KEYS[6]), file_of(tmp_path, KEYS[8])
    )  # a whole frame, of another key
    bad: list[bytes] = []

    def set_aside(namespace: bytes, digest: bytes) -> None:
        bad.append(digest)
        store._volumes[0].set_aside(namespace, digest, "corrupt")

    done = Scrub(frame_check(integrity_key), set_aside, no_error).step(
        attach(str(tmp_path)), 1 << 30, threading.Event()
    )
    assert sorted(bad) == sorted(KEYS[i].digest() for i in (3, 4, 5, 8))
    assert done >= 36 * GROUP.frame_bytes
    good = [i for i in range(40) if i not in (3, 4, 5, 6, 8)]
    assert all(
        read_one(store, KEYS[i], GROUP.frame_bytes)[1] == sealed(KEYS[i], integrity_key)
        for i in good
    )
    untouched = [i for i in good if file_of(tmp_path, KEYS[i]).stat().st_mtime_ns == mtimes[i]]
    assert untouched == good, "verifying is no use: recency stays"


def test_a_keyed_scrub_refuses_frames_without_a_mac(tmp_path: Path) -> None:
    filled(tmp_path)
    bad: list[bytes] = []
    scrub = Scrub(frame_check(b"k" * 32), lambda _, digest: bad.append(digest), no_error)
    scrub.step(attach(str(tmp_path)), 1 << 30, threading.Event())
    assert len(bad) == 40


@pytest.mark.parametrize("length", [1 << 40, 3 << 30])
def test_a_huge_file_by_a_chunks_name_is_judged_by_its_first_page(
    tmp_path: Path, length: int
) -> None:
    filled(tmp_path)
    os.truncate(file_of(tmp_path, KEYS[3]), length)  # sparse, behind a whole frame
    empty = file_of(tmp_path, KEYS[4])
    os.truncate(empty, 0)
    os.truncate(empty, length)
    bad: list[bytes] = []
    scrub = Scrub(frame_check(), lambda _, digest: bad.append(digest), no_error)
    done = scrub.step(attach(str(tmp_path)), 1 << 50, threading.Event())
    assert sorted(bad) == sorted(KEYS[i].digest() for i in (3, 4))
    assert done <= 40 * GROUP.frame_bytes


def test_a_header_that_claims_more_than_a_chunk_can_have_is_not_followed(tmp_path: Path) -> None:
    filled(tmp_path)
    path = file_of(tmp_path, KEYS[3])
    header = frame.parse_header(path.read_bytes()[:4096])
    spans = frame.frame_spans((1 << 40,))
    page = memoryview(bytearray(4096))
    frame.write_header(
        page, header._replace(spans=spans, raw_length=1 << 40), frame.PayloadChecksum(), None
    )
    path.write_bytes(page)
    os.truncate(path, 4096 + (1 << 40))
    bad: list[bytes] = []
    scrub = Scrub(frame_check(), lambda _, digest: bad.append(digest), no_error)
    assert scrub.step(attach(str(tmp_path)), 1 << 50, threading.Event()) <= 40 * GROUP.frame_bytes
    assert bad == [KEYS[3].digest()]


def test_frames_longer_than_the_buffer_and_coded_ones_are_whole(tmp_path: Path) -> None:
    store, group = disk(tmp_path, size_bytes=1 << 30), GroupLayout(16, 1, (9_000_001, 5))
    whole = memoryview(bytearray(group.frame_bytes))
    frame.seal(whole, KEYS[0], group, 16, b"", 0.0)
    assert write_one(store, KEYS[0], bytes(whole)) == Done(group.frame_bytes)
    coded = memoryview(bytearray(4096 + 8192))
    payload = frame.PayloadChecksum()
    payload.update(coded[4096 : 4096 + 5000])
    header = frame.FrameHeader(
        KEYS[1], b"", 16, 9_000_006, frame.frame_spans((5000,)), b"", 0.0, True, 4, b"p"
    )
    frame.write_header(coded, header, payload, None)
    assert write_one(store, KEYS[1], bytes(coded)) == Done(len(coded))
    bad: list[bytes] = []
    scrub = Scrub(frame_check(), lambda _, digest: bad.append(digest), no_error)
    assert scrub.step(attach(str(tmp_path)), 1 << 30, threading.Event()) == group.frame_bytes + len(
        coded
    )
    assert not bad


def test_the_scrub_keeps_to_its_budget_and_goes_on_where_the_last_one_stopped(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    seen: list[bytes] = []

    def check(digest: bytes, length: int, read: Read) -> bool:
        seen.append(digest)
        return read(0, memoryview(bytearray(length))) == length

    def new() -> Scrub:
        return Scrub(check, lambda *_: None, no_error)

    mount, stop = attach(str(tmp_path)), threading.Event()
    first = new()
    assert first.step(mount, 20 * GROUP.frame_bytes, stop) == 20 * GROUP.frame_bytes
    assert new().step(mount, 1 << 30, stop) == 0, "one process scrubs a directory"
    del first
    second = new()
    while second.step(mount, 5 * GROUP.frame_bytes, stop) == 5 * GROUP.frame_bytes:
        pass
    order = sorted(key.digest() for key in KEYS)
    assert seen[:20] == order[:20]
    assert seen[20:] == order[16:], "at most SAVE_EVERY files are read again"
    seen.clear()
    second.step(mount, 1 << 30, stop)
    assert seen == order, "round and round"
    stop.set()
    assert second.step(mount, 1 << 30, stop) == 0


def test_i8_second_sight_writes_what_is_used_again(tmp_path: Path) -> None:
    rng = random.Random(8)
    prompts = [rng.randrange(10) if rng.random() < 0.1 else 1000 + i for i in range(300)]
    store = disk(tmp_path, admission="second_sight", size_bytes=400 * CHUNK)
    offered: dict[int, int] = {}
    written = 0
    for prompt in prompts:
        key = make_key(prompt)
        held = holds(store, key, prompt, 4096)
        assert held == (offered.get(prompt, 0) >= 2)
        if not held:
            written += put(store, key, prompt, 4096)
            offered[prompt] = offered.get(prompt, 0) + 1
    assert 0 < written < 0.2 * len(prompts)


def test_second_sight_remembers_a_bounded_number() -> None:
    admit = SecondSight(remembered=3)
    digests = [make_key(i).digest() for i in range(5)]
    assert [admit(digest) for digest in digests] == [False] * 5
    assert admit(digests[4])
    assert not admit(digests[4]), "admitted, it starts anew"
    assert not admit(digests[0]), "forgotten"
    assert len(admit._seen) == 3


def test_a_rejected_admission_writes_nothing(tmp_path: Path) -> None:
    store = disk(tmp_path, admission="second_sight")
    assert write_one(store, KEYS[0], b"x") is REJECTED
    assert not list(tmp_path.rglob("*.kv"))
    assert write_one(store, KEYS[0], b"x") == Done(1)


def test_h6_a_chunk_found_by_a_read_and_by_the_scrub_is_counted_once(tmp_path: Path) -> None:
    """Whichever moves it aside: the read's caller counts it."""
    store = filled(tmp_path)
    scrub_found = store._corrupt(store._volumes[0])
    where = bytes(KEYS[0].namespace)
    for read_first in (True, False):
        key = KEYS[read_first]
        calls = [
            lambda key=key: store.set_aside([key]),
            lambda key=key: scrub_found(where, key.digest()),
        ]
        for call in calls if read_first else reversed(calls):
            call()
        assert store.report().corrupt == 0
    scrub_found(where, KEYS[2].digest())
    scrub_found(where, KEYS[2].digest())
    store.set_aside([KEYS[3]])
    assert store.report().corrupt == 1
    assert store.report().corrupt == 0
    store.close()
