"""The shipped device suite on the emulated device, in both layouts of attention layers, and the counters of copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from kvstow.device.base import Device, KVSpec, Transfer
from kvstow.device.rbln.device import RblnDevice
from kvstow.device.rbln.layouts import BlockAxis
from kvstow.device.rbln.runtime import TorchRbln
from kvstow.errors import UnsupportedError
from kvstow.layout import GroupPages
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.device_suite import DeviceSuite
from kvstow.testing.guarded_pool import everything
from kvstow.testing.kv_layouts import Built, Shape, fill
from tests.rbln import emulator, layouts


class FailingRuntime(TorchRbln):
    """From its ``fail_at``-th call on it moves half of the tensors and raises."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._left = fail_at

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._left -= 1
        if self._left >= 0:
            super().copy(targets, sources)
            return
        super().copy(targets[: len(targets) // 2], sources[: len(sources) // 2])
        raise RuntimeError("injected")


class Rbln(DeviceSuite):
    """Whatever layout a test of the suite asks for, it gets the counterpart that vllm-rbln has."""

    torch_device = "rbln"
    axis: ClassVar[BlockAxis]
    attention: ClassVar[Callable[[Shape], Built]]

    def make_device(self, fail_at: int | None = None) -> Device:
        runtime = None if fail_at is None else FailingRuntime(fail_at)
        return RblnDevice(
            ThreadExecutor("copy"), SystemClock(), block_axis=self.axis, runtime=runtime
        )

    def build(self, layout: str, **shape: object) -> Built:
        make = layouts.mla if layout.startswith("mla") else type(self).attention
        built = make(replace(Shape(device=self.torch_device), **shape))  # type: ignore[arg-type]
        fill(built, seed=7)
        return built

    def round_trip(
        self, device: Device, built: Built, blocks_per_chunk: int, seed: int = 1
    ) -> GroupPages:
        """The suite's, and then: copies between the device and the host were plain ones, and only copies."""
        seen: dict[str, int] = {}
        wait = self.wait

        def watched(device: Device, *tickets: int) -> dict[int, object]:
            ended = wait(device, *tickets)
            for name, value in emulator.counted().items():
                seen[name] = seen.get(name, 0) + value
            return ended  # type: ignore[return-value]

        # The oracle reads and fills pages by its own, other ways: only what is between is counted.
        originals = (device.copy_out, device.copy_in)

        def counted_start(start: Callable[..., None]) -> Callable[..., None]:
            def run(*args: object) -> None:
                emulator.reset_counters()
                start(*args)

            return run

        device.copy_out, device.copy_in = map(counted_start, originals)  # type: ignore[method-assign]
        self.wait = watched  # type: ignore[assignment, method-assign]
        try:
            pages = super().round_trip(device, built, blocks_per_chunk, seed)
        finally:
            self.wait = wait  # type: ignore[method-assign]
            device.copy_out, device.copy_in = originals  # type: ignore[method-assign]
        moved = 2 * blocks_per_chunk * pages.block_bytes
        assert {
            name for name in seen if name.startswith("fallback") or name.endswith("strided")
        } == set()
        assert (seen["d2h.bytes"], seen["h2d.bytes"]) == (moved, moved)
        assert seen["d2h.async"] == seen["d2h.calls"]
        return pages

    def test_o8_a_copy_is_a_block_of_a_layer_or_its_k_or_v(self, device: Device) -> None:
        """Blocks of 1,024 tokens in kernel blocks of 128: no smaller piece is moved, and no other block is written."""
        built = self.build(
            "kv_first", layers=3, blocks=5, tokens=1024, kernel_blocks=8, heads=1, size=4
        )
        _, host = self.attach(device, built, blocks_per_chunk=2)
        planes = 1 + self.axis
        for load, start in enumerate((device.copy_out, device.copy_in)):
            emulator.reset_counters()
            start(load, [Transfer(host.place(0), [4, 1])])
            self.good(device, load)
            kind = ("d2h", "h2d")[load]
            counted = emulator.counted()
            assert set(counted) == {f"{kind}.calls", f"{kind}.bytes", f"{kind}.async"}
            assert counted[f"{kind}.calls"] == 3 * 2 * planes
        before = everything(built)
        device.copy_in(9, [Transfer(host.place(0), [0], first_block=1)])
        self.good(device, 9)
        assert everything(built) == before | {(name, 0): before[name, 1] for name in built.specs}

    def test_a4_unknown_layout_is_refused_by_name(self, device: Device) -> None:
        spec = KVSpec(12, 16, 2, 16, 4, 16 * 2 * 2 * 16 * 4)
        cache = torch.zeros(12, 2, 16, 2, 8, 2, device="rbln")
        with pytest.raises(
            UnsupportedError, match=r"layers\.7\.attn.*\(12, 2, 16, 2, 8, 2\).*rbln_kv_first"
        ):
            device.attach({"layers.7.attn": cache}, [{"layers.7.attn": spec}])


class TestBlocksFirst(Rbln):
    axis = 0
    attention = layouts.blocks_first


class TestKvFirst(Rbln):
    """With ``use_custom_kernel``."""

    axis = 1
    attention = layouts.kv_first
