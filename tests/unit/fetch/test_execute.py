"""Fetches: one flight a key, one deadline an owner, nothing read behind a hole, nothing pinned for nobody."""

from __future__ import annotations

from kvstow.cache import LookupState
from kvstow.key import ChunkKey
from kvstow.testing.faults import Fault, unavailable
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, MISS0, TOKENS, Rig, assert_bytes, fill, hit, key, keys


def pending(rig: Rig, owner: str, *numbers: int) -> bool:
    return rig.fetch(owner, *numbers).state is LookupState.PENDING


def test_chunks_below_are_probed_once_read_checked_and_held_for_the_owner() -> None:
    rig = Rig()
    rig.put_below(1, 2, 3)
    assert pending(rig, "r", 1, 2, 3, 4)
    rig.run()
    assert pending(rig, "r", 1, 2, 3, 4)
    assert rig.stores[0].calls == {"contains": 1}
    rig.run()
    assert rig.fetch("r", 1, 2, 3, 4) == hit(3)
    assert rig.stores[0].calls == {"contains": 1, "read": 1}
    assert rig.pool.leased == 3
    assert rig.engine.origins("r") == {"t0": 3}
    leases = rig.engine.hold("r", keys(1, 2, 3))
    for lease, k in zip(leases, keys(1, 2, 3), strict=True):
        assert_bytes(lease, k)
        lease.release()
    rig.assert_idle()
    assert rig.counter("waits") == 1


def test_everything_resident_makes_no_state_and_asks_nobody() -> None:
    rig = Rig()
    rig.put(1, 2)
    rig.settle()
    calls = dict(rig.stores[0].calls)
    assert rig.fetch("r", 1, 2) == hit(2)
    assert rig.stores[0].calls == calls
    assert rig.engine.fetcher.get("r") is None
    rig.assert_idle()


def test_without_tiers_a_miss_is_a_miss_at_once() -> None:
    rig = Rig(tiers=0)
    assert rig.fetch("r", 1) == MISS0
    assert rig.engine.fetcher.get("r") is None


def test_nothing_is_read_behind_a_hole() -> None:
    rig = Rig()
    rig.put_below(1, 3, 4)
    assert pending(rig, "r", 1, 2, 3, 4)
    rig.settle()
    assert rig.fetch("r", 1, 2, 3, 4) == hit(1)
    assert [rig.found(i) for i in (1, 3, 4)] == [1, 0, 0]


def test_resident_chunks_between_are_passed_over() -> None:
    rig = Rig()
    rig.put_below(2, 4)
    rig.put(1, 3)
    assert pending(rig, "r", 1, 2, 3, 4)
    rig.settle()
    assert rig.fetch("r", 1, 2, 3, 4) == hit(4)


def test_a_chunk_evicted_between_those_being_read_ends_the_wait_when_they_arrive() -> None:
    rig = Rig(slots=4)
    rig.put_below(0, 2)
    rig.put(1)
    rig.settle()
    rig.fetch("r", 0, 1, 2)
    rig.run()
    rig.put(10, 11)
    assert rig.found(1) == 0
    assert pending(rig, "r", 0, 1, 2)
    rig.settle()
    assert rig.fetch("r", 0, 1, 2) == hit(1)


def test_a_start_in_the_middle_needs_nothing_before_it() -> None:
    rig = Rig()
    rig.put_below(3)
    assert rig.engine.fetch("r", keys(1, 2, 3), 2).state is LookupState.PENDING
    rig.settle()
    assert rig.engine.fetch("r", keys(1, 2, 3), 2) == hit(3)
    assert rig.engine.fetch("s", keys(1, 2, 3), 3) == (LookupState.MISS, 3)


def test_nothing_is_read_behind_what_another_tier_is_still_asked_for() -> None:
    rig = Rig(tiers=2)
    rig.put_below(1, 3, tier=0)
    rig.fetch("r", 1, 2, 3)
    rig.run(only=[rig.executors[0]])
    rig.run(only=[rig.executors[0]])
    assert [rig.found(i) for i in (1, 3)] == [1, 0]
    rig.settle()
    assert rig.fetch("r", 1, 2, 3) == hit(1)
    assert rig.found(3) == 0
    rig.engine.forget("r")
    rig.assert_idle()


def test_tiers_are_asked_in_order_and_the_first_that_has_it_wins() -> None:
    rig = Rig(tiers=2)
    rig.put_below(1, 2, tier=0)
    rig.put_below(2, 3, tier=1)
    assert pending(rig, "r", 1, 2, 3)
    rig.settle()
    assert rig.fetch("r", 1, 2, 3) == hit(3)
    assert rig.engine.origins("r") == {"t0": 2, "t1": 1}
    assert rig.stores[1].calls["contains"] == 1


def test_a_tier_that_fails_passes_on_to_the_next() -> None:
    for faults in (
        [unavailable("read")],
        [Fault("read", short_by=1)],
        [Fault("read", flip_at=5000)],
    ):
        rig = Rig(tiers=2)
        rig.put_below(1, tier=0)
        rig.put_below(1, tier=1)
        rig.stores[0].faults = faults
        assert pending(rig, "r", 1)
        rig.settle()
        assert rig.fetch("r", 1) == hit(1)
        assert rig.engine.origins("r") == {"t1": 1}
        [lease] = rig.engine.hold("r", keys(1))
        assert_bytes(lease, key(1))


def test_owners_share_a_flight() -> None:
    rig = Rig()
    rig.put_below(1, 2)
    owners = [f"r{i}" for i in range(5)]
    assert all(pending(rig, owner, 1, 2) for owner in owners)
    rig.run()
    assert pending(rig, "late", 1, 2)
    rig.settle()
    assert all(rig.fetch(owner, 1, 2) == hit(2) for owner in [*owners, "late"])
    assert rig.stores[0].calls == {"contains": 1, "read": 1}
    for owner in owners:
        rig.engine.forget(owner)
    assert rig.pool.leased == 2
    rig.engine.forget("late")
    rig.assert_idle()


def test_owners_of_one_long_prompt_do_not_each_walk_it_whenever_a_part_arrives() -> None:
    rig = Rig(slots=100, max_fetch_share=1.0, limits=TierLimits(read_batch_bytes=FRAME_BYTES))
    chunks, owners = range(60), 50
    rig.put_below(*chunks)
    for i in range(owners):
        rig.fetch(f"r{i}", *chunks)
    looks, resident = [0], rig.engine.index.resident

    def look(chunk: ChunkKey) -> bool:
        looks[0] += 1
        return resident(chunk)

    rig.engine.index.resident = look  # type: ignore[method-assign]
    while rig.executors[0].outstanding:
        rig.executors[0].run_next()
        rig.engine.poll()
    assert all(rig.fetch(f"r{i}", *chunks) == hit(60) for i in range(owners))
    assert looks[0] < 5 * owners * len(chunks)


def test_a_retry_does_no_work_while_nothing_changes() -> None:
    rig = Rig()
    rig.put_below(*range(5))
    rig.fetch("r", *range(5))
    wait = rig.engine.fetcher.get("r")
    assert wait is not None
    touched: list[int] = []
    rig.policy.touch_many = lambda ks: touched.append(len(list(ks)))
    walked = rig.engine.index.resident
    rig.engine.index.resident = touched.append  # type: ignore[method-assign, assignment]
    for _ in range(1000):
        assert pending(rig, "r", *range(5))
    assert touched == []
    rig.engine.index.resident = walked  # type: ignore[method-assign]


def test_pending_while_a_worker_fills_the_next_chunk() -> None:
    rig = Rig(tiers=0)
    rig.put(1)
    leases = [rig.engine.reserve(k, b"", TOKENS) for k in keys(2, 3)]
    assert pending(rig, "r", 1, 2, 3)
    for n, lease in enumerate(leases, 2):
        assert lease is not None
        fill(lease, key(n))
        assert pending(rig, "r", 1, 2, 3)
        rig.engine.commit(lease)
        lease.release()
    assert rig.fetch("r", 1, 2, 3) == hit(3)
    rig.engine.forget("r")
    rig.assert_idle()


def test_an_abort_ends_the_wait_for_it() -> None:
    rig = Rig(tiers=0)
    rig.put(1)
    lease = rig.engine.reserve(key(2), b"", TOKENS)
    assert pending(rig, "r", 1, 2)
    assert lease is not None
    lease.release()
    assert rig.fetch("r", 1, 2) == hit(1)


def test_a_deadline_ends_the_wait_for_a_worker_too() -> None:
    rig = Rig(tiers=0, fetch_deadline_s=0.2)
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert pending(rig, "r", 1)
    rig.clock.advance(0.2)
    assert rig.fetch("r", 1) == MISS0
    assert rig.counter("fetch_deadline_exceeded", tier="memory") == 1
    assert lease is not None


def test_the_deadline_is_one_for_the_owner_whatever_it_asks() -> None:
    rig = Rig(fetch_deadline_s=0.2)
    rig.put_below(*range(10))
    for i in range(4):
        assert pending(rig, "r", *range(i + 1))
        rig.clock.advance(0.06)
    rig.engine.poll()
    assert rig.fetch("r", *range(9)) == MISS0
    assert pending(rig, "s", *range(9))
    rig.settle()
    assert rig.fetch("s", *range(9)) == hit(4)  # half of the pool's slots for one owner


def test_asking_for_more_keys_looks_for_the_new_ones_only() -> None:
    rig = Rig(slots=20)
    rig.put_below(1, 2, 3)
    rig.fetch("r", 1, 2)
    rig.settle()
    assert pending(rig, "r", 1, 2, 3)
    rig.settle()
    assert rig.fetch("r", 1, 2, 3) == hit(3)
    assert rig.stores[0].calls == {"contains": 2, "read": 2}


def test_chunks_fetched_are_pinned_until_the_deadline_and_stay_cached_after() -> None:
    rig = Rig(fetch_deadline_s=0.2)
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.settle()
    rig.clock.advance(0.19)
    rig.engine.poll()
    assert rig.pool.leased == 1
    rig.clock.advance(0.01)
    rig.engine.poll()
    assert rig.pool.leased == 0
    assert rig.fetch("r", 1) == hit(1)
    rig.assert_idle()


def test_forget_before_a_read_begins_gives_its_slots_back_and_reads_nothing() -> None:
    rig = Rig()
    rig.put_below(1, 2)
    rig.fetch("r", 1, 2)
    rig.run()
    assert rig.pool.leased == 2
    rig.engine.forget("r")
    rig.assert_idle()
    rig.settle()
    assert "read" not in rig.stores[0].calls
    assert pending(rig, "r", 1, 2)  # a new request of that name starts anew
    rig.settle()
    assert rig.fetch("r", 1, 2) == hit(2)


def test_a_read_shared_by_another_owner_goes_on() -> None:
    rig = Rig()
    rig.put_below(1, 2)
    rig.fetch("r", 1, 2)
    rig.fetch("s", 1, 2)
    rig.run()
    rig.engine.forget("r")
    rig.settle()
    assert rig.fetch("s", 1, 2) == hit(2)


def test_a_read_that_had_begun_ends_as_an_ordinary_chunk() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.run()
    rig.executors[0].run_all()
    rig.engine.forget("r")
    rig.engine.poll()
    assert rig.found(1) == 1
    rig.assert_idle()


def test_bytes_in_flight_are_bounded_and_the_rest_follows() -> None:
    rig = Rig(
        slots=20, limits=TierLimits(max_read_bytes=2 * FRAME_BYTES, read_batch_bytes=FRAME_BYTES)
    )
    rig.put_below(*range(6))
    rig.fetch("r", *range(6))
    rig.run()
    assert rig.executors[0].pending == 2
    rig.settle()
    assert rig.fetch("r", *range(6)) == hit(6)
    assert rig.stores[0].calls["read"] == 6


def test_an_owner_fetches_at_most_its_share_of_the_pool() -> None:
    rig = Rig(slots=8, max_fetch_share=0.25)
    rig.put_below(*range(6))
    rig.fetch("r", *range(6))
    rig.settle()
    assert rig.fetch("r", *range(6)) == hit(2)
    assert rig.pool.leased == 2


def test_a_full_executor_is_no_answer_but_the_next_tier_is_asked() -> None:
    rig = Rig(tiers=2)
    rig.put_below(1, tier=1)
    rig.executors[0].close(0)
    assert pending(rig, "r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)


def test_a_read_that_the_executor_does_not_take_is_tried_again() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.executors[0].run_all()
    submit, rig.executors[0].submit = rig.executors[0].submit, lambda *_, **__: False  # type: ignore[method-assign]
    rig.engine.poll()
    assert pending(rig, "r", 1)
    assert rig.pool.leased == 0
    rig.executors[0].submit = submit  # type: ignore[method-assign]
    rig.engine.poll()
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)


def test_a_probe_for_nobody_ends_with_its_answer() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.engine.forget("r")
    rig.settle()
    assert "read" not in rig.stores[0].calls
    rig.assert_idle()


def test_a_reset_ends_waits_and_publishes_nothing_of_before() -> None:
    for progress in range(3):
        rig = Rig()
        rig.put_below(1, 2)
        rig.fetch("r", 1, 2)
        if progress > 0:
            rig.run()
        if progress > 1:
            rig.executors[0].run_all()
        rig.engine.reset()
        assert rig.fetch("r", 1, 2) == MISS0
        rig.settle()
        assert rig.found(1) == 0
        assert rig.fetch("r", 1, 2) == MISS0
        rig.assert_idle()
        assert pending(rig, "new", 1, 2)


def test_a_chunk_that_a_worker_fills_meanwhile_is_not_read() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.fetch("r", 1)
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    rig.settle()
    assert pending(rig, "r", 1)
    assert "read" not in rig.stores[0].calls
    assert lease is not None
    fill(lease, key(1))
    rig.engine.commit(lease)
    lease.release()
    assert rig.fetch("r", 1) == hit(1)


def test_a_key_is_not_reserved_while_it_is_read() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.run()
    assert rig.engine.missing(keys(1)) == []
    assert rig.engine.reserve(key(1), b"", TOKENS) is None


def test_who_comes_while_a_tier_hangs_does_not_wait_for_it() -> None:
    rig = Rig(tiers=2, limits=TierLimits(hung_after_s=5.0))
    rig.put_below(1, tier=0)
    rig.put_below(1, 2, tier=1)
    seen: list[object] = []

    def hang() -> None:
        rig.clock.advance(6)
        rig.engine.poll()
        seen.append(rig.fetch("late", 1))  # its slot is being filled by the hung call
        seen.append(rig.fetch("other", 2).state)
        rig.executors[1].run_all()
        rig.engine.poll()
        rig.executors[1].run_all()
        rig.engine.poll()
        seen.append(rig.fetch("other", 2))

    rig.stores[0].faults = [Fault("read", delay=hang)]
    rig.fetch("r", 1)
    rig.run()
    rig.run()
    assert seen == [MISS0, LookupState.PENDING, hit(1)]
    assert rig.fetch("later", 1) == hit(1)


def test_who_comes_while_a_probe_hangs_asks_the_next_tier() -> None:
    rig = Rig(tiers=2, limits=TierLimits(hung_after_s=5.0))
    rig.put_below(1, tier=1)
    seen: list[object] = []

    def hang() -> None:
        rig.clock.advance(6)
        rig.engine.poll()
        seen.append(rig.fetch("late", 1).state)
        for _ in range(2):
            rig.executors[1].run_all()
            rig.engine.poll()
        seen.append(rig.fetch("late", 1))

    rig.stores[0].faults = [Fault("contains", delay=hang)]
    rig.fetch("r", 1)
    rig.run()
    assert seen == [LookupState.PENDING, hit(1)]
    rig.settle()
    rig.engine.forget("late")
    rig.assert_idle()
