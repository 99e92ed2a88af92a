"""The media ``file``: O_DIRECT between page-aligned host memory and a file or block device.

docs/decisions/0010-direct-storage.md compares threads with io_uring.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Final

from xxhash import xxh3_128_digest

from kvstow.direct.base import Extent
from kvstow.direct.page import check_page, seal_page
from kvstow.errors import CopyError, FrameError, SettingsError
from kvstow.layout import ALIGN, HEADER_BYTES, align_up
from kvstow.pool.hostmem import private_memory

IO: Final = (os.preadv, os.pwritev)
Io = Callable[[int, Sequence[memoryview], int], int]


class FileMedia:
    """``Media`` over a file.

    The staging areas of ``area_bytes`` each, a header page and a payload, lie in one mapping,
    ``memory``. ``fd`` was opened with O_DIRECT and is owned by this object. Raises
    ``SettingsError`` when memory is short.
    """

    name = "direct storage (file)"

    def __init__(
        self, fd: int, shard: int, areas: int, area_bytes: int, *, io: tuple[Io, Io] = IO
    ) -> None:
        self.areas = areas
        self._fd = fd
        try:
            # a device keeps it beyond ``close``
            self.memory = private_memory(areas * area_bytes, "staging")
        except OSError as error:
            self.close()
            raise SettingsError(
                f"direct.staging_size: no {areas * area_bytes:,} bytes of memory ({error.strerror}): set it lower, or "
                "free memory"
            ) from error
        self._shard = shard
        self._area_bytes = area_bytes
        self._preadv, self._pwritev = io
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def select_area(self, area: int) -> int:
        """Returns the offset of an area's payload in ``memory``."""
        return area * self._area_bytes + HEADER_BYTES

    def write(self, area: int, extent: Extent) -> None:
        view = self._view(area, extent)
        payload = view[HEADER_BYTES : HEADER_BYTES + extent.length]
        view[HEADER_BYTES + extent.length :] = bytes(len(view) - HEADER_BYTES - extent.length)
        view[:HEADER_BYTES] = seal_page(
            extent.tag, self._shard, extent.length, xxh3_128_digest(payload)
        )
        self._move_all(self._pwritev, view, extent.offset, "written")

    def read(self, area: int, extent: Extent) -> None:
        view = self._view(area, extent)
        self._move_all(self._preadv, view, extent.offset, "read")
        checksum = check_page(view[:HEADER_BYTES], extent.tag, self._shard, extent.length)
        if (
            checksum is None
            or xxh3_128_digest(view[HEADER_BYTES : HEADER_BYTES + extent.length]) != checksum
        ):
            raise FrameError("the payload's checksum does not match")

    def probe(self, area: int, extent: Extent) -> None:
        self.read(area, extent)

    def scrub(self, area: int) -> None:
        return  # every read checks

    def _view(self, area: int, extent: Extent) -> memoryview:
        """Returns the bytes to move.

        Raises ``CopyError`` for a misaligned transfer, which some kernels let pass.
        """
        size = HEADER_BYTES + align_up(extent.length)
        if not 0 <= area < self.areas or not HEADER_BYTES < size <= self._area_bytes:
            raise CopyError(f"a payload of {extent.length} bytes in staging area {area}")
        start = area * self._area_bytes
        if extent.offset < ALIGN or any(n % ALIGN for n in (extent.offset, start, self._address)):
            raise CopyError(
                f"misaligned: {size} bytes at offset {extent.offset}, staging offset {start}"
            )
        return self.memory[start : start + size]

    def _move_all(self, move: Io, view: memoryview, offset: int, done: str) -> None:
        moved = 0
        while moved < len(view):  # at most 2 GiB at once
            count = move(self._fd, [view[moved:]], offset + moved)
            moved += count
            if count <= 0 or moved % ALIGN:
                raise CopyError(f"only {moved} of {len(view)} bytes at {offset} were {done}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
