"""Memory of this process that Mooncake's client may read and write directly."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Final, NamedTuple

from kvstow.backends.base import Buffer
from kvstow.errors import StoreUnavailable

# Memory of these types does not move while a view of it exists. The host pool is a ctypes array.
MAPPED_TYPES: Final = (mmap.mmap, ctypes.Array)


class Place(NamedTuple):
    """A part of registered memory: where it begins in this process, and its bytes."""

    address: int
    length: int


class RegisteredMemory:
    """Mappings that are registered with the client. Thread-safe.

    A mapping is registered whole when its first buffer is seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}  # by address; a view keeps its mapping alive

    def place_of(self, client: Any, buffer: Buffer) -> Place | None:
        """Returns the place of ``buffer``, or None if the client can't read and write it directly.

        Registers the buffer's mapping first where needed. Raises ``StoreUnavailable`` when the
        client can't register it.
        """
        if buffer.readonly or not len(buffer) or not isinstance(buffer.obj, MAPPED_TYPES):
            return None
        with self._lock:
            if not any(view.obj is buffer.obj for view in self._views.values()):
                view = memoryview(buffer.obj)
                address = _address_of(view)
                if client.register_buffer(address, len(view)):
                    raise StoreUnavailable(
                        "Mooncake's client can't register the pool's memory (ulimit -l?)"
                    )
                self._views[address] = view
        return Place(_address_of(buffer), len(buffer))

    def clear(self, client: Any) -> None:
        """Unregisters every mapping and lets go of it."""
        with self._lock:
            for address, view in self._views.items():
                client.unregister_buffer(address)
                view.release()
            self._views.clear()


def _address_of(view: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
