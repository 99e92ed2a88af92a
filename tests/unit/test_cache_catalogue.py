"""Faults that users and operators of KV-cache offloading have met: those that an engine over any tier can suffer."""

from __future__ import annotations

import logging
import random

import pytest

from kvstow.cache import LookupState
from kvstow.errors import StoreUnavailable
from kvstow.testing.faults import Fault, unavailable
from kvstow.tiers import TierLimits
from tests.unit.rig import FRAME_BYTES, MISS0, TOKENS, Rig, assert_bytes, fill, hit, key, keys


@pytest.mark.parametrize("short_by", [0, FRAME_BYTES // 2])
def test_a1_a_chunk_whose_write_failed_is_nowhere_to_be_found(short_by: int) -> None:
    rig = Rig(slots=8)
    rig.stores[0].faults = [
        Fault("write", key(2), short_by=short_by, error=StoreUnavailable("disk"))
    ]
    rig.put(1, 2, 3)
    rig.settle()
    assert rig.counter("failed_chunks", tier="t0") == 1
    rig.put(*range(10, 18))  # evicts 1, 2, 3
    rig.settle()
    assert rig.engine.missing(keys(1, 2, 3)) == [1]
    for owner, chunk, expected in (("a", 1, hit(1)), ("b", 2, MISS0), ("c", 3, hit(1))):
        rig.fetch(owner, chunk)
        rig.settle()
        assert rig.fetch(owner, chunk) == expected
        rig.engine.forget(owner)
    assert rig.counter("corrupt_chunks", tier="t0") == (1 if short_by else 0)


def test_a7_a_failed_read_ends_the_hit_before_it() -> None:
    cut, flipped = Fault("read", key(3), short_by=FRAME_BYTES), Fault("read", key(3), flip_at=9)
    for fault in (unavailable("read", key(3)), cut, flipped):
        rig = Rig(slots=20, limits=TierLimits(read_batch_bytes=FRAME_BYTES))
        rig.put_below(1, 2, 3, 4, 5)
        rig.stores[0].faults = [fault]
        rig.fetch("r", 1, 2, 3, 4, 5)
        rig.settle()
        assert rig.fetch("r", 1, 2, 3, 4, 5) == hit(2)
        leases = rig.engine.hold("r", keys(1, 2, 3, 4, 5))
        assert len(leases) == 2
        for lease, k in zip(leases, keys(1, 2), strict=True):
            assert_bytes(lease, k)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a9_a_value_replaced_during_its_read_is_a_miss(chunks: int) -> None:
    rig = Rig(slots=10)
    rig.put_below(*range(chunks), 99)
    foreign = bytearray(FRAME_BYTES)
    rig.inners[0].read([(key(99), memoryview(foreign))])

    def replace() -> None:
        rig.inners[0].delete(keys(0))
        rig.inners[0].write([(key(0), [memoryview(foreign)])])

    rig.stores[0].faults = [Fault("read", delay=replace)]
    rig.fetch("r", *range(chunks))
    rig.settle()
    assert rig.fetch("r", *range(chunks)) == MISS0
    assert rig.engine.hold("r", keys(0)) == []
    assert rig.counter("corrupt_chunks", tier="t0") == 1


def test_c6_asking_again_changes_nothing_that_is_stored_later() -> None:
    rig = Rig(slots=10)
    rig.put(0, 1)
    rig.settle()
    for _ in range(50):
        rig.fetch("r", *range(5))
        rig.run()
        assert rig.engine.missing(keys(*range(5))) == [2, 3, 4]
    rig.engine.hold("r", keys(0, 1))
    rig.put(2, 3, 4)
    assert rig.engine.lookup(keys(*range(5))) == hit(5)


def test_c9_a_key_asked_for_while_it_is_written_reaches_the_other_tier_once() -> None:
    rig = Rig(tiers=2)
    rig.put(1)
    rig.run(only=[rig.sealer])  # tier 0 has not written yet
    assert rig.engine.missing(keys(1)) == []
    assert rig.engine.reserve(key(1), b"", TOKENS) is None
    assert rig.fetch("r", 1) == hit(1)
    rig.run(only=[rig.executors[1]])
    assert rig.below(1, tier=1) == [True]
    rig.settle()
    assert rig.below(1, tier=0) == [True]
    assert [store.calls for store in rig.stores] == [{"write": 1}, {"write": 1}]


def test_c10_a_resident_chunk_is_found_while_others_write() -> None:
    rig = Rig(slots=32, tiers=0)
    rig.put(0)
    rng = random.Random(10)
    for step in range(2000):
        writing = [
            rig.engine.reserve(key(1000 * (w + 1) + step), b"", TOKENS)
            for w in range(rng.randrange(16))
        ]
        assert rig.engine.lookup(keys(0)) == hit(1)
        for lease in writing:
            if lease is not None:
                if rng.random() < 0.8:
                    rig.engine.commit(lease)
                lease.release()
    assert rig.counter("evicted_chunks") > 5000
    rig.assert_idle()


def test_d10_a_request_that_is_never_admitted_costs_next_to_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(slots=64, fetch_deadline_s=0.2)
    rig.put_below(*range(8, 16))
    rig.put(*range(8))
    rig.settle()
    touches: list[int] = []
    touch_many = rig.policy.touch_many
    rig.policy.touch_many = lambda ks: (touches.append(1), touch_many(ks))
    with caplog.at_level(logging.DEBUG, "kvstow"):
        for step in range(10_000):
            rig.fetch("r", *range(20))
            rig.engine.poll()
            if step < 100:
                rig.run()
            rig.clock.advance(0.002)
    assert rig.fetch("r", *range(20)) == hit(16)
    assert len(touches) < 10
    assert rig.stores[0].calls["contains"] == 1
    assert rig.stores[0].calls["read"] == 1
    assert len(caplog.records) <= 1
    rig.engine.forget("r")
    rig.assert_idle()


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("how", ["forget", "hold", "deadline", "reset"])
def test_e3_an_abort_at_any_point_of_a_fetch_gives_everything_back(steps: int, how: str) -> None:
    rig = Rig(slots=10, tiers=2, fetch_deadline_s=0.2)
    rig.put_below(1, 2, tier=0)
    rig.put_below(3, tier=1)
    rig.fetch("r", 1, 2, 3, 4)
    for step in range(steps):
        executor = rig.executors[0] if rig.executors[0].outstanding else rig.executors[1]
        executor.run_next() if step % 2 == 0 else rig.engine.poll()
    if how == "forget":
        rig.engine.forget("r")
        rig.engine.forget("r")
    elif how == "hold":
        for lease in rig.engine.hold("r", keys(1, 2, 3, 4)):
            lease.release()
    elif how == "deadline":
        rig.clock.advance(0.2)
        rig.engine.poll()
    else:
        rig.engine.reset()
    rig.settle()
    rig.assert_idle()
    assert rig.fetch("r", 1, 2, 3, 4).state is not LookupState.PENDING or how in ("forget", "hold")


def test_e5_a_lookup_past_its_deadline_misses_and_its_late_answer_pins_nothing() -> None:
    rig = Rig(fetch_deadline_s=0.2)
    rig.put_below(1)
    rig.fetch("r", 1)
    for _ in range(10):
        rig.clock.advance(0.2)
        assert rig.fetch("r", 1) == MISS0
    assert rig.counter("fetch_deadline_exceeded", tier="t0") == 1
    rig.settle()
    assert rig.pool.leased == 0
    assert rig.fetch("r", 1) == MISS0
    rig.assert_idle()


def test_e5_m3_what_came_in_time_is_used_though_no_step_has_taken_it() -> None:
    rig = Rig(fetch_deadline_s=0.2)
    rig.put_below(1)
    rig.fetch("r", 1)
    rig.run()
    rig.executors[0].run_all()  # read, and the step is long
    rig.clock.advance(0.3)
    assert rig.fetch("r", 1) == hit(1)
    rig.engine.poll()
    assert rig.pool.leased == 0, "its deadline has passed: nothing stays pinned for it"
    assert rig.counter("fetch_deadline_exceeded") == 0
    rig.assert_idle()


def test_g1_nothing_stays_pinned_and_the_hit_rate_stays() -> None:
    rig = Rig(slots=60, tiers=0)
    rng = random.Random(1)
    hits: list[int] = []
    for cycle in range(20_000):
        first = min(int(rng.expovariate(1 / 12)), 44) * 4  # 180 chunks, popular ones more often
        prompt = keys(*range(first, first + 4))
        found = rig.engine.fetch(f"r{cycle}", prompt)
        hits.append(found.chunks)
        leases = rig.engine.hold(f"r{cycle}", prompt[: found.chunks])
        for i in rig.engine.missing(prompt):
            lease = rig.engine.reserve(prompt[i], b"", TOKENS)
            if lease is not None:
                leases.append(lease)
                if rng.random() < 0.9:
                    rig.engine.commit(lease)
        for lease in leases:
            lease.release()
        rig.engine.forget(f"r{cycle}")
    rig.assert_idle()
    steady, last = sum(hits[1000:4000]) / 12_000, sum(hits[-3000:]) / 12_000
    assert 0.3 < steady < 0.95
    assert abs(steady - last) < 0.04


def test_g2_chunks_looked_up_but_not_loaded_are_not_pinned() -> None:
    rig = Rig(slots=8)
    rig.put(*range(8))
    rig.settle()
    for i in range(8):
        assert rig.fetch(f"r{i}", i) == hit(
            1
        )  # the device has it already; nothing more is said of this request
    assert rig.pool.leased == 0
    rig.put(*range(10, 18))
    rig.settle()
    rig.assert_idle()


@pytest.mark.parametrize(
    "faults", [[], [unavailable("write")], [Fault("write", error=OSError("full"))]]
)
def test_g3_a_lower_tier_leaves_no_reference_behind(faults: list[Fault]) -> None:
    rig = Rig(slots=4)
    rig.stores[0].faults = faults
    for i in range(40):
        rig.put(i)
        if i % 3 == 0:
            rig.settle()
    rig.settle()
    assert rig.pool.leased == 0
    rig.assert_idle()


def test_g8_probes_keep_nothing_from_being_evicted() -> None:
    rig = Rig(slots=4, tiers=0)
    rig.put(*range(4))
    for i in range(4, 40):
        for _ in range(50):
            rig.engine.lookup(keys(*range(i - 4, i)))
            rig.fetch(f"r{i}", *range(i - 4, i))
        rig.put(i)
        rig.settle()
    assert rig.counter("refused_chunks") == 0
    assert rig.counter("evicted_chunks") == 36


def test_g9_a_full_pool_makes_room_for_a_fetch() -> None:
    rig = Rig(slots=4)
    rig.put_below(1)
    rig.put(10, 11, 12, 13)
    rig.settle()
    rig.fetch("r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)


def test_g9_a_pool_pinned_whole_is_a_miss_in_bounded_time_and_a_hit_once_a_pin_drops() -> None:
    for unpinned in (False, True):
        rig = Rig(slots=4, fetch_deadline_s=0.2)
        rig.put_below(1)
        rig.put(10, 11, 12, 13)
        rig.settle()
        leases = rig.engine.hold("other", keys(10, 11, 12, 13))
        rig.fetch("r", 1)
        rig.settle()
        assert rig.fetch("r", 1).state is LookupState.PENDING
        if unpinned:
            leases[0].release()
            rig.engine.poll()
            rig.settle()
            assert rig.fetch("r", 1) == hit(1)
        else:
            rig.clock.advance(0.2)
            assert rig.fetch("r", 1) == MISS0
            assert rig.counter("fetch_deadline_exceeded", tier="memory") == 1


def test_h1_more_fetches_than_slots_all_return_in_time() -> None:
    rig = Rig(slots=2, max_fetch_share=1.0, fetch_deadline_s=0.2)
    rig.put_below(*range(16))
    owners = {f"r{i}": (2 * i, 2 * i + 1) for i in range(8)}
    for owner, numbers in owners.items():
        rig.fetch(owner, *numbers)
    rig.settle()
    first = rig.fetch("r0", 0, 1)
    assert first == hit(2)
    held = rig.engine.hold("r0", keys(0, 1))
    for _ in range(5):
        rig.clock.advance(0.05)
        rig.engine.poll()
        rig.settle()
    states = [
        rig.fetch(owner, *numbers).state for owner, numbers in owners.items() if owner != "r0"
    ]
    assert states == [LookupState.MISS] * 7
    assert rig.counter("fetch_deadline_exceeded", tier="memory") == 7
    for lease in held:
        lease.release()
    rig.assert_idle()


def test_h4_one_deadline_in_all_and_not_one_a_round() -> None:
    rig = Rig(slots=4, tiers=0, fetch_deadline_s=0.2)
    answers: list[LookupState] = []
    lease = rig.engine.reserve(key(1), b"", TOKENS)
    for _ in range(40):  # a worker that fails every 10 ms and is given the chunk again
        answers.append(rig.fetch("r", 1).state)
        rig.clock.advance(0.01)
        assert lease is not None
        lease.release()
        lease = rig.engine.reserve(key(1), b"", TOKENS)
    assert answers.index(LookupState.MISS) <= 21
    assert set(answers[answers.index(LookupState.MISS) :]) == {LookupState.MISS}


def test_h4_a_write_that_never_ends_delays_nobody() -> None:
    rig = Rig(slots=4)
    rig.put(1)
    for _ in range(100):
        assert rig.fetch("r", 1) == hit(1)
        rig.clock.advance(10)
        rig.engine.poll()
    assert not rig.engine.busy()


@pytest.mark.parametrize("undeletable", [False, True])
def test_h5_a_bad_value_is_not_tried_again_by_the_same_owner(undeletable: bool) -> None:
    rig = Rig()
    rig.put_below(1)
    rig.stores[0].faults = [Fault("read", flip_at=5000)] + (
        [unavailable("delete")] if undeletable else []
    )
    for _ in range(100):
        rig.fetch("r", 1)
        rig.run()
    assert rig.fetch("r", 1) == MISS0
    assert rig.stores[0].calls["read"] == 1
    assert rig.engine.missing(keys(1)) == [0]
    rig.fetch("s", 1)
    rig.settle()
    assert rig.fetch("s", 1) == MISS0
    assert rig.stores[0].calls["read"] == (2 if undeletable else 1)
    rig.engine.forget("s")
    rig.engine.forget("r")
    rig.assert_idle()


def test_h6a_one_flipped_payload_byte_is_a_miss_and_counted() -> None:
    rig = Rig()
    rig.put_below(1)
    rig.stores[0].faults = [Fault("read", flip_at=FRAME_BYTES - 1)]
    rig.fetch("r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == MISS0
    assert rig.counter("corrupt_chunks", tier="t0") == 1
    assert rig.below(1) == [False]


def test_k5_a_value_that_the_store_dropped_is_a_miss_and_stored_again() -> None:
    rig = Rig(slots=4)
    rig.put(1)
    rig.settle()
    rig.put(*range(10, 14))
    rig.settle()
    assert rig.engine.missing(keys(1)) == []
    rig.inners[0].delete(keys(1))
    rig.fetch("r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == MISS0
    assert rig.engine.missing(keys(1)) == [0]
    rig.put(1)
    rig.settle()
    assert rig.below(1) == [True]


def test_f4_k5_a_value_dropped_between_probe_and_read_is_a_miss() -> None:
    rig = Rig(slots=4)
    rig.put_below(1)
    rig.stores[0].faults = [Fault("read", delay=lambda: rig.inners[0].delete(keys(1)))]
    rig.fetch("r", 1)
    rig.settle()
    assert rig.fetch("r", 1) == MISS0
    assert rig.engine.missing(keys(1)) == [0]
    assert rig.counter("corrupt_chunks") == 0


def test_k9_a_chunk_is_found_while_its_write_is_pending_whatever_the_pressure() -> None:
    rig = Rig(slots=4)
    rig.put(1)
    rig.run(only=[rig.sealer])
    for i in range(10, 20):
        lease = rig.engine.reserve(key(i), b"", TOKENS)
        assert lease is not None
        fill(lease, key(i))
        lease.release()
    assert rig.fetch("r", 1) == hit(1)
    [lease] = rig.engine.hold("r", keys(1))
    assert_bytes(lease, key(1))


def test_m4_a_miss_below_costs_one_round_trip_and_no_slot() -> None:
    rig = Rig(slots=100)
    rig.put_below(0)
    reserved: list[int] = []
    reserve = rig.pool.reserve
    rig.pool.reserve = lambda group=0: (reserved.append(group), reserve(group))[1]  # type: ignore[method-assign]
    for i in range(20):
        rig.fetch(f"r{i}", i, 1000 + i)
        rig.run()
        if i:
            assert rig.fetch(f"r{i}", i, 1000 + i) == MISS0
    rig.settle()
    assert len(reserved) == 1
    assert rig.stores[0].calls == {"contains": 20, "read": 1}


def test_a2_a_slot_is_not_given_away_while_it_is_written() -> None:
    rig = Rig(slots=4)
    rig.put(1)
    rig.run(only=[rig.sealer])

    def pressure() -> None:
        for i in range(10, 20):  # every other slot changes hands, several times
            rig.put(i)

    rig.stores[0].faults = [Fault("write", key(1), delay=pressure)]
    rig.executors[0].run_next()
    rig.engine.poll()
    assert rig.below(1) == [True]
    rig.engine.reset()
    rig.settle()
    rig.fetch("r", 1)
    rig.settle()
    [lease] = rig.engine.hold("r", keys(1))
    assert_bytes(lease, key(1))
    lease.release()
    rig.assert_idle()


@pytest.mark.parametrize("how", ["forget", "deadline", "reset"])
def test_a2_a_slot_is_not_given_away_while_it_is_read_for_nobody_any_more(how: str) -> None:
    rig = Rig(slots=4, limits=TierLimits(hung_after_s=1e6))
    rig.put_below(1)

    def leave() -> None:
        if how == "forget":
            rig.engine.forget("r")
        elif how == "deadline":
            rig.clock.advance(10)
            rig.engine.poll()
        else:
            rig.engine.reset()
        rig.put(10, 11, 12)
        assert rig.engine.reserve(key(13), b"", TOKENS) is not None, "evicts one of them"

    rig.stores[0].faults = [Fault("read", delay=leave)]
    rig.fetch("r", 1)
    rig.run()
    rig.executors[0].run_all()
    rig.engine.poll()
    held = [(i, lease) for i in (10, 11, 12) for lease in rig.engine.hold("s", keys(i))]
    assert len(held) == 2
    for i, lease in held:
        assert_bytes(lease, key(i))


@pytest.mark.parametrize(
    "damage", [{"flip_at": 4096 + 10}, {"flip_at": 2 * 4096 + 10}, {"short_by": 4096}]
)
def test_a10_all_parts_of_a_chunk_come_back_or_none(damage: dict[str, int]) -> None:
    """A chunk is one object: the part of one rank is not lost, evicted or damaged without the others."""
    rig = Rig(slots=20, limits=TierLimits(read_batch_bytes=FRAME_BYTES))
    rig.put_below(0, 1, 2, 3, 4)
    rig.stores[0].faults = [Fault("read", key(3), **damage)]
    rig.fetch("r", 0, 1, 2, 3, 4)
    rig.settle()
    assert rig.fetch("r", 0, 1, 2, 3, 4) == hit(3)
    leases = rig.engine.hold("r", keys(0, 1, 2, 3, 4))
    assert len(leases) == 3
    for lease, i in zip(leases, range(3), strict=True):
        assert len(lease.spans()) == 2
        assert_bytes(lease, key(i))
    assert rig.below(3) == [False], "and no part of it is found again"


def test_m1_no_store_is_ever_called_on_the_engines_own_thread() -> None:
    """Prompts that never come back: whatever the owner calls, the tier's work waits for its threads."""
    rig = Rig(slots=8)
    for i in range(50):
        rig.fetch(f"r{i}", i)
        rig.engine.missing(keys(i))
        rig.engine.hold(f"r{i}", keys(i))
        if lease := rig.engine.reserve(key(i), b"", TOKENS):
            rig.engine.commit(lease)
            lease.release()
        rig.sealer.run_all()
        rig.engine.poll()
    assert rig.stores[0].calls == {}
    rig.settle()
    calls = rig.stores[0].calls
    assert set(calls) == {"contains", "write"}, "nothing is read that nobody has"
    assert calls["contains"] <= 50
    assert calls["write"] <= 50


def test_m2_a_shared_prefix_is_read_once_and_holds_up_nobody_else() -> None:
    rig = Rig(slots=20)
    rig.put_below(1, 2, 3)
    rig.put(7)
    rig.settle()
    rig.stores[0].calls.clear()
    owners = [f"r{i}" for i in range(10)]
    for owner in owners:
        assert rig.fetch(owner, 1, 2, 3).state is LookupState.PENDING
        assert rig.fetch("other", 7) == hit(1)
    rig.settle()
    assert rig.stores[0].calls == {"contains": 1, "read": 1}
    assert [rig.fetch(owner, 1, 2, 3) for owner in owners] == [hit(3)] * 10
    for owner in owners:
        rig.engine.forget(owner)
    rig.assert_idle()


def test_m3_what_has_arrived_is_known_at_once_whatever_the_place_in_the_queue() -> None:
    rig = Rig(slots=200, limits=TierLimits(read_batch_bytes=1))
    rig.put_below(*range(100))
    for i in range(100):
        rig.fetch(f"r{i}", i)
    rig.run()
    executor = rig.executors[0]
    assert executor.pending == 100, "each is found and is being read"
    executor.run(99)
    rig.engine.poll()
    assert rig.fetch("r99", 99) == hit(1)
    assert rig.fetch("r0", 0).state is LookupState.PENDING


def test_m6_waiting_for_a_slow_answer_asks_once() -> None:
    rig = Rig(fetch_deadline_s=10.0)
    rig.put_below(1)
    for _ in range(500):
        assert rig.fetch("r", 1).state is LookupState.PENDING
        rig.clock.advance(0.001)
        rig.engine.poll()
    assert rig.executors[0].outstanding == 1
    rig.settle()
    assert rig.fetch("r", 1) == hit(1)
    assert rig.stores[0].calls == {"contains": 1, "read": 1}
