"""Which filesystem a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = "/proc/self/mountinfo"


class Filesystem(NamedTuple):
    at: str
    kind: str
    source: str


def filesystem_of(path: str, mounts: str | None = None) -> Filesystem | None:
    """The mount that ``path``, links followed, lies on; None where the system does not say."""
    try:
        text = Path(MOUNTS).read_text(errors="surrogateescape") if mounts is None else mounts
    except OSError:
        return None
    real = os.path.realpath(path)
    found: Filesystem | None = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 2:
            continue
        at = _plain(fields[4])
        inside = at == "/" or real == at or real.startswith(f"{at}/")
        if inside and (
            found is None or len(at) >= len(found.at)
        ):  # of several at one place the last is on top
            found = Filesystem(at, kinds[0], _plain(kinds[1]))
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
