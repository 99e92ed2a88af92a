"""One data directory: reads, writes, eviction, and keeping count."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import msgspec

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.disk import files, names
from kvstow.backends.disk.index import Found, Index, Order
from kvstow.backends.disk.ledger import LedgerGone
from kvstow.backends.disk.mount import Mount, attach, faults, is_regular, reap
from kvstow.backends.disk.quarantine import quarantine, shrink
from kvstow.backends.disk.remove import awaited, remove_chunk, remove_empty_namespace
from kvstow.backends.disk.rivals import rivals
from kvstow.backends.disk.scan import Count, allocated_bytes, scan
from kvstow.backends.disk.turn import Turns
from kvstow.errors import StoreUnavailable
from kvstow.layout import ALIGN
from kvstow.runtime import Clock

R = TypeVar("R")

logger = logging.getLogger("kvstow")

MAX_ROUNDS: Final = (
    64  # of evicting and trying again to reserve, while others reserve what was freed
)
MAX_VICTIMS: Final = 4096  # looked at in one round; files that others removed already free nothing
MAX_INTRODUCTIONS: Final = 8  # of a namespace that others remove, because nothing is in it yet
MAX_BAD: Final = 1024  # bad files remembered because they could not be moved aside

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

Admit = Callable[[bytes], bool]
Describe = Callable[[bytes], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """``size_bytes``: the most that the directory holds, whoever writes to it. ``min_free_bytes``: what stays free
    on its filesystem, whoever fills it."""

    size_bytes: int
    min_free_bytes: int = 0


class _At:
    """A volume's directory for one operation, whose faults become ``StoreUnavailable``; with ``turns`` in one of them.
    Written out: a generator's context manager takes several times as long, under the GIL."""

    __slots__ = ("_turn", "_turns", "_volume", "_what")

    def __init__(self, volume: Volume, what: str, turns: Turns | None = None) -> None:
        self._volume = volume
        self._what = what
        self._turns = turns
        self._turn: threading.Lock | None = None

    def __enter__(self) -> Mount:
        mount = self._volume._mount
        if mount is None:
            with faults(f"{self._what} in {self._volume.path}"):
                mount = self._volume.attach()
        if self._turns is not None:
            self._turn = self._turns.take()
        return mount

    def pause(self, call: Callable[[], R]) -> R:
        """What ``call`` returns, mostly not in Python: meanwhile others have their turns."""
        turn, self._turn = self._turn, None
        if self._turns is None or turn is None:
            return call()
        turn.release()
        try:
            return call()
        finally:
            self._turn = self._turns.take()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._turn is not None:
            self._turn.release()
        if error is None:
            return
        if isinstance(error, LedgerGone):
            self._volume._mount = None
        elif isinstance(error, StoreUnavailable | OSError):
            self._volume.check_in_place()
            if isinstance(error, OSError):
                raise StoreUnavailable(f"{self._what} in {self._volume.path}: {error}") from error


class Volume:
    """Thread-safe. Its locks are held for no I/O but the ledger's."""

    def __init__(
        self,
        path: str,
        limits: VolumeLimits,
        order: Order,
        clock: Clock,
        *,
        describe: Describe,
        admit: Admit,
        turns: Turns,
        direct: bool = True,
    ) -> None:
        self.path = path
        self.limits = limits
        self._clock = clock
        self._describe = describe
        self._admit = admit
        self._turns = turns
        self._direct = direct
        self._index = Index(order)
        self._bad: dict[bytes, None] = {}
        self._written: set[bytes] = set()  # namespaces; a handful
        self._mount: Mount | None = None
        self._last: Mount | None = None
        self._attaching = threading.Lock()
        self.scan_wanted = True
        self._lacked_bytes = 0  # of a write that found no room: a trial must find it

    # --- attached or not ------------------------------------------------------------------------------------------

    def attach(self) -> Mount:
        """The directory, opened now if it is not. Raises ``OSError`` or a ``KVStowError``."""
        mount = self._mount
        if mount is not None:
            return mount
        if not self._attaching.acquire(blocking=False):
            raise StoreUnavailable(f"{self.path} is being attached")
        try:
            if self._mount is None:
                self._mount = self._last = attach(self.path, direct=self._direct, again=self._last)
            return self._mount
        finally:
            self._attaching.release()

    def check_in_place(self) -> None:
        """Detach from a directory that is no longer at its path: the next call attaches to what is there then."""
        mount = self._mount
        if mount is not None and not mount.in_place():
            self._mount = None

    def trial(self) -> None:
        """Raises what every call would raise. After a fault it may be another directory than before."""
        with _At(self, "trying") as mount:
            mount.probe(self._lacked_bytes)
        self._lacked_bytes = 0
        self.scan_wanted = True

    def close(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.detach()

    # --- the contract, for one key --------------------------------------------------------------------------------

    def contains(self, namespace: bytes, digest: bytes) -> bool:
        if self._index.has(digest):
            return True
        with _At(self, "looking") as mount:
            return self._learn(
                mount, namespace, digest, mount.kind(names.chunk_path(namespace, digest))
            )

    def _learn(
        self, mount: Mount, namespace: bytes, digest: bytes, result: os.stat_result | None
    ) -> bool:
        """What the filesystem says: other processes write too, and a scan takes its time."""
        if result is None or not is_regular(result) or digest in self._bad:
            self._index.drop(digest)
            return False
        self._index.add(
            namespace, [Found(digest, allocated_bytes(result, mount.ledger), result.st_mtime)]
        )
        return True

    def read(self, namespace: bytes, digest: bytes, buffer: Buffer) -> Outcome:
        path = names.chunk_path(namespace, digest)
        with (at := _At(self, "reading", self._turns)) as mount:
            direct = mount.direct and files.aligned([buffer])
            opened = None if digest in self._bad else self._open(mount, path, direct)
            if opened is None:
                self._index.drop(digest)
                if mount.kind(path) is not None:
                    self.set_aside(namespace, digest, "kind")
                return MISSING
            fd, length = opened
            if length > len(buffer):
                return REJECTED
            if direct and length % ALIGN:
                files.buffered(fd.number)
            got = at.pause(lambda: self._transfer(mount, fd, [buffer[:length]], files.read_all))
            now_s = self._clock.wall()
            if self._index.touch(digest, now_s):
                with suppress(OSError):  # recency is a help, not a duty
                    os.utime(fd.number, (now_s, now_s))
            return Done(got)

    def _open(self, mount: Mount, path: str, direct: bool) -> tuple[files.Fd, int] | None:
        """The chunk's file and its length; None: there is none, or it is not a regular file that we wrote."""
        try:
            fd = files.Fd(
                os.open(path, files.READ_FLAGS | direct * os.O_DIRECT, dir_fd=mount.root.number)
            )
        except OSError as error:
            if error.errno == errno.EINVAL and direct:  # a directory
                return self._open(mount, path, False)
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                return None
            raise
        result = os.fstat(fd.number)
        return (fd, result.st_size) if is_regular(result) and result.st_uid == mount.owner else None

    def write(self, namespace: bytes, digest: bytes, parts: Sequence[Buffer]) -> Outcome:
        size = sum(map(len, parts))
        with (at := _At(self, "writing", self._turns)) as mount:
            path = names.chunk_path(namespace, digest)
            there = mount.kind(path)
            if self._learn(mount, namespace, digest, there) or not self._admit(digest):
                return REJECTED
            if there is not None:
                self.set_aside(namespace, digest, "kind")
            if not self._make_room(mount, size, at):
                return REJECTED
            published = False
            temporary = mount.temporary()
            try:
                flags = files.CREATE_FLAGS | (mount.direct and files.aligned(parts)) * os.O_DIRECT
                fd = files.Fd(os.open(temporary, flags, names.FILE_MODE, dir_fd=mount.root.number))
                at.pause(lambda: self._transfer(mount, fd, parts, files.write_all))
                published = self._publish(mount, temporary, path, namespace)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._lacked_bytes = size
                raise
            finally:
                if not published:
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=mount.root.number)
                (mount.ledger.publish if published else mount.ledger.release)(size)
            if not published:
                return REJECTED
            self._written.add(namespace)
            self._index.add(
                namespace, [Found(digest, mount.ledger.rounded(size), self._clock.wall())]
            )
            return Done(size)

    def delete(self, namespace: bytes, digest: bytes) -> None:
        with (at := _At(self, "deleting", self._turns)) as mount:
            known_bytes = self._index.drop(digest)
            self._bad.pop(digest, None)
            epoch, ahead = mount.ledger.epoch, mount.ledger.ahead_bytes(self.limits.size_bytes)
            freed = at.pause(lambda: remove_chunk(mount, namespace, digest, known_bytes))
            mount.ledger.remove(freed, epoch, ahead)

    def set_aside(self, namespace: bytes, digest: bytes, why: str) -> bool:
        """Quarantine a bad file. Where the filesystem is read-only it is remembered as bad instead. False: it was
        before."""
        self._index.drop(digest)
        with _At(self, "quarantining") as mount:
            try:
                moved = quarantine(
                    mount, names.chunk_path(namespace, digest), digest, why, self.limits.size_bytes
                )
                self._bad.pop(digest, None)
                return moved
            except OSError as error:
                known = digest in self._bad
                if len(self._bad) < MAX_BAD:
                    self._bad[digest] = None
                logger.warning("A bad file could not be moved aside in %s: %s", self.path, error)
                return not known

    # --- pieces of it ---------------------------------------------------------------------------------------------

    def _transfer(
        self,
        mount: Mount,
        fd: files.Fd,
        parts: Sequence[Buffer],
        move: Callable[[int, Sequence[Buffer]], int],
    ) -> int:
        """A filesystem that refuses direct I/O after all is not asked again."""
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

    def _publish(self, mount: Mount, temporary: str, path: str, namespace: bytes) -> bool:
        """Give the file its name, unless something has it. False: something has."""

        def attempt() -> bool:
            try:
                files.rename_new(mount.root.number, temporary, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._introduce(mount, namespace, path)
                raise

        return _again(attempt)

    def rivals(self, namespace: bytes, root: str) -> dict[str, str]:
        with _At(self, "looking at namespaces") as mount:
            return rivals(mount, self._describe(namespace), root, self._clock.wall())

    def introduce(self, namespace: bytes, root: str) -> dict[str, str]:
        """Say that a namespace is in use, before anything is written to it. Returns its rivals, looked for after."""
        with _At(self, "introducing a namespace") as mount:
            self._written.add(namespace)
            _again(lambda: self._introduce(mount, namespace, names.namespace_json(namespace)))
        return self.rivals(namespace, root)

    def retract(self, namespace: bytes) -> None:
        with _At(self, "retracting a namespace") as mount:
            remove_empty_namespace(mount, namespace.hex())

    def _introduce(self, mount: Mount, namespace: bytes, target: str) -> None:
        """Make the directories that ``target`` is in, and say what its namespace is, in a file that people read."""
        path, temporary, root = (
            names.namespace_json(namespace),
            mount.temporary(),
            mount.root.number,
        )
        mount.ledger.add(mount.ledger.rounded(1) * mount.make_directories(target))
        if mount.kind(path) is not None:
            return
        text = {
            "namespace": namespace.hex(),
            "created": self._clock.wall(),
            **self._describe(namespace),
        }
        fd = files.Fd(os.open(temporary, files.CREATE_FLAGS, names.FILE_MODE, dir_fd=root))
        try:
            files.write_all(
                fd.number, [memoryview(msgspec.json.format(msgspec.json.encode(text), indent=2))]
            )
            files.rename_new(root, temporary, path)
            mount.ledger.add(mount.ledger.rounded(1))
        except OSError as error:
            os.unlink(temporary, dir_fd=root)
            if not isinstance(error, FileExistsError):
                raise

    # --- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, mount: Mount, size: int, at: _At) -> bool:
        """Reserve ``size`` bytes, evicting what it takes. False: there is no room."""
        if mount.ledger.rounded(size) > self.limits.size_bytes:
            return False
        for _ in range(MAX_ROUNDS):
            floor = self.limits.min_free_bytes
            lacking = floor + size - mount.free_bytes() if floor else 0
            if lacking <= 0:
                over = mount.ledger.reserve(size, self.limits.size_bytes)
                if over is None:
                    break
                if over == 0:
                    return True
                lacking = over
            wanted = lacking + mount.ledger.ahead_bytes(self.limits.size_bytes)
            if not at.pause(partial(self._evict, mount, wanted)):
                break
        self.scan_wanted = True  # what fills the directory is not known here
        return False

    def _evict(self, mount: Mount, wanted: int) -> int:
        """Remove what the policy chooses, quarantined files when it has nothing more. Returns the bytes freed."""
        freed, epoch = 0, mount.ledger.epoch
        for _ in range(MAX_VICTIMS):
            victim = self._index.victim() if freed < wanted else None
            if victim is None:
                break
            freed += remove_chunk(mount, *victim)
        mount.ledger.remove(freed, epoch, freed + mount.ledger.ahead_bytes(self.limits.size_bytes))
        return freed or shrink(mount, 0, 0)

    # --- background -----------------------------------------------------------------------------------------------

    def scan(self, stop: threading.Event, pause_s: float = 0.0) -> Count | None:
        """Count and index everything, take over what the dead had reserved, and shrink to the limit. None: stopped."""
        self.scan_wanted = False
        count: Count | None = None
        try:
            with _At(self, "scanning") as mount:
                count = self._scan(mount, stop, pause_s)
        finally:
            self.scan_wanted = self.scan_wanted or count is None
        return count

    def _scan(self, mount: Mount, stop: threading.Event, pause_s: float) -> Count | None:
        reap(mount)
        before = mount.ledger.look()
        self._index.begin_scan()
        count = scan(mount.root, mount.ledger, self._index.add, stop=stop, pause_s=pause_s)
        if count is not None:
            self._index.end_scan()
            for name in (one.name for one in count.namespaces if not one.chunks):
                if bytes.fromhex(name) not in self._written and not awaited(
                    mount, name, self._clock.wall()
                ):
                    remove_empty_namespace(mount, name)
            used = mount.ledger.reconcile(before, count.bytes).used_bytes or 0
            step = 1 + mount.ledger.ahead_bytes(self.limits.size_bytes)
            for _ in range(
                self.limits.size_bytes, used, step
            ):  # others shrink it too: each says what it has removed
                if (
                    mount.ledger.look().used_bytes or 0
                ) > self.limits.size_bytes and not stop.is_set():
                    self._evict(mount, step)
        return count

    def reap(self) -> None:
        with _At(self, "clearing up") as mount:
            reap(mount)

    @property
    def used_bytes(self) -> int | None:
        with _At(self, "looking") as mount:
            return mount.ledger.used_bytes


def _again(call: Callable[[], R]) -> R:
    """What ``call`` returns. Another process's scan may find a namespace empty, and remove it, while it is made."""
    for _ in range(MAX_INTRODUCTIONS - 1):
        with suppress(FileNotFoundError):
            return call()
    return call()
