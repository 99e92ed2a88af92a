"""The CUDA device on hardware: the shipped suite by each way of copying, and order under load."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from kvstow.device.accelerator import Arena, BatchCopy, CudaAccelerator, Segments, Stream
from kvstow.device.base import Device, Transfer
from kvstow.device.cuda import CudaDevice
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.device_suite import DeviceSuite
from kvstow.testing.guarded_pool import Host
from kvstow.testing.kv_layouts import Built

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BUSY_SIZE = (
    4096  # a matrix product of this size keeps a GPU busy for far longer than a copy takes to start
)


def vllm_batch_copy() -> BatchCopy | None:
    """vLLM's own op, where vLLM is installed with its kernels."""
    try:
        return importlib.import_module("vllm._custom_ops").swap_blocks_batch  # type: ignore[no-any-return]
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None


class TestAccelerator(CudaAccelerator):
    """Can refuse to pin, and can fail from its ``fail_at``-th copy on, after half of the ranges."""

    __test__ = False

    def __init__(self, batch_copy: BatchCopy | None, fail_at: int | None, pins: bool) -> None:
        super().__init__(batch_copy)
        self._left = fail_at
        self._pins = pins

    def pin(self, address: int, length: int) -> None:
        if not self._pins:
            raise RuntimeError("pinning is off in this test")
        super().pin(address, length)

    def _half(self, segments: Segments) -> Segments | None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                return Segments(*(column[: len(column) // 2] for column in segments))
        return None

    def copy(
        self, stream: Stream, segments: Segments, pool: torch.Tensor, arena: Arena, *, load: bool
    ) -> None:
        half = self._half(segments)
        super().copy(stream, half or segments, pool, arena, load=load)
        if half is not None:
            raise RuntimeError("injected")

    def copy_blocking(
        self, stream: Stream, segments: Segments, pool: torch.Tensor, arena: Arena, *, load: bool
    ) -> None:
        half = self._half(segments)
        super().copy_blocking(stream, half or segments, pool, arena, load=load)
        if half is not None:
            raise RuntimeError("injected")


class CudaSuite(DeviceSuite):
    torch_device = "cuda"
    batch_copy: ClassVar[Callable[[], BatchCopy | None]] = staticmethod(lambda: None)
    pins: ClassVar[bool] = True

    def make_device(self, fail_at: int | None = None) -> Device:
        accelerator = TestAccelerator(type(self).batch_copy(), fail_at, self.pins)
        return CudaDevice(ThreadExecutor("copy"), SystemClock(), accelerator=accelerator)

    def attach(self, device: Device, built: Built, blocks_per_chunk: int = 1, slots: int = 4):  # type: ignore[no-untyped-def]
        pages, host = super().attach(device, built, blocks_per_chunk, slots)
        assert isinstance(device, CudaDevice)
        while self.pins and device.pinned_bytes < len(host.memory):
            assert device.pin_error is None, device.pin_error
            device._executor.wait(10.0)
            device.finished()
        return pages, host

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def temporary_bytes(self) -> int:
        return torch.cuda.memory_allocated()


class TestPinnedByRange(CudaSuite):
    """One ``copy_`` a range."""


class TestPageable(CudaSuite):
    pins = False


@pytest.mark.skipif(vllm_batch_copy() is None, reason="vLLM's batched copy op is not here")
class TestPinnedByVllm(CudaSuite):
    batch_copy = staticmethod(vllm_batch_copy)


@pytest.mark.parametrize("op", ["range", "vllm"])
@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "pageable"])
def test_a5_order_under_load(op: str, pins: bool) -> None:
    """Each round: a long kernel, then one that writes pages, then a store of them without any wait; a long kernel
    that ends in a read of a page, then a load into that page. Every byte must be as in program order."""
    batch_copy = vllm_batch_copy() if op == "vllm" else None
    if op == "vllm" and batch_copy is None:
        pytest.skip("vLLM's batched copy op is not here")
    suite = CudaSuite()
    device = CudaDevice(
        ThreadExecutor("copy"), SystemClock(), accelerator=TestAccelerator(batch_copy, None, pins)
    )
    built = suite.build("packed_lbhnc", blocks=64, tokens=128, heads=8, size=128, layers=4)
    caches = [cache for cache in built.caches.values() if isinstance(cache, torch.Tensor)]
    [pages] = device.attach(built.caches, [built.specs])
    host = Host(pages.block_bytes, 2)
    device.map_pool(host.memory, 0)
    while pins and device.pinned_bytes < len(host.memory):
        assert device.pin_error is None, device.pin_error
        device._executor.wait(10.0)
        device.finished()
    busy = torch.randn(BUSY_SIZE, BUSY_SIZE, device="cuda")
    seen = torch.zeros(len(caches), device="cuda")

    def long_kernel() -> torch.Tensor:
        product = busy
        for _ in range(4):
            product = product @ busy
        return product[0, 0] * 0.0

    for number in range(1, 41):
        source, target = number % 64, (number * 7 + 1) % 64
        if source == target:
            continue
        for cache in caches:
            cache[target] = -float(number)
        zero = torch.nan_to_num(long_kernel())
        for cache in caches:
            cache[source] = zero + number
        device.copy_out(2 * number, [Transfer(host.place(0), [source])])
        suite.good(device, 2 * number)
        stored = torch.frombuffer(bytearray(host.payload(0)), dtype=torch.float32)
        assert bool((stored == number).all()), (
            f"round {number}: the store did not wait for the kernel"
        )

        zero = torch.nan_to_num(long_kernel())
        for i, cache in enumerate(caches):
            seen[i] = cache[target].max() + zero
        device.copy_in(2 * number + 1, [Transfer(host.place(0), [target])])
        suite.good(device, 2 * number + 1)
        assert bool((seen == -number).all()), (
            f"round {number}: the load did not wait for the last reader"
        )
        assert all(bool((cache[target] == number).all()) for cache in caches)
    device.close()
