"""The filesystem that a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = "/proc/self/mountinfo"


class Filesystem(NamedTuple):
    """A mount: where it is, its type, such as ``ext4``, and its device."""

    at: str
    kind: str
    source: str


def filesystem_of(path: str, mounts: str | None = None) -> Filesystem | None:
    """Returns the mount that ``path`` is on, links followed, or None if it is unknown.

    ``mounts`` replaces the text of ``MOUNTS``.
    """
    try:
        text = Path(MOUNTS).read_text(errors="surrogateescape") if mounts is None else mounts
    except OSError:
        return None
    real = os.path.realpath(path)
    found: Filesystem | None = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kinds = right.split()
        if len(fields) < 5 or len(kinds) < 2:
            continue
        at = _unescape(fields[4])
        inside = at == "/" or real == at or real.startswith(f"{at}/")
        if inside and (found is None or len(at) >= len(found.at)):  # the last of equals is on top
            found = Filesystem(at, kinds[0], _unescape(kinds[1]))
    return found


def _unescape(text: str) -> str:
    """Replaces octal escapes, such as ``\\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
