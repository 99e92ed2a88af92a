"""The CUDA device's logic on a fake accelerator: the whole suite, pinning, failures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from kvstow.device.base import Device, Transfer
from kvstow.device.cuda import CudaDevice
from kvstow.device.plan import Move, attach_groups
from kvstow.device.segments import GroupAddresses
from kvstow.errors import CopyError
from kvstow.testing.device_suite import DeviceSuite
from kvstow.testing.guarded_pool import Host
from kvstow.testing.kv_layouts import Built, block_bytes
from kvstow.testing.manual import ManualClock, ManualExecutor
from tests.device.fake_accelerator import FakeAccelerator

PIECE = 8192  # small, so that most copies cross pieces


class FakeCudaSuite(DeviceSuite):
    pinned = True

    def make_device(self, fail_at: int | None = None) -> Device:
        clock = ManualClock()
        self.gpu = FakeAccelerator(fail_at=fail_at)
        executor = ManualExecutor(clock, run_in_wait=True)
        if not self.pinned:
            self.gpu.pin_limit = 0
        return CudaDevice(executor, clock, accelerator=self.gpu, pin_piece_bytes=PIECE)

    def on_compute(self, run: Callable[[], None]) -> None:
        self.gpu.kernel(run)

    def synchronize(self) -> None:
        self.gpu.flush()


class TestCudaOnPinnedMemory(FakeCudaSuite):
    def attach(self, device: Device, built: Built, blocks_per_chunk: int = 1, slots: int = 4):  # type: ignore[no-untyped-def]
        pages, host = super().attach(device, built, blocks_per_chunk, slots)
        assert isinstance(device, CudaDevice)
        while device.pinned_bytes < len(host.memory):
            device._executor.wait(0.0)
            device.finished()
        return pages, host


class TestCudaOnPageableMemory(FakeCudaSuite):
    pinned = False


def make(**options: int) -> tuple[CudaDevice, FakeAccelerator, ManualExecutor, Built, Host]:
    clock, gpu = ManualClock(), FakeAccelerator()
    executor = ManualExecutor(clock)
    device = CudaDevice(
        executor, clock, accelerator=gpu, pin_piece_bytes=PIECE, drain_timeout_s=1.0, **options
    )
    suite = FakeCudaSuite()
    built = suite.build("packed_lbhnc")
    _, host = suite.attach(device, built)
    return device, gpu, executor, built, host


def pin_all(device: CudaDevice, executor: ManualExecutor) -> None:
    while executor.run_next():
        device.finished()


def test_the_pool_is_pinned_in_pieces_and_unpinned_at_close() -> None:
    device, gpu, executor, _, host = make()
    assert device.pinned_bytes == 0
    executor.run_next()
    device.finished()
    assert device.pinned_bytes == PIECE
    pin_all(device, executor)
    assert device.pinned_bytes == len(host.memory)
    assert len(gpu.pieces) == -(-len(host.memory) // PIECE)
    device.close()
    assert gpu.pieces == {}


def test_each_piece_has_its_memory_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is pinned can't become part of a huge one."""
    device, gpu, executor, _, host = make()
    populated: list[tuple[int, int, int]] = []

    def populate(view: memoryview, offset: int, length: int) -> None:
        assert len(view) == len(host.memory)
        populated.append((offset, length, len(gpu.pieces)))

    monkeypatch.setattr("kvstow.device.cuda.populate", populate)
    pin_all(device, executor)
    assert populated == [(i * PIECE, length, i) for i, length in enumerate(gpu.pieces.values())]


def test_pinning_stops_where_the_system_refuses_and_copies_go_on() -> None:
    device, gpu, executor, built, host = make()
    gpu.pin_limit = 2 * PIECE
    pin_all(device, executor)
    assert device.pinned_bytes == 2 * PIECE
    assert device.pin_error is not None
    assert "cudaErrorMemoryAllocation" in device.pin_error
    device.copy_out(1, [Transfer(host.place(3), [5])])
    executor.run_all()
    [finished] = device.finished()
    assert finished.failed == ()
    assert host.payload(3) == b"".join(block_bytes(built, name, 5) for name in built.specs)


def test_a_ticket_is_not_finished_before_its_event() -> None:
    device, gpu, executor, _, host = make()
    pin_all(device, executor)
    device.copy_out(1, [Transfer(host.place(0), [5])])
    assert device.finished() == []
    assert host.untouched([])
    gpu.flush()
    assert [finished.ticket for finished in device.finished()] == [1]


def test_loads_end_while_a_store_is_still_under_way() -> None:
    device, gpu, executor, _, host = make()
    pin_all(device, executor)
    device.copy_out(1, [Transfer(host.place(0), [5])])
    device.copy_in(2, [Transfer(host.place(1), [6])])
    flight = device._flights[2]
    while not flight.event.complete:
        gpu.step()
    device._flights[1].event.complete = False
    assert [finished.ticket for finished in device.finished()] == [2]


def test_a8_an_error_of_the_gpu_fails_everything_in_flight_and_later() -> None:
    device, gpu, executor, _, host = make()
    pin_all(device, executor)
    device.copy_out(1, [Transfer(host.place(0), [5])])
    device.copy_in(2, [Transfer(host.place(1), [6]), Transfer(host.place(2), [7])])
    gpu.broken = True
    ended = {finished.ticket: finished for finished in device.finished()}
    assert {ticket: finished.failed for ticket, finished in ended.items()} == {1: (0,), 2: (0, 1)}
    assert all("illegal memory access" in str(finished.error) for finished in ended.values())
    device.copy_out(3, [Transfer(host.place(0), [5])])
    [refused] = device.finished()
    assert (refused.ticket, refused.failed, refused.moved_bytes) == (3, (0,), 0)
    device.fence([1, 2, 3])
    device.close()


def test_a8_a_fence_on_a_broken_gpu_says_so() -> None:
    device, gpu, executor, _, host = make()
    pin_all(device, executor)
    device.copy_out(1, [Transfer(host.place(0), [5])])
    gpu.broken = True
    with pytest.raises(CopyError, match="illegal memory access"):
        device.fence([1])
    assert [finished.failed for finished in device.finished()] == [(0,)]


def test_a8_a_copy_that_could_not_be_queued_ends_after_the_part_that_was() -> None:
    device, gpu, executor, _, host = make()
    pin_all(device, executor)
    gpu._left = 0
    device.copy_out(1, [Transfer(host.place(0), [5])])
    assert device.finished() == []
    gpu.flush()
    [finished] = device.finished()
    assert (finished.failed, finished.error, finished.moved_bytes) == ((0,), "injected", 0)


def test_too_many_copies_in_flight_are_refused() -> None:
    device, gpu, executor, _, host = make(max_in_flight=1)
    pin_all(device, executor)
    device.copy_out(1, [Transfer(host.place(0), [5])])
    device.copy_out(2, [Transfer(host.place(1), [6])])
    [refused] = device.finished()
    assert (refused.ticket, refused.failed) == (2, (0,))
    gpu.flush()
    assert [finished.ticket for finished in device.finished()] == [1]


def test_close_reports_what_did_not_end() -> None:
    device, _, executor, _, host = make()
    pin_all(device, executor)
    device.copy_in(1, [Transfer(host.place(0), [5])])
    device.close()
    assert [(finished.ticket, finished.failed) for finished in device.finished()] == [(1, (0,))]


def test_neighbouring_blocks_are_one_range_and_none_crosses_a_piece() -> None:
    built = FakeCudaSuite().build("packed_lbhnc")
    [plan] = attach_groups(built.caches, [built.specs], "cpu")
    page = next(iter(built.specs.values())).page_bytes
    move = Move(0, (3, 4, 5, 9), first=0, offset=4096, blocks_per_chunk=4)
    whole = GroupAddresses(plan).segments(move, 1 << 30)
    assert whole.sizes.tolist() == [3 * page, page] * 2
    assert whole.host.tolist() == [4096, 4096 + 3 * page, 4096 + 4 * page, 4096 + 7 * page]
    first = plan.layers[0].planes[0].data_ptr()
    assert (whole.device - first).tolist() == [3 * page, 9 * page, 15 * page, 21 * page]
    cut = GroupAddresses(plan).segments(move, 4096 + 64)
    assert all(
        at // 4160 == (at + size - 1) // 4160 for at, size in zip(cut.host, cut.sizes, strict=True)
    )
    assert cut.total_bytes == whole.total_bytes == 8 * page
    assert cut.host_end == whole.host_end == 4096 + 8 * page
    joined = sorted(zip(cut.host.tolist(), cut.device.tolist(), cut.sizes.tolist(), strict=True))
    for (at, device, size), (after, there, _) in pairwise(joined):
        assert at + size == after
        assert device + size == there or after in whole.host.tolist()
