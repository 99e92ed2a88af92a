"""The command ``kvstow``. It starts no engine and needs neither vLLM nor torch."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from kvstow import __version__
from kvstow.cli import config, disk
from kvstow.cli.doctor import doctor
from kvstow.cli.output import prepare_output
from kvstow.cli.verify import verify_offload
from kvstow.errors import KVStowError, SettingsError
from kvstow.text import printable

EXIT_SETTINGS = 2
EXIT_FAILED = 1

app = typer.Typer(
    help="KV cache offloading for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(disk.app, name="disk")
app.add_typer(config.app, name="config")
app.command()(disk.namespaces)
app.command()(doctor)
app.command()(verify_offload)


class Page(StrEnum):
    """A generated page of the reference documentation."""

    settings = "settings"
    metrics = "metrics"
    lmcache = "lmcache"


def main() -> NoReturn:
    """Runs the command. Exit code 2: a setting is wrong; 1: the command failed."""
    prepare_output()
    try:
        app()
    except (KVStowError, OSError) as error:
        print(f"kvstow: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_FAILED)
    sys.exit(0)


def _version(asked: bool) -> None:
    if asked:
        print(f"kvstow {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
]


@app.callback()
def root(version: VersionOption = False) -> None:
    """KV cache offloading for vLLM."""


@app.command()
def reference(page: Page) -> None:
    """Print a page of the reference documentation, as Markdown: all settings, metrics, or LMCache's
    keys.
    """
    from kvstow.cli.reference import lmcache_page, metrics_page, settings_page

    pages = {Page.settings: settings_page, Page.metrics: metrics_page, Page.lmcache: lmcache_page}
    print(pages[page](), end="")
