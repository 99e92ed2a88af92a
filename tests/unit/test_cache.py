"""The state machine: finding, storing, resetting. Transfers and tiers have their own files."""

from __future__ import annotations

import pytest

from kvstow.cache import LookupState
from kvstow.testing.faults import unavailable
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, MISS0, TOKENS, Rig, assert_bytes, fill, hit, key, keys


def test_a_chunk_is_found_only_once_committed() -> None:
    rig = Rig(tiers=0)
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert lease is not None
    assert rig.engine.lookup(keys(1)) == MISS0
    fill(lease, key(1))
    rig.engine.commit(lease)
    lease.release()
    assert rig.engine.lookup(keys(1)) == hit(1)
    [held] = rig.engine.hold("r", keys(1))
    assert_bytes(held, key(1))
    held.release()
    rig.assert_idle()


def test_a_lookup_counts_from_its_start_to_the_first_hole() -> None:
    rig = Rig(tiers=0)
    rig.put(1, 2, 4)
    assert rig.engine.lookup(keys(1, 2, 3, 4)) == hit(2)
    assert rig.engine.lookup(keys(9, 1, 2, 3), start=1) == hit(3)
    assert rig.engine.lookup(keys(1, 2, 3), start=2) == (LookupState.MISS, 2)
    assert rig.engine.lookup([]) == MISS0


def test_a_lookup_touches_every_resident_chunk_tail_first() -> None:
    rig = Rig(slots=5, tiers=0)
    rig.put(1, 2, 4, 8, 9)
    rig.engine.lookup(
        keys(1, 2, 3, 4)
    )  # 3 is a hole; 8 and 9 are now older than 4, 4 than 2, 2 than 1
    gone = []
    for i in range(20, 25):
        before = {n for n in (1, 2, 4, 8, 9) if rig.found(n)}
        rig.put(i)
        gone += sorted(before - {n for n in (1, 2, 4, 8, 9) if rig.found(n)})
    assert gone == [8, 9, 4, 2, 1]
    assert rig.counter("evicted_chunks", tier="memory") == 5


def test_a_released_reservation_aborts() -> None:
    rig = Rig(tiers=0)
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert lease is not None
    assert rig.engine.busy()
    lease.release()
    lease.release()
    rig.engine.commit(lease)
    assert rig.engine.lookup(keys(1)) == MISS0
    assert rig.engine.missing(keys(1)) == [0]
    rig.assert_idle()


def test_a_key_is_reserved_once() -> None:
    rig = Rig(tiers=0)
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert rig.engine.reserve(key(1), b"", TOKENS) is None
    assert lease is not None
    rig.engine.commit(lease)
    lease.release()
    assert rig.engine.reserve(key(1), b"", TOKENS) is None
    assert rig.counter("refused_chunks") == 0


def test_a_full_pool_refuses_and_counts() -> None:
    rig = Rig(slots=2, tiers=0)
    rig.put(1, 2)
    leases = rig.engine.hold("r", keys(1, 2))
    assert rig.engine.reserve(key(3), b"", TOKENS) is None
    assert rig.counter("refused_chunks", tier="memory", reason="pool_full") == 1
    leases[1].release()
    rig.put(3)
    assert (rig.found(1), rig.found(2), rig.found(3)) == (1, 0, 1)
    leases[0].release()
    rig.assert_idle()


def test_hold_takes_what_is_there_up_to_a_hole() -> None:
    rig = Rig(tiers=0)
    rig.put(1, 3)
    leases = rig.engine.hold("r", keys(1, 2, 3))
    assert [lease.slot for lease in leases] == [
        lease.slot for lease in rig.engine.hold("r", keys(1))
    ]
    assert rig.pool.leased == 1


def test_missing_knows_the_pool_what_is_on_its_way_and_what_was_written_down() -> None:
    rig = Rig(slots=2)
    rig.put(1)
    rig.settle()
    rig.put(2)
    lease = rig.engine.reserve(key(3), b"", TOKENS)  # evicts 1, which is below
    assert lease is not None
    assert rig.found(1) == 0
    assert rig.engine.missing(keys(1, 2, 3, 4)) == [3]
    lease.release()
    assert rig.engine.missing(keys(1, 2, 3, 4)) == [2, 3]


def test_a_bypassed_tier_holds_nothing() -> None:
    rig = Rig(slots=1, limits=TierLimits(breaker_failures=1))
    rig.put(1)
    rig.settle()
    rig.put(2)
    rig.settle()
    rig.stores[0].faults = [unavailable("contains")]
    rig.fetch("r", 3)
    rig.settle()
    assert not rig.tiers[0].usable
    assert rig.engine.missing(keys(1)) == [0]
    rig.clock.advance(10)
    assert rig.engine.missing(keys(1)) == []


def test_reset_makes_everything_unfindable_and_keeps_leases_good() -> None:
    rig = Rig(slots=4, tiers=0)
    rig.put(1, 2)
    [held] = rig.engine.hold("r", keys(1))
    late = rig.engine.reserve(key(3), b"", TOKENS)
    assert late is not None
    rig.engine.reset()
    assert rig.engine.lookup(keys(1, 2)) == MISS0
    assert rig.engine.missing(keys(1, 2, 3)) == [0, 1, 2]
    assert_bytes(held, key(1))
    again = rig.engine.reserve(key(3), b"", TOKENS)
    assert again is not None
    assert again.slot != late.slot
    rig.engine.commit(late)  # of before the reset: aborts silently
    assert late.released
    assert rig.engine.lookup(keys(3)) == MISS0
    fill(again, key(3))
    rig.engine.commit(again)
    assert rig.engine.lookup(keys(3)) == hit(1)
    for lease in (held, late, again):
        lease.release()
    rig.assert_idle()


def test_the_version_changes_with_what_can_be_found_or_is_being_filled() -> None:
    rig = Rig(slots=1, tiers=0)
    seen = {rig.engine.version}

    def changed() -> bool:
        size = len(seen)
        seen.add(rig.engine.version)
        return len(seen) > size

    lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert changed()
    assert lease is not None
    rig.engine.commit(lease)
    assert changed()
    lease.release()
    rig.engine.lookup(keys(1, 2))
    rig.engine.fetch("r", keys(1, 2))
    rig.engine.poll()
    rig.engine.hold("r", keys(1))[0].release()
    assert not changed()
    rig.put(2)
    assert changed()
    rig.engine.reset()
    assert changed()


def test_gauges_show_the_pool() -> None:
    rig = Rig(slots=4, tiers=0)
    assert rig.gauge("pool_capacity_bytes") == 4 * FRAME_BYTES
    rig.put(1, 2)
    lease = rig.engine.hold("r", keys(1))
    rig.engine.poll()
    assert rig.gauge("pool_used_bytes") == 2 * FRAME_BYTES
    assert rig.gauge("pool_leased_slots") == 1
    assert lease


def test_an_idle_poll_counts_nothing_and_asks_no_store() -> None:
    rig = Rig()
    rig.put(1)
    rig.settle()
    rig.counter("")
    calls = dict(rig.stores[0].calls)
    for _ in range(100):
        rig.engine.poll()
    assert rig.metrics.take() is None
    assert rig.stores[0].calls == calls


def test_busy_ends_when_reserved_slots_make_no_progress() -> None:
    rig = Rig(tiers=0, work_deadline_s=30.0)
    assert not rig.engine.busy()
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    rig.clock.advance(29)
    assert rig.engine.busy()
    rig.clock.advance(1)
    assert not rig.engine.busy()
    assert lease is not None
    lease.release()


@pytest.mark.parametrize("tiers", [0, 1, 2])
def test_close_gives_everything_back(tiers: int) -> None:
    rig = Rig(tiers=tiers)
    rig.put(1, 2)
    rig.engine.fetch("r", keys(7))
    rig.engine.close(5.0)
    assert all(
        rig.below(1, 2, tier=i) == [False, False] for i in range(tiers)
    )  # closed: MemoryStore is empty
    assert [store.calls.get("close") for store in rig.stores] == [1] * tiers
    assert [store.calls.get("write") for store in rig.stores] == [2] * tiers
