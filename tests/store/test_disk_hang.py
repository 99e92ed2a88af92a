"""One of several directories hangs: its threads are few, the others serve on, and it comes back.

A hang is a call of the system that does not return: here the functions that move bytes wait, for files of that
directory, until the test lets them go. Threads are real, time is not.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.disk import DiskStore, files
from kvstow.backends.disk.in_progress import HUNG_S, CallsInProgress
from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.runtime import ThreadExecutor
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.testing.store_suite import make_key, value_of, write_one
from kvstow.tiers import Tier
from kvstow.tiers.breaker import BreakerState
from tests.store.disks import CHUNK, disk, file_of, holds, put

THREADS: Final = 4
MOST: Final = 2  # of them in one directory
LONG_S: Final = 30.0  # of real time: a test that waits for so long has failed
MANY: Final = range(32)


class Gate:
    """What moves bytes of the files in ``shut`` directories waits."""

    def __init__(self) -> None:
        self.shut: list[Path] = []
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def wrap(self, move: Callable[..., int]) -> Callable[..., int]:
        def moved(fd: int, *parts: Any) -> int:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if any(path.startswith(str(shut)) for shut in self.shut):
                self.entered.release()
                assert self.opened.wait(LONG_S)
            return move(fd, *parts)

        return moved

    def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert self.entered.acquire(timeout=LONG_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(files, "read_all", gate.wrap(files.read_all))
    monkeypatch.setattr(files, "write_all", gate.wrap(files.write_all))
    yield gate
    gate.opened.set()


class Disks:
    """A store over ``count`` directories with chunks in each."""

    def __init__(self, folder: Path, count: int = 2, threads: int = THREADS) -> None:
        self.clock = ManualClock()
        self.paths = [folder / f"d{n}" for n in range(count)]
        self.store: DiskStore = disk(*self.paths, clock=self.clock, threads=threads)
        assert all(put(self.store, make_key(i), i) for i in MANY)

    def of(self, which: int) -> list[int]:
        found = [i for i in MANY if file_of(self.paths[which], make_key(i)).exists()]
        assert len(found) > THREADS
        return found


class Calls:
    """Calls on threads of their own, and what came of them."""

    def __init__(self, work: Callable[[int], object], numbers: Sequence[int]) -> None:
        self.results: dict[int, object] = {}

        def run(number: int) -> None:
            try:
                self.results[number] = work(number)
            except StoreUnavailable as error:
                self.results[number] = error

        self._threads = [
            threading.Thread(target=run, args=(number,), daemon=True) for number in numbers
        ]
        for thread in self._threads:
            thread.start()

    def ended(self) -> list[object]:
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        return list(self.results.values())


def reader(store: DiskStore) -> Callable[[int], object]:
    return lambda i: store.read([(make_key(i), memoryview(bytearray(CHUNK)))])[0]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Disk path" in r.getMessage()]


def test_h6b_a_hung_directory_keeps_half_of_the_threads_and_its_own_chunks(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    disks = Disks(tmp_path)
    store, lost, kept = disks.store, disks.of(1), disks.of(0)
    gate.shut = [disks.paths[1]]
    calls = Calls(reader(store), lost[:THREADS])
    gate.wait_for(MOST)
    assert store.report().paths_down == 0, "it may only be slow"
    assert all(holds(store, make_key(i), i) for i in kept)
    disks.clock.advance(HUNG_S)
    with caplog.at_level(logging.WARNING, "kvstow"):
        assert (store.report().paths_down, store.report().hung_calls) == (1, MOST)
    path = disks.paths[1]
    assert said(caplog) == [
        f"Disk path {path} is out of use, its chunks are misses: a call in it does not return"
    ]
    assert all(holds(store, make_key(i), i) for i in kept)
    assert not any(holds(store, make_key(i), i) for i in lost)
    assert store.contains([make_key(i) for i in lost]) == [False] * len(lost)
    assert write_one(store, make_key(lost[0]), value_of(0, CHUNK)) is REJECTED
    store.delete([make_key(lost[0])])
    store.maintain()
    assert not gate.entered.acquire(blocking=False), "nobody else went in"
    with caplog.at_level(logging.WARNING, "kvstow"):
        gate.opened.set()
        assert sorted(map(str, calls.ended())) == sorted(
            [str(Done(CHUNK))] * MOST + ["MISSING"] * (THREADS - MOST)
        )
    assert (store.report().paths_down, store.report().hung_calls) == (0, 0)
    assert said(caplog)[1:] == [f"Disk path {path} is in use again"]
    assert all(holds(store, make_key(i), i) for i in MANY)


def test_h6b_the_next_call_notices_a_hang_too(tmp_path: Path, gate: Gate) -> None:
    disks = Disks(tmp_path)
    lost = disks.of(1)
    gate.shut = [disks.paths[1]]
    new = next(
        i
        for i in range(1000, 2000)
        if make_key(i).digest()[-4] % 2 == make_key(lost[0]).digest()[-4] % 2
    )
    calls = Calls(lambda i: write_one(disks.store, make_key(i), value_of(i, CHUNK)), [new])
    gate.wait_for(1)
    disks.clock.advance(HUNG_S)
    assert reader(disks.store)(lost[0]) is MISSING
    assert disks.store.report().paths_down == 1
    gate.opened.set()
    assert calls.ended() == [Done(CHUNK)]
    assert holds(disks.store, make_key(new), new)
    assert disks.store.report().paths_down == 0


def test_h6b_one_that_returns_is_not_in_use_while_another_call_hangs(tmp_path: Path) -> None:
    clock = ManualClock()
    inside = CallsInProgress(2, THREADS, clock)
    with inside.enter(0):
        clock.advance(HUNG_S - 1)
        with inside.enter(0):
            clock.advance(1.0)
            assert inside.hanging() == ([0], 2)
        assert inside.hangs(0)
        assert inside.hanging() == ([0], 1)
    assert inside.hanging() == ([], 0)


def test_when_all_hang_the_store_fails_at_once_and_owns_up_to_it(
    tmp_path: Path, gate: Gate
) -> None:
    disks = Disks(tmp_path)
    gate.shut = disks.paths
    calls = Calls(reader(disks.store), [disks.of(0)[0], disks.of(1)[0]])
    gate.wait_for(2)
    disks.clock.advance(HUNG_S)
    assert (disks.store.report().paths_down, disks.store.report().hung_calls) == (2, 0), (
        "no thread is the tier's to forgive"
    )
    with pytest.raises(StoreUnavailable, match="has not returned"):
        reader(disks.store)(disks.of(0)[1])
    gate.opened.set()
    assert calls.ended() == [Done(CHUNK)] * 2
    assert disks.store.report().paths_down == 0


def test_hangs_that_leave_no_thread_are_the_tiers(tmp_path: Path) -> None:
    clock = ManualClock()
    inside = CallsInProgress(3, 2, clock)
    with inside.enter(0):
        clock.advance(HUNG_S)
        assert inside.hanging() == ([0], 1)
        with inside.enter(1):
            clock.advance(HUNG_S)
            assert inside.hanging() == ([0, 1], 0)


def test_without_a_number_of_threads_as_many_go_in_as_come() -> None:
    inside = CallsInProgress(2, None, ManualClock())
    with inside.enter(0), inside.enter(0), inside.enter(0), inside.enter(1):
        assert inside.hanging() == ([], 0)


def test_a_full_directory_is_waited_for_not_given_up(tmp_path: Path, gate: Gate) -> None:
    disks = Disks(tmp_path)
    numbers = disks.of(1)[:THREADS]
    gate.shut = [disks.paths[1]]
    calls = Calls(reader(disks.store), numbers)
    gate.wait_for(MOST)
    assert calls.results == {}
    gate.opened.set()
    assert calls.ended() == [Done(CHUNK)] * THREADS


def test_each_directory_has_a_background_thread(tmp_path: Path) -> None:
    executor = ManualExecutor()
    disks = Disks(tmp_path, count=3)
    disks.store.start(executor)
    assert executor.pending == 3


# --- the tier over it -----------------------------------------------------------------------------------------------


class Slot:
    """A lease, as far as a tier's read goes."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(CHUNK))

    def view(self) -> memoryview:
        return self._bytes


LAYOUT = ChunkLayout((GroupLayout(16, 1, (CHUNK - 4096,)),))


class Over:
    """A tier with real threads; the chunks are no frames, so what is read is corrupt: enough to see that it was."""

    def __init__(self, disks: Disks) -> None:
        self.metrics, self.ended = Metrics(), threading.Semaphore(0)
        self.executor = ThreadExecutor("hang", threads=THREADS)
        store = disks.store
        self.tier = Tier(
            *("disk", store, self.executor),
            layout=LAYOUT,
            clock=disks.clock,
            metrics=self.metrics,
        )
        self.results: list[list[bool]] = []

    def read(self, key: ChunkKey) -> None:
        assert self.tier.read([(key, Slot())], self.results.append) is not None  # type: ignore[list-item]

    def settle(self, ended: int) -> None:
        while len(self.results) < ended:
            assert self.executor.wait(LONG_S)
            self.tier.poll()


def test_h6b_a_tier_goes_on_beside_a_hung_directory(tmp_path: Path, gate: Gate) -> None:
    disks = Disks(tmp_path)
    over, kept, lost = Over(disks), disks.of(0), disks.of(1)
    gate.shut = [disks.paths[1]]
    for i in lost[:MOST]:
        over.read(make_key(i))
    gate.wait_for(MOST)
    disks.clock.advance(over.tier.limits.hung_after_s)
    over.tier.poll()
    assert over.tier.state is BreakerState.CLOSED
    for i in (*kept, *lost[MOST:]):
        over.read(make_key(i))
    over.settle(len(kept) + len(lost) - MOST)
    disks.clock.advance(over.tier.limits.hung_after_s)
    over.tier.poll()
    assert over.tier.usable
    assert not over.tier.busy(), "an idle engine must not step for calls that may never return"
    gauges = (over.metrics.take() or {})["gauges"]
    assert gauges["tier_paths_down|disk"] == 1
    gate.opened.set()
    over.settle(len(MANY))
    over.tier.poll()
    assert disks.store.report().paths_down == 0
    assert over.tier.close(LONG_S)


def test_h6b_a_tier_whose_directories_all_hang_is_bypassed(tmp_path: Path, gate: Gate) -> None:
    disks = Disks(tmp_path)
    over = Over(disks)
    gate.shut = disks.paths
    for which in (0, 1):
        over.read(make_key(disks.of(which)[0]))
    gate.wait_for(2)
    disks.clock.advance(over.tier.limits.hung_after_s)
    over.tier.poll()
    assert over.tier.state is BreakerState.OPEN
    gate.opened.set()
    over.settle(2)
    over.tier.poll()
    assert over.tier.usable
    assert over.tier.close(LONG_S)
