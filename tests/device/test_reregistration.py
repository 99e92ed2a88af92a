"""KV tensors that are freed and made anew while copies run, as after sleep and wake or when KV is sized again."""

from __future__ import annotations

import gc
import weakref

from kvstow.device.base import Transfer
from kvstow.device.cpu import CpuDevice
from kvstow.testing.guarded_pool import Host, everything
from kvstow.testing.kv_layouts import LAYOUTS, Built, Shape, fill
from kvstow.testing.manual import ManualClock, ManualExecutor


def built(seed: int) -> Built:
    made = LAYOUTS["packed_lbhnc"](Shape())
    fill(made, seed=seed)
    return made


def block(made: Built, number: int) -> bytes:
    content = everything(made)
    return b"".join(content[name, number] for name in made.specs)


def test_o6_copies_end_before_the_old_memory_goes_and_later_ones_know_only_the_new() -> None:
    clock = ManualClock()
    executor = ManualExecutor(clock, run_in_wait=True)
    device = CpuDevice(executor, clock)
    old, new = built(1), built(2)
    [pages] = device.attach(old.caches, [old.specs])
    host = Host(pages.block_bytes, slots=2)
    device.map_pool(host.memory, 0)
    was = block(old, 3)

    device.copy_out(1, [Transfer(host.place(0), [3])])
    assert executor.pending, "it has not begun"
    device.attach(new.caches, [new.specs])
    assert not executor.pending, "what was in flight is drained first"
    assert host.payload(0) == was

    gone = [weakref.ref(cache) for cache in old.caches.values()]
    del old
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone), (
        "the device keeps nothing of the old memory"
    )

    device.copy_out(2, [Transfer(host.place(1), [3])])
    device.fence([1, 2])
    assert {ended.ticket: ended.failed for ended in device.finished()} == {1: (), 2: ()}
    assert host.payload(1) == block(new, 3)
    device.close()
