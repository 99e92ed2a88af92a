"""One data directory: reads, writes, eviction, and keeping count."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.disk import files, names
from kvstow.backends.disk.access import DirectoryAccess
from kvstow.backends.disk.bad_files import BadFiles
from kvstow.backends.disk.index import ChunkFile, ChunkIndex, EvictionOrder, Look
from kvstow.backends.disk.mount import MountedDirectory, is_regular, reap
from kvstow.backends.disk.other_roots import other_roots
from kvstow.backends.disk.quarantine import quarantine
from kvstow.backends.disk.remove import remove_empty_namespace, remove_empty_namespaces
from kvstow.backends.disk.room import Room, VolumeLimits
from kvstow.backends.disk.scan import ScanResult, allocated_bytes, scan
from kvstow.layout import ALIGN
from kvstow.runtime import Clock

R = TypeVar("R")
logger = logging.getLogger("kvstow")

MAX_INTRODUCTIONS: Final = 8  # of a namespace that others remove, because nothing is in it yet
MAX_UNREADABLE_IN_A_ROW: Final = 8  # files that give an error; then it is the directory that fails
MAX_UNREADABLE_DIRECTORIES: Final = 16  # of files, in one scan; then it fails

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_LACKS_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Admit = Callable[[bytes], bool]
Describe = Callable[[bytes], Mapping[str, object]]


class DiskVolume:
    """Reads, writes and evicts in one data directory. Thread-safe; only the ledger's lock is held
    during I/O.

    Every fault of the filesystem is raised as ``StoreUnavailable``, except one that a single file
    gives: that chunk is a miss, see ``BadFiles``.
    """

    def __init__(
        self,
        path: str,
        limits: VolumeLimits,
        order: EvictionOrder,
        clock: Clock,
        *,
        describe: Describe,
        admit: Admit,
        direct: bool = True,
    ) -> None:
        self.path = path
        self.limits = limits
        self._clock = clock
        self._describe = describe
        self._admit = admit
        self.access: Final = DirectoryAccess(path, direct=direct, on_attached=self._attached)
        self._index = ChunkIndex(order)
        self._bad = BadFiles()
        self._room = Room(limits, self._index, self._bad)
        self._unreadable_in_a_row = 0  # files that gave an error since one was read or written
        self._logged_errors: set[int | None] = set()
        self._logged_incomplete_scan = False
        self._written: set[bytes] = set()  # namespaces; a handful
        self.scan_wanted = True
        self._lacked_bytes = 0  # of a write that found no room: ``try_writing`` must find it

    def _attached(self) -> None:
        """Forget what was known of the directory, which may be another one now."""
        self._bad.clear()
        self.scan_wanted = True

    def try_reading(self) -> None:
        """Raise ``StoreUnavailable`` if nothing can be read in the directory."""
        with self.access.operation("trying to read", reads_only=True) as mount:
            mount.check_readable()

    def try_writing(self) -> None:
        """Raise ``StoreUnavailable`` if nothing can be written, or there is still no room for what
        was lacking."""
        with self.access.operation("trying to write") as mount:
            mount.check_writable(self._lacked_bytes)
        self._lacked_bytes = 0
        self.scan_wanted = True

    # --- the contract, for one key ----------------------------------------------------------------

    def contains(self, namespace: bytes, digest: bytes) -> bool:
        if digest in self._bad:
            return False
        if self._index.has(digest):
            return True
        operation = self.access.operation("looking", reads_only=True)
        with operation as mount, self._index.look() as look:
            try:
                result = mount.stat(names.chunk_path(namespace, digest))
            except OSError as error:
                self._note_unreadable(mount, digest, error)
                return False
            return self._learn(mount, namespace, digest, result, look)

    def _learn(
        self,
        mount: MountedDirectory,
        namespace: bytes,
        digest: bytes,
        result: os.stat_result | None,
        look: Look,
    ) -> bool:
        """Take what a ``stat`` says into the index. Returns whether the chunk is there."""
        if result is None or not is_regular(result) or digest in self._bad:
            self._index.drop(digest)
            return False
        file = ChunkFile(digest, allocated_bytes(result, mount.ledger), result.st_mtime)
        self._index.add(namespace, [file], look)
        return self._index.has(digest)

    def read(self, namespace: bytes, digest: bytes, buffer: Buffer) -> Outcome:
        if digest in self._bad:
            return MISSING
        with self.access.operation("reading", reads_only=True) as mount:
            try:
                return self._read(mount, namespace, digest, buffer)
            except OSError as error:
                self._note_unreadable(mount, digest, error)
                return MISSING

    def _read(
        self, mount: MountedDirectory, namespace: bytes, digest: bytes, buffer: Buffer
    ) -> Outcome:
        path = names.chunk_path(namespace, digest)
        direct = mount.direct and files.aligned([buffer])
        opened = self._open(mount, path, direct)
        if opened is None:
            self._index.drop(digest)
            if mount.stat(path) is not None:
                self.set_aside(namespace, digest, "kind")
            return MISSING
        fd, length = opened
        if length > len(buffer):
            return REJECTED
        if direct and length % ALIGN:
            files.buffered(fd.number)
        read_bytes = self._transfer(mount, fd, [buffer[:length]], files.read_all)
        self._unreadable_in_a_row = 0
        now_s = self._clock.wall()
        if self._index.touch(digest, now_s):
            with suppress(OSError):  # recency is a help, not a duty
                os.utime(fd.number, (now_s, now_s))
        return Done(read_bytes)

    def _open(
        self, mount: MountedDirectory, path: str, direct: bool
    ) -> tuple[files.Fd, int] | None:
        """The chunk's file and its length; None: there is none, or it is not a regular file that we
        wrote."""
        try:
            flags = files.READ_FLAGS | (os.O_DIRECT if direct else 0)
            fd = files.open_below(mount.root, path, flags)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:  # a directory
                return self._open(mount, path, False)
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                return None
            raise
        result = os.fstat(fd.number)
        return (fd, result.st_size) if is_regular(result) and result.st_uid == mount.owner else None

    def note_unreadable(self, digest: bytes, error: OSError) -> None:
        """Remember a file that gave an error to a reader other than ``read``.

        Raises ``StoreUnavailable`` where it is not that file's.
        """
        with self.access.operation("reading", reads_only=True) as mount:
            self._note_unreadable(mount, digest, error)

    def _note_unreadable(self, mount: MountedDirectory, digest: bytes, error: OSError) -> None:
        """Remember that a chunk's file gives an error: a miss until it is replaced.

        Raises ``error`` where it is not that file's: this process lacks a resource, the directory
        can't be read either, or more than ``MAX_UNREADABLE_IN_A_ROW`` files failed one after the
        other.
        """
        if error.errno in _LACKS_RESOURCES:
            raise error
        mount.check_readable()
        self._bad.add(digest)
        self._unreadable_in_a_row += 1
        if error.errno not in self._logged_errors:
            self._logged_errors.add(error.errno)
            logger.warning(
                "A chunk's file in %s can't be read, it is a miss until the chunk is stored anew "
                "(others with the same error are not logged): %s",
                self.path,
                error,
            )
        if self._unreadable_in_a_row > MAX_UNREADABLE_IN_A_ROW:
            raise error

    def write(self, namespace: bytes, digest: bytes, parts: Sequence[Buffer]) -> Outcome:
        size = sum(map(len, parts))
        path = names.chunk_path(namespace, digest)
        with self.access.operation("writing") as mount:
            with self._index.look() as look:
                there = mount.stat(path)
                known = self._learn(mount, namespace, digest, there, look)
            if known or not self._admit(digest):
                return REJECTED
            if there is not None:
                if is_regular(there) and digest not in self._bad:
                    return REJECTED  # it is being removed
                self.set_aside(namespace, digest, "kind")
            if not self._room.reserve(mount, size):
                self.scan_wanted = True  # what fills the directory is not known here
                return REJECTED
            if not self._write_new(mount, namespace, path, parts, size):
                return REJECTED
            self._written.add(namespace)
            self._bad.discard(digest)
            self._unreadable_in_a_row = 0
            file = ChunkFile(digest, mount.ledger.rounded(size), self._clock.wall())
            self._index.add(namespace, [file])
            return Done(size)

    def _write_new(
        self,
        mount: MountedDirectory,
        namespace: bytes,
        path: str,
        parts: Sequence[Buffer],
        size: int,
    ) -> bool:
        """Write a temporary file, for which room is reserved, and publish it.

        Returns False if ``path`` is taken.
        """
        published = False
        temporary = mount.temporary()
        direct = mount.direct and files.aligned(parts)
        flags = files.CREATE_FLAGS | (os.O_DIRECT if direct else 0)
        try:
            fd = files.open_below(mount.root, temporary, flags)
            self._transfer(mount, fd, parts, files.write_all)
            published = self._publish(mount, temporary, path, namespace)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._lacked_bytes = size
            raise
        finally:
            if published:
                mount.ledger.publish(size)
            else:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=mount.root.number)
                mount.ledger.release(size)
        return published

    def delete(self, namespace: bytes, digest: bytes) -> None:
        with self.access.operation("deleting") as mount:
            self._room.delete(mount, namespace, digest)

    def set_aside(self, namespace: bytes, digest: bytes, why: str) -> bool:
        """Move a bad file to the quarantine, or remember it as bad where the filesystem is
        read-only.

        Returns False if it was moved or remembered before.
        """
        with self.access.operation("quarantining") as mount:
            self._index.begin_removal(digest)
            try:
                path = names.chunk_path(namespace, digest)
                moved = quarantine(mount, path, digest, why, self.limits.size_bytes)
                self._bad.discard(digest)
                return moved
            except OSError as error:
                logger.warning("A bad file could not be moved aside in %s: %s", self.path, error)
                return self._bad.add(digest)
            finally:
                self._index.end_removal(digest)

    # --- pieces of it -----------------------------------------------------------------------------

    def _transfer(
        self,
        mount: MountedDirectory,
        fd: files.Fd,
        parts: Sequence[Buffer],
        move: Callable[[int, Sequence[Buffer]], int],
    ) -> int:
        """Move the bytes with ``move``; buffered from now on if the filesystem refuses direct I/O
        after all."""
        try:
            return move(fd.number, parts)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if mount.direct:
                mount.direct = False
                logger.warning("Direct I/O is refused in %s: buffered from here on", self.path)
            files.buffered(fd.number)
            return move(fd.number, parts)

    def _publish(
        self, mount: MountedDirectory, temporary: str, path: str, namespace: bytes
    ) -> bool:
        """Give the file its name. Returns False if another file has it."""

        def attempt() -> bool:
            try:
                files.rename_new(mount.root.number, temporary, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._make_namespace(mount, namespace, path)
                raise

        return _retry_while_removed(attempt)

    def other_roots(self, namespace: bytes, root: str) -> dict[str, str]:
        with self.access.operation("looking at namespaces") as mount:
            return other_roots(mount, self._describe(namespace), root, self._clock.wall())

    def register_namespace(self, namespace: bytes, root: str) -> dict[str, str]:
        """Records that a namespace is in use, before anything is written to it.

        Returns what ``other_roots`` finds afterwards.
        """
        with self.access.operation("registering a namespace") as mount:
            self._written.add(namespace)
            path = names.namespace_json(namespace)
            _retry_while_removed(lambda: self._make_namespace(mount, namespace, path))
        return self.other_roots(namespace, root)

    def unregister_namespace(self, namespace: bytes) -> None:
        with self.access.operation("unregistering a namespace") as mount:
            remove_empty_namespace(mount, namespace.hex())

    def _make_namespace(self, mount: MountedDirectory, namespace: bytes, target: str) -> None:
        """Make the directories above ``target``, and the ``namespace.json`` that people read."""
        path = names.namespace_json(namespace)
        mount.ledger.add(mount.ledger.rounded(1) * mount.make_directories(target))
        if mount.stat(path) is not None:
            return
        text = {
            "namespace": namespace.hex(),
            "created": self._clock.wall(),
            **self._describe(namespace),
        }
        data = memoryview(msgspec.json.format(msgspec.json.encode(text), indent=2))
        temporary = mount.temporary()
        root = mount.root.number
        fd = files.open_below(mount.root, temporary, files.CREATE_FLAGS)
        try:
            files.write_all(fd.number, [data])
            files.rename_new(root, temporary, path)
            mount.ledger.add(mount.ledger.rounded(1))
        except OSError as error:
            os.unlink(temporary, dir_fd=root)
            if not isinstance(error, FileExistsError):
                raise

    # --- background -------------------------------------------------------------------------------

    def scan(self, stop: threading.Event, pause_s: float = 0.0) -> ScanResult | None:
        """Count and index everything, take over what dead processes had reserved, and shrink to the
        limit.

        Waits ``pause_s`` seconds between directories of files. Returns None if ``stop`` was set.
        """
        self.scan_wanted = False
        count: ScanResult | None = None
        try:
            with self.access.operation("scanning") as mount:
                count = self._scan(mount, stop, pause_s)
        finally:
            self.scan_wanted = self.scan_wanted or count is None
        return count

    def _scan(
        self, mount: MountedDirectory, stop: threading.Event, pause_s: float
    ) -> ScanResult | None:
        reap(mount)
        before = mount.ledger.report()
        self._index.begin_scan()
        with self._index.look() as look:
            count = scan(
                mount.root,
                mount.ledger,
                lambda namespace, chunks: self._index.add(namespace, chunks, look),
                stop=stop,
                pause_s=pause_s,
                max_unreadable=MAX_UNREADABLE_DIRECTORIES,
            )
        if count is None:
            return None
        complete = count.unreadable == 0
        self._index.end_scan(complete=complete)
        if not complete and not self._logged_incomplete_scan:
            self._logged_incomplete_scan = True
            logger.warning(
                "Some directories of chunks in %s can't be read (%d): they are not evicted",
                self.path,
                count.unreadable,
            )
        used_bytes = before.used_bytes
        if complete or used_bytes is None:
            used_bytes = mount.ledger.reconcile(before, count.bytes).used_bytes
        if complete:
            empty = [one.name for one in count.namespaces if not one.chunks]
            unused = [name for name in empty if bytes.fromhex(name) not in self._written]
            remove_empty_namespaces(mount, unused, self._clock.wall())
        self._room.shrink_to_limit(mount, used_bytes or 0, stop)
        return count

    def reap(self) -> None:
        """Clear up after processes that are dead.

        What they had reserved may be more than they wrote, or they had removed more than they said,
        so a scan is wanted then.
        """
        with self.access.operation("clearing up") as mount:
            if reap(mount):
                self.scan_wanted = True

    @property
    def used_bytes(self) -> int | None:
        """What all processes hold in the directory; None while it is not known, after a crash."""
        with self.access.operation("looking") as mount:
            return mount.ledger.used_bytes


def _retry_while_removed(call: Callable[[], R]) -> R:
    """The value of ``call``, which makes a namespace: another process's scan may find it empty and
    remove it."""
    for _ in range(MAX_INTRODUCTIONS - 1):
        with suppress(FileNotFoundError):
            return call()
    return call()
