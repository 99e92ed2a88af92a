"""Where settings come from: defaults < YAML file < ``KVSTOW_*`` variables < ``kv_connector_extra_config``.

Reads the environment, as only ``kvstow.settings`` does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from kvstow.backends.registry import BACKENDS
from kvstow.errors import SettingsError
from kvstow.fields.kinds import OPTIONS, SECRET
from kvstow.fields.values import Secret, masked
from kvstow.settings.schema import Leaf, Settings, leaves
from kvstow.settings.yamlfile import read_yaml

S = TypeVar("S", bound=Struct)

PREFIX: Final = "KVSTOW_"
CONFIG_FILE: Final = "KVSTOW_CONFIG_FILE"
EXTRA_CONFIG: Final = "kv_connector_extra_config"
DEFAULT: Final = "default"
SHOWN_CHARACTERS: Final = 60  # of a wrong value, in a message
ALL: Final = "`kvstow reference settings` lists all"

# Kubernetes gives every pod of a namespace variables named after its services; one called kvstow must not stop it.
_KUBERNETES: Final = re.compile(
    r".*_SERVICE_HOST|.*_SERVICE_PORT(_\w+)?|.*_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?"
)
_KUBERNETES_PORT: Final = re.compile(r"(tcp|udp|sctp)://.*")


class Row(NamedTuple):
    """An effective setting: its key, its value, plain and as users write it (secrets masked), and where from."""

    key: str
    value: str | int | float | bool | None
    shown: str
    source: str


class Note(NamedTuple):
    """What there is to say, once, of what was given."""

    warns: bool
    text: str


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings, and of each key where its value came from: ``default``, a file's path, a variable's name, or
    ``kv_connector_extra_config``. ``notes`` belong into the log."""

    settings: Settings
    sources: Mapping[str, str]
    notes: tuple[Note, ...] = ()

    def describe(self) -> list[Row]:
        """Every setting, in the order of the schema."""
        return [self._row(leaf) for leaf in leaves()]

    def _row(self, leaf: Leaf) -> Row:
        value = value_of(self.settings, leaf)
        shown = leaf.show(value)
        plain = shown if isinstance(value, Secret | str) else value
        if isinstance(value, tuple):
            plain = tuple(map(masked, value))
        return Row(leaf.key, plain, shown, self.sources[leaf.key])

    @contextmanager
    def named(self) -> Iterator[None]:
        """A ``SettingsError`` of the block says where the settings that it names came from."""
        try:
            yield
        except SettingsError as error:
            text = str(error)
            given = {key: source for key, source in self.sources.items() if source != DEFAULT}
            found = [
                f"{key} is from {source}"
                for key, source in given.items()
                if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", text)
            ]
            if not found:
                raise
            raise SettingsError(f"{text} ({'; '.join(found)})") from error

    def one_line(self) -> str:
        """All of it in one line for the log, with the source of what isn't a default."""
        shown = (
            f"{r.key}={r.shown}" + (f" ({r.source})" if r.source != DEFAULT else "")
            for r in self.describe()
        )
        return ", ".join(shown) + " (sizes are per engine, all ranks together)"


def value_of(settings: Settings, leaf: Leaf) -> Any:
    """Returns the value of one setting."""
    section: Struct = settings
    if leaf.section:
        section = settings.backends.get(leaf.section) or getattr(settings, leaf.section)
    return getattr(section, leaf.name)


def load(extra_config: Mapping[str, Any] | None = None, *, file: str | None = None) -> Effective:
    """The settings of this process. ``file`` stands in for ``KVSTOW_CONFIG_FILE``."""
    return parse(file, os.environ, extra_config)


def variable(name: str) -> str | None:
    """A variable of this process's environment that isn't kvstow's own, such as PYTHONHASHSEED."""
    return os.environ.get(name)


def parse(
    file: str | None,
    env: Mapping[str, str],
    extra_config: Mapping[str, Any] | None = None,
    *,
    base: Iterable[tuple[str, str, object]] = (),
) -> Effective:
    """Settings from a YAML file, an environment and the connector's extra config, the later the stronger.

    ``base``, key, source and value, is weaker than all of them. Without ``file`` the one that ``env`` names in
    ``KVSTOW_CONFIG_FILE``, if any. Raises ``SettingsError``
    naming source, key and what is wrong: an unknown key with the nearest valid one, a wrong type, an empty
    value, a key given twice, a file that can't be read or isn't a mapping.
    """
    known = {leaf.key: leaf for leaf in leaves()}
    values: dict[str, Any] = {key: leaf.default for key, leaf in known.items()}
    sources = dict.fromkeys(known, DEFAULT)
    named_by = ""
    if file is None and CONFIG_FILE in env:
        file, named_by = env[CONFIG_FILE], f" (named by {CONFIG_FILE})"
        if not file.strip():
            raise SettingsError(
                f"{CONFIG_FILE} is set but empty: unset it, or give it the path of a YAML file"
            )

    def take(entries: Iterable[tuple[str, str, object]], *, from_text: bool) -> None:
        seen: set[str] = set()
        for key, source, raw in entries:
            if key in seen:
                raise SettingsError(f"setting {key} is given twice in {source}")
            seen.add(key)
            values[key], sources[key] = (
                _checked(known[key], raw, source, from_text=from_text),
                source,
            )

    take(base, from_text=False)
    if file is not None:
        take(_flat(read_yaml(file, named_by), file, known), from_text=False)
    take(_variables(env, known), from_text=True)
    take(_flat(extra_config or {}, EXTRA_CONFIG, known), from_text=False)
    return Effective(_build(known.values(), values), sources)


def _checked(leaf: Leaf, raw: object, source: str, *, from_text: bool) -> Any:
    try:
        return leaf.parse(raw, from_text=from_text)
    except ValueError as error:
        value = "" if leaf.kind in (SECRET, OPTIONS) else f" = {shown(raw)}"
        raise SettingsError(f"setting {leaf.key}{value} (from {source}): {error}") from None


_PLAIN = re.compile(r"[\w./-]*")


def shown(raw: object) -> str:
    """A wrong value, for a message: nothing of a mapping, or a list but of plain words, where passwords may be."""
    if isinstance(raw, str):
        return repr(masked(raw)[:SHOWN_CHARACTERS])
    if isinstance(raw, list) and all(
        isinstance(item, str) and _PLAIN.fullmatch(item) for item in raw
    ):
        return repr(str(raw)[:SHOWN_CHARACTERS])
    try:
        return repr(raw) if isinstance(raw, int | float | None) else f"a {type(raw).__name__}"
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(raw).__name__}"


def _build(known: Iterable[Leaf], values: Mapping[str, Any]) -> Settings:
    parts: dict[str, dict[str, Any]] = {}
    for leaf in known:
        parts.setdefault(leaf.section, {})[leaf.name] = values[leaf.key]
    sections = {
        f.name: f.type(**parts[f.name]) for f in msgspec.structs.fields(Settings) if f.name in parts
    }
    backends = {backend.name: backend.section(**parts[backend.name]) for backend in BACKENDS}
    return Settings(**parts[""], **sections, backends=backends)


def parse_section(kind: type[S], given: Mapping[str, Any], source: str) -> S:
    """Returns a section of a plug-in from its options. ``source`` names them in messages.

    Raises ``SettingsError`` for an unknown name or a wrong value.
    """
    known = {leaf.name: leaf for leaf in leaves(kind)}
    values = {}
    for name, raw in given.items():
        if name not in known:
            valid = nearest(name, known)
            raise SettingsError(f"unknown setting {shown_name(name)} in {source}; {valid}")
        values[name] = _checked(known[name], raw, source, from_text=False)
    return kind(**values)


def _flat(
    mapping: Mapping[Any, Any], source: str, known: Mapping[str, Leaf]
) -> Iterator[tuple[str, str, object]]:
    """Keys, written ``memory.size`` or nested, in dotted form."""
    sections = {leaf.section for leaf in known.values()} - {""}
    for name, value in mapping.items():
        key = str(name)
        if key not in sections:
            yield _known(key, known, source), source, value
        elif isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield _known(f"{key}.{inner}", known, source), source, inner_value
        elif value is not None:
            names = ", ".join(leaf.name for leaf in known.values() if leaf.section == key)
            raise SettingsError(f"{key} in {source} is a section, not a value; it has {names}")


def _known(key: str, known: Mapping[str, Leaf], source: str) -> str:
    if key not in known:
        raise SettingsError(
            f"unknown setting {shown_name(key)} in {source}; {nearest(key, known, ALL)}"
        )
    return key


def _variables(
    env: Mapping[str, str], known: Mapping[str, Leaf]
) -> Iterator[tuple[str, str, object]]:
    by_variable = {leaf.variable: key for key, leaf in known.items()}
    for name in sorted(env):
        if not name.startswith(PREFIX) or name == CONFIG_FILE:
            continue
        if name in by_variable:
            if not env[name].strip():
                raise SettingsError(f"{name} is set but empty: unset it, or give it a value")
            yield by_variable[name], name, env[name]
        elif not of_kubernetes(name, env[name]):
            near = nearest(name, [*by_variable, CONFIG_FILE], ALL)
            raise SettingsError(f"unknown variable {shown_name(name)}; {near}")


def of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes makes this variable for a service."""
    if _KUBERNETES.fullmatch(name):
        return True
    return name.endswith("_PORT") and _KUBERNETES_PORT.fullmatch(value) is not None


def shown_name(name: str) -> str:
    """A key as it was written, for a message."""
    return masked(name)[:SHOWN_CHARACTERS]


def nearest(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """``did you mean …``: by spelling, the separators not counting; else that nothing is like it, and ``otherwise``."""
    plain = {re.sub(r"[^a-z0-9]", "", v.lower()): v for v in valid}
    near = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), plain, n=1, cutoff=0.6)
    if near:
        return f"did you mean {plain[near[0]]}?"
    return f"nothing is named like it{otherwise and ': '}{otherwise}"
