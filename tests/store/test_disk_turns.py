"""Of a store's threads one at a time is in its Python: what they take from the thread that schedules has a bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, Done
from kvstow.backends.disk import turn
from kvstow.backends.disk.turn import Turns
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.store.disks import CHUNK, disk, put


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """That of all stores which the test makes."""
    one = Turns()
    monkeypatch.setattr("kvstow.backends.disk.store.Turns", lambda: one)
    return one


def free(turns: Turns) -> bool:
    if turns._lock.acquire(blocking=False):
        turns._lock.release()
        return True
    return False


def watch(
    monkeypatch: pytest.MonkeyPatch, turns: Turns, seen: list[tuple[str, bool]], name: str
) -> None:
    """Note whether the turn is free whenever ``os.name`` is called."""
    call: Callable[..., Any] = getattr(os, name)

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append((name, free(turns)))
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, noted)


def test_short_calls_are_made_in_a_turn_and_long_ones_between_two(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key, seen = disk(tmp_path), make_key(0), list[tuple[str, bool]]()
    put(store, make_key(1), 1)
    for name in ("open", "fstat", "pwritev", "preadv", "unlink"):
        watch(monkeypatch, turns, seen, name)
    put(store, key, 0)
    assert [one for one in seen if one[0] != "fstat"][:2] == [("open", False), ("pwritev", True)]
    seen.clear()
    assert read_one(store, key, CHUNK)[0] == Done(CHUNK)
    assert seen == [("open", False), ("fstat", False), ("preadv", True)]
    seen.clear()
    store.delete([key])
    assert seen == [("unlink", True)]
    assert free(turns)


def test_evicting_takes_as_long_as_the_disk_likes_and_is_done_between_two_turns(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = disk(tmp_path, size_bytes=16 * CHUNK), list[tuple[str, bool]]()
    watch(monkeypatch, turns, seen, "unlink")
    for i in range(32):
        put(store, make_key(i), i)
    assert seen
    assert all(between for _, between in seen)


@pytest.mark.parametrize("name", ["open", "fstat", "preadv"])
def test_a_fault_ends_the_turn(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, key = disk(tmp_path), make_key(0)
    put(store, key, 0)
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(5, "Input/output error")

        broken.setattr(os, name, fail)
        with pytest.raises(Exception, match="Input/output error"):
            read_one(store, key, CHUNK)
    assert free(turns)
    assert read_one(store, key, CHUNK)[0] == Done(CHUNK)


def test_looking_a_chunk_up_waits_for_nobody(tmp_path: Path, turns: Turns) -> None:
    store, key = disk(tmp_path), make_key(0)
    put(store, key, 0)
    mine = turns.take()
    assert store.contains([key, make_key(1)]) == [True, False]
    mine.release()


def test_who_hangs_in_a_turn_is_waited_for_once(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "LONGEST_S", 0.001)
    store, key = disk(tmp_path), make_key(0)
    hangs = turns.take()
    assert write_one(store, key, value_of(0, CHUNK)) == Done(CHUNK)
    monkeypatch.setattr(turn, "LONGEST_S", 3600.0)
    assert read_one(store, key, CHUNK)[0] == Done(CHUNK), "nobody waits for it any more"
    hangs.release()
    store.delete([key])
    assert read_one(store, key, CHUNK)[0] is MISSING
    assert free(turns)


def test_who_gets_no_turn_again_gives_away_nobody_elses(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = disk(tmp_path), make_key(0)
    put(store, key, 0)
    take, others = turns.take, list[threading.Lock]()

    def first_only() -> threading.Lock:
        monkeypatch.setattr(turns, "take", fail)
        return take()

    def fail() -> threading.Lock:
        others.append(take())  # another thread has the turn when this one gives up
        raise MemoryError

    monkeypatch.setattr(turns, "take", first_only)
    with pytest.raises(MemoryError):
        read_one(store, key, CHUNK)
    assert not free(turns)
    others[0].release()
