"""Environment variables that a client library reads in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_defaults(values: Mapping[str, str]) -> None:
    """Set each where it isn't set: a user's own value stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
