"""A data directory as one process has it open: its root, its lock, its place in the ledger.

All paths are relative to the root's descriptor. When a filesystem vanishes from its mount point,
nothing is written to the directory below.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from kvstow.backends.disk import names
from kvstow.backends.disk.files import (
    CREATE_FLAGS,
    READ_FLAGS,
    Fd,
    direct_works,
    open_below,
    open_directory,
)
from kvstow.backends.disk.ledger import PAGE_BYTES, Ledger, LedgerPage, read_page
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.layout import ALIGN

MAX_UNIT_BYTES: Final = 1 << 20  # filesystems that report larger blocks still allocate smaller ones
MAX_ATTEMPTS: Final = 20  # to make a lock file while others take it for a dead process's
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)


@dataclass(slots=True)
class MountedDirectory:
    """A directory that ``attach`` has opened.

    ``identity`` is the root's device and inode, ``owner`` the user id that our files get, ``token``
    the name of this process in the directory. ``took_over``: there were dead processes, whose
    reservations are counted as published.
    """

    path: str
    root: Fd
    identity: tuple[int, int]
    owner: int
    direct: bool
    token: str
    lock: Fd
    ledger: Ledger
    ledger_id: bytes
    took_over: bool = False
    serials: Iterator[int] = field(default_factory=partial(count, 3))  # 0 to 2: lock and probe

    def temporary(self) -> str:
        """A new path for a file of this process, on the same filesystem."""
        return f"{names.TMP}/{self.tag()}"

    def tag(self) -> str:
        """A new name that no other process makes."""
        return f"{self.token}-{next(self.serials)}"  # one step of ``count`` is atomic

    def stat(self, path: str) -> os.stat_result | None:
        """``lstat`` of a path below the root; None if nothing is there. Raises ``OSError``."""
        try:
            return os.stat(path, dir_fd=self.root.number, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def make_directories(self, path: str) -> int:
        """Make the directories above ``path``. Returns how many are new."""
        parts = path.split("/")[:-1]
        return sum(_mkdir(self.root, "/".join(parts[: i + 1])) for i in range(len(parts)))

    def free_bytes(self) -> int:
        return free_bytes(self.root)

    def check_readable(self) -> None:
        """Read the ledger, from the device where direct I/O works.

        Raises ``OSError`` if that fails.
        """
        flags = READ_FLAGS | (os.O_DIRECT if self.direct else 0)
        file = open_below(self.root, names.LEDGER, flags)
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            os.preadv(file.number, [view], 0)

    def check_writable(self, room_bytes: int) -> None:
        """Write, read and publish a file of at least ``room_bytes``.

        Raises ``OSError`` if that fails.
        """
        _probe(self.root, f"{names.TMP}/{self.token}-1", self.direct, room_bytes)

    def in_place(self) -> bool:
        """Whether the path still leads to this directory, and the files of ``attach`` are still in
        it."""
        needed = (names.LEDGER, names.TMP, names.QUARANTINE, names.lock_path(self.token))
        try:
            return _identity(os.stat(self.path)) == self.identity and None not in map(
                self.stat, needed
            )
        except OSError:
            return False

    def detach(self) -> None:
        """Leave the ledger and give up the lock."""
        with suppress(StoreUnavailable, OSError):
            self.ledger.leave()
            os.unlink(names.lock_path(self.token), dir_fd=self.root.number)


def attach(
    path: str, *, direct: bool = True, previous: MountedDirectory | None = None
) -> MountedDirectory:
    """Open a data directory, make the directories and files that it lacks, and clear up after dead
    processes.

    ``direct`` allows direct I/O, where the filesystem has it. ``previous`` is the same directory as
    this process had it open before: then a bare mount point is not taken for it. Raises
    ``OSError``, ``StoreUnavailable``, and ``UnsupportedError`` for a filesystem that can't serve.
    """
    if previous is None or _device(os.path.dirname(os.path.abspath(path))) == previous.identity[0]:
        os.makedirs(path, names.DIR_MODE, exist_ok=True)
    root = open_directory(path)
    identity = _identity(os.fstat(root.number))
    if (
        previous is not None
        and identity[0] != previous.identity[0]
        and not _has_ledger(root, previous.ledger_id)
    ):
        raise StoreUnavailable(
            f"{path} is another filesystem than before, and the ledger is not on it"
        )
    for directory in (names.RUN, names.TMP, names.QUARANTINE):
        _mkdir(root, directory)
    token = secrets.token_bytes(names.TOKEN_BYTES)
    lock = _take_lock(root, token.hex())
    ledger, page = _join(root, token)
    owner, works = _probe(root, f"{names.TMP}/{token.hex()}-1", direct)
    mount = MountedDirectory(path, root, identity, owner, works, token.hex(), lock, ledger, page.id)
    mount.took_over = reap(mount)
    return mount


def free_bytes(root: Fd) -> int:
    """The bytes that the filesystem has left for this user."""
    room = os.fstatvfs(root.number)
    return room.f_bavail * room.f_frsize


def reap(mount: MountedDirectory) -> bool:
    """Take over the reservations of dead processes, and remove their temporary files.

    Returns whether there were any. Raises ``OSError`` and ``StoreUnavailable``.
    """
    root = mount.root
    with mount.ledger.page() as page:
        locks = {token for name in _list(root, names.RUN) if (token := names.owner_of_lock(name))}
        slots = {token.hex() for token in page.reserved}
        temporaries = [
            (token, name)
            for name in _list(root, names.TMP)
            if (token := names.owner_of_temporary(name))
        ]
        tokens = locks | slots | {token for token, _ in temporaries}
        dead = {token for token in tokens - {mount.token} if not alive(root, token)}
        for token, name in temporaries:
            if token in dead:
                _unlink(root, f"{names.TMP}/{name}")
        for token in dead:
            page.add(page.reserved.pop(bytes.fromhex(token), 0))
            _unlink(root, names.lock_path(token))
        mount.ledger.report_to(page)  # last: a failure before it leaves the page as it is
    return bool(dead)


def _take_lock(root: Fd, token: str) -> Fd:
    """Make and lock this process's lock file.

    It is locked under another name first, so that a file called ``<token>.lock`` is locked while
    its process lives.
    """
    hidden = f"{names.TMP}/{token}-0"
    for _ in range(MAX_ATTEMPTS):
        try:
            lock = try_lock(root, hidden, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            _unlink(root, hidden)
            if error.errno in _NO_LOCKS:
                raise UnsupportedError(
                    f"the filesystem has no file locks, which the size needs: {error}"
                ) from error
            raise
        with suppress(FileNotFoundError):  # another process has reaped it, not yet locked
            os.rename(
                hidden, names.lock_path(token), src_dir_fd=root.number, dst_dir_fd=root.number
            )
            if lock is not None:
                return lock
    raise StoreUnavailable("the lock file is removed again and again")


def alive(root: Fd, token: str) -> bool:
    """Whether the process with this token lives."""
    try:
        return try_lock(root, names.lock_path(token)) is None
    except FileNotFoundError:
        return False


def try_lock(root: Fd, path: str, flags: int = 0) -> Fd | None:
    """Open and lock a file. Returns None if another process has it locked.

    It is opened read-only, so that the filesystem may be made so, and for writing where that is not
    enough: network filesystems lock only files that are open for writing.
    """
    for access in (os.O_RDONLY, os.O_RDWR):
        fd = open_below(root, path, access | flags)
        try:
            fcntl.flock(fd.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EBADF or access == os.O_RDWR:
                raise
            flags &= ~os.O_EXCL
        else:
            return fd
    return None


def unit_bytes(root: Fd) -> int:
    """The bytes to a multiple of which a file's size is rounded up on this filesystem."""
    return max(ALIGN, min(MAX_UNIT_BYTES, os.fstatvfs(root.number).f_frsize)) // ALIGN * ALIGN


def _join(root: Fd, token: bytes) -> tuple[Ledger, LedgerPage]:
    unit = unit_bytes(root)

    def fresh() -> LedgerPage:
        """The usage of a directory without chunks is known."""
        empty = not any(names.is_namespace(name) for name in _list(root, ".")) and not _list(
            root, names.QUARANTINE
        )
        return LedgerPage(secrets.token_bytes(16), unit * len(names.OWN) if empty else None)

    ledger = Ledger(root, token, unit)
    return ledger, ledger.join(fresh)


def _probe(root: Fd, name: str, direct: bool, room_bytes: int = 0) -> tuple[int, bool]:
    """Try all that the tier needs, with a file of at least ``room_bytes``.

    Returns the user id that our files get, and whether direct I/O works. Hard links are tried as
    well, because publishing may need them. Raises ``OSError`` and ``UnsupportedError``.
    """
    link = f"{name[:-1]}2"
    try:
        works = direct and direct_works(root, name)
        if not works:
            _unlink(root, name)
            open_below(root, name, CREATE_FLAGS)
        if room_bytes:
            fd = open_below(root, name, os.O_WRONLY)
            os.posix_fallocate(fd.number, 0, room_bytes)
        try:
            os.link(
                name, link, src_dir_fd=root.number, dst_dir_fd=root.number, follow_symlinks=False
            )
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            raise UnsupportedError(
                f"the filesystem has no hard links, which publishing needs: {error}"
            ) from error
        return os.stat(name, dir_fd=root.number).st_uid, works
    finally:
        _unlink(root, name)
        _unlink(root, link)


def _has_ledger(root: Fd, id_: bytes) -> bool:
    with suppress(OSError):
        page = read_page(root)
        return page is not None and page.id == id_
    return False


def _device(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def _identity(result: os.stat_result) -> tuple[int, int]:
    return result.st_dev, result.st_ino


def _mkdir(root: Fd, path: str) -> bool:
    """Make a directory. Returns False if something of that name is there."""
    try:
        os.mkdir(path, names.DIR_MODE, dir_fd=root.number)
    except FileExistsError:
        return False
    return True


def _list(root: Fd, path: str) -> list[str]:
    """The names in a directory below the root; none if it is not there."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC  # a link will do
        directory = Fd(os.open(path, flags, dir_fd=root.number))
    except FileNotFoundError:
        return []
    return os.listdir(directory.number)


def _unlink(root: Fd, path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path, dir_fd=root.number)


def is_regular(result: os.stat_result) -> bool:
    return stat.S_ISREG(result.st_mode)
