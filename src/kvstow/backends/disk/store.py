"""The disk tier's store: one file a chunk, in one or several directories."""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome, StoreReport
from kvstow.backends.disk.admission import SecondSight
from kvstow.backends.disk.check import Check
from kvstow.backends.disk.health import FaultKind, Health
from kvstow.backends.disk.in_progress import CallsInProgress
from kvstow.backends.disk.index import EvictionOrder
from kvstow.backends.disk.maintenance import Maintenance
from kvstow.backends.disk.room import VolumeLimits
from kvstow.backends.disk.scan import ScanResult
from kvstow.backends.disk.scrub import Scrub
from kvstow.backends.disk.volume import Admit, DiskVolume
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.key import ChunkKey
from kvstow.runtime import Clock, Executor

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("kvstow")

SHOWN_DIGITS: Final = 16  # of a namespace


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk store uses its directories.

    ``size_bytes`` is the most that all directories hold together, each an even part of it, whoever
    writes there: other processes, earlier ones, other models. ``min_free_bytes`` stays free on each
    directory's filesystem.

    ``volume`` pins all chunks to one directory, by its place in the list; None: a chunk's digest
    chooses. ``scrub_bytes_s`` is what the scrub reads each second; 0: no scrub. ``direct`` allows
    direct I/O. ``threads`` is the most calls that come at a time, of which a directory among
    several takes half at most; None: no limit.
    """

    size_bytes: int
    min_free_bytes: int = 0
    volume: int | None = None
    admission: Literal["all", "second_sight"] = "all"
    scrub_bytes_s: int = 0
    direct: bool = True
    threads: int | None = None


class DiskStore:
    """A ``Store`` of files. What is published survives this process; a crash of the machine may
    lose the newest.

    Nothing is synced: a lost chunk is a miss, and a checksum finds one that was half written.
    Several processes may share a directory, and each finds what the others wrote. A directory that
    fails or hangs while others work costs its own chunks only: they are misses and are not written
    until it works again.

    ``order`` makes the eviction order of a directory, ``describe`` the fields of a
    ``namespace.json``. ``check`` is the scrub's. The constructor opens the directories and raises
    what that raises.
    """

    def __init__(
        self,
        paths: Sequence[str],
        options: DiskOptions,
        *,
        order: Callable[[], EvictionOrder],
        clock: Clock,
        describe: Callable[[bytes], Mapping[str, object]] = lambda _: {},
        check: Check | None = None,
    ) -> None:
        limits = VolumeLimits(options.size_bytes // len(paths), options.min_free_bytes)
        admit: Admit = SecondSight() if options.admission == "second_sight" else lambda _: True
        self._lock = threading.Lock()
        self._found_corrupt: set[bytes] = set()  # digests; not counted yet
        self._volumes = [
            DiskVolume(
                path, limits, order(), clock, describe=describe, admit=admit, direct=options.direct
            )
            for path in paths
        ]
        self._spread = self._volumes  # those that chunks are spread over
        if options.volume is not None:
            self._spread = [self._volumes[options.volume % len(paths)]]
        self._health = Health([volume.path for volume in self._spread], clock)
        self._in_progress = CallsInProgress(len(self._spread), options.threads, clock)
        scrubs = []
        if check is not None and options.scrub_bytes_s:
            scrubs = [
                Scrub(check, self._corrupt(volume), volume.note_unreadable)
                for volume in self._volumes
            ]
        self._maintenance = Maintenance(
            self._volumes,
            scrubs,
            scrub_bytes_s=options.scrub_bytes_s,
            try_again=self._try_again,
            clock=clock,
        )
        for volume in self._volumes:
            volume.access.attach()

    # --- the contract -----------------------------------------------------------------------------

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [self._call(key, FaultKind.READ, DiskVolume.contains, False) for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        return [
            self._call(key, FaultKind.READ, DiskVolume.read, MISSING, buffer)
            for key, buffer in items
        ]

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return [
            self._call(key, FaultKind.WRITE, DiskVolume.write, REJECTED, parts)
            for key, parts in items
        ]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._call(key, FaultKind.WRITE, DiskVolume.delete, None)

    def close(self) -> None:
        self._maintenance.stop.set()
        for volume in self._volumes:
            volume.access.close()

    # --- beyond it --------------------------------------------------------------------------------

    def register_namespace(self, namespace: bytes, root: str) -> None:
        """Records in each directory that an engine uses a namespace with this root.

        Raises ``UnsupportedError`` where a namespace is there that differs in the root alone: the two
        engines would never find each other's chunks. Of two engines that start at the same time at
        least one sees the other. A directory that fails is skipped, with a warning.
        """
        working = [*self._spread]
        others = self._each(working, lambda volume: volume.other_roots(namespace, root))
        if not others:
            others = self._each(working, lambda volume: volume.register_namespace(namespace, root))
            for volume in self._spread if others else ():
                with suppress(StoreUnavailable):
                    volume.unregister_namespace(namespace)
        if others:
            first, name, theirs = others[0]
            paths = " ".join(
                f"--path {shlex.quote(path)}" for path, other, _ in others if other == name
            )
            raise UnsupportedError(
                f"the block hashes of engines that use {first} too begin with another root "
                f"({theirs}; here {root}): nothing would be shared, or found again. "
                "Give PYTHONHASHSEED the same value on all of them, or on "
                "none. If none of those runs any more, remove what they stored: "
                f"kvstow disk clear {paths} --namespace {name[:SHOWN_DIGITS]}"
            )

    @staticmethod
    def _each(
        working: list[DiskVolume], ask: Callable[[DiskVolume], Mapping[str, str]]
    ) -> list[tuple[str, str, str]]:
        """What each finds, behind its path. Those that fail are taken off the list."""
        found: list[tuple[str, str, str]] = []
        for volume in [*working]:
            try:
                found += [(volume.path, *item) for item in ask(volume).items()]
            except StoreUnavailable as error:
                working.remove(volume)
                logger.warning(
                    "Whose chunks are in %s can't be told now, kvstow goes on: %s",
                    volume.path,
                    error,
                )
        return found

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """Move the files of corrupt values aside: each key is a miss from now on, and can be
        written again."""
        for key in keys:
            self._call(key, FaultKind.WRITE, DiskVolume.set_aside, False, "corrupt")
            with self._lock:
                self._found_corrupt.discard(key.digest())  # the caller counts it

    def report(self) -> StoreReport:
        """Return what the scrub found, how maintenance fared, and which directories are out of use
        or hang."""
        with self._lock:
            corrupt = len(self._found_corrupt)
            self._found_corrupt.clear()
        hung_calls = 0
        if len(self._spread) > 1:
            hanging, hung_calls = self._in_progress.hanging()
            for which in hanging:
                error = StoreUnavailable("a call in it does not return")
                self._health.failed(which, FaultKind.HANG, error, at_once=True)
        failures = self._maintenance.take_failures()
        return StoreReport(corrupt, failures, self._health.down, hung_calls)

    @property
    def used_bytes(self) -> int | None:
        """What all directories hold, as all processes agree; None while it is not known, after a
        crash."""
        used = [volume.used_bytes for volume in self._volumes]
        return None if None in used else sum(filter(None, used))

    def scan(self, pause_s: float = 0.0) -> list[ScanResult | None]:
        """Count, index and shrink every directory; see ``DiskVolume.scan``.

        Blocks; other calls go on meanwhile.
        """
        return [volume.scan(self._maintenance.stop, pause_s) for volume in self._volumes]

    def _call(
        self,
        key: ChunkKey,
        kind: FaultKind,
        method: Callable[Concatenate[DiskVolume, bytes, bytes, P], R],
        otherwise: R,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Call a method of the volume that ``key`` belongs to.

        Returns ``otherwise`` where it is one of several and does not work; ``kind`` is what a fault
        of this call is counted as.
        """
        digest = key.digest()
        if len(self._spread) == 1:
            return method(self._spread[0], key.namespace, digest, *arguments, **named)
        which = int.from_bytes(digest[-4:], "little") % len(self._spread)
        may = self._health.may_write if method is DiskVolume.write else self._health.may_read
        if not may(which):
            return otherwise
        try:
            with self._in_progress.enter(which):
                result = method(self._spread[which], key.namespace, digest, *arguments, **named)
        except StoreUnavailable as error:
            hangs = self._in_progress.hangs(which)
            fault = FaultKind.HANG if hangs else kind
            if self._health.failed(which, fault, error, at_once=hangs):
                raise
            return otherwise
        if isinstance(result, Done):  # other answers may come from memory
            self._health.worked(which, kind)
        if not self._in_progress.hangs(which):
            self._health.worked(which, FaultKind.HANG)
        return result

    def _corrupt(self, volume: DiskVolume) -> Callable[[bytes, bytes], None]:
        """What the scrub of a volume does with a corrupt chunk."""

        def set_aside(namespace: bytes, digest: bytes) -> None:
            if volume.set_aside(namespace, digest, "corrupt"):  # else a read found it too
                logger.warning(
                    "The scrub found a corrupt chunk in %s and moved it to the quarantine",
                    volume.path,
                )
                with self._lock:
                    self._found_corrupt.add(digest)

        return set_aside

    # --- background -------------------------------------------------------------------------------

    def start(self, executor: Executor) -> None:
        """Scan, scrub and clear up until ``close``, on threads of ``executor``, which needs one for
        each directory."""
        self._maintenance.start(executor)

    def maintain(self) -> None:
        """Do one round of background work in each directory."""
        for which in range(len(self._volumes)):
            self._maintenance.run_once(which)

    def _try_again(self, which: int) -> bool:
        """Try a directory that is out of use, if that is due.

        Returns whether it can be read; raises what fails.
        """
        if self._spread is not self._volumes:
            return True
        volume = self._volumes[which]
        if not self._health.readable(which):
            kinds = (FaultKind.READ, FaultKind.HANG)
            due = [kind for kind in kinds if self._health.due(which, kind)]
            if self._in_progress.hangs(which) or not due:
                return False
            volume.try_reading()
            for kind in kinds:
                self._health.worked(which, kind)
        if self._health.due(which, FaultKind.WRITE):
            volume.try_writing()
            self._health.worked(which, FaultKind.WRITE)
        return True
