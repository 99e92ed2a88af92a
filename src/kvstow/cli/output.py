"""What is printed: on whatever terminal, pipe or file, and never as a terminal's commands."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

from kvstow.text import printable as printable

PIPED_COLUMNS: Final = 10_000  # of a table that isn't on a terminal: a row a line, for grep


def measured(size: int) -> str:
    """Bytes that were counted, in decimal units: ``133.1MB``. (Settings are shown in the unit that divides them.)"""
    for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if size >= 1000**power:
            return f"{size / 1000**power:.4g}{letter}B"
    return f"{size}B"


def lenient() -> None:
    """What the output's encoding doesn't have is replaced; closed output is as ``/dev/null``."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
