"""How many bytes a data directory holds, as all processes that share it agree: one page of a file.

The page is changed under flock. Bytes are *published* (files, quarantine, directories), or
*reserved* by a live process for what it is writing. A process reserves before it creates a file, so
the sum of both is never less than what is on disk, whoever is killed at any moment:

- killed before its file was published: the reservation is counted as published when the process
  is reaped;
- killed after that, and before it reported the file: the reservation was the published file.

A scan takes the surplus away: see ``reconcile``.

A process reserves some bytes ahead, and reports what became of them when it reserves again. So most
writes don't touch the page; until then those bytes stay reserved for all others. Removals are
reported late, too. A scan may have noticed them by then, so each scan that is taken over begins an
*epoch*, and a removal of an earlier epoch is not subtracted any more: what the scan had not noticed
stays as surplus until the next.

A page that isn't whole, after a crash of the machine, is started anew as *unknown*: nothing can be
reserved until a scan has counted what is there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvstow.backends.disk.files import READ_FLAGS, Fd, open_below
from kvstow.backends.disk.names import LEDGER, TOKEN_BYTES
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.layout import align_up

MAGIC: Final = b"KVSTOWL1"
PAGE_BYTES: Final = 4096
MAX_AHEAD_BYTES: Final = 64 << 20  # some 16 chunks
AHEAD_SHARE: Final = 256
LOCK_WAIT_S: Final = 0.002
LOCK_TRIES: Final = 500  # the lock is held for microseconds: after a second its holder is stopped
_HEAD: Final = struct.Struct("<8sIHH16sQQQ")  # magic, CRC32, processes, epoch, id, three counts
_BODY_AT: Final = 12  # the CRC32 is of all from here on
_SLOT: Final = struct.Struct(f"<{TOKEN_BYTES}sQ")
MAX_PROCESSES: Final = (PAGE_BYTES - _HEAD.size) // _SLOT.size
_EPOCHS: Final = 1 << 16  # then they begin again: no process keeps a removal for so many scans
_UNKNOWN: Final = (1 << 64) - 1


@dataclass
class LedgerPage:
    """The page's content.

    ``published_bytes`` is None while it is unknown. ``added_bytes`` and ``removed_bytes`` only
    grow: they tell a scan what happened meanwhile. ``reserved`` maps each process's token to its
    bytes; ``epoch`` counts the scans that were taken over.
    """

    id: bytes
    published_bytes: int | None = None
    added_bytes: int = 0
    removed_bytes: int = 0
    reserved: dict[bytes, int] = field(default_factory=dict)
    epoch: int = 0

    @property
    def used_bytes(self) -> int | None:
        """Published and reserved bytes together; None while they are unknown."""
        if self.published_bytes is None:
            return None
        return self.published_bytes + sum(self.reserved.values())

    def add(self, size: int) -> None:
        """Count ``size`` bytes as published."""
        self.added_bytes += size
        if self.published_bytes is not None:
            self.published_bytes += size

    def remove(self, size: int) -> None:
        """Count ``size`` published bytes as removed."""
        self.removed_bytes += size
        if self.published_bytes is not None:
            self.published_bytes = max(0, self.published_bytes - size)

    def pack(self) -> bytes:
        published = _UNKNOWN if self.published_bytes is None else self.published_bytes
        counts = (published, self.added_bytes, self.removed_bytes)
        head = _HEAD.pack(MAGIC, 0, len(self.reserved), self.epoch, self.id, *counts)
        slots = b"".join(_SLOT.pack(*slot) for slot in self.reserved.items())
        body = (head + slots).ljust(PAGE_BYTES, b"\0")[_BODY_AT:]
        return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def unpack(cls, data: bytes) -> LedgerPage | None:
        """The content of a page; None if it isn't whole, or not of this format."""
        if len(data) != PAGE_BYTES or data[:8] != MAGIC:
            return None
        _, crc, count, epoch, id_, published, added, removed = _HEAD.unpack_from(data)
        if crc != zlib.crc32(data[_BODY_AT:]) or count > MAX_PROCESSES:
            return None
        slots = (_SLOT.unpack_from(data, _HEAD.size + i * _SLOT.size) for i in range(count))
        return cls(
            id=id_,
            published_bytes=None if published == _UNKNOWN else published,
            added_bytes=added,
            removed_bytes=removed,
            reserved=dict(slots),
            epoch=epoch,
        )


def read_page(root: Fd) -> LedgerPage | None:
    """Read the page of a directory without its lock; None if it isn't whole. Raises ``OSError``."""
    file = open_below(root, LEDGER, READ_FLAGS)
    return LedgerPage.unpack(os.pread(file.number, PAGE_BYTES, 0))


class LedgerGone(StoreUnavailable):
    """The file was removed, or replaced, under this process: it must attach again."""


class Ledger:
    """This process's share in the page. Thread-safe; each call holds the lock for two small system
    calls.

    The file is opened anew each time. An open file that is written to would keep an operator from
    making the filesystem read-only, and one that was removed meanwhile would count for nobody else.
    """

    def __init__(self, root: Fd, token: bytes, unit_bytes: int) -> None:
        """``token`` names this process in the page.

        Sizes of files are rounded up to ``unit_bytes``.
        """
        self._root = root
        self._token = token
        self._unit_bytes = unit_bytes
        self._threads = threading.Lock()
        self._pause = threading.Event()
        self._ahead_bytes = 0  # reserved, and not given to any write
        self._published_bytes = 0  # reserved as the page says, and published since
        self._removed_bytes = 0  # published as the page says, and removed since
        self.epoch = 0  # of the page when it was last read; look at it before removing a file

    def rounded(self, size: int) -> int:
        """The bytes that a file of ``size`` bytes takes."""
        return align_up(size, self._unit_bytes)

    @contextmanager
    def page(self, *, new_page: Callable[[], LedgerPage] | None = None) -> Iterator[LedgerPage]:
        """Lock and read the page for the block, and write it back at its end if it has changed.

        ``new_page`` makes one where there is none that is whole. Raises ``LedgerGone`` and
        ``StoreUnavailable``.
        """
        if not self._threads.acquire(timeout=LOCK_TRIES * LOCK_WAIT_S):
            raise StoreUnavailable("another thread holds the ledger's lock")
        file: Fd | None = None
        try:
            file = self._open_locked(os.O_CREAT if new_page else 0)
            data = os.pread(file.number, PAGE_BYTES, 0)
            page = LedgerPage.unpack(data)
            if page is None and new_page is not None:
                page = new_page()
            if page is None:
                raise LedgerGone("the ledger is not whole")
            yield page
            changed = page.pack()
            if changed != data:
                self._write(file.number, changed)
        except LedgerGone:
            self._ahead_bytes = 0  # it is not, or no longer, in the page
            raise
        finally:
            file = None  # closing unlocks it, even while somebody keeps the error with its frames
            self._threads.release()

    @staticmethod
    def _write(file: int, data: bytes) -> None:
        """Write the page.

        Raises ``LedgerGone`` if that fails: this process must attach under another token, and what
        it has reserved is counted as published.
        """
        try:
            if os.pwrite(file, data, 0) != PAGE_BYTES:
                raise OSError(errno.EIO, "a page cut short")
        except OSError as error:
            raise LedgerGone(f"the ledger can't be written: {error}") from error

    def _open_locked(self, flags: int) -> Fd:
        try:
            file = open_below(self._root, LEDGER, os.O_RDWR | flags)
        except FileNotFoundError as error:
            raise LedgerGone("the ledger was removed") from error
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._pause.wait(LOCK_WAIT_S)
            else:
                return file
        raise StoreUnavailable("another process holds the ledger's lock")

    def join(self, new_page: Callable[[], LedgerPage]) -> LedgerPage:
        """Enter this process into the page.

        Raises ``UnsupportedError`` if too many share the directory.
        """
        with self.page(new_page=new_page) as page:
            if len(page.reserved) >= MAX_PROCESSES:
                raise UnsupportedError(
                    f"{MAX_PROCESSES} processes share the data directory already, which is the most"
                )
            page.reserved.setdefault(self._token, 0)
        return page

    def leave(self) -> None:
        """Take this process out of the page, and give back what it has reserved."""
        with self.page() as page:
            self.report_to(page)
            self._ahead_bytes = 0
            page.reserved.pop(self._token, None)

    def reserve(self, size: int, limit_bytes: int) -> int | None:
        """Reserve the bytes of a file of ``size`` bytes, within ``limit_bytes`` of all processes
        together.

        Returns 0 if they are reserved, else how many bytes are lacking; None if it is unknown how
        many are used.
        """
        need = self.rounded(size)
        with self._threads:
            if need <= self._ahead_bytes:
                self._ahead_bytes -= need
                return 0
        with self.page() as page:
            self.report_to(page)
            if page.used_bytes is None:
                return None
            room = limit_bytes - page.used_bytes + self._ahead_bytes
            if room < need:
                return need - room
            taken = min(room, need + self.ahead_bytes(limit_bytes))
            page.reserved[self._token] += taken - self._ahead_bytes
            self._ahead_bytes = taken - need
            return 0

    @staticmethod
    def ahead_bytes(limit_bytes: int) -> int:
        """The bytes that a process reserves ahead: a small part, because others can't use them."""
        return min(MAX_AHEAD_BYTES, limit_bytes // AHEAD_SHARE)

    def publish(self, size: int) -> None:
        """Take note that the file of ``size`` bytes for which bytes were reserved is there."""
        with self._threads:
            self._published_bytes += self.rounded(size)

    def release(self, size: int) -> None:
        """Take back what was reserved for a file of ``size`` bytes."""
        with self._threads:
            self._ahead_bytes += self.rounded(size)

    def report_to(self, page: LedgerPage) -> None:
        """Enter what this process has published and removed. Precondition: inside ``page``'s block.

        Raises ``LedgerGone`` if the process is not in the page.
        """
        if self._token not in page.reserved:
            raise LedgerGone("this process is not in the ledger")
        left_bytes = page.reserved[self._token] - self._published_bytes
        page.reserved[self._token] = max(0, left_bytes)
        page.add(self._published_bytes)
        if self.epoch == page.epoch:
            page.remove(self._removed_bytes)
        self._published_bytes = 0
        self._removed_bytes = 0
        self.epoch = page.epoch

    def add(self, size: int) -> None:
        """Count ``size`` bytes that were not reserved as published."""
        with self.page() as page:
            page.add(size)

    def remove(self, size: int, epoch: int, unreported_bytes: int = 0) -> None:
        """Count ``size`` bytes as removed; ``epoch`` is what it was before the first of them went.

        They are reported at once if more than ``unreported_bytes`` have gathered, else with the
        next report.
        """
        with self._threads:
            if self.epoch == epoch:
                self._removed_bytes += size
            if self._removed_bytes <= unreported_bytes:
                return
        self.report()

    def report(self) -> LedgerPage:
        """Bring the page up to date, and return it."""
        with self.page() as page:
            self.report_to(page)
        return page

    @property
    def used_bytes(self) -> int | None:
        """Published bytes and those being written, without what this process has reserved ahead;
        None: unknown."""
        used_bytes = self.report().used_bytes
        return None if used_bytes is None else used_bytes - self._ahead_bytes

    def reconcile(self, before: LedgerPage, counted_bytes: int) -> LedgerPage:
        """Take over a scan's count of everything published, begun when the page was ``before``.

        What other processes did meanwhile may or may not be in the count, so the published bytes
        are only moved into the range that they must be in. In a quiet directory that is the count
        itself.
        """
        with self.page() as page:
            self.report_to(page)
            removed_bytes = page.removed_bytes - before.removed_bytes
            highest = counted_bytes + page.added_bytes - before.added_bytes
            lowest = counted_bytes - removed_bytes - sum(page.reserved.values())
            now = highest if page.published_bytes is None else page.published_bytes
            page.published_bytes = max(0, lowest, min(now, highest))
            page.epoch = (page.epoch + 1) % _EPOCHS
            self.epoch = page.epoch
        return page
