"""The emulated device itself: it must make visible what it exists for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.rbln import emulator

ROOT = Path(__file__).resolve().parents[2]
LATE_US = 50_000


def device_tensor(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values, and them on the device."""
    host = torch.randn(shape)
    return host, host.to("rbln")


def test_it_says_that_it_is_emulated() -> None:
    assert torch.rbln.EMULATED  # type: ignore[attr-defined]
    assert "EMULATED" in torch.rbln.get_device_name()  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(6, 2, 4, 1, 16, 8), (2, 6, 4, 1, 16, 8)])
def test_kv_is_int8_seen_as_another_type_and_sliced_by_block(shape: tuple[int, ...]) -> None:
    axis = shape.index(6)
    host = torch.randn(shape).to(torch.bfloat16)
    raw = torch.empty(host.nbytes, dtype=torch.int8, device="rbln")
    kv = raw.view(torch.bfloat16).view(shape)
    kv.copy_(host)
    assert torch.equal(kv.select(axis, 3).cpu(), host.select(axis, 3))
    part = torch.randn(4, 1, 16, 8).to(torch.bfloat16)
    (kv[5, 0] if axis == 0 else kv[0, 5]).copy_(part)
    assert torch.equal((kv[5, 0] if axis == 0 else kv[0, 5]).cpu(), part)


def test_copies_of_contiguous_tensors_are_counted_as_such() -> None:
    _, kv = device_tensor(6, 2, 4)
    host = torch.empty(2, 2, 4)
    emulator.reset_counters()
    torch._foreach_copy_([host[0], host[1]], [kv[1], kv[4]])
    assert emulator.counted() == {"d2h.calls": 2, "d2h.bytes": host.nbytes}


def test_strided_copies_and_operators_on_the_cpu_are_counted() -> None:
    host, kv = device_tensor(6, 8)
    emulator.reset_counters()
    torch.empty(6, 4).copy_(kv[:, :4])
    assert torch.equal(kv.index_select(0, torch.tensor([3, 1]).to("rbln")).cpu(), host[[3, 1]])
    counted = emulator.counted()
    assert counted["d2h.strided"] == 1
    assert counted["fallback.aten::index_select"] == 1


def test_strict_refuses_operators_on_the_cpu_by_name() -> None:
    _, kv = device_tensor(6, 8)
    emulator.refuse_fallback("*")
    with pytest.raises(RuntimeError, match="index_select"):
        kv.index_select(0, torch.tensor([0], device="rbln"))
    emulator.refuse_fallback()


def test_a_copy_that_does_not_block_is_late() -> None:
    emulator.configure(delay_us=LATE_US)
    source, target = torch.ones(1024), torch.zeros(1024)
    there = torch.zeros(1024, device="rbln")
    there.copy_(source, non_blocking=True)
    target.copy_(there, non_blocking=True)
    assert target.sum() == 0
    torch.rbln.synchronize()  # type: ignore[attr-defined]
    assert target.sum() == 1024


def test_streams_run_side_by_side_until_an_event_orders_them() -> None:
    rbln = torch.rbln  # type: ignore[attr-defined]
    first, second = rbln.Stream(), rbln.Stream()
    there, target = torch.zeros(1024, device="rbln"), torch.zeros(1024)
    emulator.configure(delay_us=LATE_US)
    with rbln.stream(first):
        there.copy_(torch.ones(1024), non_blocking=True)
    event = first.record_event()
    assert not event.query()
    with rbln.stream(second):
        second.wait_event(event)
        target.copy_(there, non_blocking=True)
    second.synchronize()
    assert event.query()
    assert target.sum() == 1024


def test_events_have_no_timing_and_stay_in_their_process() -> None:
    event = torch.rbln.Event()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="timing"):
        event.elapsed_time(event)
    with pytest.raises(RuntimeError, match="processes"):
        torch.rbln.Event(interprocess=True)  # type: ignore[attr-defined]


def test_memory_has_a_limit() -> None:
    emulator.configure(capacity_bytes=1 << 30)
    with pytest.raises(RuntimeError, match="SYS_ENOMEM: Out of memory"):
        torch.empty(1 << 31, dtype=torch.uint8, device="rbln")


def test_the_host_cannot_read_device_memory() -> None:
    code = (
        "import ctypes, torch; from tests.rbln import emulator; emulator.install(); "
        "t = torch.ones(4, device='rbln'); print(ctypes.c_float.from_address(t.data_ptr()).value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == -11, done.stderr
    assert ctypes.sizeof(ctypes.c_float) == 4


def test_threads_do_not_disturb_each_other() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            there = torch.full((257,), number, dtype=torch.float32).to("rbln")
            there[3:9].copy_(torch.zeros(6))
            if there.cpu().sum().item() != number * 251:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(1024, None)])
def test_zeroing_a_whole_area_or_a_part(part: slice) -> None:
    there = torch.full((5000,), 3.0, device="rbln")
    there[part].zero_()
    expected = torch.full((5000,), 3.0)
    expected[part] = 0
    assert torch.equal(there.cpu(), expected)


def test_two_devices() -> None:
    emulator.configure(devices=2)
    host = torch.randn(5)
    assert str(torch.zeros(2, device="rbln:1").device) == "rbln:1"
    assert torch.equal(host.to("rbln:1").to("rbln:0").cpu(), host)
