"""The table's records: what a restart may find, and what it must not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.direct.geometry import RECORD_BYTES
from kvstow.direct.table import MAX_GENERATION, Table, entries, record
from kvstow.key import ChunkKey, Namespace
from kvstow.testing.manual import ManualClock, ManualExecutor

NAMESPACE = Namespace.from_fields({"made by": "table test"})


def key(number: int, length: int = 32) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, number.to_bytes(length, "little"))


def test_records_come_in_the_order_of_their_generations() -> None:
    data = record(key(1), 30) + bytes(RECORD_BYTES) + record(key(2), 10) + record(key(3, 64), 20)
    assert entries(data, 4) == [(10, 2, key(2)), (20, 3, key(3, 64)), (30, 0, key(1))]


def test_of_a_key_s_several_records_the_latest_counts() -> None:
    assert entries(record(key(1), 5) + record(key(1), 9) + record(key(1), 7), 3) == [(9, 1, key(1))]


def test_a_table_cut_short() -> None:
    data = record(key(1), 1) + record(key(2), 2)
    assert entries(data[:-1], 2) == [(1, 0, key(1))]
    assert entries(b"", 2) == []
    assert entries(data, 1) == [(1, 0, key(1))]


@given(bit=st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_flipped_bit_loses_that_record_only(bit: int) -> None:
    data = bytearray(record(key(1), 1) + record(key(2), 2))
    data[bit // 8] ^= 1 << bit % 8
    assert entries(bytes(data), 2) == [(2, 1, key(2))]


@pytest.mark.parametrize("generation", [MAX_GENERATION, (1 << 64) - 1])
def test_a_generation_that_leaves_no_room_to_count_on_is_no_record(generation: int) -> None:
    whole = record(key(1), MAX_GENERATION - 1)
    assert entries(record(key(1), generation) + whole, 2) == [(MAX_GENERATION - 1, 1, key(1))]


def test_a_table_that_can_not_be_read_is_an_empty_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fd, clock = os.open(tmp_path, os.O_RDONLY), ManualClock()
    try:
        assert Table(fd, 2, ManualExecutor(clock), clock).read() == []
    finally:
        os.close(fd)
    assert "can't be read, so nothing is found" in caplog.text


@given(data=st.binary(max_size=RECORD_BYTES * 3))
def test_noise(data: bytes) -> None:
    assert entries(data, 3) == []


class Hung(ManualExecutor):
    """Its thread has begun, and does not come back."""

    def close(self, timeout_s: float) -> bool:
        return False


def test_closing_says_whether_a_write_hangs() -> None:
    clock = ManualClock()
    for executor, ends in ((ManualExecutor(clock), True), (Hung(clock), False)):
        table = Table(-1, 2, executor, clock)
        table.put(0, key(1), 1)
        assert table.close(5.0) is ends
    assert Table(-1, 2, Hung(clock), clock).close(5.0), (
        "a thread that only has not noticed yet writes nothing"
    )
