"""The scrub: it reads every chunk in the background and reports those that are bad, before a
request meets them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvstow.backends.disk import files, names
from kvstow.backends.disk.check import Check
from kvstow.backends.disk.files import Fd
from kvstow.backends.disk.mount import MountedDirectory, is_regular, try_lock
from kvstow.backends.disk.scan import list_directory, namespaces

SAVE_EVERY: Final = 16  # files between two saves of the cursor, read again after a restart at most
CURSOR_BYTES: Final = 256


class VerifyResult(NamedTuple):
    """Whether a chunk's file is whole, and how many bytes were read to know that."""

    namespace: bytes
    digest: bytes
    good: bool
    read_bytes: int


def chunks_after(root: Fd, cursor: str, *, skip_unreadable: bool = False) -> Iterator[str]:
    """The paths of all chunks in order, beginning after the path ``cursor``, or at the first if it
    is empty.

    A directory of files that can't be read is left out if ``skip_unreadable``, else it raises
    ``OSError``.
    """
    for namespace in namespaces(root):
        for first in names.DIGITS:
            for second in names.DIGITS:
                directory = f"{namespace}/{first}/{second}"
                if f"{directory}/~" < cursor:
                    continue
                try:
                    listed = [entry.name for entry in list_directory(root, directory)]
                except OSError:
                    if not skip_unreadable:
                        raise
                    continue
                for name in sorted(listed):
                    path = f"{directory}/{name}"
                    if names.digest_of(name) and path > cursor:
                        yield path


def digest_in(path: str) -> bytes:
    """The digest in the name of a chunk's file, whose path came from ``chunks_after``."""
    digest = names.digest_of(path.rsplit("/", 1)[1])
    assert digest is not None, "only chunks' files are listed"
    return digest


def verify(mount: MountedDirectory, path: str, check: Check) -> VerifyResult | None:
    """Check one chunk's file. Returns None if it is gone, or is not a file. Raises ``OSError``.

    Its time of last use does not change.
    """
    namespace = bytes.fromhex(path[:64])
    digest = digest_in(path)
    try:
        flags = files.READ_FLAGS | (os.O_DIRECT if mount.direct else 0)
        fd = files.open_below(mount.root, path, flags)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL):
            return None
        raise
    result = os.fstat(fd.number)
    if not is_regular(result):
        return None
    read_bytes = 0

    def read(at: int, buffer: memoryview) -> int:
        nonlocal read_bytes
        if not files.aligned([buffer]):
            files.buffered(fd.number)
        got = files.read_all(fd.number, [buffer], at)
        read_bytes += got
        return got

    good = check(digest, result.st_size, read)
    return VerifyResult(namespace, digest, good, read_bytes)


class Scrub:
    """Checks the chunks of one directory round and round, beginning where the last process stopped.

    One thread.
    """

    def __init__(
        self,
        check: Check,
        bad: Callable[[bytes, bytes], None],
        unreadable: Callable[[bytes, OSError], None],
    ) -> None:
        """``bad`` is called with namespace and digest of a chunk that is not whole, ``unreadable``
        with the digest of one whose file gives an error; it raises the error if it is not that
        file's."""
        self._check = check
        self._bad = bad
        self._unreadable = unreadable
        self._lock: Fd | None = None
        self._mount: MountedDirectory | None = None
        self._paths: Iterator[str] = iter(())
        self._unsaved = 0

    def step(self, mount: MountedDirectory, budget_bytes: int, stop: threading.Event) -> int:
        """Check files until ``budget_bytes`` are read, or the round ends. Returns the bytes read.

        Returns 0 while another process scrubs this directory, because one is enough. Raises
        ``OSError``.
        """
        if not self._lock_cursor(mount):
            return 0
        done = 0
        while done < budget_bytes and not stop.is_set():
            path = next(self._paths, None)
            if path is None:
                self._save("")
                self._paths = chunks_after(mount.root, "", skip_unreadable=True)
                break
            try:
                result = verify(mount, path, self._check)
            except OSError as error:
                self._unreadable(digest_in(path), error)
                continue
            if result is not None:
                done += result.read_bytes or 1
                if not result.good:
                    self._bad(result.namespace, result.digest)
            self._unsaved += 1
            if self._unsaved >= SAVE_EVERY:
                self._save(path)
        return done

    def _lock_cursor(self, mount: MountedDirectory) -> bool:
        """Lock the cursor's file, and begin at the cursor.

        Returns False if another process has it locked.
        """
        if self._mount is mount and self._lock is not None:
            return True
        fd = try_lock(mount.root, names.SCRUB_CURSOR, os.O_CREAT)
        if fd is None:
            return False
        self._lock, self._mount = fd, mount
        cursor = os.pread(fd.number, CURSOR_BYTES, 0).decode("ascii", "replace").strip()
        self._paths = chunks_after(mount.root, cursor, skip_unreadable=True)
        return True

    def _save(self, cursor: str) -> None:
        assert self._mount is not None
        self._unsaved = 0
        fd = files.open_below(self._mount.root, names.SCRUB_CURSOR, os.O_WRONLY)
        os.pwrite(fd.number, cursor.ljust(CURSOR_BYTES).encode(), 0)
