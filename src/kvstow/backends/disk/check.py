"""The check of a chunk's file: does it hold a whole frame of the key that it is named by?

It needs to know neither the model nor the layout nor the codec.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvstow import frame
from kvstow.errors import FrameError
from kvstow.layout import HEADER_BYTES, align_up
from kvstow.pool.hostmem import private_memory

PIECE_BYTES: Final = 4 << 20  # read at once; one buffer a thread
MAX_FRAME_BYTES: Final = 4 << 30  # some 100 times the largest chunk: a longer file is not ours

#: Fills the buffer with the file's bytes from an offset on; returns how many came.
Read = Callable[[int, memoryview], int]
#: Takes the digest of a key, the length of a file, and its bytes. Returns whether the file is a
#: whole frame of that key.
Check = Callable[[bytes, int, Read], bool]


def frame_check(integrity_key: bytes | None = None) -> Check:
    """A check for frames with or without a MAC of ``integrity_key``. Thread-safe, with one buffer a
    thread.

    It reads the header page first, and no more unless that fits the file. It raises what reading
    raises.
    """
    of_thread = threading.local()

    def check(digest: bytes, length: int, read: Read) -> bool:
        if not hasattr(of_thread, "buffer"):
            of_thread.buffer = private_memory(PIECE_BYTES, "check", at_once=True)
        try:
            _check(digest, length, read, of_thread.buffer, integrity_key)
        except FrameError:
            return False
        return True

    return check


def _check(
    digest: bytes, length: int, read: Read, buffer: memoryview, integrity_key: bytes | None
) -> None:
    if (
        not HEADER_BYTES < length <= MAX_FRAME_BYTES
        or read(0, buffer[:HEADER_BYTES]) < HEADER_BYTES
    ):
        raise FrameError(f"{length} bytes are no frame")
    page = bytes(buffer[:HEADER_BYTES])
    payload = frame.PayloadChecksum(integrity_key)
    header = frame.parse_header(page)
    if header.key.digest() != digest or header.frame_length != length:
        raise FrameError(
            f"the frame of {header.key!r}, of {header.frame_length} bytes, in a file of {length}"
        )
    for span in header.spans:
        for at in range(0, span.length, PIECE_BYTES):
            wanted = min(PIECE_BYTES, span.length - at)
            if read(span.offset + at, buffer[: align_up(wanted)]) < wanted:
                raise FrameError("the file became shorter")
            payload.update(buffer[:wanted])
    frame.verify(page, header, payload, integrity_key=integrity_key)
