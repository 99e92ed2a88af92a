"""Chunks through direct storage on real files: shuffled blocks, staging smaller than a prompt, restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.direct.rig import BLOCKS, BLOCKS_PER_CHUNK, Rig, shuffled


def test_round_trips_under_shuffled_blocks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    chunks = dict(enumerate(shuffled(BLOCKS // BLOCKS_PER_CHUNK // 2, 1)))
    targets = dict(enumerate(shuffled(BLOCKS // BLOCKS_PER_CHUNK // 2, 2)))
    before = [{n: rank.bytes_of(blocks) for n, blocks in chunks.items()} for rank in rig.ranks]
    assert all(end.failed == () for end in rig.store(chunks))
    assert all(end.failed == () and end.error is None for end in rig.load(targets))
    for rank, bytes_of in zip(rig.ranks, before, strict=True):
        assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == bytes_of
    rig.extents.check_integrity()
    assert rig.extents.leased == 0
    rig.close()


@pytest.mark.parametrize("areas", [2, 3])
def test_a_prompt_larger_than_the_staging(tmp_path: Path, areas: int) -> None:
    probe = Rig(tmp_path / "probe", ranks=1)
    rig = Rig(tmp_path / "rig", ranks=1, staging_size=areas * probe.ref.geometry.extent_bytes[0])
    probe.close()
    assert rig.ref.areas(0) == areas
    chunks = dict(enumerate(shuffled(16, 3)))
    [rank] = rig.ranks
    before = {n: rank.bytes_of(blocks) for n, blocks in chunks.items()}
    [end] = rig.store(chunks)
    assert (end.failed, end.moved_bytes) == ((), sum(map(len, before.values())))
    targets = dict(enumerate(shuffled(16, 4)))
    [end] = rig.load(targets)
    assert end.failed == ()
    assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == before
    rig.close()


def test_warm_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    chunks = dict(enumerate(shuffled(12, 5)))
    before = [{n: rank.bytes_of(blocks) for n, blocks in chunks.items()} for rank in rig.ranks]
    rig.store(chunks)
    rig.close()
    again = Rig(tmp_path)
    assert again.found(*chunks) == list(chunks)
    targets = dict(enumerate(shuffled(12, 6)))
    assert all(end.failed == () for end in again.load(targets))
    for rank, bytes_of in zip(again.ranks, before, strict=True):
        assert {n: rank.bytes_of(blocks) for n, blocks in targets.items()} == bytes_of
    again.close()


def test_the_least_recently_used_chunk_makes_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_chunks=4)
    assert rig.extents.slots == 4
    for number, blocks in enumerate(shuffled(6, 7)):
        rig.store({number: blocks})
    assert rig.found(*range(6)) == [2, 3, 4, 5]
    rig.close()
    again = Rig(tmp_path, max_chunks=4)
    assert again.found(*range(6)) == [2, 3, 4, 5]
    again.store({9: (0, 1)})
    assert again.found(*range(10)) == [3, 4, 5, 9], (
        "after a restart the chunk stored first goes first"
    )
    again.close()


def test_metrics_say_which_engine_it_is_and_how_full(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_chunks=4)
    for number, blocks in enumerate(shuffled(6, 7)):
        rig.store({number: blocks})
    rig.settle()
    taken = rig.metrics.take()
    assert taken is not None
    slot = rig.extents.slot_bytes
    assert {
        name: value
        for name, value in taken["gauges"].items()
        if name.startswith(("direct", "pool"))
    } == {
        "direct_engine|file": 1,
        "direct_capacity_bytes": 4 * slot,
        "direct_used_bytes": 4 * slot,
        "direct_leased_slots": 0,
    }
    assert taken["counters"]["evicted_chunks|direct"] == 2
    rig.close()
