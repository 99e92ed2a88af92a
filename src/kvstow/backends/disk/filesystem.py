"""The filesystem that a path is on."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil


class Filesystem(NamedTuple):
    """A mount: where it is, its type, such as ``ext4``, and its device."""

    at: str
    kind: str
    source: str


def filesystem_of(path: str) -> Filesystem | None:
    """Returns the mount that ``path`` is on, links followed, or None if it is unknown."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    real = os.path.realpath(path)
    found: Filesystem | None = None
    for mount in mounts:
        at = mount.mountpoint
        inside = at == "/" or real == at or real.startswith(f"{at}/")
        if inside and (found is None or len(at) >= len(found.at)):  # the last of equals is on top
            found = Filesystem(at, mount.fstype, mount.device)
    return found
