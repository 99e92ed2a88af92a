"""``kvstow disk`` and ``kvstow namespaces``: look at the disk tier's directories, and remove what
is in them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated, Any, Final, TypeVar

import typer

from kvstow.backends.disk import frame_check
from kvstow.backends.disk.scan import NamespaceUsage
from kvstow.backends.disk.settings import DiskSettings
from kvstow.cli.data_directory import DataDirectory, DirectoryUsage, DirectoryView, EmptyDirectory
from kvstow.cli.output import JsonOption, print_table
from kvstow.errors import SettingsError, StoreError
from kvstow.fields.values import format_bytes
from kvstow.runtime import SystemClock
from kvstow.settings import load
from kvstow.text import printable

EXIT_BAD: Final = 1
SHOWN_DIGITS: Final = 16  # of a namespace
DAY_S: Final = 86_400
# Weights as the namespace names them: a digest, and what it is of.
_DIGEST: Final = re.compile(r"^(?:revision )?([0-9a-f]{8})[0-9a-f]{24,}(?: of (\S+)| \(.*)$")

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    help="What the disk tier's directories hold. Safe beside a running server.",
)

PathOption = Annotated[
    list[str] | None,
    typer.Option("--path", help="A directory; may be repeated. Default: the setting disk.paths."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Only this namespace: its first digits, as `ls` shows them.")
]


@app.command()
def ls(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Namespaces: which model, how many chunks, how many bytes, last used when."""
    now = SystemClock().wall()
    looked, code = _look_at_each(path, DirectoryView.usage)
    rows = [
        _namespace_row(view, one, now) for view, usage in looked for one in usage.counted.namespaces
    ]
    _print_table(
        rows if as_json else None,
        ("namespace", "model", "chunks", "size", "last used", "longest unused", "in"),
        [
            (
                row["namespace"][:SHOWN_DIGITS],
                row["model"],
                row["chunks"],
                format_bytes(row["bytes"]),
                _age(row["newest_age_s"]),
                _age(row["oldest_age_s"]),
                row["path"],
            )
            for row in rows
        ],
    )
    raise typer.Exit(code)


@app.command()
def du(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Bytes in each directory, counted now, and what the processes that share it have reserved."""
    looked, code = _look_at_each(path, DirectoryView.usage)
    _print_table(
        [_usage_row(usage) for _, usage in looked] if as_json else None,
        (
            "in",
            "used",
            "chunks",
            "quarantine",
            "with reservations",
            "processes",
            "left on the disk",
        ),
        [
            (
                usage.path,
                format_bytes(usage.counted.bytes),
                sum(namespace.chunks for namespace in usage.counted.namespaces),
                usage.counted.quarantined,
                "unknown" if usage.ledger_bytes is None else format_bytes(usage.ledger_bytes),
                usage.processes,
                format_bytes(usage.free_bytes),
            )
            for _, usage in looked
        ],
    )
    raise typer.Exit(code)


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
    with _open_directories(path) as directories:
        for directory in directories:
            total = sum(namespace.chunks for namespace in directory.usage().counted.namespaces)
            with _progress(f"verifying {directory.path}", total, quiet=as_json) as advance:
                for result in directory.verify(check, set_aside=set_aside):
                    advance()
                    if result.good:
                        good += 1
                    else:
                        found = {"namespace": result.namespace.hex(), "chunk": result.digest.hex()}
                        bad.append({"path": directory.path, **found})
    if as_json:
        print(json.dumps({"good": good, "bad": bad}, indent=2))
    else:
        for row in bad:
            namespace = row["namespace"][:SHOWN_DIGITS]
            print(f"bad: {row['path']} namespace {namespace} chunk {row['chunk']}")
        moved = " and set aside" if bad and set_aside else ""
        print(f"{good} chunks are whole, {len(bad)} are bad{moved}")
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
    """Remove what dead processes left, quarantined files, empty namespaces; if asked old chunks."""
    now = SystemClock().wall()
    rows = []
    with _open_directories(path) as directories:
        going = []
        files = sum(directory.usage().counted.quarantined for directory in directories)
        empty = yes or _terminal()
        if files and empty:
            going.append(f"{files} quarantined files")
        elif files:
            _print_error(
                f"{files} quarantined files are left: to remove them without a terminal give --yes"
            )
        if older_than_days is not None and directories:
            going.append(f"the chunks not used for {older_than_days:g} days")
        if going:
            _confirm(f"Remove {' and '.join(going)} in {_paths_of(directories)}?", yes)
        oldest_s = -math.inf if older_than_days is None else now - older_than_days * DAY_S
        for directory in directories:
            files, freed = directory.tidy(empty)
            chunks, size = directory.remove(lambda _, used_s: used_s < oldest_s)
            rows.append(
                {
                    "path": directory.path,
                    "chunks": chunks,
                    "quarantined": files,
                    "bytes": freed + size,
                }
            )
    _print_removed(rows, as_json)


@app.command()
def clear(
    path: PathOption = None,
    namespace: NamespaceOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all chunks, or those of one namespace, its adapters and resets."""
    if namespace == "":
        raise SettingsError(
            "--namespace is empty: give the first digits of one, "
            "or leave it out to remove all chunks"
        )
    rows = []
    with _open_directories(path) as directories:
        one, what = None, "all chunks"
        if namespace is not None and directories:
            one = _namespace_named(directories, namespace)
            what = f"the chunks of namespace {one[:SHOWN_DIGITS]}"
        _confirm(f"Remove {what} in {_paths_of(directories)}?", yes or not directories)
        for directory in directories:
            chunks, size = directory.remove(_chosen_by(directory, one))
            rows.append({"path": directory.path, "chunks": chunks, "bytes": size})
    _print_removed(rows, as_json)


def namespaces(path: PathOption = None, as_json: JsonOption = False) -> None:
    """What differs between the namespaces on disk: why KV of one is never used for another."""
    looked, code = _look_at_each(path, DirectoryView.namespaces)
    known = {name: dict(view.about(name)) for view, found in reversed(looked) for name in found}
    if as_json:
        print(json.dumps(known, indent=2))
        raise typer.Exit(code)
    fields = sorted(
        {field for about in known.values() for field in about} - {"namespace", "created"}
    )
    differing = [
        field for field in fields if len({str(about.get(field)) for about in known.values()}) > 1
    ]
    if len(known) < 2 or not differing:
        differing = fields
    for name, about in known.items():
        print(name[:SHOWN_DIGITS])
        for field in differing:
            print(printable(f"  {field}: {about.get(field, '-')}"))
    raise typer.Exit(code)


def _paths(path: Sequence[str] | None) -> list[str]:
    """The directories to work on, each once."""
    paths = path or load().settings.section(DiskSettings).paths
    if not paths:
        raise SettingsError("no directory: give --path, or set disk.paths")
    if "" in paths:
        raise SettingsError(
            "--path is empty: give a directory; without --path those of disk.paths are meant"
        )
    return list({os.path.realpath(one): one for one in paths}.values())


def _print_error(text: str) -> None:
    print(printable(text), file=sys.stderr)


@contextmanager
def _open_directories(path: Sequence[str] | None) -> Iterator[list[DataDirectory]]:
    """Open all directories for the block, or none and raise. Empty directories are left out."""
    with ExitStack() as stack:
        opened = []
        for one in _paths(path):
            try:
                opened.append(stack.enter_context(closing(DataDirectory(one))))
            except EmptyDirectory as error:
                _print_error(str(error))
        yield opened


def _look_at_each(
    path: Sequence[str] | None, look: Callable[[DirectoryView], T]
) -> tuple[list[tuple[DirectoryView, T]], int]:
    """The value of ``look`` for each directory, and the exit code: not 0 if one, which is named,
    can't be read."""
    looked = []
    code = 0
    for one in _paths(path):
        try:
            view = DirectoryView(one)
            looked.append((view, look(view)))
        except EmptyDirectory as error:
            _print_error(str(error))
        except StoreError as error:
            _print_error(f"kvstow: {error}")
            code = EXIT_BAD
    return looked, code


def _chosen_by(directory: DataDirectory, one: str | None) -> Callable[[str, float], bool]:
    """A choice of chunks for ``DataDirectory.remove``: those of namespace ``one`` and of its
    adapters and resets; None: all."""
    chosen = {
        name
        for name in directory.namespaces()
        if one in (None, name, directory.base_namespace(name))
    }
    return lambda name, _: name in chosen


def _namespace_named(directories: Sequence[DataDirectory], prefix: str) -> str:
    known = {
        (name, directory.base_namespace(name))
        for directory in directories
        for name in directory.namespaces()
    }
    matching = sorted({name for pair in known for name in pair if name.startswith(prefix)})
    if not matching:
        raise SettingsError(f"no namespace starts with {prefix!r}: see `kvstow disk ls`")
    if len(matching) > 1:
        found = ", ".join(name[: max(SHOWN_DIGITS, len(prefix) + 1)] for name in matching)
        raise SettingsError(
            f"{len(matching)} namespaces start with {prefix!r}: {found}. Give more digits of one"
        )
    return matching[0]


def _terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not _terminal():
        raise SettingsError(
            f"{question} Not done: to be asked needs a terminal; without one give --yes"
        )
    # Standard output is for what was asked for.
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        _print_error("Not done.")
        raise typer.Exit(EXIT_BAD)


def _paths_of(directories: Sequence[DirectoryView]) -> str:
    return ", ".join(directory.path for directory in directories)


def _model(about: Mapping[str, Any]) -> str:
    """A model's name; or its architecture, and its weights' digest or revision, of which the first
    digits."""
    architecture = re.search(r'"architectures":\["(\w+)"', str(about.get("model config")))
    weights = _DIGEST.sub(r"\2 \1", str(about.get("weights", "?")))
    return str(
        about.get("model")
        or " ".join([*(architecture.groups() if architecture else ()), *weights.split()])
    )


def _namespace_row(directory: DirectoryView, found: NamespaceUsage, now: float) -> dict[str, Any]:
    about = directory.about(found.name)
    return {
        "path": directory.path,
        "namespace": found.name,
        "model": _model(about),
        "weights": about.get("weights"),
        "chunks": found.chunks,
        "bytes": found.bytes,
        "oldest_age_s": round(now - found.oldest_s) if found.chunks else None,
        "newest_age_s": round(now - found.newest_s) if found.chunks else None,
    }


def _usage_row(usage: DirectoryUsage) -> dict[str, Any]:
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


def _print_removed(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        files = (
            f"{row['quarantined']} quarantined files removed, " if row.get("quarantined") else ""
        )
        print(
            f"{row['path']}: {row['chunks']} chunks removed, {files}{format_bytes(row['bytes'])} freed"
        )


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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _print_table(
    as_json: Sequence[object] | None, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print ``as_json`` if given, else a table."""
    if as_json is not None:
        print(json.dumps(as_json, indent=2))
        return
    if not rows:
        _print_error("nothing to show")
        return
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    print_table(headings, cells, markup=False)
