"""A data directory as an operator sees and changes it, beside any server that uses it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstow.backends.disk import names
from kvstow.backends.disk.check import Check
from kvstow.backends.disk.files import open_directory
from kvstow.backends.disk.ledger import Ledger, read_page
from kvstow.backends.disk.mount import MountedDirectory, alive, attach, free_bytes, reap, unit_bytes
from kvstow.backends.disk.quarantine import quarantine, shrink
from kvstow.backends.disk.remove import expects_chunks, remove_chunk, remove_empty_namespace
from kvstow.backends.disk.scan import (
    ScanResult,
    base_namespace,
    list_directory,
    namespaces,
    read_namespace_json,
    scan,
)
from kvstow.backends.disk.scrub import VerifyResult, chunks_after, digest_in, verify
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.runtime import SystemClock

_NOT_OURS: Final = {"lost+found"}  # what a new filesystem has


class EmptyDirectory(StoreRefused):
    """The directory is empty: its tier may not have been started yet."""


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """The usage of a data directory.

    ``counted`` is what a scan has found. ``ledger_bytes`` is what the ledger says, reservations
    included; None if that is unknown. ``processes`` is the number of live processes that share the
    directory, ``free_bytes`` what its filesystem has left.
    """

    path: str
    counted: ScanResult
    ledger_bytes: int | None
    processes: int
    free_bytes: int


class DirectoryView:
    """One data directory, read only: nothing in it is made or changed."""

    def __init__(self, path: str) -> None:
        """Open ``path``.

        Raises ``StoreRefused`` if no disk tier has used it, ``EmptyDirectory`` if it is empty, and
        ``StoreUnavailable`` if it can't be read.
        """
        self.path = path
        with _faults("opening", path, "read"):
            self._check()
            self.root = open_directory(path)
            read_page(self.root)  # raises now, and not later about some file below
            self.ledger = Ledger(self.root, b"", unit_bytes(self.root))

    def _check(self) -> None:
        try:
            listing = set(os.listdir(self.path))
        except FileNotFoundError as error:
            raise StoreRefused(
                f"{self.path} holds no kvstow chunks: there is no such directory"
            ) from error
        except NotADirectoryError as error:
            raise StoreRefused(
                f"{self.path} holds no kvstow chunks: it is not a directory"
            ) from error
        if listing <= _NOT_OURS:
            raise EmptyDirectory(
                f"{self.path}: nothing is stored there yet "
                "(if that is a mount point: is its disk mounted?)"
            )
        if names.LEDGER not in listing:
            raise StoreRefused(f"{self.path} holds no kvstow chunks: it has no {names.LEDGER} file")

    def usage(self) -> DirectoryUsage:
        """Count everything."""
        with _faults("counting", self.path, "read"):
            count = scan(self.root, self.ledger, lambda _, __: None, stop=threading.Event())
            assert count is not None, "nobody stopped it"
            page = read_page(self.root)
            processes = sum(alive(self.root, token.hex()) for token in page.reserved) if page else 0
            return DirectoryUsage(
                self.path,
                count,
                page.used_bytes if page else None,
                processes,
                free_bytes(self.root),
            )

    def about(self, namespace: str) -> Mapping[str, Any]:
        """The fields of ``namespace.json``; none if it can't be read."""
        return read_namespace_json(self.root, namespace)

    def base_namespace(self, namespace: str) -> str:
        """The namespace that an adapter's, or one after a reset, belongs to; any other belongs to
        itself."""
        return base_namespace(namespace, self.about(namespace))

    def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        with _faults("listing", self.path, "read"):
            return namespaces(self.root)


class DataDirectory(DirectoryView):
    """One data directory, to change it.

    It takes part in the ledger as a server does, so no server's count is upset.
    """

    def __init__(self, path: str) -> None:
        """Open ``path``, which must exist. Raises what ``DirectoryView`` does."""
        super().__init__(path)
        with _faults("opening", path, "written"):
            self._mount: MountedDirectory = attach(path)
        self.root = self._mount.root
        self.ledger = self._mount.ledger
        if self._mount.took_over:
            self.usage()  # what the dead had reserved is not what they have written

    def close(self) -> None:
        """Leave the ledger."""
        self._mount.detach()

    def usage(self) -> DirectoryUsage:
        """Count everything, and bring the ledger in line with the count."""
        with _faults("counting", self.path, "read"):
            before = self.ledger.report()
            usage = super().usage()
            self.ledger.reconcile(before, usage.counted.bytes)
            return usage

    def verify(self, check: Check, *, set_aside: bool) -> Iterator[VerifyResult]:
        """Check every chunk, and move bad ones to the quarantine if ``set_aside``."""
        with _faults("verifying", self.path, "read"):
            for path in chunks_after(self._mount.root, ""):
                result = self._verify(path, check)
                if result is None:
                    continue
                if set_aside and not result.good:
                    quarantine(self._mount, path, result.digest, "corrupt", 1 << 62)
                yield result

    def _verify(self, path: str, check: Check) -> VerifyResult | None:
        """Check one chunk.

        A file that gives an error is bad; raises ``OSError`` if the directory can't be read.
        """
        try:
            return verify(self._mount, path, check)
        except OSError:
            self._mount.check_readable()
            return VerifyResult(bytes.fromhex(path[:64]), digest_in(path), good=False, read_bytes=0)

    def remove(self, chosen: Callable[[str, float], bool]) -> tuple[int, int]:
        """Remove the chunks for which ``chosen(namespace, last use)`` is true. Returns their number
        and their bytes.

        Empty namespaces are removed as well. One that a running engine may be about to write to is
        kept, unless it is chosen whatever the last use.
        """
        removed = freed = 0

        def found(namespace: bytes, chunks: list[Any]) -> None:
            nonlocal removed, freed
            size = 0
            epoch = self._mount.ledger.epoch
            for chunk in chunks:
                if chosen(namespace.hex(), chunk.used_s):
                    chunk_bytes = remove_chunk(self._mount, namespace, chunk.digest)
                    if chunk_bytes:
                        removed += 1
                    size += chunk_bytes
            self._mount.ledger.remove(size, epoch)
            freed += size

        with _faults("removing chunks in", self.path, "written"):
            count = scan(self._mount.root, self._mount.ledger, found, stop=threading.Event())
            for name in (one.name for one in (count.namespaces if count else [])):
                if chosen(name, math.inf) or not expects_chunks(
                    self._mount, name, SystemClock().wall()
                ):
                    remove_empty_namespace(self._mount, name)
        return removed, freed

    def tidy(self, empty: bool) -> tuple[int, int]:
        """Clear up after dead processes, and remove all quarantined files if ``empty``.

        Returns the number of files that the quarantine has lost, and the bytes freed.
        """
        with _faults("clearing up", self.path, "written"):
            reap(self._mount)
            held = self._quarantined()
            freed = shrink(self._mount, 0, 0) if empty else 0
            return len(held - self._quarantined()), freed

    def _quarantined(self) -> set[str]:
        return {
            entry.name
            for entry in list_directory(self.root, names.QUARANTINE)
            if names.is_quarantined(entry.name)
        }


@contextmanager
def _faults(doing: str, path: str, access: str) -> Iterator[None]:
    """Raise what the filesystem refuses as ``StoreUnavailable``; a missing permission with the
    owner's name."""
    try:
        yield
    except PermissionError as error:
        how = f"run this as the user that vLLM runs as (owner: {_owner(path)})"
        raise StoreUnavailable(f"{path} can't be {access}: {error.strerror}: {how}") from error
    except OSError as error:
        raise StoreUnavailable(f"{doing} {path}: {error}") from error


def _owner(path: str) -> str:
    try:
        return Path(path).owner()
    except KeyError:
        return f"user {os.stat(path).st_uid}"
    except OSError:
        return "unknown"
