"""Slots and leases: who may use which bytes, and when they are free again. How the memory is shared: test_hostmem."""

import os
from collections.abc import Callable, Iterator

import pytest

from kvstow.layout import ChunkLayout, GroupLayout, Place, Span
from kvstow.pool.pool import HostPool, Lease, PoolError

LAYOUT = ChunkLayout((GroupLayout(16, 2, (3000, 1000)), GroupLayout(16, 2, (100,))))
SLOT = 4096 + 8192 + 4096


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool.create(LAYOUT, 4 * SLOT, name="test")
    yield pool
    pool.check_integrity()
    pool.close()


def reserve(pool: HostPool, group: int = 0) -> Lease:
    lease = pool.reserve(group)
    assert lease is not None
    return lease


def put(pool: HostPool, fill: int = 1) -> int:
    """A committed chunk that nobody leases; returns its slot."""
    with reserve(pool) as lease:
        lease.view()[:] = bytes([fill]) * len(lease.view())
        lease.commit()
        return lease.slot


def fill_up(pool: HostPool) -> list[Lease]:
    leases = []
    while (lease := pool.reserve()) is not None:
        leases.append(lease)
    return leases


def test_every_slot_is_given_once_and_then_none(pool: HostPool) -> None:
    leases = fill_up(pool)
    assert sorted(lease.slot for lease in leases) == [0, 1, 2, 3]
    assert (pool.slots, pool.free, pool.leased) == (4, 0, 4)
    for lease in leases:
        lease.release()
    assert (pool.free, pool.leased) == (4, 0)


def test_the_first_slots_are_given_first(pool: HostPool) -> None:
    """They are the ones that are prefaulted first."""
    assert [lease.slot for lease in fill_up(pool)] == [0, 1, 2, 3]


def test_views_of_different_slots_share_no_byte(pool: HostPool) -> None:
    leases = fill_up(pool)
    for fill, lease in enumerate(leases):
        lease.view()[:] = bytes([fill]) * len(lease.view())
    for fill, lease in enumerate(leases):
        assert bytes(lease.view()) == bytes([fill]) * len(lease.view())
        for span in lease.spans():
            assert bytes(span) == bytes([fill]) * len(span)


def test_a_place_names_the_spans_in_the_mapping(pool: HostPool) -> None:
    reserve(pool)
    lease = reserve(pool)
    assert lease.place == Place("pool", (Span(SLOT + 4096, 6000), Span(SLOT + 4096 + 8192, 2000)))
    lease.spans()[1][:] = b"s" * 2000
    offset, length = lease.place.spans[1]
    assert bytes(pool.memory[offset : offset + length]) == b"s" * 2000


def test_a_lease_has_the_geometry_of_its_group(pool: HostPool) -> None:
    with reserve(pool, group=1) as lease:
        lease.commit()
        assert [len(span) for span in lease.spans()] == [200]
        assert len(lease.view()) == 2 * 4096
        with pool.lease(lease.slot) as reader:
            assert (reader.group, reader.place) == (1, lease.place)
    pool.free_slot(lease.slot)
    assert reserve(pool, group=0).slot == lease.slot


def test_released_uncommitted_a_reservation_aborts(pool: HostPool) -> None:
    with reserve(pool):
        assert pool.free == 3
    assert pool.free == 4


def test_an_abort_is_told_once_and_a_release_after_commit_is_none(pool: HostPool) -> None:
    told: list[Lease] = []
    aborted, kept = reserve(pool), reserve(pool)
    aborted.on_abort = kept.on_abort = told.append
    kept.commit()
    for lease in (aborted, kept, aborted):
        lease.release()
    assert told == [aborted]


def test_an_exception_in_the_block_releases(pool: HostPool) -> None:
    with pytest.raises(KeyError), reserve(pool):
        raise KeyError
    assert pool.free == 4


def test_a_committed_chunk_stays_without_a_lease(pool: HostPool) -> None:
    slot = put(pool, fill=7)
    assert (pool.free, pool.leased, pool.evictable(slot)) == (3, 0, True)
    with pool.lease(slot) as lease:
        assert set(lease.view()) == {7}
        assert not pool.evictable(slot)
    pool.free_slot(slot)
    assert pool.free == 4


def test_a_slot_being_filled_is_neither_evictable_nor_to_be_leased(pool: HostPool) -> None:
    with reserve(pool) as lease:
        assert not pool.evictable(lease.slot)
        with pytest.raises(AssertionError):
            pool.lease(lease.slot)


def test_g4_bytes_of_an_evicted_chunk_stay_until_the_last_reader_releases_and_are_free_once(
    pool: HostPool,
) -> None:
    slots = [put(pool, fill) for fill in range(4)]
    first, second = pool.lease(slots[1]), pool.lease(slots[1])
    for slot in slots:
        pool.free_slot(slot)
    others = fill_up(pool)
    assert len(others) == 3
    for lease in others:
        lease.view()[:] = b"\xff" * len(lease.view())
    assert set(first.view()) == {1}
    first.release()
    assert (set(second.view()), pool.reserve()) == ({1}, None)
    second.release()
    assert reserve(pool).slot == slots[1]
    assert pool.reserve() is None


def test_an_evicted_chunk_cannot_be_leased_again_while_a_reader_still_holds_it(
    pool: HostPool,
) -> None:
    slot = put(pool)
    with pool.lease(slot):
        pool.free_slot(slot)
        with pytest.raises(AssertionError):
            pool.lease(slot)


def test_g5_g6_a_release_by_two_paths_is_harmless(pool: HostPool) -> None:
    """The slot may be somebody else's by the time of the second."""
    slot = put(pool)
    first, second = pool.lease(slot), pool.lease(slot)
    first.release()
    first.release()
    assert not pool.evictable(slot)
    second.release()
    pool.free_slot(slot)
    with reserve(pool) as new:
        assert new.slot == slot
        for stale in (first, second, first):
            stale.release()
        assert pool.free == 3
        pool.check_integrity()


def test_g6_an_aborted_reservation_released_twice_does_not_give_its_slot_to_two(
    pool: HostPool,
) -> None:
    lease = reserve(pool)
    lease.release()
    new = reserve(pool)
    lease.release()
    assert new.slot == lease.slot
    assert new.slot not in [other.slot for other in fill_up(pool)]


MISUSES: dict[str, Callable[[HostPool, int], object]] = {
    "free a free slot": lambda pool, slot: pool.free_slot(slot),
    "lease a free slot": lambda pool, slot: pool.lease(slot),
    "unpin a free slot": lambda pool, slot: pool._unpin(slot),
    "give a free slot back": lambda pool, slot: pool._give_back(slot),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_g6_a_double_free_raises_and_changes_nothing(pool: HostPool, misuse: str) -> None:
    slot = put(pool)
    pool.free_slot(slot)
    with pytest.raises(AssertionError):
        MISUSES[misuse](pool, slot)
    pool.check_integrity()
    assert len(fill_up(pool)) == 4


def test_a_leased_chunk_cannot_be_dropped_twice(pool: HostPool) -> None:
    slot = put(pool)
    with pool.lease(slot):
        pool.free_slot(slot)
        with pytest.raises(AssertionError):
            pool.free_slot(slot)


def test_a_slot_is_committed_once(pool: HostPool) -> None:
    lease = reserve(pool)
    lease.commit()
    with pytest.raises(AssertionError):
        lease.commit()


@pytest.mark.parametrize("use", ["place", "view", "spans", "commit"])
def test_a_lease_is_of_no_use_after_its_release(pool: HostPool, use: str) -> None:
    lease = reserve(pool)
    lease.release()
    assert lease.released
    with pytest.raises(AssertionError):
        getattr(lease, use)() if use != "place" else lease.place


BREAKAGES: dict[str, Callable[[HostPool], object]] = {
    "a slot free twice": lambda pool: pool._free.append(pool._free[0]),
    "a slot lost": lambda pool: pool._free.pop(),
    "a pin too many": lambda pool: pool._pins.__setitem__(3, 1),
    "a pin too few": lambda pool: pool._pins.__setitem__(0, -1),
    "leases miscounted": lambda pool: setattr(pool, "_leased", 2),
    "reserved by nobody": lambda pool: pool._pins.__setitem__(0, 0) or setattr(pool, "_leased", 0),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_check_integrity_sees(breakage: str) -> None:
    pool = HostPool.create(LAYOUT, 4 * SLOT, name="test")
    reserve(pool)
    pool.check_integrity()
    BREAKAGES[breakage](pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize("budget", [SLOT, SLOT + 1, 2 * SLOT - 1, 10 * SLOT + 4095])
def test_m7_never_more_than_the_budget_and_all_of_it_but_a_part_of_a_slot(budget: int) -> None:
    pool = HostPool.create(LAYOUT, budget, name="test")
    assert budget - SLOT < pool.capacity_bytes <= budget
    assert (
        pool.capacity_bytes
        == pool.slots * pool.slot_bytes
        == len(pool.memory)
        == pool.ref.size_bytes
    )
    pool.close()


def test_o3_a_budget_below_one_chunk_is_refused_and_the_error_says_what_to_set() -> None:
    with pytest.raises(
        PoolError,
        match=r"memory\.size=16,383 bytes .* one chunk of 16,384 bytes .* set memory\.size",
    ):
        HostPool.create(LAYOUT, SLOT - 1, name="test")


def test_prefault_reserves_the_pool_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.pool.pool.PIECE_BYTES", 3 * SLOT)
    pool = HostPool.create(LAYOUT, 7 * SLOT, name="test")
    reserved = []
    assert pool.pieces == 3
    for piece in range(pool.pieces):
        pool.prefault(piece, lambda: 3 * SLOT)
        reserved.append(os.stat(f"/proc/self/fd/{pool.ref.fd}").st_blocks * 512)
    assert reserved == [3 * SLOT, 6 * SLOT, 7 * SLOT]
    pool.close()


def test_prefault_takes_nothing_where_memory_is_short_and_names_the_setting() -> None:
    pool = HostPool.create(LAYOUT, 4 * SLOT, name="test")
    with pytest.raises(PoolError, match=r"memory\.size: 65,535 bytes of memory are left .* 65,536"):
        pool.prefault(0, lambda: 4 * SLOT - 1)
    assert os.stat(f"/proc/self/fd/{pool.ref.fd}").st_blocks == 0
    pool.close()


def test_close_leaves_a_lease_its_bytes() -> None:
    pool = HostPool.create(LAYOUT, 4 * SLOT, name="test")
    view = reserve(pool).view()
    view[:3] = b"abc"
    pool.close()
    pool.close()
    assert bytes(view[:3]) == b"abc"
