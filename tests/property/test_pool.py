"""Random use of a pool against an oracle that knows only who holds what, checked after every step."""

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest

from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool, Lease
from kvstow.runtime import ThreadExecutor

LAYOUT = ChunkLayout(
    (GroupLayout(16, 1, (3000, 500)), GroupLayout(16, 1, (100,)), GroupLayout(16, 1, (5000,)))
)
SLOT = LAYOUT.max_frame_bytes
PATIENCE_S = 30.0


class Chunk:
    """The oracle's view: what bytes a slot must hold for as long as anyone has a claim on it."""

    def __init__(self, slot: int, fill: int) -> None:
        self.slot = slot
        self.fill = fill
        self.resident = False  # committed and not dropped
        self.dropped = False
        self.leases: list[Lease] = []

    @property
    def alive(self) -> bool:
        return self.resident or bool(self.leases)


class PoolMachine:
    """Takes one random step at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.pool = HostPool.create(LAYOUT, 6 * SLOT, name="test")
        self.chunks: list[Chunk] = []
        self.released: list[Lease] = []
        self.fills = 0

    def step(self) -> None:
        self.rng.choice(
            [self.reserve, self.commit, self.lease, self.release, self.release_again, self.drop]
        )()
        self.check()

    def pick(self, wanted: list[Chunk]) -> Iterator[Chunk]:
        if wanted:
            yield self.rng.choice(wanted)

    def reserve(self) -> None:
        lease = self.pool.reserve(self.rng.randrange(3))
        assert (lease is None) == (sum(chunk.alive for chunk in self.chunks) == 6)
        if lease is not None:
            self.fills = self.fills % 255 + 1
            assert lease.slot not in {chunk.slot for chunk in self.chunks if chunk.alive}, (
                "one slot, two owners"
            )
            chunk = Chunk(lease.slot, self.fills)
            lease.view()[:] = bytes([chunk.fill]) * len(lease.view())
            chunk.leases.append(lease)
            self.chunks.append(chunk)

    def commit(self) -> None:
        for chunk in self.pick(
            [c for c in self.chunks if not c.resident and c.leases and not c.dropped]
        ):
            chunk.leases[0].commit()
            chunk.resident = True

    def lease(self) -> None:
        for chunk in self.pick([c for c in self.chunks if c.resident]):
            chunk.leases.append(self.pool.lease(chunk.slot))

    def release(self) -> None:
        for chunk in self.pick([c for c in self.chunks if c.leases]):
            lease = chunk.leases.pop(self.rng.randrange(len(chunk.leases)))
            lease.release()
            self.released.append(lease)

    def release_again(self) -> None:
        for lease in self.released[-20:]:
            lease.release()

    def drop(self) -> None:
        for chunk in self.pick([c for c in self.chunks if c.resident]):
            assert self.pool.evictable(chunk.slot) == (not chunk.leases)
            self.pool.free_slot(chunk.slot)
            chunk.resident = False
            chunk.dropped = True

    def check(self) -> None:
        self.pool.check_integrity()
        self.chunks = [chunk for chunk in self.chunks if chunk.alive]
        assert self.pool.free == 6 - len(self.chunks)
        assert self.pool.leased == sum(bool(chunk.leases) for chunk in self.chunks)
        for chunk in self.chunks:
            for lease in chunk.leases:
                assert lease.view().tobytes().count(chunk.fill) == len(lease.view()), (
                    "somebody else wrote"
                )


@pytest.mark.parametrize("seed", range(40))
def test_g4_g5_g6_slots_have_one_owner_and_leased_bytes_stay(seed: int) -> None:
    machine = PoolMachine(seed)
    for _ in range(300):
        machine.step()
    for chunk in machine.chunks:
        if chunk.resident:
            machine.pool.free_slot(chunk.slot)
        for lease in chunk.leases:
            lease.release()
    machine.pool.check_integrity()
    assert machine.pool.free == 6
    machine.pool.close()


def test_a3_eight_threads_fill_and_verify_while_the_owner_gives_and_takes() -> None:
    """A thread gets a lease's views only; the lease goes back to the owner with the result, and is released there."""
    rng = Random(3)
    pool = HostPool.create(LAYOUT, 24 * SLOT, name="test")
    executor = ThreadExecutor("a3", threads=8, queue_limit=64)
    faults: list[object] = []
    done = 0

    def fill_and_verify(lease: Lease, fill: int, spans: list[memoryview]) -> Lease:
        for _ in range(3):
            for span in spans:
                span[:] = bytes([fill]) * len(span)
            if any(span.tobytes().count(fill) != len(span) for span in spans):
                faults.append(
                    f"slot {lease.slot} was written by two: {threading.current_thread().name}"
                )
        return lease

    def finished(lease: Lease | None, error: BaseException | None) -> None:
        nonlocal done
        done += 1
        if lease is None:
            faults.append(error)
            return
        if rng.random() < 0.5:
            lease.commit()
            with pool.lease(lease.slot):
                pool.free_slot(lease.slot)
        lease.release()

    sent = 0
    while done < 3000:
        lease = pool.reserve(rng.randrange(3)) if sent < 3000 else None
        if lease is not None:
            work = (lease, sent % 255 + 1, lease.spans())
            assert executor.submit(lambda work=work: fill_and_verify(*work), finished)
            sent += 1
            continue
        assert executor.wait(PATIENCE_S)
        executor.poll()
    assert faults == []
    assert executor.close(PATIENCE_S)
    pool.check_integrity()
    assert (pool.free, pool.leased) == (24, 0)
    pool.close()


def test_g7_memory_of_the_owner_does_not_grow_with_inserts_and_evictions() -> None:
    pool = HostPool.create(LAYOUT, 16 * SLOT, name="test")
    policy = LRU()
    slots: dict[ChunkKey, int] = {}
    namespace = Namespace.from_fields({})

    def cycle(count: int, start: int) -> None:
        for i in range(start, start + count):
            lease = pool.reserve(i % 3)
            if lease is None:
                victim = policy.victim(lambda key: pool.evictable(slots[key]))
                assert victim is not None
                pool.free_slot(slots.pop(victim))
                lease = pool.reserve(i % 3)
                assert lease is not None
            key = ChunkKey.build(namespace, 0, i.to_bytes(8, "little"))
            with lease, lease.view() as view:
                view[0] = 1
                lease.commit()
            slots[key] = lease.slot
            policy.insert(key)

    cycle(200, 0)
    tracemalloc.start()
    try:
        cycle(200, 1000)
        gc.collect()
        warm = tracemalloc.get_traced_memory()[0]
        cycle(5000, 2000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < warm * 1.05 + 4096
    finally:
        tracemalloc.stop()
    pool.check_integrity()
    pool.close()
