"""Whole-file reads and writes in few large calls, which release the GIL, direct where alignment allows."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import CDLL, addressof, c_char, get_errno
from typing import Final

from kvstow.backends.base import Buffer
from kvstow.backends.disk.names import FILE_MODE
from kvstow.layout import ALIGN

IOV_MAX: Final = 1024  # Linux's limit of buffers in a call
PROBE_BYTES: Final = 2 * ALIGN
READ_FLAGS: Final = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # a FIFO must not block the open
CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

RENAME_NOREPLACE: Final = 1
_renameat2: Final = getattr(
    CDLL(None, use_errno=True), "renameat2", None
)  # in glibc since 2.28; releases the GIL


class Fd:
    """An open file, closed when the last user lets go: so a number in use is never closed and given away."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def aligned(parts: Sequence[Buffer]) -> bool:
    """Whether every part may take part in direct I/O: its address and length are multiples of ``ALIGN``.

    The kernel's own limits are often smaller and differ by device and version; these satisfy all. The address of a
    read-only buffer can't be seen from here: it counts as not aligned.
    """
    for part in parts:
        length = len(part)
        if length and (
            length % ALIGN or part.readonly or addressof(c_char.from_buffer(part)) % ALIGN
        ):
            return False
    return True


def buffered(fd: int) -> None:
    """Make an open file's I/O go through the page cache from here on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def read_all(fd: int, parts: Sequence[Buffer], start: int = 0) -> int:
    """Fill ``parts`` from byte ``start`` of the file on; returns how many bytes came, fewer only at the file's end."""
    return _move(os.preadv, fd, parts, start)


def write_all(fd: int, parts: Sequence[Buffer]) -> int:
    """Write the concatenation of ``parts`` at the file's start. Returns its length."""
    length = sum(map(len, parts))
    if _move(os.pwritev, fd, parts) < length:
        raise OSError(errno.EIO, "a write of 0 bytes")
    return length


def _move(
    call: Callable[[int, Sequence[Buffer], int], int],
    fd: int,
    parts: Sequence[Buffer],
    start: int = 0,
) -> int:
    """Repeat ``call`` until all is moved or nothing moves. Returns the bytes moved."""
    left = [part for part in parts if len(part)]
    at = start
    while left and (moved := call(fd, left[:IOV_MAX], at)):
        at += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
        if left and at % ALIGN:
            buffered(fd)  # direct I/O can't go on from here
    return at - start


def rename_new(root: int, source: str, target: str) -> None:
    """Give a file a name that nothing has. Raises ``FileExistsError`` or another ``OSError``. In one call where the
    filesystem and the C library can. Where they can't, a ``source`` that won't go stays until its process is reaped."""
    arguments = (root, source.encode(), root, target.encode(), RENAME_NOREPLACE)
    code = _renameat2(*arguments) and get_errno() if _renameat2 else errno.ENOSYS
    if code in (errno.EINVAL, errno.ENOSYS):
        os.link(source, target, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        with suppress(OSError):
            os.unlink(source, dir_fd=root)
    elif code:
        raise OSError(code, os.strerror(code), target)


def direct_works(root: int, name: str) -> bool:
    """Whether the filesystem takes direct I/O: tried with a real aligned write and read of the new file ``name``.

    An ``open`` that succeeds says nothing: some filesystems reject the first write. Other faults than a
    refusal of direct I/O are raised. The file is left behind for the caller to remove.
    """
    page = mmap.mmap(-1, PROBE_BYTES)
    with memoryview(page) as view:
        view[:] = bytes(range(256)) * (PROBE_BYTES // 256)
        expected = bytes(view)
        try:
            fd = Fd(os.open(name, CREATE_FLAGS | os.O_DIRECT, FILE_MODE, dir_fd=root))
            write_all(fd.number, [view])
            view[:] = bytes(PROBE_BYTES)
            works = read_all(fd.number, [view]) == PROBE_BYTES and bytes(view) == expected
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            works = False
    page.close()
    return works
