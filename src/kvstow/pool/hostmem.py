"""Host memory that the engine's processes share, and that is freed with the last of them.

The scheduler's process creates it, and each worker maps it. It is a memfd, which has no name and
goes with the last process that maps it, or a file in ``pool_dir``. Such a file is unlinked once
every worker has mapped it. Until then its creator holds it under flock; if the creator dies, the
next creator unlinks it. docs/decisions/0001-pool-memory.md gives the reasons, with measurements.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from dataclasses import dataclass
from typing import Final

from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import ALIGN, align_up

FILE_SUFFIX: Final = ".kvstow-pool"
_FILE_NAME: Final = re.compile(r"kvstow-\d+-[0-9a-f]{16}" + re.escape(FILE_SUFFIX))
_NAME_TRIES: Final = 8  # a second try is needed only if another process reaps the file too early
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python's mmap module does not name it
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_HUGE_PAGE_BYTES: Final = 2 << 20  # populated at a time: the memory map is locked for 1 to 2 ms
_MAP_FIXED: Final = 0x10  # on every architecture of vLLM; Python's mmap module does not name it
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_NO_MEMORY: Final = frozenset((errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EFAULT))


class PoolError(SettingsError):
    """The pool cannot have its memory. The message names the setting, the numbers and the fix."""


@dataclass(frozen=True, slots=True)
class PoolRef:
    """A reference by which another process of the same user maps the memory. It is plain data.

    ``path`` is None for a memfd. ``name`` is shown in errors.
    """

    pid: int
    fd: int
    path: str | None
    size_bytes: int
    inode: int
    name: str


class HostMemory:
    """The creator's end of the memory.

    ``view`` is the whole mapping, ``ref`` what workers need to map it.
    """

    def __init__(self, fd: int, path: str | None, size_bytes: int, name: str) -> None:
        self._fd = fd
        self._open = threading.Lock()
        self.closed = threading.Event()
        self.view = _map(fd, size_bytes)
        self.ref = PoolRef(os.getpid(), fd, path, size_bytes, os.fstat(fd).st_ino, name)

    @classmethod
    def anonymous(cls, size_bytes: int, name: str) -> HostMemory:
        """Create a memfd of mode 0600. Its memory is not reserved yet: see ``reserve``. Raises
        ``PoolError``.

        Taking more memory than there is does not fail, it wakes the OOM killer. So the caller first
        compares ``size_bytes`` with the free memory.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            _size(fd, size_bytes)
            return cls(fd, None, size_bytes, name)
        except OSError as error:
            os.close(fd)
            raise _refused(error, size_bytes, None) from error

    @classmethod
    def in_directory(cls, size_bytes: int, name: str, directory: str) -> HostMemory:
        """Create a file of mode 0600 in ``directory``, which is created with mode 0700. Raises
        ``PoolError``.

        Its space is reserved, so that no write ends in SIGBUS. Files that dead processes of the
        same user left there are unlinked first.
        """
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            reap(directory)
            room = os.statvfs(directory)
            free_bytes = room.f_bavail * room.f_frsize
            if room.f_blocks and free_bytes < size_bytes:  # hugetlbfs may not know its blocks
                raise OSError(errno.ENOSPC, f"{free_bytes:,} are free there")
            fd, path = _create_locked(directory)
        except OSError as error:
            raise _refused(error, size_bytes, directory) from error
        try:
            # On hugetlbfs a file's size is a multiple of its page size.
            file_bytes = align_up(size_bytes, os.fstat(fd).st_blksize)
            os.posix_fallocate(fd, 0, file_bytes)
            return cls(fd, path, file_bytes, name)
        except OSError as error:
            _unlink(path)
            os.close(fd)
            raise _refused(error, size_bytes, directory) from error

    def reserve(self, offset: int, length: int) -> None:
        """Take ``length`` bytes at ``offset`` from the system now rather than at their first use.
        Raises ``PoolError``.

        Content stays. Huge pages are taken where the system has them. May be called on any thread,
        and releases the GIL. It takes some 5 GB/s, a tenth of that where a virtual machine's host
        must find the memory. Small pages are not mapped here: that would lock the process's memory
        map, and with it stop the owner's thread.
        """
        with self._open:  # the descriptor must not be closed, and its number reused, under the call
            if self._fd < 0:
                return
            try:
                _make_huge(self.view, offset, length)
                # A file is reserved already. Where its filesystem can't, libc would write: a race.
                if self.ref.path is None:
                    os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                raise _refused(error, self.ref.size_bytes, None) from error

    def unname(self) -> None:
        """Unlink the file, after which no kill leaves it behind.

        Processes that have mapped it keep it. Idempotent.
        """
        if self.ref.path is not None:
            _unlink(self.ref.path)

    def close(self) -> None:
        """Give the memory back, once the last view of it is gone. Idempotent."""
        self.closed.set()
        with self._open:
            if self._fd < 0:
                return
            self.unname()
            os.close(self._fd)
            self._fd = -1
        self.view.release()  # the mapping goes with the last view of it


def private_memory(size_bytes: int, name: str, *, at_once: bool = False) -> memoryview:
    """Memory like the pool's that only this process maps. Raises ``OSError``.

    ``at_once``: it is taken now, in huge pages, rather than at its first use.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        _size(fd, size_bytes)
        view = _map(fd, size_bytes)
    finally:
        os.close(fd)
    if at_once:
        _make_huge(view, 0, size_bytes)
    return view


def map_memory(ref: PoolRef) -> memoryview:
    """Map another process's memory: the same bytes, shared.

    Raises ``UnsupportedError`` if it can't be reached.
    """
    path = ref.path if ref.path is not None else f"/proc/{ref.pid}/fd/{ref.fd}"
    # /proc's entry is a link that the kernel follows to the open file; a pool file must not be one.
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if ref.path is not None else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise UnsupportedError(
            f"cannot open the host pool {ref.name!r} of process {ref.pid} at {path}: "
            f"{error.strerror}. Scheduler and workers must run on one host as one user and see "
            "each other's processes; where they can't, set "
            "memory.pool_dir to a directory that all of them share, such as /dev/shm"
        ) from error
    try:
        status = os.fstat(fd)
        seen = (stat.S_ISREG(status.st_mode), status.st_ino, status.st_size, status.st_uid)
        if seen != (True, ref.inode, ref.size_bytes, os.geteuid()):
            raise UnsupportedError(
                f"{path} is not the host pool {ref.name!r}: inode {status.st_ino}, "
                f"{status.st_size} bytes, owner {status.st_uid}; expected inode {ref.inode}, "
                f"{ref.size_bytes} bytes, owner {os.geteuid()}. Its "
                "creator has ended, or runs in another PID namespace: start the engine again"
            )
        return _map(fd, ref.size_bytes)
    finally:
        os.close(fd)


def populate(view: memoryview, offset: int, length: int) -> None:
    """Map ``length`` bytes at ``offset``, a multiple of the page size, in this process, backed with
    memory.

    Content stays. Huge pages are taken where the system has them. A process that copies into the
    pool calls this first: the first copy into a page takes some 13 times as long as the next one, 6
    times where another process has touched it. May be called on any thread, and releases the GIL.
    It takes 0.5 s a GiB, or 0.2 s where the pages exist. On kernels before 5.14, and where a
    sandbox forbids it, nothing happens. Raises ``PoolError``.
    """
    _make_huge(view, offset, length)
    base = ctypes.c_char.from_buffer(view, offset)  # keeps the mapping alive
    address = ctypes.addressof(base)
    for at in range(0, length, _HUGE_PAGE_BYTES):
        if (
            _libc.madvise(address + at, min(_HUGE_PAGE_BYTES, length - at), _MADV_POPULATE_WRITE)
            != 0
        ):
            code = ctypes.get_errno()
            if code not in _NO_MEMORY:
                return
            raise _refused(OSError(code, os.strerror(code)), len(view), None)


def _make_huge(view: memoryview, offset: int, length: int) -> None:
    """Make huge pages of what lies within these bytes; content stays. Nothing happens where the
    kernel has none.

    docs/decisions/0018-collapse.md gives the reasons, with measurements.
    """
    base = ctypes.c_char.from_buffer(view, offset)
    begin = align_up(ctypes.addressof(base), _HUGE_PAGE_BYTES)
    length = (ctypes.addressof(base) + length - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # A range that has no page at all is not collapsed, so each gets one.
    for at in range(begin, begin + length, _HUGE_PAGE_BYTES):
        _libc.madvise(at, ALIGN, _MADV_POPULATE_WRITE)
    if length > 0:
        _libc.madvise(begin, length, _MADV_COLLAPSE)


def reap(directory: str) -> list[str]:
    """Unlink the pool files of this user in ``directory`` whose creators are dead.

    Returns their paths.
    """
    reaped: list[str] = []
    for entry in os.listdir(directory):
        path = os.path.join(directory, entry)
        if not _FILE_NAME.fullmatch(entry) or (fd := _open_own(path)) is None:
            continue
        try:
            if _lock(fd) and _same_file(fd, path):
                os.unlink(path)
                reaped.append(path)
        finally:
            os.close(fd)
    return reaped


def _create_locked(directory: str) -> tuple[int, str]:
    """Create a pool file and lock it. Returns its descriptor and path."""
    for _ in range(_NAME_TRIES):
        path = os.path.join(directory, f"kvstow-{os.geteuid()}-{secrets.token_hex(8)}{FILE_SUFFIX}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(fd) and _same_file(fd, path):
            return fd, path
        os.close(fd)  # another process has reaped it between its creation and its lock
    raise OSError(errno.EAGAIN, f"{_NAME_TRIES} new files were removed by others at once")


def _open_own(path: str) -> int | None:
    """A descriptor of a regular file of this user; None if ``path`` is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None  # gone, a link, or another user's
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # it is gone, or the next start reaps it
        os.unlink(path)


def _size(fd: int, size_bytes: int) -> None:
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)


def _map(fd: int, size_bytes: int) -> memoryview:
    """Map all of ``fd``, shared, at an address where a huge page may begin, until the last view is
    gone.

    Until then the process keeps a descriptor of it, by which others see which processes hold a
    pool.
    """
    alignment = max(_HUGE_PAGE_BYTES, os.fstat(fd).st_blksize)
    room = align_up(size_bytes, alignment) + alignment
    begin = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = align_up(begin, alignment)
    memory = (ctypes.c_char * size_bytes).from_address(at)
    # Not at exit, because a thread may still be copying.
    weakref.finalize(memory, _libc.munmap, begin, room).atexit = False
    weakref.finalize(memory, os.close, os.dup(fd)).atexit = False
    _mmap(at, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    # For kernels that have huge pages and no MADV_COLLAPSE.
    _libc.madvise(at, size_bytes, mmap.MADV_HUGEPAGE)
    return memoryview(memory).cast("B")


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    mapped: int = _libc.mmap(address, length, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _refused(error: OSError, size_bytes: int, directory: str | None) -> PoolError:
    """The error to raise for what the system refused."""
    if directory is not None and error.errno not in _NO_MEMORY:
        return PoolError(
            f"pool_dir={directory!r}: cannot create a pool file there ({error}): "
            "set another directory"
        )
    where = "of memory" if directory is None else f"in pool_dir={directory!r}"
    fix = "set memory.size lower, or free memory (an earlier engine may still be running)"
    if directory is not None:
        fix += "; for /dev/shm in a container raise its size with --shm-size"
    return PoolError(
        f"memory.size: no {size_bytes:,} bytes {where} for the pool ({error.strerror}): {fix}"
    )


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.restype = ctypes.c_int
    return libc


_libc: Final = _load_libc()
