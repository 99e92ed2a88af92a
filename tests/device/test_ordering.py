"""A5: copies are ordered against compute. Stores wait for the kernels that fill the pages, loads for the last reader.

On a fake accelerator whose streams run in random order except where an event forbids it. The same run on one that
ignores waits must go wrong, or this test could not fail.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvstow.device.base import Transfer
from kvstow.device.cuda import CudaDevice
from kvstow.testing.device_suite import DeviceSuite
from kvstow.testing.guarded_pool import Host
from kvstow.testing.kv_layouts import Built
from kvstow.testing.manual import ManualClock, ManualExecutor
from tests.device.fake_accelerator import FakeAccelerator

BLOCKS, SLOTS, STEPS, SEEDS = 8, 6, 12, 200


class Engine:
    """A toy engine: every block holds one number in all its elements. It keeps, in the order of its own program, what
    each block and slot must hold, and looks at what they do hold only in kernels and after tickets ended."""

    def __init__(self, seed: int, *, deaf: bool = False, pinned: bool = True) -> None:
        clock = ManualClock()
        executor = ManualExecutor(clock, run_in_wait=True)
        self.random = random.Random(seed)
        self.gpu = FakeAccelerator(seed, deaf=deaf)
        self.gpu.pin_limit = None if pinned else 0
        self.device = CudaDevice(executor, clock, accelerator=self.gpu, pin_piece_bytes=4096)
        self.built: Built = DeviceSuite().build(
            "kv_first", blocks=BLOCKS, layers=2, heads=1, tokens=4
        )
        [pages] = self.device.attach(self.built.caches, [self.built.specs])
        self.host = Host(pages.block_bytes, SLOTS)
        self.device.map_pool(self.host.memory, 0)
        while pinned and self.device.pinned_bytes < len(self.host.memory):
            executor.run_next()
            self.device.finished()
        self.wrong: list[str] = []
        self.numbers = iter(range(1, 1_000_000))
        self.blocks: list[float] = [-1.0] * BLOCKS
        self.slots: list[float] = [-1.0] * SLOTS
        self.busy: set[int] = set()  # blocks a load is filling: nobody reads them before it ended
        self.stores: dict[int, tuple[int, int, float]] = {}
        self.loads: dict[int, tuple[int, float]] = {}
        self.tickets = iter(range(1, 1_000_000))

    def _fill(self, block: int, number: float) -> None:
        for cache in self.built.caches.values():
            assert isinstance(cache, torch.Tensor)
            cache[:, block].fill_(number)

    def _look(self, block: int, number: float, who: str) -> None:
        for cache in self.built.caches.values():
            assert isinstance(cache, torch.Tensor)
            if not bool((cache[:, block] == number).all()):
                self.wrong.append(f"{who} finds block {block} without {number}")

    def write(self, block: int) -> None:
        """A kernel fills the block. Copies out of it that are under way are fenced first, as at a preemption."""
        reading = [ticket for ticket, (of, _, _) in self.stores.items() if of == block]
        self.device.fence(reading)
        number = float(next(self.numbers))
        self.blocks[block] = number
        self.gpu.kernel(lambda: self._fill(block, number))

    def read(self, block: int) -> None:
        """A kernel of the running step reads the block."""
        number = self.blocks[block]
        self.gpu.kernel(lambda: self._look(block, number, "a kernel"))

    def store(self, block: int, slot: int) -> None:
        ticket = next(self.tickets)
        self.stores[ticket] = (block, slot, self.blocks[block])
        self.slots[slot] = float("nan")
        self.device.copy_out(ticket, [Transfer(self.host.place(slot), [block])])

    def load(self, slot: int, block: int) -> None:
        """Into a block that an earlier step may still be reading."""
        ticket = next(self.tickets)
        self.loads[ticket] = (block, self.slots[slot])
        self.blocks[block] = self.slots[slot]
        self.busy.add(block)
        self.device.copy_in(ticket, [Transfer(self.host.place(slot), [block])])

    def poll(self) -> None:
        for finished in self.device.finished():
            assert not finished.failed, finished.error
            if finished.ticket in self.stores:
                _, slot, number = self.stores.pop(finished.ticket)
                self.slots[slot] = number
                held = torch.frombuffer(bytearray(self.host.payload(slot)), dtype=torch.float32)
                if not bool((held == number).all()):
                    self.wrong.append(f"slot {slot} lacks {number}")
            else:
                block, number = self.loads.pop(finished.ticket)
                self.busy.discard(block)
                self._look(block, number, "the end of a load")

    def run(self) -> None:
        for block in range(BLOCKS):
            self.write(block)
        for _ in range(STEPS):
            storing = {slot for _, slot, _ in self.stores.values()}
            free = [block for block in range(BLOCKS) if block not in self.busy]
            full = [slot for slot in range(SLOTS) if slot not in storing and self.slots[slot] > 0]
            for block in self.random.sample(free, len(free) // 2):
                self.random.choice((self.read, self.write))(block)
            empty = [
                slot for slot in range(SLOTS) if slot not in storing and not self._loading(slot)
            ]
            if free and empty:
                self.store(self.random.choice(free), self.random.choice(empty))
                storing = {slot for _, slot, _ in self.stores.values()}
            full = [slot for slot in full if slot not in storing]
            free = [
                block for block in free if not any(of == block for of, _, _ in self.stores.values())
            ]
            if free and full:
                self.load(self.random.choice(full), self.random.choice(free))
            for _ in range(self.random.randrange(12)):
                self.gpu.step()
            self.poll()
        self.gpu.flush()
        while self.stores or self.loads:
            self.device._executor.wait(0.0)
            self.poll()
        self.device.close()

    def _loading(self, slot: int) -> bool:
        return any(number == self.slots[slot] for _, number in self.loads.values())


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a5_data_is_exact_under_random_interleavings(pinned: bool) -> None:
    for seed in range(SEEDS):
        engine = Engine(seed, pinned=pinned)
        engine.run()
        assert engine.wrong == [], f"seed {seed}"


def test_a5_the_interleavings_would_show_a_missing_wait() -> None:
    engines = [Engine(seed, deaf=True) for seed in range(50)]
    for engine in engines:
        engine.run()
    told = " ".join(" ".join(engine.wrong) for engine in engines)
    assert "slot" in told
    assert "a kernel finds" in told
    assert sum(bool(engine.wrong) for engine in engines) > 25


def test_a5_the_log_shows_a_wait_on_compute_before_each_copy() -> None:
    engine = Engine(0)
    engine.gpu.log.clear()
    engine.write(3)
    engine.store(3, 0)
    engine.gpu.flush()
    engine.poll()
    engine.read(5)
    engine.load(0, 5)
    out, into = engine.device._streams[False].name, engine.device._streams[True].name
    assert engine.gpu.log == [
        *(("record", "compute"), ("wait", out), ("copy_out", out), ("record", out)),
        *(("record", "compute"), ("wait", into), ("copy_in", into), ("record", into)),
    ]


def test_a5_a_load_waits_for_stores_of_the_same_blocks_and_only_those() -> None:
    engine = Engine(0)
    for block in range(3):
        engine.write(block)
    engine.store(0, 0)
    engine.gpu.flush()
    engine.poll()
    engine.store(1, 1)
    engine.gpu.log.clear()
    engine.device.copy_in(90, [Transfer(engine.host.place(0), [2])])
    engine.device.copy_in(91, [Transfer(engine.host.place(0), [1])])
    waits = [entry for entry in engine.gpu.log if entry[0] == "wait"]
    assert len(waits) == 1 + 2
    engine.device.fence([90])
    assert engine.gpu.log[-1] == ("wait", "compute")
