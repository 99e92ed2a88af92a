"""The disk tier's directories: there, writable, with room, on a disk, and how fast."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from kvstow.backends.disk import files
from kvstow.backends.disk.filesystem import Filesystem, filesystem_of
from kvstow.backends.disk.ledger import read_page
from kvstow.backends.disk.settings import DiskSettings
from kvstow.backends.disk.stored import check_stored
from kvstow.backends.result import PlannedCheck, Result, failed, ok, warning
from kvstow.fields.values import format_size
from kvstow.pool.hostmem import private_memory
from kvstow.runtime import Clock

STORED_S: Final = 10.0
DISK_S: Final = 20.0
PIECE_BYTES: Final = 4 << 20  # of a chunk's size
SAMPLE_BYTES: Final = 64 << 20  # written and read; less where SAMPLE_S comes first
SAMPLE_S: Final = 2.0  # each way
ROOM_FOR_SAMPLE: Final = 4 * SAMPLE_BYTES
SLOW_BYTES_S: Final = 500e6  # a GPU computes many models' KV faster
NETWORK: Final = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "beegfs",
    "gpfs",
    "9p",
    "afs",
    "ocfs2",
    "gfs2",
]
MEMORY: Final = frozenset(("tmpfs", "ramfs"))
PATHS: Final = {"disk.size": "disk.paths", "direct.size": "direct.path"}
LACKING: Final = {
    "disk.size": "chunks make room before the size is reached: set disk.size to less",
    "direct.size": "files are taken whole at the start: unless they are there already, set direct.size to less",
}
_NO_ACCESS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def checks(section: DiskSettings, clock: Clock, hash_seed: str | None) -> Iterator[PlannedCheck]:
    """The checks of ``kvstow doctor`` for each directory."""
    paths = section.paths or ()
    for path in paths:
        run = partial(check_stored, path, hash_seed)
        yield PlannedCheck(f"chunks in {path}", STORED_S, run)
    for path in paths:
        part_bytes = (section.size or 0) // len(paths)
        measure_path = partial(check_path, path, part_bytes, section.min_free, clock)
        yield PlannedCheck(f"disk {path}", DISK_S, measure_path)


class Measured(NamedTuple):
    direct: bool
    links: bool
    locks: bool
    write_bytes_s: float | None  # None: no room for a sample
    read_bytes_s: float | None


def check_path(
    path: str, size_bytes: int, min_free_bytes: int, clock: Clock, setting: str = "disk.size"
) -> Iterator[Result]:
    """``size_bytes``: this path's part of ``setting``; 0: unset.

    Leaves nothing behind, and makes no directory.
    """
    folder = _existing(path)
    if (
        setting == "direct.size"
        and folder == path
        and not os.path.isdir(path)
        and os.access(path, os.R_OK | os.W_OK)
    ):
        yield ok("disk path", f"{path}: a file or device, readable and writable")
        return
    if not os.path.isdir(folder):
        yield failed(
            "disk path", f"{path}: {folder} is no directory", f"set {PATHS[setting]} to a directory"
        )
        return
    mount = filesystem_of(folder)
    if folder != path and mount is not None and mount.at == "/":
        found = (
            f"{path}: not there, and {folder} is on the filesystem at /, which chunks would fill"
        )
        yield warning(
            "disk path", found, f"mount its disk; if / is meant: mkdir -p {shlex.quote(path)}"
        )
        if os.access(folder, os.W_OK | os.X_OK):
            return
    else:
        yield from _filesystem(path, mount)
    try:
        measured = measure(folder, clock)
    except OSError as error:
        fix = (
            "make it writable for the user that vLLM runs as"
            if error.errno in _NO_ACCESS
            else "see the kernel's log"
        )
        yield failed("disk path", f"{path} can't be written: {error.strerror}", fix)
        return
    there = "writable" if folder == path else f"not there yet, {folder} is writable"
    yield ok("disk path", f"{path}: {there}")
    yield from _room(path, folder, size_bytes, min_free_bytes, setting)
    yield from _quality(path, measured)


def _existing(path: str) -> str:
    """``path``, or the nearest directory above it that is there."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _filesystem(path: str, mount: Filesystem | None) -> Iterator[Result]:
    if mount is None:
        return
    shown = f"{path} is on {mount.kind} ({mount.source})"
    if mount.kind in NETWORK or (mount.kind.startswith("fuse.") and mount.kind != "fuse.overlayfs"):
        yield warning(
            "filesystem",
            f"{shown}: over a network each lookup waits, and a hang takes the directory out of use",
            "use a local disk; to share KV between hosts use redis.url",
        )
    elif mount.kind in MEMORY:
        yield warning(
            "filesystem", f"{shown}, which is memory", "use a disk; for memory there is memory.size"
        )
    elif "overlay" in mount.kind:
        yield warning(
            "filesystem",
            f"{shown}, a container's own layer, which goes with it",
            "mount a volume there",
        )
    else:
        yield ok("filesystem", shown)


def _room(
    path: str, folder: str, size_bytes: int, min_free_bytes: int, setting: str
) -> Iterator[Result]:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    lacking = size_bytes + min_free_bytes - free - used_bytes(path)
    shown = f"{path}: {format_size(free)} free"
    if lacking > 0:
        bounds = f"{setting} and disk.min_free" if setting == "disk.size" else setting
        found = f"{shown}; with its part of {bounds} {format_size(lacking)} are lacking"
        yield warning("disk room", found, LACKING[setting])
    else:
        part = f", its part of {setting} is {format_size(size_bytes)}" if size_bytes else ""
        yield ok("disk room", f"{shown}{part}")


def used_bytes(path: str) -> int:
    """What the ledger of a directory says that chunks take there already; 0: no or no whole ledger."""
    with suppress(OSError):
        book = read_page(files.open_directory(path))
        return (book.used_bytes or 0) if book is not None else 0
    return 0


def _quality(path: str, measured: Measured) -> Iterator[Result]:
    for works, what in ((measured.links, "hard links"), (measured.locks, "file locks")):
        if not works:
            yield failed(
                "disk path", f"{path}: the filesystem has no {what}", "use ext4, XFS or Btrfs"
            )
    if measured.direct:
        yield ok("direct I/O", f"{path}: works")
    else:
        yield warning(
            "direct I/O",
            f"{path}: refused; reads and writes go through the page cache, with several times the CPU",
            "use ext4, XFS or Btrfs on a local disk",
        )
    if measured.write_bytes_s is None or measured.read_bytes_s is None:
        yield warning(
            "disk speed", f"{path}: not measured, the filesystem is nearly full", "make room"
        )
        return
    speeds = f"{path}: reads {measured.read_bytes_s / 1e6:,.0f} MB/s, writes {measured.write_bytes_s / 1e6:,.0f} MB/s"
    if measured.read_bytes_s < SLOW_BYTES_S:
        yield warning(
            "disk speed", f"{speeds}: reading may take longer than computing", "use local NVMe"
        )
    else:
        yield ok("disk speed", speeds)


def measure(folder: str, clock: Clock) -> Measured:
    """With a file that has lost its name before anything long is done with it.

    Raises ``OSError``.
    """
    name = f".kvstow-doctor-{secrets.token_hex(8)}"
    root = files.open_directory(folder)
    try:
        direct = files.direct_works(root, name)
        fd = files.open_below(root, name, os.O_RDWR | os.O_CREAT)
        links = _works(
            lambda: os.link(name, f"{name}-2", src_dir_fd=root.number, dst_dir_fd=root.number)
        )
        locks = _works(lambda: fcntl.flock(fd.number, fcntl.LOCK_EX | fcntl.LOCK_NB))
    finally:
        for each in (name, f"{name}-2"):
            with suppress(OSError):
                os.unlink(each, dir_fd=root.number)
    room = os.fstatvfs(fd.number)
    if room.f_bavail * room.f_frsize < ROOM_FOR_SAMPLE:
        return Measured(direct, links, locks, None, None)
    if direct:
        fcntl.fcntl(fd.number, fcntl.F_SETFL, os.O_DIRECT)
    piece = private_memory(PIECE_BYTES, "sample", at_once=True)
    piece[:] = os.urandom(4096) * (PIECE_BYTES // 4096)
    written, write_s = _sample(os.pwritev, fd.number, [piece], clock, SAMPLE_BYTES)
    began = clock.monotonic()
    if not direct:
        os.fdatasync(fd.number)
    os.posix_fadvise(fd.number, 0, 0, os.POSIX_FADV_DONTNEED)
    write_s += clock.monotonic() - began
    read, read_s = _sample(os.preadv, fd.number, [piece], clock, written)
    return Measured(direct, links, locks, written / max(write_s, 1e-9), read / max(read_s, 1e-9))


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _sample(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    clock: Clock,
    most: int,
) -> tuple[int, float]:
    """Bytes moved and the seconds that took: at most ``most``, for at most ``SAMPLE_S``."""
    began, at = clock.monotonic(), 0
    while at < most and clock.monotonic() - began < SAMPLE_S:
        moved = move(fd, views, at)
        if moved <= 0:
            break
        at += moved
    return at, clock.monotonic() - began
