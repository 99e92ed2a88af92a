"""``kvstow disk``: what is in the disk tier's directories, and making it less. Safe beside a running server."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated, Any, Final

import typer

from kvstow.cli.data_directory import DataDirectory, Usage
from kvstow.cli.output import PIPED_COLUMNS
from kvstow.errors import SettingsError, StoreRefused
from kvstow.runtime import SystemClock
from kvstow.settings import format_size, load
from kvstow.store.disk import frame_check
from kvstow.store.disk.scan import Namespace

EXIT_BAD: Final = 1
SHOWN_DIGITS: Final = 16  # of a namespace
DAY_S: Final = 86_400

app = typer.Typer(no_args_is_help=True, help="What the disk tier's directories hold. Safe beside a running server.")

PathOption = Annotated[
    list[str] | None, typer.Option("--path", help="A directory; may be repeated. Default: the setting disk.paths.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
NamespaceOption = Annotated[str | None, typer.Option(help="Only this namespace: its first digits, as `ls` shows them.")]


@app.command()
def ls(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Namespaces: which model, how many chunks, how many bytes, last used when."""
    now = SystemClock().wall()
    rows: list[dict[str, Any]] = []
    with _directories(path) as directories:
        for directory in directories:
            rows += [_namespace_row(directory, found, now) for found in directory.usage().counted.namespaces]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _table(
        ("namespace", "model", "chunks", "size", "last used", "oldest", "in"),
        [
            (
                row["namespace"][:SHOWN_DIGITS],
                row["model"],
                row["chunks"],
                format_size(row["bytes"]),
                _age(row["newest_age_s"]),
                _age(row["oldest_age_s"]),
                row["path"],
            )
            for row in rows
        ],
    )


@app.command()
def du(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Bytes in each directory, counted now, and what the processes that share it have reserved."""
    with _directories(path) as directories:
        usages = [directory.usage() for directory in directories]
    if as_json:
        print(json.dumps([_usage_row(usage) for usage in usages], indent=2))
        return
    _table(
        ("in", "used", "chunks", "quarantine", "with reservations", "processes", "left on the disk"),
        [
            (
                usage.path,
                format_size(usage.counted.bytes),
                sum(namespace.chunks for namespace in usage.counted.namespaces),
                usage.counted.quarantined,
                format_size(usage.ledger_bytes or 0),
                usage.processes,
                format_size(usage.free_bytes),
            )
            for usage in usages
        ],
    )


@app.command()
def verify(
    path: PathOption = None,
    set_aside: Annotated[bool, typer.Option(help="Move bad chunks to the quarantine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and check it. Exit code 1: some are bad."""
    good = 0
    bad: list[dict[str, str]] = []
    from kvstow.build import integrity_key  # not at the top: no other command needs the tiers

    check = frame_check(integrity_key(load().settings))
    with _directories(path) as directories:
        for directory in directories:
            total = sum(namespace.chunks for namespace in directory.usage().counted.namespaces)
            with _progress(f"verifying {directory.path}", total, quiet=as_json) as advance:
                for result in directory.verify(check, set_aside=set_aside):
                    advance()
                    good += result.good
                    if not result.good:
                        found = {"namespace": result.namespace.hex(), "chunk": result.digest.hex()}
                        bad.append({"path": directory.path, **found})
    if as_json:
        print(json.dumps({"good": good, "bad": bad}, indent=2))
    else:
        for row in bad:
            print(f"bad: {row['path']} namespace {row['namespace'][:SHOWN_DIGITS]} chunk {row['chunk']}")
        print(f"{good} chunks are whole, {len(bad)} are bad{' and set aside' if bad and set_aside else ''}")
    if bad:
        raise typer.Exit(EXIT_BAD)


@app.command()
def gc(
    path: PathOption = None,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Remove chunks that were not used for so long.")
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Clear up after dead processes, empty the quarantine, remove empty namespaces, and old chunks if asked."""
    now = SystemClock().wall()
    rows = []
    with _directories(path) as directories:
        if older_than_days is not None:
            _confirm(f"Remove chunks not used for {older_than_days:g} days in {_names(directories)}?", yes)
        oldest_s = -math.inf if older_than_days is None else now - older_than_days * DAY_S
        for directory in directories:
            freed = directory.tidy()
            chunks, size = directory.remove(lambda _, used_s: used_s < oldest_s)
            rows.append({"path": directory.path, "chunks": chunks, "bytes": freed + size})
    _removed(rows, as_json)


@app.command()
def clear(
    path: PathOption = None, namespace: NamespaceOption = None, yes: YesOption = False, as_json: JsonOption = False
) -> None:
    """Remove all chunks, or those of one namespace, its adapters and resets."""
    rows = []
    with _directories(path) as directories:
        if namespace is not None:
            _one_namespace(directories, namespace)
        what = "all chunks" if namespace is None else f"the chunks of namespace {namespace}"
        _confirm(f"Remove {what} in {_names(directories)}?", yes)
        for directory in directories:
            chunks, size = directory.remove(_inside(directory, namespace or ""))
            rows.append({"path": directory.path, "chunks": chunks, "bytes": size})
    _removed(rows, as_json)


def namespaces(path: PathOption = None, as_json: JsonOption = False) -> None:
    """What differs between the namespaces on disk: why KV of one is never used for another."""
    known: dict[str, dict[str, Any]] = {}
    with _directories(path) as directories:
        for directory in directories:
            for name in directory.namespaces():
                known.setdefault(name, dict(directory.about(name)))
    if as_json:
        print(json.dumps(known, indent=2))
        return
    fields = sorted({field for about in known.values() for field in about} - {"namespace", "created"})
    differing = [field for field in fields if len({str(about.get(field)) for about in known.values()}) > 1]
    if len(known) < 2 or not differing:
        differing = fields
    for name, about in known.items():
        print(name[:SHOWN_DIGITS])
        for field in differing:
            print(f"  {field}: {about.get(field, '-')}")


@contextmanager
def _directories(path: Sequence[str] | None) -> Iterator[list[DataDirectory]]:
    """Open for the block."""
    paths = path or load().settings.disk.paths
    if not paths:
        raise SettingsError("no directory: give --path, or set disk.paths")
    for one in paths:
        if not os.path.isdir(one):
            raise StoreRefused(f"{one} holds no kvstow chunks: there is no such directory")
    with ExitStack() as stack:
        yield [stack.enter_context(closing(DataDirectory(one))) for one in paths]


def _inside(directory: DataDirectory, prefix: str) -> Callable[[str, float], bool]:
    """What chooses the namespaces that begin so, and those inside them."""
    pairs = [(name, directory.family(name)) for name in directory.namespaces()]
    chosen = {name for name, family in pairs if name.startswith(prefix) or family.startswith(prefix)}
    return lambda name, _: name in chosen


def _one_namespace(directories: Sequence[DataDirectory], prefix: str) -> None:
    known = {(name, directory.family(name)) for directory in directories for name in directory.namespaces()}
    matching = {name for pair in known for name in pair if name.startswith(prefix)}
    if len(matching) != 1:
        found = "no namespace" if not matching else f"{len(matching)} namespaces"
        raise SettingsError(f"{found} starts with {prefix!r}: see `kvstow disk ls`")


def _confirm(question: str, yes: bool) -> None:
    if not yes and not (sys.stdin.isatty() and typer.confirm(question)):
        raise SettingsError(f"{question} Not done: answer yes, or give --yes")


def _names(directories: Sequence[DataDirectory]) -> str:
    return ", ".join(directory.path for directory in directories)


def _model(about: Any) -> str:
    return str(about.get("model", about.get("weights", "?")))


def _namespace_row(directory: DataDirectory, found: Namespace, now: float) -> dict[str, Any]:
    return {
        "path": directory.path,
        "namespace": found.name,
        "model": _model(directory.about(found.name)),
        "chunks": found.chunks,
        "bytes": found.bytes,
        "oldest_age_s": round(now - found.oldest_s) if found.chunks else None,
        "newest_age_s": round(now - found.newest_s) if found.chunks else None,
    }


def _usage_row(usage: Usage) -> dict[str, Any]:
    counted = usage.counted
    return {
        "path": usage.path,
        "bytes": counted.bytes,
        "chunks": sum(namespace.chunks for namespace in counted.namespaces),
        "quarantined": counted.quarantined,
        "quarantined_bytes": counted.quarantined_bytes,
        "ledger_bytes": usage.ledger_bytes,
        "processes": usage.processes,
        "free_bytes": usage.free_bytes,
    }


def _removed(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['path']}: {row['chunks']} chunks removed, {format_size(row['bytes'])} freed")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(table)
