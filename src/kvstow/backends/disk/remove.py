"""Removal of chunks and of empty namespaces. Several processes may remove; one of them counts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from kvstow.backends.disk import names
from kvstow.backends.disk.mount import MountedDirectory
from kvstow.backends.disk.scan import allocated_bytes, list_directory

# An engine that has just started may be about to write its first chunk.
KEPT_EMPTY_S: Final = 86_400.0


def remove_chunk(
    mount: MountedDirectory, namespace: bytes, digest: bytes, counted_bytes: int | None = None
) -> int:
    """Remove a chunk's file. Returns the bytes that this frees, for the ledger; 0 if another
    remover was faster.

    A file that has grown since it was counted with ``counted_bytes``, which no writer of ours does,
    frees no more than that. Raises ``OSError``.
    """
    path = names.chunk_path(namespace, digest)
    root = mount.root.number
    try:
        result = os.stat(path, dir_fd=root, follow_symlinks=False)
        os.unlink(path, dir_fd=root)
    except FileNotFoundError:
        return 0
    freed = allocated_bytes(result, mount.ledger)
    return freed if counted_bytes is None else min(freed, counted_bytes)


def expects_chunks(mount: MountedDirectory, name: str, now_s: float) -> bool:
    """Whether an empty namespace may get chunks soon: an engine has made it within
    ``KEPT_EMPTY_S``, and another process, which may be that engine, uses the directory."""
    made = mount.stat(names.namespace_json(bytes.fromhex(name)))
    return (
        made is not None
        and now_s - made.st_mtime <= KEPT_EMPTY_S
        and len(mount.ledger.report().reserved) > 1
    )


def remove_empty_namespace(mount: MountedDirectory, name: str) -> None:
    """Remove the directories of a namespace that holds no chunks; files that are not ours stay.

    A writer that comes meanwhile makes them anew. The next scan notices the bytes freed.
    """
    root = mount.root.number
    for first in names.DIGITS:
        for second in names.DIGITS:
            with suppress(OSError):
                os.rmdir(f"{name}/{first}/{second}", dir_fd=root)
        with suppress(OSError):
            os.rmdir(f"{name}/{first}", dir_fd=root)
    with suppress(OSError):
        if {entry.name for entry in list_directory(mount.root, name)} <= {names.NAMESPACE_JSON}:
            os.unlink(f"{name}/{names.NAMESPACE_JSON}", dir_fd=root)
    with suppress(OSError):
        os.rmdir(name, dir_fd=root)


def remove_empty_namespaces(mount: MountedDirectory, empty: Iterable[str], now_s: float) -> None:
    """Remove namespaces that hold no chunks, except those that may get some soon."""
    for name in empty:
        if not expects_chunks(mount, name, now_s):
            remove_empty_namespace(mount, name)
