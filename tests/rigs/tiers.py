"""Tiers as ``kvstow.build`` opens them, one at a time."""

from __future__ import annotations

from typing import Any

from kvstow import build
from kvstow.backends.descriptor import HashRoot, OpenContext
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, SystemClock
from kvstow.settings import Settings
from kvstow.settings.variables import set_defaults


def open_tier(
    settings: Settings,
    layout: Any,
    *,
    clock: Clock | None = None,
    metrics: Metrics | None = None,
    root: tuple[str, str] | None = None,
    **context: Any,
) -> Any:
    """The one tier that ``settings`` ask for; None if they ask for none."""
    configured = [*build.configured_backends(settings), *build.resolve_plugins(settings)]
    if not configured:
        return None
    [one] = configured
    own = OpenContext(
        layout,
        clock or SystemClock(),
        root=HashRoot(*root) if root else None,
        set_variables=set_defaults,
        **context,
    )
    return build.open_tier(one, own, metrics or Metrics())
