"""Scans of a data directory: entries and their ``stat``, never a chunk's content."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from kvstow.backends.disk import names
from kvstow.backends.disk.files import READ_FLAGS, Fd, open_below
from kvstow.backends.disk.index import ChunkFile
from kvstow.backends.disk.ledger import Ledger

BLOCK_BYTES: Final = 512  # the unit of ``st_blocks``
MAX_JSON_BYTES: Final = 1 << 20  # of a namespace.json


class DirectoryEntry(NamedTuple):
    name: str
    result: os.stat_result


@dataclass(slots=True)
class NamespaceUsage:
    """One namespace's directory as a scan found it.

    ``bytes`` includes the bytes of its directories. ``oldest_s`` and ``newest_s`` are the earliest
    and the latest last use of a chunk, in seconds since the epoch; 0 without chunks.
    """

    name: str
    chunks: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def count(self, size: int, used_s: float) -> None:
        """Count a chunk's file of ``size`` bytes, last used at ``used_s``."""
        self.oldest_s = min(self.oldest_s, used_s) if self.chunks else used_s
        self.newest_s = max(self.newest_s, used_s)
        self.chunks += 1
        self.bytes += size


@dataclass(slots=True)
class ScanResult:
    """What a scan found: all that the ledger calls published."""

    namespaces: list[NamespaceUsage]
    own_bytes: int = 0  # of ledger, locks and directories
    quarantined: int = 0
    quarantined_bytes: int = 0
    unreadable: int = 0  # directories of files whose chunks are not counted

    @property
    def bytes(self) -> int:
        return (
            self.own_bytes
            + self.quarantined_bytes
            + sum(namespace.bytes for namespace in self.namespaces)
        )


def allocated_bytes(result: os.stat_result, ledger: Ledger) -> int:
    """The bytes that a file takes: its length, or the allocated blocks where these are more."""
    if not stat.S_ISREG(result.st_mode):
        return 0
    return ledger.rounded(max(result.st_size, result.st_blocks * BLOCK_BYTES))


def list_directory(root: Fd, path: str) -> Iterator[DirectoryEntry]:
    """The entries of a directory below the root, with their ``lstat``.

    There are none if it does not exist or is not a directory. They come in the order of their
    inodes, as they lie on disk: on a cold cache that is several times faster.
    """
    try:
        directory = open_below(root, path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    with os.scandir(directory.number) as entries:
        for entry in sorted(entries, key=os.DirEntry.inode):
            try:
                yield DirectoryEntry(entry.name, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue


def namespaces(root: Fd) -> list[str]:
    """The names of the namespaces' directories. Raises ``OSError``."""
    return sorted(name for name in os.listdir(root.number) if names.is_namespace(name))


def read_namespace_json(root: Fd, namespace: str) -> dict[str, Any]:
    """The fields of ``namespace.json``; none if it can't be read.

    Others may have written it: trust nothing in it.
    """
    try:
        fd = open_below(root, f"{namespace}/{names.NAMESPACE_JSON}", READ_FLAGS)
        return msgspec.json.decode(os.pread(fd.number, MAX_JSON_BYTES, 0), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}


def base_namespace(namespace: str, about: Mapping[str, object]) -> str:
    """The namespace that an adapter's, or one after a reset, belongs to; any other belongs to
    itself."""
    parent = about.get("parent")
    return parent if isinstance(parent, str) and names.is_namespace(parent) else namespace


def scan(
    root: Fd,
    ledger: Ledger,
    found: Callable[[bytes, list[ChunkFile]], None],
    *,
    stop: threading.Event,
    pause_s: float = 0.0,
    max_unreadable: int = 0,
) -> ScanResult | None:
    """Walk the whole directory.

    ``found`` is called with the namespace and the chunks of each directory of files; between two of
    these the scan waits ``pause_s`` seconds. Up to ``max_unreadable`` of them may give an error.
    Returns None if ``stop`` was set. Raises ``OSError``.
    """
    count = ScanResult([], own_bytes=sum(_bytes(root, name, ledger) for name in names.OWN))
    for name in namespaces(root):
        namespace = NamespaceUsage(name, bytes=_bytes(root, name, ledger))
        namespace.bytes += _bytes(root, f"{name}/{names.NAMESPACE_JSON}", ledger)
        count.namespaces.append(namespace)
        for first in names.DIGITS:
            namespace.bytes += _bytes(root, f"{name}/{first}", ledger)
            for second in names.DIGITS:
                if stop.wait(pause_s) if pause_s else stop.is_set():
                    return None
                try:
                    chunks = _chunks(root, f"{name}/{first}/{second}", ledger, namespace)
                except OSError:
                    count.unreadable += 1
                    if count.unreadable > max_unreadable:
                        raise
                    continue
                if chunks:
                    found(bytes.fromhex(name), chunks)
    for entry in list_directory(root, names.QUARANTINE):
        if names.is_quarantined(entry.name):
            count.quarantined += 1
            count.quarantined_bytes += allocated_bytes(entry.result, ledger)
    return count


def _chunks(root: Fd, path: str, ledger: Ledger, namespace: NamespaceUsage) -> list[ChunkFile]:
    namespace.bytes += _bytes(root, path, ledger)
    chunks: list[ChunkFile] = []
    for name, result in list_directory(root, path):
        digest = names.digest_of(name)
        if digest is None or not stat.S_ISREG(result.st_mode):
            continue
        size = allocated_bytes(result, ledger)
        namespace.count(size, result.st_mtime)
        chunks.append(ChunkFile(digest, size, result.st_mtime))
    return chunks


def _bytes(root: Fd, path: str, ledger: Ledger) -> int:
    """The bytes that a file, or a directory without its content, takes."""
    try:
        result = os.stat(path, dir_fd=root.number, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return ledger.rounded(result.st_blocks * BLOCK_BYTES)
