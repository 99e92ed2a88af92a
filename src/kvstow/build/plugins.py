"""Tiers of other packages, from settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvstow.backends.base import Store
from kvstow.errors import SettingsError, StoreError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, ThreadExecutor
from kvstow.settings import Settings, leaves
from kvstow.settings.values import MASK
from kvstow.tiers import Tier
from kvstow.tiers.checked import CheckedStore, within

GROUP: Final = "kvstow.stores"  # of entry points
OPEN_S: Final = 30.0  # the longest that importing and opening one may take

_NAME: Final = re.compile(r"[A-Za-z][\w-]{0,31}", re.ASCII)
_METHODS: Final = ("contains", "read", "write", "delete", "close")
_SECRET: Final = re.compile("password|passwd|secret|token|key", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def plugin_names(settings: Settings) -> Mapping[str, str]:
    """Of each store that settings name its tier's name, and ``module:function`` or, for an entry point, nothing.

    Raises ``SettingsError``.
    """
    named = {}
    taken = {leaf.section for leaf in leaves()}
    for entry in settings.plugins.stores or ():
        name, _, where = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"plugins.stores: {name!r} is no name: letters, digits, _ and -, at most 32"
            )
        if name in taken or name in named:
            raise SettingsError(
                f"plugins.stores: there is a tier {name} already, name this one otherwise"
            )
        if "=" in entry and not re.fullmatch(r"[\w.]+:[\w.]+", where):
            raise SettingsError(f"plugins.stores: {entry}: expected name=module:function")
        named[name] = where
    return named


def build_plugins(
    settings: Settings, layout: ChunkLayout, *, clock: Clock, metrics: Metrics
) -> list[Tier]:
    """A tier for each store that other packages bring. Raises ``SettingsError`` when one can't be opened."""
    named = plugin_names(settings)
    options = json.loads(settings.plugins.options.reveal()) if settings.plugins.options else {}
    for name in options:
        if name not in named:
            raise SettingsError(
                f"plugins.options has options for {name}, which plugins.stores doesn't name"
            )
    tiers = []
    for name, where in named.items():
        store = CheckedStore(_open(name, where, options.get(name, {})))
        executor = ThreadExecutor(name, threads=settings.plugins.threads)
        tiers.append(Tier(name, store, executor, layout=layout, clock=clock, metrics=metrics))
    return tiers


def _open(name: str, where: str, options: Mapping[str, Any]) -> Store:
    def opened() -> tuple[Store, str | None]:
        store: Store = _factory(name, where)(options)
        missing = [method for method in _METHODS if not callable(getattr(store, method, None))]
        return store, f"{type(store).__name__} has no {missing[0]}()" if missing else None

    try:
        store, lacks = within(f"open-{name}", opened, OPEN_S)
    except StoreError as error:
        text = _IN_URL.sub(rf"\1{MASK}@", str(error))
        for secret in _secrets(options):
            text = text.replace(secret, MASK)
        what = where or f"entry point {name} of group {GROUP}"
        raise SettingsError(
            f"plugins.stores: {name} can't be opened: {text}. {what} must be a function that takes options, a mapping, "
            "and returns a kvstow Store"
        ) from None
    if lacks:
        raise SettingsError(f"plugins.stores: {name} is no kvstow Store: {lacks}")
    return store


def _secrets(value: Any, named: bool = False) -> Iterator[str]:
    """What is under a secret's name, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, named or _SECRET.search(name) is not None)
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets(inner, named)
    elif named and value:
        yield str(value)


def _factory(name: str, where: str) -> Callable[[Mapping[str, Any]], Any]:
    if where:
        module, _, attribute = where.partition(":")
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    else:
        points = importlib.metadata.entry_points(group=GROUP)
        if name not in points.names:
            known = ", ".join(sorted(points.names)) or "none"
            raise SettingsError(f"no installed package has registered it (there are: {known})")
        found = points[name].load()
    factory: Callable[[Mapping[str, Any]], Any] = found
    return factory
