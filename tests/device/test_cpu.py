"""The CPU device: the shipped suite, and what is its own."""

from __future__ import annotations

import pytest

from kvstow.device import cpu
from kvstow.device.base import Device, Transfer
from kvstow.device.cpu import CpuDevice
from kvstow.device.page_copy import (
    Int64s,
    PageCopies,
    PageCopy,
    copy_page_by_page,
    kernels,
)
from kvstow.errors import CopyError
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.device_suite import DeviceSuite
from kvstow.testing.guarded_pool import everything
from kvstow.testing.manual import ManualClock, ManualExecutor


def failing(fail_at: int) -> PageCopies:
    """Copies that move half of the pages and raise, from call ``fail_at`` on."""
    left = fail_at

    def copy(
        planes: Int64s, ids: Int64s, place: int, per_chunk: int, first: int, load: bool
    ) -> None:
        nonlocal left
        left -= 1
        moved = ids if left >= 0 else ids[: len(ids) // 2]
        copy_page_by_page(planes, moved, place, per_chunk, first, load)
        if left < 0:
            raise RuntimeError("injected")

    return PageCopies(copy, copy)


class TestCpuDevice(DeviceSuite):
    def make_device(self, fail_at: int | None = None) -> Device:
        copies = None if fail_at is None else failing(fail_at)
        return CpuDevice(ThreadExecutor("copy"), SystemClock(), copies=copies)


class TestCpuDeviceByHand(DeviceSuite):
    """The same on an executor without threads: nothing runs before someone waits for it."""

    def make_device(self, fail_at: int | None = None) -> Device:
        clock = ManualClock()
        copies = None if fail_at is None else failing(fail_at)
        return CpuDevice(ManualExecutor(clock, run_in_wait=True), clock, copies=copies)


class CopiesSuite(DeviceSuite):
    """The suite with one fixed way to copy, which a measurement on this machine might not choose."""

    copies: PageCopies

    def make_device(self, fail_at: int | None = None) -> Device:
        copies = self.copies if fail_at is None else failing(fail_at)
        return CpuDevice(ThreadExecutor("copy"), SystemClock(), copies=copies)


def compiled() -> tuple[PageCopy, PageCopy]:
    found = kernels()
    assert found is not None, "vLLM's CPU build brings numba"
    return found.plain, found.streaming


class TestPlainCopies(CopiesSuite):
    copies = PageCopies(compiled()[0], compiled()[0])


class TestStreamingCopies(CopiesSuite):
    copies = PageCopies(compiled()[1], compiled()[1])


class TestCopiesWithoutNumba(CopiesSuite):
    copies = PageCopies(copy_page_by_page, copy_page_by_page)


def by_hand(**options: int) -> tuple[CpuDevice, ManualExecutor]:
    clock = ManualClock()
    executor = ManualExecutor(clock, **options)
    return CpuDevice(executor, clock, fence_timeout_s=5.0), executor


def test_nothing_is_copied_on_the_callers_thread() -> None:
    device, executor = by_hand()
    built = TestCpuDevice().build("packed_lbhnc")
    _, host = TestCpuDevice().attach(device, built)
    device.copy_out(1, [Transfer(host.place(0), [1])])
    assert host.untouched([])
    assert device.finished() == []
    executor.run_all()
    assert [finished.ticket for finished in device.finished()] == [1]
    assert not host.untouched([])


def test_a_full_queue_fails_the_ticket() -> None:
    device, executor = by_hand(queue_limit=1)
    _, host = TestCpuDevice().attach(device, TestCpuDevice().build("mla"))
    device.copy_out(1, [Transfer(host.place(0), [1])])
    device.copy_out(2, [Transfer(host.place(1), [2]), Transfer(host.place(2), [3])])
    [refused] = device.finished()
    assert (refused.ticket, refused.failed) == (2, (0, 1))
    executor.run_all()
    assert [finished.ticket for finished in device.finished()] == [1]


def test_the_pool_is_touched_piece_by_piece_beside_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(
        cpu, "populate", lambda view, offset, length: touched.append((offset, length))
    )
    monkeypatch.setattr(cpu, "POPULATE_BYTES", 4096)
    toucher = ManualExecutor()
    device = CpuDevice(ManualExecutor(), ManualClock(), toucher=toucher)
    _, host = TestCpuDevice().attach(device, TestCpuDevice().build("mla"))
    assert touched == []
    toucher.run_all()
    total = len(host.memory)
    assert touched == [(at, min(4096, total - at)) for at in range(0, total, 4096)]


def test_a_closed_device_stops_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    toucher = ManualExecutor()
    device = CpuDevice(ManualExecutor(), ManualClock(), toucher=toucher)

    def touch(view: memoryview, offset: int, length: int) -> None:
        touched.append(offset)
        device.close()

    monkeypatch.setattr(cpu, "populate", touch)
    monkeypatch.setattr(cpu, "POPULATE_BYTES", 4096)
    TestCpuDevice().attach(device, TestCpuDevice().build("mla"))
    toucher.run_all()
    assert touched == [0]


def test_a_fence_that_runs_out_of_time_fails_its_copies_for_good() -> None:
    device, executor = by_hand()
    _, host = TestCpuDevice().attach(device, TestCpuDevice().build("mla"))
    device.copy_out(1, [Transfer(host.place(0), [1])])
    device.copy_out(2, [Transfer(host.place(1), [1])])
    with pytest.raises(CopyError, match="1 copies"):
        device.fence([1])
    executor.run_all()
    late, other = device.finished()
    assert (late.ticket, late.failed) == (1, (0,))
    assert (other.ticket, other.failed) == (2, ())


def test_close_reports_what_it_could_not_wait_for() -> None:
    device, _ = by_hand()
    _, host = TestCpuDevice().attach(device, TestCpuDevice().build("mla"))
    device.copy_in(1, [Transfer(host.place(0), [1])])
    device.close()
    assert [(finished.ticket, finished.failed) for finished in device.finished()] == [(1, (0,))]


def test_blocks_that_are_not_copied_stay() -> None:
    suite = TestCpuDevice()
    device = suite.make_device()
    built = suite.build("packed_bhlnc")
    _, host = suite.attach(device, built)
    before = everything(built)
    device.copy_in(1, [Transfer(host.place(0), [4])])
    suite.good(device, 1)
    changed = {
        block for (name, block), data in everything(built).items() if data != before[name, block]
    }
    assert changed == {4}
    device.close()
