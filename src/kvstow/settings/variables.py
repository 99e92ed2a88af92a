"""Environment variables that a client library reads in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set each where it isn't set: a user's own value stays. Returns what is in force."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}
