"""LMCache's configuration, collected from all its sources and translated into kvstow's settings.

The sources are LMCache's YAML file, its ``LMCACHE_*`` variables, and ``lmcache.<key>`` in vLLM's
``kv_connector_extra_config``; later ones win. Only connectors with LMCache's names read them. Every
key that is set leads to a setting, a line in the log, or an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvstow.errors import SettingsError
from kvstow.settings.lmcache_keys import (
    ALIASES,
    CONNECTOR_KEYS,
    KEYS,
    OTHER_VARIABLES,
    SourcedValue,
)
from kvstow.settings.lmcache_mooncake import CONFIG_PATH
from kvstow.settings.lmcache_translate import Translation, translate
from kvstow.settings.sources import (
    EXTRA_CONFIG,
    Effective,
    Note,
    nearest,
    of_kubernetes,
    parse,
    shown_name,
)
from kvstow.settings.yamlfile import read_yaml

PREFIX: Final = "LMCACHE_"
CONFIG_FILE: Final = "LMCACHE_CONFIG_FILE"
FORCE_SKIP_SAVE: Final = "LMCACHE_FORCE_SKIP_SAVE"
OVERRIDE: Final = "lmcache."


def load_lmcache(extra_config: Mapping[str, Any] | None, *, workers: int) -> Effective:
    """Returns this process's settings, kvstow's own over LMCache's.

    ``extra_config`` is vLLM's ``kv_connector_extra_config``, or None. ``workers`` is the number of
    ranks of an engine: tensor times pipeline parallel size.
    """
    return parse_lmcache(os.environ, extra_config, workers=workers)


def lmcache_variables() -> list[str]:
    """The names of LMCache's variables that this process has."""
    return sorted(name for name in os.environ if name.startswith(PREFIX))


def convert_lmcache(file: str | None, *, workers: int) -> Translation:
    """Translates ``file``, or, without it, this process's variables and the file that they name."""
    values, notes = collect({} if file else os.environ, {}, file=file)
    if not values:
        where = file or f"this shell's {PREFIX}* variables"
        notes.append(Note(True, f"Nothing of LMCache's is set in {where}: these are its defaults"))
    translation = translate(values, workers, os.environ.get(CONFIG_PATH))
    return Translation(translation.entries, notes + translation.notes)


def parse_lmcache(
    env: Mapping[str, str], extra_config: Mapping[str, Any] | None, *, workers: int
) -> Effective:
    """Returns settings from all sources, kvstow's own over LMCache's.

    Raises ``SettingsError``, which names source and key, for a wrong value and for something that
    kvstow can't do and the user relies on.
    """
    extra = extra_config or {}
    theirs = {
        key: value
        for key, value in extra.items()
        if str(key).startswith(OVERRIDE) or key in CONNECTOR_KEYS
    }
    own = {key: value for key, value in extra.items() if key not in theirs}
    values, notes = collect(env, theirs)
    entries, more_notes = translate(values, workers, env.get(CONFIG_PATH))
    effective = parse(None, env, own, base=entries)
    notes += more_notes
    overruled = [
        f"{entry.key} ({effective.sources[entry.key]})"
        for entry in entries
        if effective.sources[entry.key] != entry.source
    ]
    if overruled:
        text = f"kvstow's own settings win over LMCache's: {', '.join(overruled)}"
        notes.append(Note(True, text))
    return replace(effective, notes=tuple(notes))


def collect(
    env: Mapping[str, str], extra: Mapping[str, Any], *, file: str | None = None
) -> tuple[dict[str, SourcedValue], list[Note]]:
    """Returns the strongest value of each of LMCache's keys, and notes on what is no key.

    ``extra`` is LMCache's part of ``kv_connector_extra_config``. ``file`` replaces the one that a
    variable names.
    """
    if env.get(FORCE_SKIP_SAVE, "").strip():
        raise SettingsError(
            f"{FORCE_SKIP_SAVE} can't be served: to store nothing set kv_role to kv_consumer"
        )
    sources = _Sources()
    named_by = ""
    if file is None and env.get(CONFIG_FILE, "").strip():
        file = env[CONFIG_FILE]
        named_by = f" (named by {CONFIG_FILE})"
    if file is not None:
        for key, value in read_yaml(file, named_by).items():
            sources.add(str(key), value, f"{shown_name(str(key))} in {file}")
    for variable in sorted(name for name in env if name.startswith(PREFIX)):
        if variable in (CONFIG_FILE, FORCE_SKIP_SAVE) or of_kubernetes(variable, env[variable]):
            continue
        if variable in OTHER_VARIABLES:
            sources.ignore(variable, OTHER_VARIABLES[variable])
        else:
            name = variable.removeprefix(PREFIX).lower()
            sources.add(name, _unquoted(env[variable]), shown_name(variable))
    for key, value in extra.items():
        if key in CONNECTOR_KEYS:
            sources.ignore(f"{key} in {EXTRA_CONFIG}", CONNECTOR_KEYS[key])
        else:
            source = f"{shown_name(key)} in {EXTRA_CONFIG}"
            sources.add(key.removeprefix(OVERRIDE), value, source)
    return sources.values, sources.notes


class _Sources:
    """Values of LMCache's keys, added from the weakest source to the strongest."""

    def __init__(self) -> None:
        self.values: dict[str, SourcedValue] = {}
        self.notes: list[Note] = []

    def add(self, written: str, value: object, source: str) -> None:
        """Add a value.

        ``written`` is the key as its source has it, perhaps an older name or none.
        """
        name = ALIASES.get(written, written)
        if name in KEYS:
            self.values[name] = SourcedValue(value, source)
            return
        text = f"{source} is not a key of LMCache's and is ignored; {nearest(written, KEYS)}"
        self.notes.append(Note(True, text))

    def ignore(self, source: str, why: str) -> None:
        """Note that something has no effect."""
        self.notes.append(Note(False, f"{source} is ignored: {why}"))


def _unquoted(text: str) -> str:
    """LMCache takes a variable's value without quotes around it."""
    stripped = text.strip()
    quoted = len(stripped) >= 2 and stripped[0] == stripped[-1] and stripped[0] in "'\""
    return stripped[1:-1] if quoted else stripped
