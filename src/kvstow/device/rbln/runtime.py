"""Orders copies against compute on an RBLN NPU, through ``torch.rbln``.

The module is probed at run time: it may have streams and events, or only ``synchronize``. No
package of the vendor is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvstow.errors import UnsupportedError


class TorchRbln:
    """Orders copies against compute. A method raises ``RuntimeError`` when the device fails.

    With streams and events copies overlap compute. Without them ``record`` waits for the device.
    Raises ``UnsupportedError`` where torch has no usable ``torch.rbln``.
    """

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

    def select_device(self, device: torch.device) -> None:
        """Directs all later calls to ``device``."""
        self._device = device
        self._side = self._module.Stream(device) if self._streams else None

    def record(self) -> object:
        """Marks the end of everything queued on the caller's stream, for ``copy_context``."""
        if not self._streams:
            self._module.synchronize(self._device)
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    @contextmanager
    def copy_context(self, after: object) -> Iterator[None]:
        """Encloses copies that start after the mark ``after``.

        They have ended when the context exits, also by an exception. Called on the copy thread.
        """
        with ExitStack() as stack:
            if hasattr(self._module, "device"):  # the current device is a thread's own
                stack.enter_context(self._module.device(self._device))
            # the engine's KV may be an inference tensor
            stack.enter_context(torch.inference_mode())
            if self._side is None:
                stack.callback(self._module.synchronize, self._device)
            else:
                self._side.wait_event(after)
                stack.callback(self._side.synchronize)
                stack.enter_context(self._module.stream(self._side))
            yield

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queues copies between contiguous tensors of equal shapes and types."""
        torch._foreach_copy_(targets, sources, non_blocking=True)
