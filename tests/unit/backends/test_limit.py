"""A bound on bytes written a second; reads are not its business."""

from __future__ import annotations

from kvstow.backends.base import REJECTED, Done, Outcome
from kvstow.testing.manual import ManualClock
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import make_key, read_one, write_one
from kvstow.tiers.limit import BURST_S, WriteLimit

RATE = 1000.0


def make() -> tuple[WriteLimit, ManualClock]:
    clock = ManualClock()
    return WriteLimit(MemoryStore(), clock, bytes_s=RATE), clock


def write(store: WriteLimit, i: int, size: int) -> Outcome:
    return write_one(store, make_key(i), bytes(size))


def test_a_burst_passes_and_what_is_more_is_rejected() -> None:
    store, _ = make()
    took = [isinstance(write(store, i, 100), Done) for i in range(30)]
    assert took == [True] * int(BURST_S * RATE / 100) + [False] * 10


def test_a_pause_makes_no_more_than_a_burst() -> None:
    store, clock = make()
    clock.advance(1000.0)
    assert sum(isinstance(write(store, i, 100), Done) for i in range(50)) == int(
        BURST_S * RATE / 100
    )


def test_over_a_long_time_it_is_the_rate() -> None:
    store, clock = make()
    wrote = 0
    for i in range(2000):
        clock.advance(0.05)
        wrote += 100 * isinstance(write(store, i, 100), Done)
    assert 0.99 * 100 * RATE <= wrote <= 100 * RATE + BURST_S * RATE


def test_what_is_larger_than_a_burst_is_written_now_and_paid_for_later() -> None:
    store, clock = make()
    assert write(store, 0, 10_000) == Done(10_000)
    clock.advance(8.0)
    assert write(store, 1, 1) is REJECTED
    clock.advance(0.1)
    assert write(store, 1, 1) == Done(1)


def test_a_batch_keeps_its_order() -> None:
    store, _ = make()
    sizes = [1500, 1500, 400, 400]
    items = [(make_key(i), [memoryview(bytes(size))]) for i, size in enumerate(sizes)]
    assert store.write(items) == [Done(1500), REJECTED, Done(400), REJECTED]


def test_reads_are_not_limited() -> None:
    store, _ = make()
    write(store, 0, 1900)
    for _ in range(100):
        assert read_one(store, make_key(0), 2000)[0] == Done(1900)
        assert store.contains([make_key(0)]) == [True]
