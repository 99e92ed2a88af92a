"""Reads and writes of whole files, in few large system calls that release the GIL."""

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
# O_NONBLOCK: a FIFO must not block the open.
READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK
CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL

RENAME_NOREPLACE: Final = 1
# In glibc since 2.28. The call releases the GIL.
_renameat2: Final = getattr(CDLL(None, use_errno=True), "renameat2", None)


class Fd:
    """An open file.

    It is closed with the last reference, so a number in use is never closed and given away.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def open_below(root: Fd, path: str, flags: int) -> Fd:
    """Open a file below the root, but no link. A file that this makes is for its owner alone."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return Fd(os.open(path, flags, FILE_MODE, dir_fd=root.number))


def open_directory(path: str) -> Fd:
    """Open a directory, such as the root of a data directory."""
    return Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def aligned(parts: Sequence[Buffer]) -> bool:
    """Whether the address and length of every part are multiples of ``ALIGN``, as direct I/O needs.

    The kernel's own limits are often smaller, and differ by device and version. The address of a
    read-only buffer can't be had from Python, so it counts as not aligned.
    """
    for part in parts:
        length = len(part)
        if length and (
            length % ALIGN or part.readonly or addressof(c_char.from_buffer(part)) % ALIGN
        ):
            return False
    return True


def buffered(fd: int) -> None:
    """Make an open file's I/O go through the page cache from now on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def read_all(fd: int, parts: Sequence[Buffer], start: int = 0) -> int:
    """Fill ``parts`` with the file's bytes from ``start`` on.

    Returns how many came: fewer only at the file's end.
    """
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
    """Repeat ``call`` until all bytes are moved or none move. Returns how many were moved."""
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
    """Rename a file to a name that is not taken. Raises ``FileExistsError`` or another ``OSError``.

    This is one call where the filesystem and the C library have it. Elsewhere it is a link and an
    unlink; a ``source`` that can't be unlinked stays until its process is reaped.
    """
    code = errno.ENOSYS
    if _renameat2 is not None:
        failed = _renameat2(root, source.encode(), root, target.encode(), RENAME_NOREPLACE)
        code = get_errno() if failed else 0
    if code in (errno.EINVAL, errno.ENOSYS):
        os.link(source, target, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        with suppress(OSError):
            os.unlink(source, dir_fd=root)
    elif code:
        raise OSError(code, os.strerror(code), target)


def direct_works(root: Fd, name: str) -> bool:
    """Whether the filesystem takes direct I/O, tried with an aligned write and read of the new file
    ``name``.

    An ``open`` that succeeds proves nothing, as some filesystems reject the first write. Faults
    other than a refusal of direct I/O are raised. The caller removes the file.
    """
    page = mmap.mmap(-1, PROBE_BYTES)
    with memoryview(page) as view:
        view[:] = bytes(range(256)) * (PROBE_BYTES // 256)
        expected = bytes(view)
        try:
            fd = open_below(root, name, CREATE_FLAGS | os.O_DIRECT)
            write_all(fd.number, [view])
            view[:] = bytes(PROBE_BYTES)
            works = read_all(fd.number, [view]) == PROBE_BYTES and bytes(view) == expected
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            works = False
    page.close()
    return works
