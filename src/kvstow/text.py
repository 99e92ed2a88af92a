"""Text that others wrote, made fit for a log or a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` in one line: line ends, and what a terminal would obey, are shown as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
