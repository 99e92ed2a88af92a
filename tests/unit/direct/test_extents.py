"""Slots of direct storage: tags, resting, evict and retry on a full device, what the table is told."""

from __future__ import annotations

import os

import pytest

from kvstow.cache import Cache
from kvstow.direct.extents import RETRY_S, Extents
from kvstow.direct.geometry import Geometry, extent_bytes, slots_in
from kvstow.direct.page import tag_of
from kvstow.direct.table import record
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ALIGN, HEADER_BYTES, ChunkLayout, GroupLayout, Place, Span
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.testing.manual import ManualClock, ManualExecutor

LAYOUT = ChunkLayout((GroupLayout(16, 2, (1000, 4096)),))
NAMESPACE = Namespace.from_fields({"made by": "extents test"})


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, group, number.to_bytes(32, "little"))


class FakeTable:
    def __init__(self, there: list[tuple[int, int, ChunkKey]] | None = None) -> None:
        self.there = there or []
        self.records: dict[int, bytes | None] = {}
        self.closed = False
        self.hangs = False

    def read(self) -> list[tuple[int, int, ChunkKey]]:
        return self.there

    def put(self, slot: int, chunk: ChunkKey, generation: int) -> None:
        self.records[slot] = record(chunk, generation)

    def clear(self, slot: int) -> None:
        self.records[slot] = None

    def poll(self) -> None: ...

    def busy(self) -> bool:
        return False

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return not self.hangs


class Rig:
    def __init__(
        self, slots: int = 4, *, preallocated: bool = True, table: FakeTable | None = None
    ) -> None:
        self.clock = ManualClock()
        self.table = table
        self.geometry = Geometry.with_files(LAYOUT, slots)
        self.extents = Extents(
            self.geometry,
            LAYOUT,
            self.clock,
            preallocated=preallocated,
            table=table,  # type: ignore[arg-type]
        )
        self.engine = Cache(
            pool=self.extents,
            policy=LRU(),
            tiers=(),
            layout=LAYOUT,
            clock=self.clock,
            metrics=Metrics(),
            sealer=ManualExecutor(self.clock),
        )

    def put(self, *numbers: int, fails: bool = False) -> None:
        for number in numbers:
            lease = self.engine.reserve(key(number), b"", 32)
            assert lease is not None, f"no slot for {number}"
            if fails:
                self.engine.failed(lease)
            else:
                self.engine.commit(lease)
            lease.release()

    def found(self) -> list[int]:
        return [number for number in range(100) if self.engine.index.resident(key(number))]

    def check(self) -> None:
        self.extents.check_integrity()
        assert self.extents.leased == 0
        assert self.extents.free + len(self.engine.index) == self.extents.slots


def test_geometry() -> None:
    geometry = Geometry.with_files(LAYOUT, 100)
    assert (
        geometry.extent_bytes
        == (HEADER_BYTES + ALIGN, HEADER_BYTES + 2 * ALIGN)
        == extent_bytes(LAYOUT)
    )
    assert geometry.offsets == (ALIGN + 4 * ALIGN, ALIGN)
    slots = slots_in(geometry.extent_bytes, 1 << 20)
    fits, more = Geometry.with_files(LAYOUT, slots), Geometry.with_files(LAYOUT, slots + 2)
    assert sum(map(fits.file_bytes, (0, 1))) <= 1 << 20 < sum(map(more.file_bytes, (0, 1)))
    assert slots_in(geometry.extent_bytes, 100) == 0


def test_a_place_says_where_and_what() -> None:
    rig = Rig()
    lease = rig.engine.reserve(key(7), b"", 32)
    assert lease is not None
    first, second = rig.geometry.offsets
    assert lease.place == Place(
        "direct", (Span(first, 2000), Span(second, 8192)), tag_of(key(7), 1)
    )
    rig.engine.commit(lease)
    [again] = rig.engine.hold("r", [key(7)])
    assert again.place == lease.place
    for held in (lease, again):
        held.release()
    rig.put(*range(8, 12), 7)
    [again] = rig.engine.hold("r", [key(7)])
    assert again.place.tag == tag_of(key(7), 6), "a new filling, a new generation"
    again.release()
    rig.check()


def test_no_bytes_in_this_process() -> None:
    rig = Rig()
    lease = rig.engine.reserve(key(1), b"", 32)
    assert lease is not None
    with pytest.raises(AssertionError, match="not in this process"):
        lease.view()
    with pytest.raises(AssertionError, match="not in this process"):
        lease.spans()
    lease.release()


def test_a_leased_extent_is_not_given_away() -> None:
    rig = Rig()
    rig.put(0, 1, 2, 3)
    held = rig.engine.hold("r", [key(0)])
    rig.put(4, 5, 6)
    assert rig.found() == [0, 4, 5, 6]
    for lease in held:
        lease.release()
    rig.check()


def test_k7_a_full_device_evicts_and_goes_on() -> None:
    """NVMe has room for two: a filling that fails makes another chunk give way, and nothing more is tried."""
    rig = Rig(slots=50, preallocated=False)
    rig.put(1, 2)
    rig.put(3, fails=True)
    assert rig.found() == [1, 2]
    rig.put(3)
    assert rig.found() == [2, 3], "in the place of the one least recently used"
    rig.put(4)
    assert rig.found() == [3, 4]
    rig.clock.advance(RETRY_S)
    rig.put(5)
    assert rig.found() == [3, 4, 5], "after a while it is tried again"
    rig.check()


def test_nothing_to_evict_on_a_full_device() -> None:
    rig = Rig(slots=50, preallocated=False)
    rig.put(1, fails=True)
    assert rig.engine.reserve(key(1), b"", 32) is None
    rig.check()


def test_a_slot_that_failed_rests_where_all_space_is_there() -> None:
    rig = Rig(slots=3)
    rig.put(1, fails=True)
    rig.put(1, 2)
    assert rig.found() == [1, 2]
    rig.put(3)
    assert rig.found() == [2, 3], "rather another chunk's place than that slot"
    rig.clock.advance(RETRY_S)
    rig.put(4)
    assert rig.found() == [2, 3, 4]
    rig.check()


def test_a_chunk_that_could_not_be_read_is_gone() -> None:
    table = FakeTable()
    rig = Rig(table=table)
    rig.put(1, 2)
    before = rig.engine.version
    held = rig.engine.hold("r", [key(1), key(2)])
    rig.engine.failed(held[1])
    assert rig.found() == [1]
    assert rig.engine.version > before
    held[1].release()
    rig.engine.failed(held[0])
    rig.engine.failed(held[0])
    held[0].release()
    assert rig.found() == []
    assert set(table.records.values()) == {None}
    rig.check()


def test_what_the_table_is_told() -> None:
    table = FakeTable()
    rig = Rig(slots=2, table=table)
    rig.put(1, 2)
    assert sorted(table.records.values(), key=str) == sorted(
        (record(key(1), 1), record(key(2), 2)), key=str
    )
    lease = rig.engine.reserve(key(3), b"", 32)
    assert lease is not None
    assert table.records[lease.slot] is None, "invalid from before its worker hears of it"
    lease.release()
    rig.engine.reset()
    assert set(table.records.values()) == {None}, "a reset is for good"
    rig.engine.close(1.0)
    assert table.closed


@pytest.mark.parametrize("hangs", [False, True])
def test_the_table_s_file_stays_open_under_a_write_that_hangs(hangs: bool) -> None:
    """Else its number becomes another file's, which the rest of the records then go to."""
    table, fds = FakeTable(), [os.memfd_create("table"), os.memfd_create("other")]
    table.hangs = hangs
    geometry = Geometry.with_files(LAYOUT, 2)
    extents = Extents(geometry, LAYOUT, ManualClock(), preallocated=True, table=table, fds=fds)  # type: ignore[arg-type]
    extents.close(1.0)
    extents.close(1.0)
    assert [_is_open(fd) for fd in fds] == [hangs, False]
    if hangs:
        os.close(fds[0])


def _is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_chunks_of_an_earlier_engine() -> None:
    table = FakeTable([(3, 2, key(7)), (5, 0, key(8)), (6, 1, key(9, group=4))])
    rig = Rig(table=table)
    assert rig.found() == [7, 8]
    rig.check()
    rig.put(1, 2)
    assert rig.found() == [1, 2, 7, 8]
    rig.put(3)
    assert rig.found() == [1, 2, 3, 8], "in the order in which they were stored"
    [lease] = rig.engine.hold("r", [key(3)])
    assert lease.place.tag == tag_of(key(3), 9), "generations go on"
    lease.release()
    rig.check()
