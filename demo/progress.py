"""Progress of slow steps: a spinner with the time and the last log line; on a pipe, a line a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

LAST_LINE_CHARACTERS = 70


@contextmanager
def step(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show ``what`` while the block runs; the yielded function shows a line of detail beside it."""
    started = time.monotonic()

    def elapsed() -> str:
        return f"{time.monotonic() - started:4.0f} s"

    with console.status(what) as status:

        def detail(line: str) -> None:
            status.update(f"{what}  {elapsed()}  [dim]{escape(line[:LAST_LINE_CHARACTERS])}[/dim]")

        detail("")
        yield detail
    console.print(f"  {what}  {elapsed()}", highlight=False)
