"""LMCache's configuration as kvstow's settings: its YAML file, its ``LMCACHE_*`` variables, and what vLLM is given as
``lmcache.<key>`` in ``kv_connector_extra_config``, the later the stronger. Its table: ``kvstow.settings.lmcache_keys``.

Only connectors with LMCache's names read any of it. Nothing that is given is dropped in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvstow.errors import SettingsError
from kvstow.settings.lmcache_keys import ALIASES, CONNECTOR_KEYS, KEYS, OTHER_VARIABLES, Given
from kvstow.settings.lmcache_mooncake import CONFIG_PATH
from kvstow.settings.lmcache_values import Translation, translate
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
    """The settings of this process, LMCache's under kvstow's own. ``workers``: ranks of an engine, TP x PP."""
    return parse_lmcache(os.environ, extra_config, workers=workers)


def lmcache_variables() -> list[str]:
    """The names of LMCache's variables that this process has."""
    return sorted(name for name in os.environ if name.startswith(PREFIX))


def convert_lmcache(file: str | None, *, workers: int) -> Translation:
    """What ``file`` says; without it the variables of this process, and the file that they name."""
    given, notes = gather({} if file else os.environ, {}, file=file)
    if not given:
        where = file or f"this shell's {PREFIX}* variables"
        notes.append(Note(True, f"Nothing of LMCache's is set in {where}: these are its defaults"))
    entries, more = translate(given, workers, os.environ.get(CONFIG_PATH))
    return Translation(entries, notes + more)


def parse_lmcache(
    env: Mapping[str, str], extra_config: Mapping[str, Any] | None, *, workers: int
) -> Effective:
    """kvstow's settings from all that is given, kvstow's own over LMCache's. Raises ``SettingsError`` naming source and
    key: a wrong type, or something that kvstow can't do and the user counts on."""
    extra = extra_config or {}
    theirs = {
        key: value
        for key, value in extra.items()
        if str(key).startswith(OVERRIDE) or key in CONNECTOR_KEYS
    }
    given, notes = gather(env, theirs)
    entries, more = translate(given, workers, env.get(CONFIG_PATH))
    own = {key: value for key, value in extra.items() if key not in theirs}
    effective = parse(None, env, own, base=entries)
    notes += more
    won = [
        f"{e.key} ({effective.sources[e.key]})"
        for e in entries
        if effective.sources[e.key] != e.source
    ]
    if won:
        notes.append(Note(True, f"kvstow's own settings win over LMCache's: {', '.join(won)}"))
    return replace(effective, notes=tuple(notes))


def gather(
    env: Mapping[str, str], extra: Mapping[str, Any], *, file: str | None = None
) -> tuple[dict[str, Given], list[Note]]:
    """LMCache's keys that are given, the strongest of each, and what there is to say of others."""
    given: dict[str, Given] = {}
    notes: list[Note] = []

    def take(found: Iterable[tuple[str, object, str]]) -> None:
        for written, value, source in found:
            name = ALIASES.get(written, written)
            if name in KEYS:
                given[name] = Given(value, source)
            else:
                said = (
                    f"{source} is not a key of LMCache's and is ignored; {nearest(written, KEYS)}"
                )
                notes.append(Note(True, said))

    named_by = ""
    if file is None and env.get(CONFIG_FILE, "").strip():
        file, named_by = env[CONFIG_FILE], f" (named by {CONFIG_FILE})"
    if file is not None:
        found = read_yaml(file, named_by).items()
        take((str(key), value, f"{shown_name(str(key))} in {file}") for key, value in found)
    variables: list[tuple[str, object, str]] = []
    if env.get(FORCE_SKIP_SAVE, "").strip():
        raise SettingsError(
            f"{FORCE_SKIP_SAVE} can't be served: to store nothing set kv_role to kv_consumer"
        )
    known = (CONFIG_FILE, FORCE_SKIP_SAVE)
    for variable in sorted(name for name in env if name.startswith(PREFIX) and name not in known):
        if variable in OTHER_VARIABLES:
            notes.append(Note(False, f"{variable} is ignored: {OTHER_VARIABLES[variable]}"))
        elif not of_kubernetes(variable, env[variable]):
            variables.append(
                (
                    variable.removeprefix(PREFIX).lower(),
                    _unquoted(env[variable]),
                    shown_name(variable),
                )
            )
    take(variables)
    named = [key for key in extra if key in CONNECTOR_KEYS]
    notes += [
        Note(False, f"{key} in {EXTRA_CONFIG} is ignored: {CONNECTOR_KEYS[key]}") for key in named
    ]
    take(
        (key.removeprefix(OVERRIDE), value, f"{shown_name(key)} in {EXTRA_CONFIG}")
        for key, value in extra.items()
        if key not in CONNECTOR_KEYS
    )
    return given, notes


def _unquoted(text: str) -> str:
    """LMCache takes a variable's value without quotes around it."""
    stripped = text.strip()
    quoted = len(stripped) >= 2 and stripped[0] == stripped[-1] and stripped[0] in "'\""
    return stripped[1:-1] if quoted else stripped
