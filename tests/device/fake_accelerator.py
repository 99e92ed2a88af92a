"""An accelerator without hardware: streams are queues, and nothing on them runs before a flush, in an order drawn by
a seed from all that events allow. It logs what it was asked, and asserts what real hardware would punish."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvstow.device.accelerator import CudaAccelerator, copy_ranges
from kvstow.device.segments import Arena, Segments


@dataclass(eq=False)
class FakeEvent:
    complete: bool = False


@dataclass(eq=False)
class FakeStream:
    name: str
    queue: deque[tuple[str, Callable[[], bool]]] = field(default_factory=deque)

    def add(self, what: str, run: Callable[[], bool]) -> None:
        """``run`` says False while it cannot go on."""
        self.queue.append((what, run))


class FakeAccelerator(CudaAccelerator):
    """``deaf``: waits are logged but do nothing, as in code that forgot them."""

    device_type = "cpu"

    def __init__(self, seed: int = 0, *, fail_at: int | None = None, deaf: bool = False) -> None:
        super().__init__()
        self.log: list[tuple[str, ...]] = []
        self.compute = FakeStream("compute")
        self.streams = [self.compute]
        self.pieces: dict[int, int] = {}
        self.pin_limit: int | None = None
        self.broken = False
        self._random = random.Random(seed)
        self._left = fail_at
        self._deaf = deaf

    # --- what the engine does --------------------------------------------------------------------------------------

    def kernel(self, run: Callable[[], None]) -> None:
        """A kernel on the compute stream."""

        def step() -> bool:
            run()
            return True

        self.compute.add("kernel", step)

    def step(self) -> bool:
        """Run one thing that may run now. False: nothing can."""
        ready = [stream for stream in self.streams if stream.queue]
        self._random.shuffle(ready)
        for stream in ready:
            _, run = stream.queue[0]
            if run():
                stream.queue.popleft()
                return True
        assert not ready, f"deadlock: {[stream.name for stream in ready]}"
        return False

    def flush(self) -> None:
        """Run everything."""
        while self.step():
            pass

    # --- Accelerator -----------------------------------------------------------------------------------------------

    def select_device(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def compute_stream(self) -> FakeStream:
        return self.compute

    def side_stream(self) -> FakeStream:
        self.streams.append(FakeStream(f"side{len(self.streams)}"))
        return self.streams[-1]

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def record(self, stream: FakeStream) -> FakeEvent:
        self._check()
        event = FakeEvent()

        def complete() -> bool:
            event.complete = True
            return True

        stream.add("record", complete)
        self.log.append(("record", stream.name))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._check()
        self.log.append(("wait", stream.name))
        if not self._deaf:
            stream.add("wait", lambda: event.complete)

    def done(self, event: FakeEvent) -> bool:
        self._check()
        return event.complete

    def copy(
        self,
        stream: FakeStream,
        segments: Segments,
        pool: torch.Tensor,
        arena: Arena,
        *,
        load: bool,
    ) -> None:
        self._check()
        self.log.append(("copy_in" if load else "copy_out", stream.name))
        base = pool.data_ptr()
        ranges = list(zip(*(column.tolist() for column in segments), strict=True))
        for _, host, size in ranges:
            assert any(
                a <= base + host and base + host + size <= a + n for a, n in self.pieces.items()
            ), "not pinned"
        failing = self._left is not None and self._left <= 0
        if self._left is not None:
            self._left -= 1
        for device, host, size in ranges[: len(ranges) // 2] if failing else ranges:
            target, source = (device, base + host) if load else (base + host, device)
            stream.add("copy", lambda t=target, s=source, n=size: bool(ctypes.memmove(t, s, n)))
        if failing:
            raise RuntimeError("injected")

    def copy_blocking(
        self,
        stream: FakeStream,
        segments: Segments,
        pool: torch.Tensor,
        arena: Arena,
        *,
        load: bool,
    ) -> None:
        self._check()
        self.log.append(("copy_in blocking" if load else "copy_out blocking", stream.name))
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("injected")
        while stream.queue:
            self.step()
        copy_ranges(segments, pool, arena, load=load, non_blocking=False)

    def pin(self, address: int, length: int) -> None:
        if self.pin_limit is not None and sum(self.pieces.values()) + length > self.pin_limit:
            raise RuntimeError("cudaErrorMemoryAllocation")
        assert address % 4096 == 0
        self.pieces[address] = length

    def unpin(self, address: int) -> None:
        del self.pieces[address]
