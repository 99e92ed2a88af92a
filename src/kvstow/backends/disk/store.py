"""The disk tier's store: one file a chunk, in one or several directories."""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.backends.disk.admission import SecondSight
from kvstow.backends.disk.check import Check
from kvstow.backends.disk.health import FaultKind, Health
from kvstow.backends.disk.index import EvictionOrder
from kvstow.backends.disk.inside import Inside
from kvstow.backends.disk.room import VolumeLimits
from kvstow.backends.disk.scan import Count
from kvstow.backends.disk.scrub import Scrub
from kvstow.backends.disk.volume import Admit, Volume
from kvstow.errors import KVStowError, StoreUnavailable, UnsupportedError
from kvstow.key import ChunkKey
from kvstow.runtime import Clock, Executor, repeat
from kvstow.settings import format_size

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("kvstow")

TICK_S: Final = 1.0  # between two rounds of background work
RESTART_S: Final = 60.0  # until background work starts again that ended by an unforeseen error
MAX_LOGGED_FAILURES: Final = (
    32  # kinds of failures of background work, of which the first is logged
)
SCAN_AGAIN_S: Final = 10.0  # at the earliest, when a directory is full of what is not known
SCAN_EVERY_S: Final = 600.0  # learns of what others wrote, and takes drift out of the count
REAP_EVERY_S: Final = 10.0  # room and temporary files of processes that died
SHOWN_DIGITS: Final = 16  # of a namespace
SCAN_PAUSE_S: Final = (
    0.02  # between directories of such a scan, which is in no hurry: 5 s for 256 directories
)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``size_bytes`` is the most that all directories hold together, each an even part of it, whoever writes there:
    other processes, earlier ones, other models. ``min_free_bytes`` stays free on each directory's filesystem.

    ``volume`` pins everything to one directory, by its place in the list; otherwise a chunk's digest chooses.
    ``scrub_bytes_s`` 0: no scrub. ``threads``: how many calls may come at a time; of several directories one that hangs
    then takes half of them at most.
    """

    size_bytes: int
    min_free_bytes: int = 0
    volume: int | None = None
    admission: Literal["all", "second_sight"] = "all"
    scrub_bytes_s: int = 0
    direct: bool = True
    threads: int | None = None


class DiskStore:
    """A ``Store`` of files. What is published survives this process; a machine that crashes may lose the newest.

    Nothing is ever synced: losing a chunk is a miss, and a checksum finds what was half written. Several processes
    may share a directory; each finds what the others wrote. A directory that fails or hangs while others work costs its
    own chunks only: they are misses and are not written, until it works again.

    ``order`` makes a policy for each directory. ``describe`` says for people what a namespace is. ``check`` is the
    scrub's. The constructor opens the directories and raises what that raises.
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
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._found_corrupt: set[bytes] = set()  # digests; not counted yet
        self._maintenance_failures = 0  # not counted yet
        self._logged_failures: set[tuple[int, type[Exception], int | None]] = set()
        self._options = options
        self._volumes = [
            Volume(
                path,
                limits,
                order(),
                clock,
                describe=describe,
                admit=admit,
                direct=options.direct,
            )
            for path in paths
        ]
        scrubbed = self._volumes if options.scrub_bytes_s else []
        self._scrubs = (
            [Scrub(check, self._corrupt(volume), volume.note_unreadable) for volume in scrubbed]
            if check
            else []
        )
        self._spread = (
            self._volumes
            if options.volume is None
            else [self._volumes[options.volume % len(paths)]]
        )
        self._health = Health([volume.path for volume in self._spread], clock)
        self._inside = Inside(len(self._spread), options.threads, clock)
        self._due = [_Due() for _ in self._volumes]
        for volume in self._volumes:
            volume.attach()

    # --- the contract ---------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [self._call(key, FaultKind.READ, Volume.contains, False) for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        return [
            self._call(key, FaultKind.READ, Volume.read, MISSING, buffer) for key, buffer in items
        ]

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        return [
            self._call(key, FaultKind.WRITE, Volume.write, REJECTED, parts) for key, parts in items
        ]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._call(key, FaultKind.WRITE, Volume.delete, None)

    def close(self) -> None:
        self._stop.set()
        for volume in self._volumes:
            volume.close()

    # --- beyond it ------------------------------------------------------------------------------------------------

    def introduce(self, namespace: bytes, root: str) -> None:
        """Say in each directory that an engine uses a namespace, whose block hashes begin with ``root``.

        Raises ``UnsupportedError`` where one is there that differs in that alone: neither would ever find what the
        other stored. Of two engines that start at once one sees the other, or each does. A directory that fails is
        passed over, with a warning.
        """
        working = [*self._spread]
        rivals = self._each(working, lambda volume: volume.rivals(namespace, root))
        if not rivals:
            rivals = self._each(working, lambda volume: volume.introduce(namespace, root))
            for volume in self._spread if rivals else ():
                with suppress(StoreUnavailable):
                    volume.retract(namespace)
        if rivals:
            first, name, theirs = rivals[0]
            paths = " ".join(
                f"--path {shlex.quote(path)}" for path, other, _ in rivals if other == name
            )
            raise UnsupportedError(
                f"the block hashes of engines that use {first} too begin with another root ({theirs}; here {root}): "
                "nothing would be shared, or found again. Give PYTHONHASHSEED the same value on all of them, or on "
                "none. If none of those runs any more, remove what they stored: "
                f"kvstow disk clear {paths} --namespace {name[:SHOWN_DIGITS]}"
            )

    @staticmethod
    def _each(
        working: list[Volume], ask: Callable[[Volume], Mapping[str, str]]
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

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Move the files of corrupt values aside: each key is a miss from now on, and can be written again."""
        for key in keys:
            self._call(key, FaultKind.WRITE, Volume.set_aside, False, "corrupt")
            with self._lock:
                self._found_corrupt.discard(key.digest())  # the caller counts it

    def take_corrupt(self) -> int:
        """How many corrupt values the scrub has set aside since the last call."""
        with self._lock:
            count = len(self._found_corrupt)
            self._found_corrupt.clear()
        return count

    def take_maintenance_failures(self) -> int:
        """How often background work has ended by an unforeseen error since the last call."""
        with self._lock:
            count = self._maintenance_failures
            self._maintenance_failures = 0
        return count

    def paths_down(self) -> int:
        """How many of the directories that chunks are spread over are out of use, or are not written."""
        if len(self._spread) > 1:  # asked on every step
            for which in self._inside.look()[0]:
                error = StoreUnavailable("a call in it does not return")
                self._health.failed(which, FaultKind.HANG, error, at_once=True)
        return self._health.down

    def stuck(self) -> int:
        """How many calls hang in directories that are out of use, while other directories and threads work."""
        return self._inside.look()[1]

    @property
    def used_bytes(self) -> int | None:
        """What all directories hold, as all processes agree; None while it is not known, after a crash."""
        used = [volume.used_bytes for volume in self._volumes]
        return None if None in used else sum(filter(None, used))

    def scan(self, pause_s: float = 0.0) -> list[Count | None]:
        """Count, index and shrink every directory; see ``Volume.scan``. Blocks; other calls go on meanwhile."""
        return [volume.scan(self._stop, pause_s) for volume in self._volumes]

    def _call(
        self,
        key: ChunkKey,
        kind: FaultKind,
        method: Callable[Concatenate[Volume, bytes, bytes, P], R],
        otherwise: R,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Call a method of the volume that ``key`` belongs to. Returns ``otherwise`` where it is one of several and
        does not work; ``kind`` is what a fault of this call is counted as."""
        digest = key.digest()
        if len(self._spread) == 1:
            return method(self._spread[0], key.namespace, digest, *arguments, **named)
        which = int.from_bytes(digest[-4:], "little") % len(self._spread)
        may = self._health.may_write if method is Volume.write else self._health.may_read
        if not may(which):
            return otherwise
        try:
            with self._inside.visit(which):
                result = method(self._spread[which], key.namespace, digest, *arguments, **named)
        except StoreUnavailable as error:
            hangs = self._inside.hangs(which)
            fault = FaultKind.HANG if hangs else kind
            if self._health.failed(which, fault, error, at_once=hangs):
                raise
            return otherwise
        if isinstance(result, Done):  # other answers may come from memory
            self._health.worked(which, kind)
        if not self._inside.hangs(which):
            self._health.worked(which, FaultKind.HANG)
        return result

    def _corrupt(self, volume: Volume) -> Callable[[bytes, bytes], None]:
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

    # --- background -----------------------------------------------------------------------------------------------

    def start(self, executor: Executor) -> None:
        """Scan, scrub and clear up until ``close``, on threads of ``executor``, which needs one for each directory."""
        for which in range(len(self._volumes)):
            executor.submit(partial(self._maintain, which), lambda _value, _error: None)

    def _maintain(self, which: int) -> None:
        repeat(
            partial(self._tend, which),
            self._stop,
            pause_s=TICK_S,
            failed=partial(self._maintenance_failed, which),
            restart_s=RESTART_S,
        )

    def _maintenance_failed(self, which: int, error: Exception) -> None:
        with self._lock:
            self._maintenance_failures += 1
        logger.error(
            "Background work in %s ended by an unforeseen error, it starts again in %g s: %r",
            self._volumes[which].path,
            RESTART_S,
            error,
            exc_info=error if self._first_of_its_kind(which, error) else None,
        )

    def _first_of_its_kind(self, which: int, error: Exception) -> bool:
        """Whether background work in a directory has not failed with such an error before."""
        code = error.errno if isinstance(error, OSError) else None
        kind = (which, type(error), code)
        with self._lock:
            if kind in self._logged_failures or len(self._logged_failures) >= MAX_LOGGED_FAILURES:
                return False
            self._logged_failures.add(kind)
            return True

    def tend(self) -> None:
        """Do one round of background work in each directory: what is due, and a trial where it is out of use."""
        for which in range(len(self._volumes)):
            self._tend(which)

    def _tend(self, which: int) -> None:
        volume = self._volumes[which]
        try:
            volume.check_in_place()
            if self._spread is self._volumes and not self._try_again(which):
                return
            self._scan_or_reap(volume, self._due[which])
            if self._scrubs:
                self._scrubs[which].step(volume.attach(), self._options.scrub_bytes_s, self._stop)
        except (KVStowError, OSError) as error:  # calls fail likewise: the breaker sees them
            cause = error.__cause__
            kind = cause if isinstance(cause, OSError) else error
            if self._first_of_its_kind(which, kind):
                logger.warning(
                    "Background work in %s failed (more failures of this kind are not logged): %s",
                    volume.path,
                    error,
                )

    def _try_again(self, which: int) -> bool:
        """Try a directory that is out of use, if that is due. Returns whether it can be read; raises what fails."""
        volume = self._volumes[which]
        if not self._health.readable(which):
            kinds = (FaultKind.READ, FaultKind.HANG)
            due = [kind for kind in kinds if self._health.due(which, kind)]
            if self._inside.hangs(which) or not due:
                return False
            volume.try_reading()
            for kind in kinds:
                self._health.worked(which, kind)
        if self._health.due(which, FaultKind.WRITE):
            volume.try_writing()
            self._health.worked(which, FaultKind.WRITE)
        return True

    def _scan_or_reap(self, volume: Volume, due: _Due) -> None:
        now_s = self._clock.monotonic()
        wanted = volume.scan_wanted
        if now_s >= (due.wanted_scan_s if wanted else due.scan_s):
            due.scan_s = now_s + SCAN_EVERY_S
            due.wanted_scan_s = now_s + SCAN_AGAIN_S
            due.reap_s = now_s + REAP_EVERY_S
            count = volume.scan(self._stop, 0.0 if wanted else SCAN_PAUSE_S)
            if count is not None and not due.logged:
                due.logged = True
                logger.info(
                    "Disk tier: %s held %d chunks (%s) at the start, at most %s",
                    volume.path,
                    sum(namespace.chunks for namespace in count.namespaces),
                    format_size(count.bytes),
                    format_size(volume.limits.size_bytes),
                )
        elif now_s >= due.reap_s:
            due.reap_s = now_s + REAP_EVERY_S
            volume.reap()


@dataclass(slots=True)
class _Due:
    """When a directory's background work is due, on the monotonic clock."""

    scan_s: float = 0.0
    wanted_scan_s: float = 0.0
    reap_s: float = 0.0
    logged: bool = False  # what the first scan found
