"""What a data directory holds, as all processes that share it agree: one page of a file, changed under flock.

Bytes are *published* (files, quarantine, directories) or *reserved* by a live process, for what it is writing. A
process reserves before it creates a file, so their sum is never less than what is on disk, whoever is killed when:

- killed before the file was published: its reservation becomes published bytes of nothing when it is reaped;
- killed between publishing and saying so: the reservation becomes what was published;

and ``reconcile`` takes the surplus away. A process reserves some ahead, and says only when it reserves again what
became of it, so that most writes don't touch the page at all: to others those bytes stay reserved. Removals are said
late too. A count may have noticed them by then, so each count that is taken over begins an *epoch*, and what was
removed in an earlier one is not subtracted any more: what the count had not noticed stays as surplus for the next.
A page that isn't whole (a machine crash) is started anew as *unknown*: nothing can be reserved until a scan has counted
what is there.
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

from kvstow.backends.disk.files import Fd
from kvstow.backends.disk.names import FILE_MODE, LEDGER, TOKEN_BYTES
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.layout import align_up

MAGIC: Final = b"KVSTOWL1"
PAGE_BYTES: Final = 4096
MAX_AHEAD_BYTES: Final = 64 << 20  # some 16 chunks
AHEAD_SHARE: Final = 256
LOCK_TRIES: Final = (
    500  # of 2 ms: the lock is held for microseconds, so a second means a holder that is stopped
)
LOCK_WAIT_S: Final = 0.002
_HEAD: Final = struct.Struct(
    "<8sIHH16sQQQ"
)  # magic, CRC32 of what follows, processes, epoch, id, Book's counts
_BODY_AT: Final = 12
_SLOT: Final = struct.Struct(f"<{TOKEN_BYTES}sQ")
MAX_PROCESSES: Final = (PAGE_BYTES - _HEAD.size) // _SLOT.size
_EPOCHS: Final = (
    1 << 16
)  # then they begin again: nobody keeps a removal to himself for as many counts
_UNKNOWN: Final = (1 << 64) - 1


@dataclass
class Book:
    """The page. ``added_bytes`` and ``removed_bytes`` only grow: they say what happened while someone counted."""

    id: bytes
    published_bytes: int | None = None  # None: unknown
    added_bytes: int = 0
    removed_bytes: int = 0
    reserved: dict[bytes, int] = field(default_factory=dict)  # by token, of each process
    epoch: int = 0  # counts taken over so far

    @property
    def used_bytes(self) -> int | None:
        return (
            None
            if self.published_bytes is None
            else self.published_bytes + sum(self.reserved.values())
        )

    def add(self, size: int) -> None:
        self.added_bytes += size
        if self.published_bytes is not None:
            self.published_bytes += size

    def remove(self, size: int) -> None:
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
    def unpack(cls, page: bytes) -> Book | None:
        """None: not a whole page of this format."""
        if len(page) != PAGE_BYTES or page[:8] != MAGIC:
            return None
        _, crc, count, epoch, id_, published, added, removed = _HEAD.unpack_from(page)
        if crc != zlib.crc32(page[_BODY_AT:]) or count > MAX_PROCESSES:
            return None
        slots = (_SLOT.unpack_from(page, _HEAD.size + i * _SLOT.size) for i in range(count))
        return cls(
            id_, None if published == _UNKNOWN else published, added, removed, dict(slots), epoch
        )


def peek(root: Fd) -> Book | None:
    """The page as it is, read without its lock; None: it is not whole. Raises ``OSError``."""
    file = Fd(
        os.open(
            LEDGER, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root.number
        )
    )
    return Book.unpack(os.pread(file.number, PAGE_BYTES, 0))


class LedgerGone(StoreUnavailable):
    """The file was removed, or replaced, under us: attach again."""


class Ledger:
    """This process's share in the page. Thread-safe; each call holds the lock for two small system calls.

    The file is opened anew each time: an open file that is written to would keep an operator from making the
    filesystem read-only, and one that was removed meanwhile would count for nobody.
    """

    def __init__(self, root: Fd, token: bytes, unit_bytes: int) -> None:
        self._root = root
        self._token = token
        self._unit = unit_bytes
        self._threads = threading.Lock()
        self._pause = threading.Event()
        self._ahead = 0  # reserved, and not given to any write
        self._settled = 0  # reserved as far as the page says, and published since
        self._removed = 0  # published as far as the page says, and removed since
        self.epoch = 0  # of the page when it was last seen; read it before removing something

    def rounded(self, size: int) -> int:
        """What a file of ``size`` bytes takes."""
        return align_up(size, self._unit)

    @contextmanager
    def book(self, *, fresh: Callable[[], Book] | None = None) -> Iterator[Book]:
        """The page, to read and change; written back at the end of the block.

        ``fresh`` makes a new one where there is none that is whole.
        """
        if not self._threads.acquire(timeout=LOCK_TRIES * LOCK_WAIT_S):
            raise StoreUnavailable("the ledger's lock was not to be had")
        file: Fd | None = None
        try:
            file = self._locked(os.O_CREAT if fresh else 0)
            page = os.pread(file.number, PAGE_BYTES, 0)
            book = Book.unpack(page) or (fresh() if fresh else None)
            if book is None:
                raise LedgerGone("the ledger is not whole")
            yield book
            if (changed := book.pack()) != page:
                self._write(file.number, changed)
        except LedgerGone:
            self._ahead = 0  # it is not, or no longer, in the page
            raise
        finally:
            file = None  # closing it unlocks, even while somebody keeps the error with its frames
            self._threads.release()

    @staticmethod
    def _write(file: int, page: bytes) -> None:
        """After a failure what this process holds is written off as published: it attaches under another token."""
        try:
            if os.pwrite(file, page, 0) != PAGE_BYTES:
                raise OSError(errno.EIO, "a page cut short")
        except OSError as error:
            raise LedgerGone(f"the ledger can't be written: {error}") from error

    def _locked(self, flags: int) -> Fd:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = Fd(os.open(LEDGER, flags, FILE_MODE, dir_fd=self._root.number))
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

    def join(self, fresh: Callable[[], Book]) -> Book:
        """Take part. Raises ``UnsupportedError`` when too many processes do."""
        with self.book(fresh=fresh) as book:
            if len(book.reserved) >= MAX_PROCESSES:
                raise UnsupportedError(
                    f"{MAX_PROCESSES} processes share the data directory already, which is the most"
                )
            book.reserved.setdefault(self._token, 0)
        return book

    def leave(self) -> None:
        with self.book() as book:
            self.settle(book)
            self._ahead = 0
            book.reserved.pop(self._token, None)

    def reserve(self, size: int, limit_bytes: int) -> int | None:
        """Reserve what a file of ``size`` bytes takes. 0: done; else the bytes lacking; None: usage is unknown."""
        need = self.rounded(size)
        with self._threads:
            if need <= self._ahead:
                self._ahead -= need
                return 0
        with self.book() as book:
            self.settle(book)
            if book.used_bytes is None:
                return None
            room = limit_bytes - book.used_bytes + self._ahead
            if room < need:
                return need - room
            taken = min(room, need + self.ahead_bytes(limit_bytes))
            book.reserved[self._token] += taken - self._ahead
            self._ahead = taken - need
            return 0

    @staticmethod
    def ahead_bytes(limit_bytes: int) -> int:
        """How much a process reserves ahead: of all that it keeps from others, a small part."""
        return min(MAX_AHEAD_BYTES, limit_bytes // AHEAD_SHARE)

    def publish(self, size: int) -> None:
        """What was reserved for a file of ``size`` bytes is there now."""
        with self._threads:
            self._settled += self.rounded(size)

    def release(self, size: int) -> None:
        """What was reserved for a file of ``size`` bytes is not needed."""
        with self._threads:
            self._ahead += self.rounded(size)

    def settle(self, book: Book) -> None:
        """Bring the page up to date."""
        if self._token not in book.reserved:
            raise LedgerGone("this process is not in the ledger")
        book.reserved[self._token] = max(0, book.reserved[self._token] - self._settled)
        book.add(self._settled)
        book.remove(self._removed if self.epoch == book.epoch else 0)
        self._settled, self._removed, self.epoch = 0, 0, book.epoch

    def add(self, size: int) -> None:
        with self.book() as book:
            book.add(size)

    def remove(self, size: int, epoch: int, unsaid_bytes: int = 0) -> None:
        """So much is there no longer; ``epoch`` is what it was before the first byte went. The page hears of it when
        more than ``unsaid_bytes`` have gathered, or with what it is told next."""
        with self._threads:
            self._removed += size if self.epoch == epoch else 0
            if self._removed <= unsaid_bytes:
                return
        self.look()

    def look(self) -> Book:
        with self.book() as book:
            self.settle(book)
        return book

    @property
    def used_bytes(self) -> int | None:
        """What is published and being written, what this process has reserved ahead left out."""
        used = self.look().used_bytes
        return None if used is None else used - self._ahead

    def reconcile(self, before: Book, counted_bytes: int) -> Book:
        """Take over a count of everything published that began when the page was ``before``.

        What others did meanwhile may or may not be in the count, so the published bytes are only moved into
        the range that they must be in; of a quiet directory the count itself.
        """
        with self.book() as book:
            self.settle(book)
            highest = counted_bytes + book.added_bytes - before.added_bytes
            lowest = (
                counted_bytes
                - (book.removed_bytes - before.removed_bytes)
                - sum(book.reserved.values())
            )
            now = highest if book.published_bytes is None else book.published_bytes
            book.published_bytes = max(0, lowest, min(now, highest))
            book.epoch = self.epoch = (book.epoch + 1) % _EPOCHS
        return book
