"""The engine over a slow, blocking, file-backed store, with real threads: what an idle engine gets done, and hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow import frame
from kvstow.backends.base import Done
from kvstow.cache import Cache, LookupState
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.runtime import Clock, SystemClock, ThreadExecutor
from kvstow.testing.faults import Fault, Gate
from kvstow.testing.manual import ManualClock
from kvstow.tiers import Tier, TierLimits
from tests.rigs.file_store import FileStore
from tests.unit.rig import FRAME_BYTES, LAYOUT, MISS0, TOKENS, Rig, fill, hit, key, keys

CHUNKS = range(12)


class Served:
    """An engine with real threads over files, and an idle loop such as vLLM's: poll while it says it is busy."""

    def __init__(self, store: FileStore, clock: Clock) -> None:
        metrics = Metrics()
        self.sealer = ThreadExecutor("sealer")
        executor = ThreadExecutor("files", threads=2)
        self.tier = Tier("files", store, executor, layout=LAYOUT, clock=clock, metrics=metrics)
        self.engine = Cache(
            pool=HostPool.create(LAYOUT, 24 * FRAME_BYTES, name="served"),
            policy=LRU(),
            tiers=[self.tier],
            layout=LAYOUT,
            clock=clock,
            metrics=metrics,
            sealer=self.sealer,
        )

    def store_one_request(self) -> None:
        leases = [self.engine.reserve(key(i), b"", TOKENS) for i in CHUNKS]
        for i, lease in zip(CHUNKS, leases, strict=True):
            assert lease is not None
            fill(lease, key(i))
            self.engine.commit(lease)
            lease.release()

    def idle(self) -> None:
        while self.engine.busy():
            (self.sealer if self.sealer.outstanding else self.tier.executor).wait(1.0)
            self.engine.poll()


def assert_all_on_disk(root: Path) -> None:
    for i in CHUNKS:
        buffer = memoryview(bytearray(FRAME_BYTES))
        assert FileStore(root).read([(key(i), buffer)]) == [Done(FRAME_BYTES)]
        frame.check(buffer, FRAME_BYTES, key(i), LAYOUT.groups[0])


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()


def test_an_idle_engine_writes_everything_down_through_a_store_that_blocks(
    tmp_path: Path, gate: Gate
) -> None:
    served = Served(FileStore(tmp_path / "s", before=lambda _: gate()), SystemClock())
    served.store_one_request()
    while not gate.wait_arrived(2, timeout_s=0.001):
        assert served.engine.busy()
        served.engine.poll()
    assert served.engine.lookup(keys(*CHUNKS)) == hit(len(CHUNKS))
    assert served.engine.busy()
    gate.release()
    served.idle()
    assert_all_on_disk(tmp_path / "s")
    served.engine.close(5.0)


def test_a_store_that_never_answers_keeps_an_idle_engine_stepping_only_so_long(
    tmp_path: Path, gate: Gate
) -> None:
    clock = ManualClock()
    served = Served(FileStore(tmp_path / "s", before=lambda _: gate()), clock)
    served.store_one_request()
    while not gate.wait_arrived(2, timeout_s=0.001):
        served.engine.poll()
    while served.sealer.outstanding:
        served.sealer.wait(1.0)
        served.engine.poll()
    clock.advance(29.9)
    served.engine.poll()
    assert served.engine.busy()
    clock.advance(0.1)
    assert not served.engine.busy()
    assert not served.tier.usable


def test_what_an_idle_engine_has_stored_outlives_a_sigkill(tmp_path: Path) -> None:
    child = f"""
import os, signal
from pathlib import Path
from kvstow.runtime import SystemClock
from tests.rigs.file_store import FileStore
from tests.store.test_engine_over_files import Served
served = Served(FileStore(Path({str(tmp_path / "s")!r}), delay_s=0.01), SystemClock())
served.store_one_request()
served.idle()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = [str(Path(__file__).parents[2]), *sys.path]
    code = f"import sys; sys.path[:] = {path!r}\n{child}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert_all_on_disk(tmp_path / "s")
    later = Served(FileStore(tmp_path / "s"), SystemClock())
    assert later.engine.fetch("r", keys(*CHUNKS)).state is LookupState.PENDING
    while (found := later.engine.fetch("r", keys(*CHUNKS))).state is LookupState.PENDING:
        later.tier.executor.wait(1.0)
        later.engine.poll()
    assert found == hit(len(CHUNKS))
    later.engine.close(5.0)


def test_close_waits_for_what_is_being_written(tmp_path: Path) -> None:
    served = Served(FileStore(tmp_path / "s"), SystemClock())
    served.store_one_request()
    served.engine.close(30.0)
    assert_all_on_disk(tmp_path / "s")


def test_h6b_a_store_that_hangs_on_every_thread_is_bypassed_and_comes_back(gate: Gate) -> None:
    rig = Rig(
        slots=8,
        tiers=2,
        limits=TierLimits(hung_after_s=5.0, read_batch_bytes=FRAME_BYTES),
        fetch_deadline_s=0.2,
        executor=lambda i: ThreadExecutor(f"h6-{i}", threads=2),
    )
    rig.put_below(1, 2, tier=0)
    rig.put_below(3, tier=1)
    rig.stores[0].faults = [Fault("read", delay=gate)]

    def until_answered(owner: str, *numbers: int) -> object:
        while (found := rig.fetch(owner, *numbers)).state is LookupState.PENDING:
            for executor in rig.executors:
                executor.wait(0.01)
            rig.engine.poll()
        return found

    rig.fetch("r", 1, 2)
    while rig.stores[0].calls.get("read", 0) < 2:
        rig.executors[0].wait(0.01)
        rig.engine.poll()
    assert gate.wait_arrived(2)
    rig.clock.advance(0.2)
    rig.engine.poll()
    assert rig.fetch("r", 1, 2) == MISS0
    rig.clock.advance(5)
    rig.engine.poll()
    assert not rig.tiers[0].usable
    assert rig.gauge("tier_state|t0") == 2
    assert rig.fetch("s", 1) == MISS0  # not asked, no wait
    assert until_answered("t", 3) == hit(1)
    gate.release()
    while rig.executors[0].outstanding:
        rig.executors[0].wait(1.0)
        rig.engine.poll()
    assert rig.tiers[0].usable
    assert rig.gauge("tier_state|t0") == 0
    assert until_answered("u", 1, 2) == hit(2)
    for owner in "rstu":
        rig.engine.forget(owner)
    rig.assert_idle()
    rig.engine.close(5.0)
