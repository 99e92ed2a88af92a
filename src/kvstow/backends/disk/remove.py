"""Removing chunks and what is left of namespaces, counted once whoever removes."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from kvstow.backends.disk import names
from kvstow.backends.disk.mount import Mount
from kvstow.backends.disk.scan import allocated_bytes, list_directory

KEPT_EMPTY_S: Final = (
    86_400.0  # a namespace without chunks: an engine that has just started may be about to write
)


def remove_chunk(
    mount: Mount, namespace: bytes, digest: bytes, counted_bytes: int | None = None
) -> int:
    """Remove a chunk's file. Returns what that frees, for the ledger; 0 if another remover was faster.

    Of several removers one unlinks it, and counts it. What has grown since it was ``counted_bytes`` long, which no
    writer of ours does, gives back no more than that. Raises ``OSError``.
    """
    path, root = names.chunk_path(namespace, digest), mount.root.number
    try:
        result = os.stat(path, dir_fd=root, follow_symlinks=False)
        os.unlink(path, dir_fd=root)
    except FileNotFoundError:
        return 0
    freed = allocated_bytes(result, mount.ledger)
    return freed if counted_bytes is None else min(freed, counted_bytes)


def awaited(mount: Mount, name: str, now_s: float) -> bool:
    """Whether a namespace that holds no chunks may soon: lately an engine said that it uses it, and there is another
    process that may be that engine."""
    said = mount.stat(names.namespace_json(bytes.fromhex(name)))
    return (
        said is not None
        and now_s - said.st_mtime <= KEPT_EMPTY_S
        and len(mount.ledger.look().reserved) > 1
    )


def remove_empty_namespace(mount: Mount, name: str) -> None:
    """Remove the directories of a namespace that holds no chunks, and what is not ours stays. A writer that comes
    meanwhile makes them anew. The next count notices what that freed."""
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
