"""Progress of slow steps: a spinner with the time and the last log line; on a pipe, a line a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


class Line:
    """A step and how long it has taken, anew whenever it is drawn; in one line, whatever the terminal's width."""

    def __init__(self, what: str) -> None:
        self._started_s = time.monotonic()
        self._what = what
        self.detail = ""

    def __str__(self) -> str:
        return f"{self._what}  {time.monotonic() - self._started_s:4.0f} s"

    def __rich__(self) -> Text:
        return Text.assemble(f"{self}  ", (self.detail, "dim"), no_wrap=True, overflow="ellipsis")


@contextmanager
def step(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show ``what`` while the block runs; the yielded function shows a line of detail beside it."""
    line = Line(what)

    def detail(text: str) -> None:
        line.detail = text

    with console.status(line):
        yield detail
    console.print(f"  {line}", highlight=False)
