"""Stores of other packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from msgspec import Struct

from kvstow.backends.descriptor import Backend, ConfiguredBackend, OpenContext, OpenedStore
from kvstow.errors import SettingsError, StoreError
from kvstow.fields.values import MASK
from kvstow.settings import Settings, leaves, parse_section
from kvstow.tiers.checked import CheckedStore, within

T = TypeVar("T")

GROUP: Final = "kvstow.stores"  # of entry points
OPEN_S: Final = 30.0  # the longest that importing and opening one may take

_NAME: Final = re.compile(r"[A-Za-z][\w-]{0,31}", re.ASCII)
_METHODS: Final = ("contains", "read", "write", "delete", "close")
_SECRET: Final = re.compile("password|passwd|secret|token|key", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def plugin_names(settings: Settings) -> Mapping[str, str | None]:
    """Maps each configured plug-in's tier name to its ``module:function``, or to None if it is an entry point.

    Raises ``SettingsError`` for a name that is taken or can't be one.
    """
    named: dict[str, str | None] = {}
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
        named[name] = where or None
    return named


class FactorySettings(Struct, frozen=True, kw_only=True):
    """The section of a plug-in that is a plain function: its options, as they are."""

    options: dict[str, Any]


def resolve_plugins(settings: Settings) -> list[ConfiguredBackend]:
    """Imports each plug-in that settings name. Raises ``SettingsError`` if one can't be imported."""
    named = plugin_names(settings)
    options = json.loads(settings.plugins.options.reveal()) if settings.plugins.options else {}
    for name in options:
        if name not in named:
            raise SettingsError(
                f"plugins.options has options for {name}, which plugins.stores doesn't name"
            )
    return [
        _resolve(name, where, options.get(name, {}), settings.plugins.threads)
        for name, where in named.items()
    ]


def _resolve(
    name: str, where: str | None, options: dict[str, Any], threads: int
) -> ConfiguredBackend:
    """Makes a backend of a plug-in's descriptor or function that opens, checks and answers within limits."""
    found = _guarded(name, where, options, lambda: _load(name, where))
    section: Struct
    if isinstance(found, Backend):
        backend = found
        section = parse_section(found.section, options, f"plugins.options.{name}")
    else:
        backend = Backend(
            name, FactorySettings, lambda own, _: OpenedStore(found(own.options), name)
        )
        section = FactorySettings(options=options)

    def open_store(own: Any, context: OpenContext) -> OpenedStore:
        def opened() -> tuple[OpenedStore, str | None]:
            result: OpenedStore = backend.open(own, context)
            store = result.store
            missing = [each for each in _METHODS if not callable(getattr(store, each, None))]
            return result, f"{type(store).__name__} has no {missing[0]}()" if missing else None

        result, lacks = _guarded(name, where, options, opened)
        if lacks:
            raise SettingsError(f"plugins.stores: {name} is no kvstow Store: {lacks}")
        return replace(result, store=CheckedStore(result.store))

    return ConfiguredBackend(name, replace(backend, open=open_store), section, threads)


def _guarded(name: str, where: str | None, options: Mapping[str, Any], work: Callable[[], T]) -> T:
    """Returns the value of a plug-in's ``work``. Raises ``SettingsError``, without secrets, if it fails or hangs."""
    try:
        return within(f"open-{name}", work, OPEN_S)
    except StoreError as error:
        text = _IN_URL.sub(rf"\1{MASK}@", str(error))
        for secret in _secrets(options):
            text = text.replace(secret, MASK)
        what = where or f"entry point {name} of group {GROUP}"
        raise SettingsError(
            f"plugins.stores: {name} can't be opened: {text}. {what} must be a function that takes options, a mapping, "
            "and returns a kvstow Store, or a Backend"
        ) from None


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


def _load(name: str, where: str | None) -> Any:
    """Imports the function or descriptor that a plug-in is named by."""
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
    return found
