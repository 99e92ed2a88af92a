"""Output to terminals, pipes and files, free of terminal control characters."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
FileOption = Annotated[
    str | None, typer.Option(help="A YAML file, instead of the one that KVSTOW_CONFIG_FILE names.")
]
PIPED_COLUMNS: Final = 10_000  # width of tables in pipes: a line each row, for grep


def prepare_output() -> None:
    """Makes the streams replace characters that their encoding lacks.

    Closed ones become ``/dev/null``.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, markup: bool) -> None:
    """Prints a table. In a pipe every row is one line.

    With ``markup`` the cells hold rich's tags for colours.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    Console(width=width, markup=markup).print(table)
