"""Stores that others wrote: what they answer is checked, what they are lent is taken back, what they do is a miss."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Store
from kvstow.errors import StoreUnavailable
from kvstow.runtime import ThreadExecutor
from kvstow.testing.faults import Gate
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import StoreSuite, make_key, read_one, write_one
from kvstow.tiers import TierLimits
from kvstow.tiers.checked import CheckedStore, within
from tests.unit.rig import FRAME_BYTES, MISS0, Rig, hit


class Mute(BaseException):
    def __str__(self) -> str:
        raise ValueError


class Hostile(MemoryStore):
    """A good store until ``evil``: then each method is what ``evil`` makes of what the good one answered."""

    def __init__(self) -> None:
        super().__init__()
        self.evil: Callable[[str, Any, Any], Any] | None = None

    def contains(self, keys: Any) -> Any:
        return self._spoilt("contains", keys, super().contains(keys))

    def read(self, items: Any) -> Any:
        return self._spoilt("read", items, super().read(items))

    def write(self, items: Any) -> Any:
        return self._spoilt("write", items, super().write(items))

    def delete(self, keys: Any) -> None:
        super().delete(keys)
        self._spoilt("delete", keys, None)

    def close(self) -> None:
        self._spoilt("close", None, None)

    def _spoilt(self, op: str, given: Any, answer: Any) -> Any:
        return answer if self.evil is None else self.evil(op, given, answer)


def raises(error: BaseException) -> Callable[[str, Any, Any], Any]:
    def evil(*_: Any) -> Any:
        raise error

    return evil


def other_bytes(op: str, given: Any, answer: Any) -> Any:
    if op == "read":
        for _, buffer in given:
            buffer[:] = bytes(len(buffer))
    return answer


def longer_than_its_buffer(op: str, given: Any, answer: Any) -> Any:
    return [Done(1 << 40)] * len(given) if op in ("read", "write") else answer


WAYS = {
    "raises what it should": raises(StoreUnavailable("gone")),
    "raises anything": raises(ZeroDivisionError()),
    "ends the interpreter": raises(SystemExit(3)),
    "raises what can't be printed": raises(Mute()),
    "answers nothing": lambda *_: None,
    "answers text": lambda *_: "yes",
    "answers too little": lambda op, given, answer: answer[:-1] if answer else answer,
    "answers other kinds": lambda op, given, answer: [3.5] * len(given or []),
    "answers a length that is none": lambda op, given, answer: [Done("all")] * len(given or []),  # type: ignore[arg-type]
    "answers a negative length": lambda op, given, answer: [Done(-1)] * len(given or []),
    "answers a length beyond its buffer": longer_than_its_buffer,
    "reads other bytes": other_bytes,
}
HOSTILE = pytest.mark.parametrize("way", WAYS)


class TestCheckedStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return CheckedStore(MemoryStore())


@HOSTILE
def test_whatever_a_store_does_is_a_miss_and_a_counter(way: str) -> None:
    store = Hostile()
    rig = Rig(inners=[CheckedStore(store)])  # type: ignore[list-item]
    rig.put_below(1, 2)
    store.evil = WAYS[way]
    rig.fetch("r", 1, 2)
    rig.settle()
    assert rig.fetch("r", 1, 2) == MISS0
    rig.put(3)
    rig.settle()
    assert rig.engine.lookup([]) == MISS0
    assert rig.found(3) == 1, "memory has it, whatever the tier below did"
    assert rig.counter("failed_chunks", tier="t0") + rig.counter("corrupt_chunks", tier="t0") > 0
    rig.engine.forget("r")
    rig.assert_idle()
    store.evil = None
    rig.clock.advance(60)
    rig.put_below(5)
    rig.fetch("s", 5)
    rig.settle()
    assert rig.fetch("s", 5) == hit(1), "and it is used again once it behaves"
    store.evil = WAYS[way]
    rig.engine.close(1.0)


def test_a_store_that_hangs_holds_up_no_request() -> None:
    store, gate = Hostile(), Gate()
    rig = Rig(
        inners=[CheckedStore(store)],  # type: ignore[list-item]
        limits=TierLimits(hung_after_s=5.0),
        executor=lambda _: ThreadExecutor("hostile"),
        fetch_deadline_s=0.2,
    )
    source = Rig(slots=4, inners=rig.inners)
    source.put(1)
    source.settle()
    store.evil = lambda op, given, answer: (gate(), answer)[1]
    try:
        rig.fetch("r", 1)
        assert gate.wait_arrived()
        rig.clock.advance(0.2)
        rig.engine.poll()
        assert rig.fetch("r", 1) == MISS0
        rig.clock.advance(5.0)
        rig.engine.poll()
        assert not rig.tiers[0].usable
    finally:
        gate.release()
    while rig.executors[0].outstanding:
        rig.executors[0].wait(1.0)
        rig.engine.poll()
    assert rig.tiers[0].usable
    rig.engine.close(5.0)


def test_a_kept_buffer_cannot_be_used() -> None:
    kept: list[Any] = []

    class Keeper(MemoryStore):
        def read(self, items: Any) -> Any:
            kept.extend(buffer for _, buffer in items)
            return super().read(items)

        def write(self, items: Any) -> Any:
            kept.extend(part for _, parts in items for part in parts)
            return super().write(items)

    store = CheckedStore(Keeper())
    assert write_one(store, make_key(0), b"abc") == Done(3)
    assert read_one(store, make_key(0), 3) == (Done(3), b"abc")
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            view[0]


@pytest.mark.parametrize("error", [None, StoreUnavailable("gone"), ZeroDivisionError()])
def test_an_array_over_a_buffer_that_lives_on_hides_neither_answer_nor_error(
    error: Exception | None,
) -> None:
    kept: list[Any] = []

    class Arrays(MemoryStore):
        def read(self, items: Any) -> Any:
            kept.extend((ctypes.c_char * len(buffer)).from_buffer(buffer) for _, buffer in items)
            if error is not None:
                raise error
            return super().read(items)

    store = CheckedStore(Arrays())
    write_one(store, make_key(0), b"abc")
    if error is None:
        assert read_one(store, make_key(0), 3) == (Done(3), b"abc")
    else:
        with pytest.raises(type(error)):
            read_one(store, make_key(0), 3)


def test_parts_are_lent_to_be_read_only() -> None:
    class Scribbler(MemoryStore):
        def write(self, items: Any) -> Any:
            for _, parts in items:
                parts[0][0] = 0
            return super().write(items)

    mine = bytearray(b"abc")
    with pytest.raises(TypeError):
        CheckedStore(Scribbler()).write([(make_key(0), [memoryview(mine)])])
    assert mine == b"abc"


def test_outcomes_of_the_contract_pass() -> None:
    store = CheckedStore(MemoryStore())
    buffer: Buffer = memoryview(bytearray(2))
    write_one(store, make_key(0), b"abc")
    assert store.read([(make_key(0), buffer), (make_key(1), buffer)]) == [REJECTED, MISSING]


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), SystemExit(2), KeyboardInterrupt()])
def test_within_makes_one_exception_of_all(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(StoreUnavailable, match=type(error).__name__):
        within("test", work, 30.0)


def test_within_does_not_wait_for_ever(gate: Gate) -> None:
    with pytest.raises(StoreUnavailable, match=r"within 0.01 s"):
        within("test", gate, 0.01)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()


def test_a_frame_is_what_is_stored() -> None:
    store = MemoryStore()
    rig = Rig(inners=[CheckedStore(store)])  # type: ignore[list-item]
    rig.put(1)
    rig.settle()
    assert rig.below(1) == [True]
    assert rig.counter("stored_bytes", tier="t0") == FRAME_BYTES


@pytest.mark.parametrize("length", [-1, 4, True, "3", 2.0])
def test_a_read_of_a_length_that_cannot_be_is_a_fault(length: Any) -> None:
    store = Hostile()
    store.evil = lambda op, given, answer: [Done(length)] * len(given)
    with pytest.raises(StoreUnavailable, match="isn't what a store answers"):
        read_one(CheckedStore(store), make_key(0), 3)
