"""Reports a part of the benchmark that is run alone: a table on the terminal, JSON in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.machine import machine

OUT: Final = Path(__file__).resolve().parent.parent / "out"


def finish(result: dict[str, Any], table: Table, out: Path) -> None:
    """Prints the table, writes the result and the machine it comes from to ``out``."""
    Console().print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result | {"machine": machine()}, indent=2) + "\n")


def options(
    doc: str | None, rounds: int, out: Path, folder: Path | None = None
) -> argparse.ArgumentParser:
    """What every part may be told; ``folder`` for those that make files."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    if folder is not None:
        where = "where to make the files: on the disk to measure"
        parser.add_argument("--folder", type=Path, default=folder, help=where)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def command(
    doc: str | None,
    name: str,
    rounds: int,
    run: Callable[..., dict[str, Any]],
    table: Callable[[dict[str, Any]], Table],
    *,
    folder: Path | None = None,
) -> None:
    """A part as a command of its own; ``run`` takes the number of rounds, and the folder where
    there is one.
    """
    arguments = options(doc, rounds, OUT / f"bench_{name}.json", folder).parse_args()
    result = run(arguments.rounds) if folder is None else run(arguments.rounds, arguments.folder)
    finish(result, table(result), arguments.out)
