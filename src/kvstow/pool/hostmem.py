"""Host memory shared by the engine's processes, which nobody has to clean up.

The scheduler's process creates it, each worker maps it. Either a memfd, which has no name and goes with the last
process that maps it, or a file in ``pool_dir``, whose name is taken away once every worker has mapped it; until then it
is held under flock, and where its creator dies the next one unlinks it. docs/decisions/0001-pool-memory.md says why,
with measurements.
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
_NAME_TRIES: Final = (
    8  # a name is 64 random bits: a second try is needed only if a reaper saw the file too early
)
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python's mmap module does not name it
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_HUGE_PAGE_BYTES: Final = (
    2 << 20
)  # populated at a time: the kernel holds the process's memory map for 1 to 2 ms
_MAP_FIXED: Final = (
    0x10  # on every architecture that vLLM runs on; Python's mmap module does not name it
)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_NO_MEMORY: Final = frozenset((errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EFAULT))


class PoolError(SettingsError):
    """The pool cannot have its memory. The message names the setting, the numbers and the fix."""


@dataclass(frozen=True, slots=True)
class PoolRef:
    """What another process of the same user needs to map the memory. Plain data: send it in any way."""

    pid: int
    fd: int
    path: str | None  # None: a memfd
    size_bytes: int
    inode: int
    name: str


class HostMemory:
    """The creator's end. ``view`` is the whole mapping; ``close`` is the only other thing to do with it."""

    def __init__(self, fd: int, path: str | None, size_bytes: int, name: str) -> None:
        self._fd = fd
        self._open = threading.Lock()
        self.closed = threading.Event()
        self.view = _map(fd, size_bytes)
        self.ref = PoolRef(os.getpid(), fd, path, size_bytes, os.fstat(fd).st_ino, name)

    @classmethod
    def anonymous(cls, size_bytes: int, name: str) -> HostMemory:
        """A memfd of mode 0600. Nothing is reserved yet: see ``reserve``.

        A memfd is limited by nothing but memory itself: taking more of it than there is does not fail, it wakes the
        OOM killer. So the caller compares ``size_bytes`` with what is free, before.
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
        """A new file of mode 0600 in ``directory`` (created, 0700), its space reserved so that no write meets SIGBUS.

        First unlinks the files there that earlier creators of the same user left behind.
        """
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            reap(directory)
            room = os.statvfs(directory)
            if (
                room.f_blocks and room.f_bavail * room.f_frsize < size_bytes
            ):  # hugetlbfs may not say
                raise OSError(errno.ENOSPC, f"{room.f_bavail * room.f_frsize:,} are free there")
            fd, path = _create_locked(directory)
        except OSError as error:
            raise _refused(error, size_bytes, directory) from error
        try:
            whole = align_up(
                size_bytes, os.fstat(fd).st_blksize
            )  # hugetlbfs lets a file end with a page only
            os.posix_fallocate(fd, 0, whole)
            return cls(fd, path, whole, name)
        except OSError as error:
            _unlink(path)
            os.close(fd)
            raise _refused(error, size_bytes, directory) from error

    def reserve(self, offset: int, length: int) -> None:
        """Take ``length`` bytes at ``offset`` from the system now rather than at their first use. Content stays.

        In huge pages, where the system has them. Any thread; releases the GIL; some 5 GB/s, a tenth of that where a
        virtual machine's host must find the memory. Small pages are not mapped here: that would hold the process's
        memory map, and with it the owner's thread.
        """
        with self._open:  # the descriptor must not be closed, and its number reused, under the call
            if self._fd < 0:
                return
            try:
                _make_huge(self.view, offset, length)
                if (
                    self.ref.path is None
                ):  # a file's is, and where its file system can't, libc writes: a race
                    os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                raise _refused(error, self.ref.size_bytes, None) from error

    def unname(self) -> None:
        """Take the file's name away: whoever has mapped it keeps it, and a kill leaves nothing behind. Idempotent."""
        if self.ref.path is not None:
            _unlink(self.ref.path)

    def close(self) -> None:
        """Give the memory back, or leave that to the last view that is still held. Idempotent."""
        self.closed.set()
        with self._open:
            if self._fd < 0:
                return
            self.unname()
            os.close(self._fd)
            self._fd = -1
        self.view.release()  # the mapping goes with the last view of it


def private_memory(size_bytes: int, name: str, *, at_once: bool = False) -> memoryview:
    """Memory of this process's own, such as the pool's; ``at_once``: in huge pages now. Raises ``OSError``."""
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
    """Map another process's memory: the same bytes, shared. Raises ``UnsupportedError``: no pool on this host."""
    path = ref.path if ref.path is not None else f"/proc/{ref.pid}/fd/{ref.fd}"
    # /proc's entry is a link that the kernel follows to the open file itself; a pool file must not be a link.
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if ref.path is not None else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise UnsupportedError(
            f"cannot open the host pool {ref.name!r} of process {ref.pid} at {path}: {error.strerror}. Scheduler and "
            "workers must run on one host as one user and see each other's processes; where they can't, set "
            "memory.pool_dir to a directory that all of them share, such as /dev/shm"
        ) from error
    try:
        status = os.fstat(fd)
        seen = (stat.S_ISREG(status.st_mode), status.st_ino, status.st_size, status.st_uid)
        if seen != (True, ref.inode, ref.size_bytes, os.geteuid()):
            raise UnsupportedError(
                f"{path} is not the host pool {ref.name!r}: inode {status.st_ino}, {status.st_size} bytes, owner "
                f"{status.st_uid}; expected inode {ref.inode}, {ref.size_bytes} bytes, owner {os.geteuid()}. Its "
                "creator has ended, or runs in another PID namespace: start the engine again"
            )
        return _map(fd, ref.size_bytes)
    finally:
        os.close(fd)


def populate(view: memoryview, offset: int, length: int) -> None:
    """Map ``length`` bytes at ``offset`` (a multiple of the page size) in this process, backed with memory, in huge
    pages where the system has them.

    Their content stays. For whoever copies into the pool: the first copy into a page takes some 13 times as long as
    the next one, 6 times where another process has touched it. Any thread; releases the GIL; in the background, as it
    takes 0.5 s a GiB, or 0.2 s where the pages exist already. Kernels before 5.14 can't, and a sandbox may forbid it:
    nothing happens.
    """
    _make_huge(view, offset, length)
    base = ctypes.c_char.from_buffer(view, offset)  # while this lives the mapping cannot go
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
    """Make huge pages of what lies within these bytes; the content stays. Where the kernel can't, or has none, nothing
    changes. docs/decisions/0018-collapse.md says why, with measurements.
    """
    base = ctypes.c_char.from_buffer(view, offset)
    begin = align_up(ctypes.addressof(base), _HUGE_PAGE_BYTES)
    length = (ctypes.addressof(base) + length - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    for at in range(
        begin, begin + length, _HUGE_PAGE_BYTES
    ):  # one that has no page at all is not collapsed
        _libc.madvise(at, ALIGN, _MADV_POPULATE_WRITE)
    if length > 0:
        _libc.madvise(begin, length, _MADV_COLLAPSE)


def reap(directory: str) -> list[str]:
    """Unlink this user's pool files in ``directory`` whose creators have ended. Returns their paths."""
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
    for _ in range(_NAME_TRIES):
        path = os.path.join(directory, f"kvstow-{os.geteuid()}-{secrets.token_hex(8)}{FILE_SUFFIX}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _lock(fd) and _same_file(fd, path):
            return fd, path
        os.close(fd)  # between creation and lock a reaper took it for an orphan, and unlinks it
    raise OSError(errno.EAGAIN, f"{_NAME_TRIES} new files were removed by others at once")


def _open_own(path: str) -> int | None:
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
    with contextlib.suppress(
        OSError
    ):  # already gone, or no longer ours to remove: the next start reaps it
        os.unlink(path)


def _size(fd: int, size_bytes: int) -> None:
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)


def _map(fd: int, size_bytes: int) -> memoryview:
    """The whole of ``fd``, shared, until its last view is gone; where a huge page may begin, one of hugetlbfs too.

    So long it has a descriptor: by those others see which processes hold a pool.
    """
    alignment = max(_HUGE_PAGE_BYTES, os.fstat(fd).st_blksize)
    room = align_up(size_bytes, alignment) + alignment
    begin = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = align_up(begin, alignment)
    memory = (ctypes.c_char * size_bytes).from_address(at)
    weakref.finalize(
        memory, _libc.munmap, begin, room
    ).atexit = False  # a thread may still be copying
    weakref.finalize(memory, os.close, os.dup(fd)).atexit = False
    _mmap(at, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    _libc.madvise(
        at, size_bytes, mmap.MADV_HUGEPAGE
    )  # a kernel that cannot collapse may have them all the same
    return memoryview(memory).cast("B")


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    got: int = _libc.mmap(address, length, protection, flags, fd, 0)
    if got == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got


def _refused(error: OSError, size_bytes: int, directory: str | None) -> PoolError:
    if directory is not None and error.errno not in _NO_MEMORY:
        return PoolError(
            f"pool_dir={directory!r}: cannot create a pool file there ({error}): set another directory"
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
