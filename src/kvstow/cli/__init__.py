"""The ``kvstow`` command."""

from kvstow.cli.main import app, main

__all__ = ["app", "main"]
