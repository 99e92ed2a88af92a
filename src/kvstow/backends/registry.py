"""The backends of kvstow's own."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from kvstow.backends.descriptor import Backend

# The folders below this one, in the order in which their tiers are asked: the nearest first.
_FOLDERS: Final = ("disk", "redis", "mooncake", "objects")

BACKENDS: Final[tuple[Backend[Any], ...]] = tuple(
    import_module(f"kvstow.backends.{folder}.backend").BACKEND for folder in _FOLDERS
)
