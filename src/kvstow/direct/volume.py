"""Creates, recognises and locks the files or block devices of direct storage.

Without ``direct.format`` only an empty file, or one that begins with a kvstow superblock, is
written to. A file whose superblock has another geometry starts empty.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from kvstow.direct.geometry import RECORD_BYTES, SUPERBLOCK_BYTES, Geometry
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import align_up

logger = logging.getLogger("kvstow")

MAGIC: Final = b"KVSTOWV1"
FILE_NAME: Final = "kvstow-direct-{engine}-{shard}"
LOCK_TIMEOUT_S: Final = 30.0  # an engine whose server was killed may live on for a while
_LOCK_RETRY_S: Final = 0.5
_HEAD: Final = struct.Struct("<8s16sIIQQQ")
_CHECKSUM_BYTES: Final = 16
_FILES: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_ZEROS: Final = bytes(1 << 20)


class Superblock(NamedTuple):
    """The first page of a file. ``slots`` is 0 while the file is being formatted."""

    set_id: bytes
    shard: int
    shards: int
    slots: int
    extent_bytes: int
    offset: int

    def pack(self) -> bytes:
        head = _HEAD.pack(MAGIC, *self)
        page = head + bytes(SUPERBLOCK_BYTES - len(head) - _CHECKSUM_BYTES)
        return page + xxh3_128_digest(page)


def read_superblock(fd: int) -> Superblock | None:
    """Reads a file's superblock. None: the file is not kvstow's."""
    page = mmap.mmap(-1, SUPERBLOCK_BYTES)  # aligned, as direct I/O wants it
    if os.preadv(fd, [page], 0) != SUPERBLOCK_BYTES or page[:8] != MAGIC:
        return None
    if xxh3_128_digest(page[:-_CHECKSUM_BYTES]) != page[-_CHECKSUM_BYTES:]:
        return None
    return Superblock(*_HEAD.unpack_from(page)[1:])


class Volume(NamedTuple):
    """The open, locked files, one for each shard. ``fds[0]`` holds the table."""

    paths: tuple[str, ...]
    fds: tuple[int, ...]
    set_id: bytes


def paths_for(given: Sequence[str], shards: int, engine: int) -> tuple[str, ...]:
    """Returns the file or block device of each shard.

    ``engine`` is the index of this engine among the host's data parallel engines. A single path
    that is neither a file nor a block device is a directory for all shards. Otherwise ``given``
    names one directory, file or block device for each shard of each engine. Raises
    ``SettingsError``.
    """
    if len(given) == 1 and not _is_volume(given[0]):
        return tuple(_within(given[0], engine, shard) for shard in range(shards))
    mine = given[engine * shards : (engine + 1) * shards]
    if len(mine) < shards:
        raise SettingsError(
            f"direct.path names {len(given)} files; {shards} ranks of {engine + 1} engines on this host need one each: "
            "name as many, or one directory"
        )
    return tuple(
        _within(path, engine, shard) if os.path.isdir(path) else path
        for shard, path in enumerate(mine)
    )


def device_bytes(path: str) -> int | None:
    """Returns the bytes of a block device.

    None: ``path`` isn't one. Raises ``SettingsError`` where it can't be read.
    """
    try:
        if not stat.S_ISBLK(os.stat(path).st_mode):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(f"direct.path {path} can't be opened: {error.strerror}") from error
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def open_volume(
    paths: Sequence[str], geometry: Geometry, *, consent: bool, lock_timeout_s: float
) -> Volume:
    """Locks every file, and formats them all unless they are one set of this geometry.

    ``consent`` allows formatting of what isn't kvstow's. Raises ``SettingsError``.
    """
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise SettingsError(
            f"direct.path: {', '.join(paths)}: each rank needs a file or block device of its own"
        )
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(_open(path))
            _lock(fds[-1], path, lock_timeout_s)
        blocks = [read_superblock(fd) for fd in fds]
        for path, fd, block in zip(paths, fds, blocks, strict=True):
            if block is None and not consent and not _empty_file(fd):
                raise SettingsError(
                    f"direct.path {path} holds something that isn't kvstow's: name another, or set direct.format to "
                    "true to use it; what is on it is lost then"
                )
        for fd in fds:
            if _regular(fd):
                os.fchmod(fd, 0o600)
        set_id = blocks[0].set_id if blocks[0] is not None else b""
        if blocks == [_superblock(set_id, geometry, shard) for shard in range(len(fds))]:
            for fd, path, shard in zip(fds, paths, range(len(fds)), strict=True):
                # Does nothing unless the file was truncated.
                _allocate(fd, path, geometry.file_bytes(shard))
            return Volume(tuple(paths), tuple(fds), set_id)
        if any(block is not None and block.slots for block in blocks):
            logger.warning(
                "Direct storage starts empty: size, KV layout or ranks are not those it was made for"
            )
        return Volume(tuple(paths), tuple(fds), _format(fds, paths, geometry))
    except OSError as error:
        _close(fds)
        raise SettingsError(f"direct.path {','.join(paths)} can't be used: {error}") from error
    except SettingsError:
        _close(fds)
        raise


def open_extents(path: str, set_id: bytes, geometry: Geometry, shard: int) -> int:
    """Opens a worker's shard for direct I/O and returns the descriptor.

    Raises ``UnsupportedError`` where it isn't the file that the engine opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        raise UnsupportedError(
            f"direct.path {path} can't be opened for direct I/O: {error.strerror}"
        ) from error
    try:
        # Through this descriptor: by its path it might be another file, put there in between.
        if read_superblock(fd) == _superblock(set_id, geometry, shard):
            return fd
    except OSError as error:
        os.close(fd)
        raise UnsupportedError(
            f"direct.path {path} can't be read with direct I/O: {error.strerror}"
        ) from error
    os.close(fd)
    raise UnsupportedError(
        f"direct.path {path} isn't shard {shard} of the set that this engine opened"
    )


def _is_volume(path: str) -> bool:
    with suppress(OSError):
        mode = os.stat(path).st_mode
        return stat.S_ISREG(mode) or stat.S_ISBLK(mode)
    return False


def _within(directory: str, engine: int, shard: int) -> str:
    return str(Path(directory) / FILE_NAME.format(engine=engine, shard=shard))


def _open(path: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        # A block device that is mounted, or part of a RAID or LVM, refuses O_EXCL.
        more = os.O_EXCL if device_bytes(path) is not None else os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(path, _FILES | more, 0o600)
    except OSError as error:
        raise SettingsError(f"direct.path {path} can't be opened: {error.strerror}") from error
    try:
        if not (_regular(fd) or stat.S_ISBLK(os.fstat(fd).st_mode)):
            raise SettingsError(f"direct.path {path} is neither a file nor a block device")
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
    except SettingsError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        why = "no direct I/O on this filesystem" if error.errno == errno.EINVAL else error.strerror
        raise SettingsError(f"direct.path {path} can't be used: {why}") from error
    return fd


def _lock(fd: int, path: str, timeout_s: float) -> None:
    never = threading.Event()
    for _ in range(max(1, int(timeout_s / _LOCK_RETRY_S))):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            never.wait(min(_LOCK_RETRY_S, timeout_s))
            continue
        return
    raise SettingsError(
        f"direct.path {path} is in use by another engine, perhaps of a server that was killed: end it, or name another"
    )


def _regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _empty_file(fd: int) -> bool:
    return _regular(fd) and os.fstat(fd).st_size == 0


def _superblock(set_id: bytes, geometry: Geometry, shard: int) -> Superblock:
    sizes = geometry.extent_bytes
    return Superblock(
        set_id, shard, len(sizes), geometry.slots, sizes[shard], geometry.offsets[shard]
    )


def _format(fds: Sequence[int], paths: Sequence[str], geometry: Geometry) -> bytes:
    """Makes all files an empty set. After a kill in between they are kvstow's, but no set."""
    set_id = secrets.token_bytes(16)
    for shard, (fd, path) in enumerate(zip(fds, paths, strict=True)):
        os.pwrite(fd, _superblock(set_id, geometry, shard)._replace(slots=0).pack(), 0)
        if _regular(fd):
            os.ftruncate(fd, min(os.fstat(fd).st_size, geometry.file_bytes(shard)))
        try:
            _allocate(fd, path, geometry.file_bytes(shard))
        except SettingsError:
            if _regular(fd):
                os.ftruncate(fd, SUPERBLOCK_BYTES)
            raise
    table = align_up(geometry.slots * RECORD_BYTES)
    for at in range(0, table, len(_ZEROS)):
        os.pwrite(fds[0], _ZEROS[: table - at], SUPERBLOCK_BYTES + at)
    os.fsync(fds[0])
    for shard, fd in enumerate(fds):
        os.pwrite(fd, _superblock(set_id, geometry, shard).pack(), 0)
        os.fsync(fd)
    return set_id


def _allocate(fd: int, path: str, size_bytes: int) -> None:
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        if (there := os.lseek(fd, 0, os.SEEK_END)) < size_bytes:
            raise SettingsError(
                f"direct.path {path} has {there:,} bytes, direct.size asks for {size_bytes:,} of it"
            )
        return
    room = os.statvfs(path)
    free_bytes = room.f_bavail * room.f_frsize
    try:
        if size_bytes - os.fstat(fd).st_blocks * 512 > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise SettingsError(
            f"direct.size: no {size_bytes:,} bytes for {path} ({error.strerror}), {free_bytes:,} are free there: set "
            "direct.size lower"
        ) from error


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
