"""The quarantine: bad files, kept for people to look at.

Their number and bytes have bounds; the oldest go first.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from kvstow.backends.disk import names
from kvstow.backends.disk.mount import MountedDirectory
from kvstow.backends.disk.scan import BLOCK_BYTES, allocated_bytes, list_directory

MAX_FILES: Final = 32
SIZE_SHARE: Final = 32  # the quarantine takes at most this part of the directory's size


def quarantine(
    mount: MountedDirectory, path: str, digest: bytes, why: str, size_bytes: int
) -> bool:
    """Move the entry at ``path`` to the quarantine, whatever it is, and remove the oldest ones that
    are too many.

    ``why`` becomes part of its name. It stays counted. Returns False if nothing is there. Raises
    ``OSError`` if the filesystem can't be changed.
    """
    target = f"{names.QUARANTINE}/{digest.hex()}.{why}.{mount.tag()}"
    try:
        os.rename(path, target, src_dir_fd=mount.root.number, dst_dir_fd=mount.root.number)
    except FileNotFoundError:
        return False
    shrink(mount, MAX_FILES, size_bytes // SIZE_SHARE)
    return True


def shrink(mount: MountedDirectory, most_files: int, most_bytes: int) -> int:
    """Remove the oldest entries until at most ``most_files`` and ``most_bytes`` are left.

    Returns the bytes freed.
    """
    held = sorted(
        (entry.result.st_ctime_ns, entry.name, allocated_bytes(entry.result, mount.ledger))
        for entry in list_directory(mount.root, names.QUARANTINE)
        if names.is_quarantined(entry.name)
    )
    total = sum(size for _, _, size in held)
    freed = 0
    epoch = mount.ledger.epoch
    while held and (len(held) > most_files or total > most_bytes):
        _, name, size = held.pop(0)
        total -= size
        freed += _drop(mount, f"{names.QUARANTINE}/{name}")
    mount.ledger.remove(freed, epoch)
    return freed


def _drop(mount: MountedDirectory, path: str) -> int:
    """Remove one entry, a directory only if it is empty: its content is not ours. Returns the bytes
    freed.

    The length of a bad file may be wrong, and more than was ever counted, so no more than its
    blocks are given back.
    """
    with suppress(OSError):
        result = os.stat(path, dir_fd=mount.root.number, follow_symlinks=False)
        remove = os.rmdir if stat.S_ISDIR(result.st_mode) else os.unlink
        remove(path, dir_fd=mount.root.number)
        return min(
            allocated_bytes(result, mount.ledger),
            mount.ledger.rounded(result.st_blocks * BLOCK_BYTES),
        )
    return 0
