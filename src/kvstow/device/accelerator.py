"""Streams, events and copies of an accelerator, as ``CudaDevice`` needs them.

Not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from kvstow.device.segments import Arena, Segments

Stream: TypeAlias = Any
Event: TypeAlias = Any

BatchCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
"""``(source addresses, target addresses, sizes, source is never written meanwhile)``: the first
three int64 tensors on the CPU; enqueues all copies on the current stream and returns. vLLM's
``_custom_ops.swap_blocks_batch`` is one.
"""

# cudaHostRegisterPortable: pinned for every CUDA context of the process
HOST_REGISTER_PORTABLE: Final = 1


class CudaAccelerator:
    """Streams, events and copies. A method raises ``RuntimeError`` when the GPU fails.

    ``batch_copy`` copies many ranges at once; None: each range is one ``copy_``.
    """

    device_type: str = "cuda"

    def __init__(self, batch_copy: BatchCopy | None = None) -> None:
        self._batch_copy = batch_copy
        self._device = torch.device("cuda")

    def select_device(self, device: torch.device) -> None:
        """Directs all later calls to ``device``."""
        self._device = device

    def compute_stream(self) -> Stream:
        """Returns the caller's current stream, on which the engine's kernels run."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Stream:
        """Returns a new stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> Event:
        """Returns an event that completes after everything queued on ``stream`` so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes everything queued on ``stream`` later start after ``event``. Does not block."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Whether ``event`` is complete. Does not block."""
        return bool(event.query())

    def copy(
        self, stream: Stream, segments: Segments, pool: torch.Tensor, arena: Arena, *, load: bool
    ) -> None:
        """Queues copies on ``stream``.

        The pool's ranges are pinned; ``segments`` stay alive until they end.
        """
        with torch.cuda.stream(stream):
            if self._batch_copy is None:
                copy_ranges(segments, pool, arena, load=load, non_blocking=True)
                return
            host = segments.host + pool.data_ptr()
            source, target = (host, segments.device) if load else (segments.device, host)
            # A slot that is loaded from is not written until its lease ends; pages are written by
            # the next step.
            self._batch_copy(source, target, segments.sizes, load)

    def copy_blocking(
        self, stream: Stream, segments: Segments, pool: torch.Tensor, arena: Arena, *, load: bool
    ) -> None:
        """Copies ranges that need not be pinned, and returns when done.

        Called on the executor's thread.
        """
        with torch.cuda.stream(stream):
            copy_ranges(segments, pool, arena, load=load, non_blocking=False)
            stream.synchronize()

    def pin(self, address: int, length: int) -> None:
        """Pins host memory. Called on the executor's thread."""
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(
                runtime.cudaHostRegister(address, length, HOST_REGISTER_PORTABLE)
            )

    def unpin(self, address: int) -> None:
        """Undoes ``pin(address, ...)``."""
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(address))


def copy_ranges(
    segments: Segments, pool: torch.Tensor, arena: Arena, *, load: bool, non_blocking: bool
) -> None:
    """Copies each range by one ``copy_`` on the current stream."""
    for device, host, size in zip(*(column.tolist() for column in segments), strict=True):
        pages, place = arena.at(device, size), pool[host : host + size]
        target, source = (pages, place) if load else (place, pages)
        target.copy_(source, non_blocking=non_blocking)
