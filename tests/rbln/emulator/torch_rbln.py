"""``torch.rbln`` of the emulated device: what the vendor's module offers, as far as is known from public code."""

from __future__ import annotations

import contextlib
import mmap
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

GIB: Final = 1 << 30
EMULATED_DEVICE_BYTES: Final = 16 * GIB
CHIPLETS: Final = 4
DEVICE_TYPE: Final = int(torch._C._autograd.DeviceType.PrivateUse1)


def native() -> Any:
    """The C++ part."""
    return torch.ops.rbln_emulator


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != "rbln":
        raise ValueError(f"Expected rbln device, but got {named.type}")
    return int(native().current_device()) if named.index is None else named.index


class Stream(torch.Stream):
    def __new__(
        cls, device: torch.device | int | None = None, priority: int = 0, **which: int
    ) -> Stream:
        if "stream_id" in which:
            return super().__new__(cls, priority=priority, **which)  # type: ignore[call-overload, no-any-return]
        place = torch.device("rbln", _index(device))
        return super().__new__(cls, place, priority=priority)  # type: ignore[call-overload, no-any-return]

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        if interprocess:
            raise RuntimeError("emulated rbln: events cannot be shared between processes")
        return super().__new__(cls, device="rbln", enable_timing=False, blocking=blocking)  # type: ignore[call-overload, no-any-return]

    def elapsed_time(self, other: object) -> float:
        raise RuntimeError("emulated rbln: events have no timing")


def current_stream(device: torch.device | int | None = None) -> Stream:
    index = _index(device)
    return Stream(
        stream_id=native().current_stream(index), device_index=index, device_type=DEVICE_TYPE
    )


def default_stream(device: torch.device | int | None = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=DEVICE_TYPE)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        native().set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


@contextlib.contextmanager
def device(device: torch.device | int | None) -> Iterator[None]:
    before = native().current_device()
    native().set_device(_index(device))
    try:
        yield
    finally:
        native().set_device(before)


def synchronize(device: torch.device | int | None = None) -> None:
    native().synchronize(_index(device))


def bind_device_memory(tensor: torch.Tensor) -> None:
    """Give a tensor that is its whole storage a side on the device, which direct storage can reach."""
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    if (
        tensor.device.type != "rbln"
        or not whole
        or tensor.nbytes != tensor.untyped_storage().nbytes()
    ):
        raise RuntimeError(
            "bind_device_memory: an RBLN tensor that covers its whole storage is needed"
        )
    native().bind(tensor.data_ptr())


def huge_host_empty(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _per_chiplet(device: object = None) -> dict[str, int]:
    used, total = native().memory_bytes() // CHIPLETS, EMULATED_DEVICE_BYTES // CHIPLETS
    sizes = {"total": total, "used": used, "free": total - used}
    return {
        f"npu.0.chiplet.{i}.{name}": size for i in range(CHIPLETS) for name, size in sizes.items()
    }


def module() -> types.ModuleType:
    """A new module to register as ``torch.rbln``. ``EMULATED`` tells it from the vendor's."""
    made = types.ModuleType("torch.rbln", "EMULATED: not the vendor's module")
    ours = (
        *(Stream, Event, current_stream, default_stream, set_stream, stream, device),
        *(synchronize, bind_device_memory, huge_host_empty),
    )
    made.__dict__.update({each.__name__: each for each in ours})
    made.__dict__.update(
        EMULATED=True,
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_dummy_device=lambda: False,
        device_count=lambda: int(native().device_count()),
        physical_device_count=lambda: int(native().device_count()),
        current_device=lambda: int(native().current_device()),
        set_device=lambda device: native().set_device(_index(device)),
        get_device_name=lambda device=None: "RBLN-EMULATED",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        empty_cache=lambda device=None: None,
        memory_allocated=lambda device=None: native().memory_bytes(),
        memory_reserved=lambda device=None: native().memory_bytes(),
        max_memory_allocated=lambda device=None: native().peak_bytes(),
        reset_peak_memory_stats=lambda device=None: native().reset_peak(),
        memory_stats=lambda device=None: {
            "allocated.current": native().memory_bytes(),
            "allocated.peak": native().peak_bytes(),
        },
        mem_get_info=lambda device=None: (
            EMULATED_DEVICE_BYTES - native().memory_bytes(),
            EMULATED_DEVICE_BYTES,
        ),
        mem_get_info_per_chiplet=_per_chiplet,
        set_device_layout_like=lambda target, like: None,
    )
    return made
