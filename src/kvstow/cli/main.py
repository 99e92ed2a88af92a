"""``kvstow``: what an operator asks without starting an engine. Needs neither vLLM nor torch."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from kvstow import __version__
from kvstow.cli import codec, disk
from kvstow.cli.doctor import doctor
from kvstow.cli.verify import verify_offload
from kvstow.errors import KVStowError, SettingsError
from kvstow.settings import Effective, load

EXIT_SETTINGS = 2
EXIT_FAILED = 1

app = typer.Typer(
    help="KV cache offloading for vLLM.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(disk.app, name="disk")
app.add_typer(codec.app, name="codec")
app.command()(disk.namespaces)
app.command()(doctor)
app.command()(verify_offload)


class Page(StrEnum):
    settings = "settings"
    metrics = "metrics"


def main() -> NoReturn:
    """Entry point. Exit code 2: a setting is wrong; 1: the command failed."""
    try:
        app()
    except SettingsError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS)
    except KVStowError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    sys.exit(0)


def _version(asked: bool) -> None:
    if asked:
        print(f"kvstow {__version__}")
        raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
FileOption = Annotated[str | None, typer.Option(help="A YAML file, instead of the one that KVSTOW_CONFIG_FILE names.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback()
def root(version: VersionOption = False) -> None:
    """KV cache offloading for vLLM."""


@app.command()
def config(file: FileOption = None, as_json: JsonOption = False) -> None:
    """Show every setting, its value, and where that came from.

    Reads the defaults, the YAML file and the KVSTOW_* variables of this shell. What vLLM is given as
    kv_connector_extra_config overrides them; vLLM's log shows the outcome at start.
    """
    effective = load(file=file)
    print(_as_json(effective)) if as_json else _print_table(effective)


@app.command(hidden=True)
def reference(page: Page) -> None:
    """Print a page of the reference documentation, as Markdown."""
    from kvstow.cli.reference import metrics_page, settings_page

    print({Page.settings: settings_page, Page.metrics: metrics_page}[page](), end="")


def _as_json(effective: Effective) -> str:
    rows = {r.key: {"value": r.value, "shown": r.shown, "source": r.source} for r in effective.describe()}
    return json.dumps(rows, indent=2)


def _print_table(effective: Effective) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for row in effective.describe():
        table.add_row(row.key, row.shown, row.source)
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(table)
    console.print("Sizes are per engine, all ranks together.")
