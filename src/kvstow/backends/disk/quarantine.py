"""Bad files, moved aside so that somebody can look at them: a few, of bounded bytes, the oldest going first."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from kvstow.backends.disk import names
from kvstow.backends.disk.mount import Mount
from kvstow.backends.disk.scan import BLOCK_BYTES, allocated_bytes, list_directory

MAX_FILES: Final = 32
SIZE_SHARE: Final = 32  # at most this part of the tier's size


def quarantine(mount: Mount, path: str, digest: bytes, why: str, size_bytes: int) -> bool:
    """Move what is at ``path`` aside, whatever it is. It stays counted; then the oldest go until all is in bounds.

    False: nothing is there. Raises ``OSError`` where the filesystem can't be changed.
    """
    target = f"{names.QUARANTINE}/{digest.hex()}.{why}.{mount.tag()}"
    try:
        os.rename(path, target, src_dir_fd=mount.root.number, dst_dir_fd=mount.root.number)
    except FileNotFoundError:
        return False
    shrink(mount, MAX_FILES, size_bytes // SIZE_SHARE)
    return True


def shrink(mount: Mount, most_files: int, most_bytes: int) -> int:
    """Drop the oldest until at most so many are left. Returns the bytes that this gave back."""
    held = sorted(
        (entry.result.st_ctime_ns, entry.name, allocated_bytes(entry.result, mount.ledger))
        for entry in list_directory(mount.root, names.QUARANTINE)
        if names.is_quarantined(entry.name)
    )
    total, freed, epoch = sum(size for _, _, size in held), 0, mount.ledger.epoch
    while held and (len(held) > most_files or total > most_bytes):
        _, name, size = held.pop(0)
        total -= size
        freed += _drop(mount, f"{names.QUARANTINE}/{name}")
    mount.ledger.remove(freed, epoch)
    return freed


def _drop(mount: Mount, path: str) -> int:
    """Remove one thing. Directories only if they are empty: what is in them is not ours. What a bad file says of its
    length may be as wrong as the rest, and more than was ever counted: only what it took is given back."""
    with suppress(OSError):
        result = os.stat(path, dir_fd=mount.root.number, follow_symlinks=False)
        (os.rmdir if stat.S_ISDIR(result.st_mode) else os.unlink)(path, dir_fd=mount.root.number)
        return min(
            allocated_bytes(result, mount.ledger),
            mount.ledger.rounded(result.st_blocks * BLOCK_BYTES),
        )
    return 0
