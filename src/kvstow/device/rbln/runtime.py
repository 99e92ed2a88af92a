"""What of ``torch.rbln`` orders copies. Probed, never assumed, and nothing of the vendor's is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from kvstow.errors import UnsupportedError


class Runtime(Protocol):
    """Orders copies against compute. A method raises ``RuntimeError`` when the device fails."""

    def use(self, device: torch.device) -> None:
        """Everything from now on is about this device."""
        ...

    def now(self) -> object:
        """A mark after everything queued on the caller's stream so far, for ``copying``."""
        ...

    def copying(self, after: object) -> Any:
        """A context in which copies are queued: they start after the mark, and have ended when it exits, also by an
        exception. For the copy thread."""
        ...

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies of contiguous tensors of equal shapes and types."""
        ...


class TorchRbln:
    """``Runtime`` by way of ``torch.rbln``. With streams and events copies overlap compute; without them each mark
    waits for the device."""

    def __init__(self) -> None:
        self._module: Any = getattr(torch, "rbln", None)
        if self._module is None or not hasattr(self._module, "synchronize"):
            raise UnsupportedError(
                "torch has no rbln device with `torch.rbln.synchronize`: is torch-rbln installed, and its version the "
                "one that vllm-rbln wants?"
            )
        names = ("Stream", "Event", "stream", "current_stream")
        self._streams = all(hasattr(self._module, name) for name in names)
        self._device = torch.device("rbln")
        self._side: Any = None

    def use(self, device: torch.device) -> None:
        self._device = device
        self._side = self._module.Stream(device) if self._streams else None

    def now(self) -> object:
        if not self._streams:
            self._module.synchronize(self._device)
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        with ExitStack() as stack:
            if hasattr(self._module, "device"):  # the current device is a thread's own
                stack.enter_context(self._module.device(self._device))
            stack.enter_context(
                torch.inference_mode()
            )  # the engine's KV may be an inference tensor
            if self._side is None:
                stack.callback(self._module.synchronize, self._device)
            else:
                self._side.wait_event(after)
                stack.callback(self._side.synchronize)
                stack.enter_context(self._module.stream(self._side))
            yield

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources, non_blocking=True)
