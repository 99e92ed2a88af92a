"""Copies are ordered against compute, on an emulated device whose queued work is late: what forgets to wait, shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from kvstow.device.base import Transfer
from kvstow.device.rbln.device import RblnDevice
from kvstow.device.rbln.runtime import TorchRbln
from kvstow.layout import Place, Span
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.guarded_pool import Host
from kvstow.testing.kv_layouts import Built, Shape, fill
from tests.rbln import emulator, layouts

LATE_US = 30_000
QUEUED = (
    4  # kernels before the one that counts, so that a copy which does not wait is well before it
)


class Forgetful(TorchRbln):
    """Leaves one thing out."""

    def __init__(self, forget: str) -> None:
        super().__init__()
        self._forget = forget

    @contextmanager
    def copy_context(self, after: object) -> Iterator[None]:
        stream = self._module.Stream(self._device)
        if self._forget != "wait":
            stream.wait_event(after)
        with self._module.stream(stream), torch.inference_mode():
            yield
        if self._forget != "synchronize":
            stream.synchronize()


@pytest.fixture(params=["streams", "no streams"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchRbln:
    if request.param == "no streams":
        monkeypatch.delattr(torch.rbln, "Event")  # type: ignore[attr-defined]
    return TorchRbln()


class Rig:
    """A device over one layer of six blocks of ones, and a pool."""

    def __init__(self, runtime: TorchRbln) -> None:
        self.device = RblnDevice(ThreadExecutor("copy"), SystemClock(), runtime=runtime)
        self.built: Built = layouts.blocks_first(Shape(layers=1, blocks=6, device="rbln"))
        cache = self.built.caches["layers.0.attn"]
        assert isinstance(cache, torch.Tensor)
        self.cache = cache
        self.cache.fill_(1)
        [pages] = self.device.attach(self.built.caches, [self.built.specs])
        self.host = Host(pages.block_bytes, 2)
        self.device.map_pool(self.host.memory, 0)
        self.twos = torch.full(tuple(self.cache.shape), 2.0)
        self.idle = torch.zeros(16, device="rbln")

    def kernels(self) -> None:
        """What keeps the compute stream busy for a while."""
        for _ in range(QUEUED):
            self.idle.copy_(torch.zeros(16), non_blocking=True)

    def stored(self) -> set[float]:
        return set(torch.frombuffer(bytearray(self.host.payload(0)), dtype=torch.float32).tolist())

    def store(self) -> set[float]:
        """Values stored by a copy out that comes after a kernel which writes twos."""
        emulator.configure(delay_us=LATE_US)
        self.kernels()
        self.cache.copy_(self.twos, non_blocking=True)
        self.device.copy_out(1, [Transfer(self.host.place(0), [3])])
        self.device.fence([1])
        return self.stored()

    def load(self) -> set[float]:
        """Values read by a kernel that comes before a copy in."""
        self.device.copy_out(1, [Transfer(self.host.place(0), [3])])
        self.device.fence([1])
        self.cache.fill_(7)
        emulator.configure(delay_us=LATE_US)
        self.kernels()
        read = torch.zeros_like(self.cache[3], device="cpu")
        read.copy_(self.cache[3], non_blocking=True)
        self.device.copy_in(2, [Transfer(self.host.place(0), [3])])
        self.device.fence([2])
        emulator.configure()
        torch.rbln.synchronize()  # type: ignore[attr-defined]
        assert set(self.cache[3].cpu().flatten().tolist()) == {1.0}
        return set(read.flatten().tolist())

    def close(self) -> None:
        with suppress(RuntimeError):
            torch.rbln.synchronize()  # type: ignore[attr-defined]
        self.device.close()


def test_out_comes_after_the_kernels_that_fill_the_pages(runtime: TorchRbln) -> None:
    rig = Rig(runtime)
    assert rig.store() == {2.0}
    rig.close()


def test_in_comes_after_the_last_reader_of_the_old_content(runtime: TorchRbln) -> None:
    rig = Rig(runtime)
    assert rig.load() == {7.0}
    rig.close()


@pytest.mark.parametrize("forget", ["wait", "synchronize"])
def test_these_tests_see_what_is_left_out_of_a_store(forget: str) -> None:
    rig = Rig(Forgetful(forget))
    assert rig.store() != {2.0}
    rig.close()


def test_these_tests_see_a_load_that_does_not_wait() -> None:
    rig = Rig(Forgetful("wait"))
    assert rig.load() != {7.0}
    rig.close()


def test_tickets_end_in_order(runtime: TorchRbln) -> None:
    rig = Rig(runtime)
    emulator.configure(delay_us=1000)
    for ticket in range(5):
        start = rig.device.copy_in if ticket % 2 else rig.device.copy_out
        start(ticket, [Transfer(rig.host.place(0), [ticket])])
    rig.device.fence(range(5))
    assert [ended.ticket for ended in rig.device.finished()] == list(range(5))
    rig.close()


def test_a_failing_synchronise_fails_the_whole_ticket() -> None:
    class Broken(TorchRbln):
        @contextmanager
        def copy_context(self, after: object) -> Iterator[None]:
            with super().copy_context(after):
                yield
            raise RuntimeError("SYS_EIO")

    rig = Rig(Broken())
    rig.device.copy_out(1, [Transfer(rig.host.place(0), [1]), Transfer(rig.host.place(1), [2])])
    rig.device.fence([1])
    [ended] = rig.device.finished()
    assert (ended.failed, ended.error, ended.moved_bytes) == ((0, 1), "SYS_EIO", 0)
    rig.close()


def test_a_device_that_fails_at_once_fails_the_ticket() -> None:
    class Dead(TorchRbln):
        def record(self) -> object:
            raise RuntimeError("SYS_ENODEV")

    rig = Rig(Dead())
    rig.device.copy_out(1, [Transfer(rig.host.place(0), [1])])
    [ended] = rig.device.finished()
    assert ended.failed == (0,)
    assert "SYS_ENODEV" in str(ended.error)
    rig.close()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_pool_on_the_device_keeps_every_byte_there(axis: int) -> None:
    """As direct storage uses it: the pages go to a tensor on the device, in whole blocks, and come back."""
    make = layouts.kv_first if axis else layouts.blocks_first
    built = make(Shape(layers=3, blocks=6, tokens=64, device="rbln", dtype=torch.bfloat16))
    fill(built, seed=3)
    before = {
        name: cache.cpu() for name, cache in built.caches.items() if isinstance(cache, torch.Tensor)
    }
    device = RblnDevice(ThreadExecutor("copy"), SystemClock(), block_axis=1 if axis else 0)
    [pages] = device.attach(built.caches, [built.specs])
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="rbln")
    device.map_device_pool(pool, 0)
    place = Place("pool", (Span(8192, 2 * pages.block_bytes),))
    emulator.configure(delay_us=1000)
    emulator.reset_counters()
    device.copy_out(1, [Transfer(place, [4, 1])])
    device.copy_in(2, [Transfer(place, [5, 0])])
    device.fence([1, 2])
    assert all(not ended.failed for ended in device.finished())
    counted = emulator.counted()
    assert set(counted) == {"d2d.calls", "d2d.bytes", "d2d.async"}
    assert counted["d2d.bytes"] == 4 * pages.block_bytes
    for name, cache in built.caches.items():
        assert isinstance(cache, torch.Tensor)
        expected = before[name].clone()
        expected.select(axis, 5).copy_(before[name].select(axis, 4))
        expected.select(axis, 0).copy_(before[name].select(axis, 1))
        assert torch.equal(cache.cpu().view(torch.int16), expected.view(torch.int16))
    device.close()
