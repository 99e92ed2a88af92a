"""``kvstow config``: what is set and where that came from; and LMCache's configuration as kvstow's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvstow.cli.conflicts import conflicts
from kvstow.cli.output import FileOption, JsonOption, print_table
from kvstow.errors import SettingsError
from kvstow.fields.kinds import OPTIONS, SECRET, SIZE
from kvstow.fields.values import MASK, format_size
from kvstow.settings import Effective, convert_lmcache, leaves, load, parse, redact_url
from kvstow.text import printable

app = typer.Typer(invoke_without_command=True)

MISSING = "what is masked is left out: put it in"


@app.callback()
def config(context: typer.Context, file: FileOption = None, as_json: JsonOption = False) -> None:
    """Show every setting, its value, and where that came from.

    Reads the defaults, the YAML file and the KVSTOW_* variables of this shell. What vLLM is given
    as kv_connector_extra_config overrides them; vLLM's log shows the outcome at start.
    """
    if context.invoked_subcommand is not None:
        return
    effective = load(file=file)
    if as_json:
        print(_as_json(effective))
    else:
        rows = [(row.key, row.shown, row.source) for row in effective.describe()]
        print_table(("setting", "value", "from"), rows, markup=False)
        print("Sizes are per engine, all ranks together.")
    _refuse(effective)


@app.command()
def convert(
    file: Annotated[
        str | None,
        typer.Argument(
            help="LMCache's YAML. Without it: LMCACHE_CONFIG_FILE and the LMCACHE_* variables."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Tensor times pipeline parallel size: LMCache's sizes are of each worker."
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Print LMCache's configuration as kvstow's, with what has no counterpart as comments."""
    converted = convert_lmcache(file, workers=workers)
    # What kvstow would refuse is refused here too.
    effective = parse(None, {}, base=converted.entries)
    kinds = {leaf.key: leaf.kind for leaf in leaves()}
    rows = [(key, source, _plain(value, kinds[key])) for key, source, value in converted.entries]
    notes = [note.text for note in converted.notes]
    if as_json:
        sources = {key: source for key, source, _ in rows}
        print(
            json.dumps(
                {"settings": {k: v for k, _, v in rows}, "sources": sources, "notes": notes},
                indent=2,
            )
        )
    else:
        _print_yaml(rows, notes, workers)
    _refuse(effective)


def _refuse(effective: Effective) -> None:
    """End with an error where vLLM would not start with what has just been printed."""
    if wrong := [str(error) for error in conflicts(effective)]:
        sys.stdout.flush()  # the error comes last
        raise SettingsError(f"vLLM would not start with these settings: {'; '.join(wrong)}")


def _print_yaml(rows: Sequence[tuple[str, str, Any]], notes: Sequence[str], workers: int) -> None:
    print(
        f"# kvstow's settings for LMCache's, {workers} worker{'s' if workers > 1 else ''} an engine"
    )
    print("".join(f"# {printable(note)}\n" for note in notes), end="")
    for section in dict.fromkeys(
        key.rpartition(".")[0] for key, _, _ in sorted(rows, key=lambda row: "." in row[0])
    ):
        print(f"{section}:\n" if section else "", end="")
        for key, source, value in rows:
            if key.rpartition(".")[0] == section:
                left_out = f"; {MISSING}" if MASK in str(value) else ""
                indent, name = "  " if section else "", key.rpartition(".")[2]
                print(f"{indent}{name}: {json.dumps(value)}  # {printable(source)}{left_out}")


def _plain(value: Any, kind: str) -> Any:
    """As JSON and YAML have it; secrets masked."""
    if kind == SIZE:
        return format_size(value)
    if kind == SECRET:
        return redact_url(value) if "://" in value else MASK
    return (
        {name: dict.fromkeys(own, MASK) for name, own in value.items()}
        if kind == OPTIONS
        else value
    )


def _as_json(effective: Effective) -> str:
    rows = {
        r.key: {"value": r.value, "shown": r.shown, "source": r.source}
        for r in effective.describe()
    }
    return json.dumps(rows, indent=2)
