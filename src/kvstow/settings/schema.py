"""All settings: their types, defaults and descriptions.

A section is a struct, and a setting is a field of it. The sections of backends are in their folders, the others in
``kvstow.settings.sections``. To add a setting, add a field: sources, ``kvstow config`` and the reference page follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct

from kvstow.backends.registry import BACKENDS
from kvstow.fields.kinds import NAMES, OPTIONS, PATHS, SECRET, SIZE
from kvstow.fields.values import (
    Secret,
    format_size,
    masked,
    parse_names,
    parse_options,
    parse_paths,
    parse_setting_size,
)
from kvstow.settings.sections.direct import DirectSettings
from kvstow.settings.sections.fetch import FetchSettings
from kvstow.settings.sections.memory import MemorySettings
from kvstow.settings.sections.plugins import PluginsSettings

S = TypeVar("S", bound=Struct)


def _default_sections() -> Mapping[str, Struct]:
    return {backend.name: backend.section() for backend in BACKENDS}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine."""

    chunk_size: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=1 << 20)],
        Meta(
            description="Tokens that are stored, found and restored together: a multiple of vLLM's block size. "
            "`auto` is the smallest multiple whose KV is at least 4 MiB, at most 128 tokens or one block."
        ),
    ] = "auto"
    save_decode: Annotated[
        bool,
        Meta(
            description="Store chunks of generated tokens too, not only of prompts; for conversations that continue."
        ),
    ] = False
    priority_limit: Annotated[
        Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None,
        Meta(
            description="Requests whose vLLM `priority` is above this are not stored (they are restored). Unset: all "
            "are stored."
        ),
    ] = None
    integrity_key_file: Annotated[
        str | None,
        Meta(
            description="File, mode 0600, with a key: 32 bytes, or 64 hexadecimal digits. Every chunk in a lower tier "
            "then carries a MAC, and one without it, or of another key, is a miss: who can write to a shared tier can "
            "neither forge nor swap KV. The same key in all engines that share a tier. Unset: checksums only."
        ),
    ] = None
    fetch: FetchSettings = FetchSettings()
    memory: MemorySettings = MemorySettings()
    direct: DirectSettings = DirectSettings()
    backends: Mapping[str, Struct] = msgspec.field(default_factory=_default_sections)
    plugins: PluginsSettings = PluginsSettings()

    def section(self, kind: type[S]) -> S:
        """Returns the section of a backend, by its type: ``settings.section(DiskSettings)``."""
        for section in self.backends.values():
            if isinstance(section, kind):
                return section
        raise KeyError(kind.__name__)


def _parse_secret(raw: object) -> Secret:
    if not isinstance(raw, str):
        raise ValueError("expected text")
    return Secret(raw)


_ACCEPTS: Final = {
    SIZE: "size",
    SECRET: "secret text",
    PATHS: "paths, a list or comma-separated",
    NAMES: "names, a list or comma-separated",
    OPTIONS: "options by name, masked",
}
_PARSERS: Final[Mapping[str, Callable[[object], Any]]] = {
    SIZE: parse_setting_size,
    SECRET: _parse_secret,
    PATHS: parse_paths,
    NAMES: parse_names,
    OPTIONS: parse_options,
}


class Leaf(NamedTuple):
    """One setting. ``kind`` is empty, ``size``, ``secret``, ``paths``, ``names`` or ``options``."""

    key: str
    section: str
    name: str
    type: Any
    default: Any
    kind: str
    description: str

    @property
    def variable(self) -> str:
        return "KVSTOW_" + self.key.replace(".", "_").upper()

    @property
    def accepts(self) -> str:
        """What may be written, in words."""
        return _ACCEPTS.get(self.kind) or " or ".join(_words(self.type))

    @property
    def nullable(self) -> bool:
        return "null" in _words(self.type)

    def show(self, value: Any) -> str:
        """A value as users write it; secrets masked."""
        if value is None:
            return "null"
        if self.kind == SIZE:
            return format_size(value)
        if self.kind in (PATHS, NAMES):
            return ",".join(map(masked, value))
        return str(value).lower() if isinstance(value, bool) else masked(str(value))

    def parse(self, raw: object, *, from_text: bool) -> Any:
        """The checked value of ``raw``. With ``from_text`` text stands for any type, ``null`` for none.

        Raises ValueError with what was expected, never with the value.
        """
        if self.nullable and (raw is None or (from_text and raw == "null")):
            return None
        if isinstance(raw, str) and not raw.strip():
            raise ValueError("it is empty")
        if self.kind in _PARSERS:
            return _PARSERS[self.kind](raw)
        try:
            return msgspec.convert(raw, self.type, strict=not from_text)
        except msgspec.ValidationError as error:
            raise ValueError(f"expected {self.accepts}") from error


def leaves(root: type[Struct] = Settings, section: str = "") -> Iterator[Leaf]:
    """Every setting of ``root``, in the order of its fields."""
    hints = get_type_hints(root, include_extras=True)
    for field in msgspec.structs.fields(root):
        if root is Settings and field.name == "backends":
            for backend in BACKENDS:
                yield from leaves(backend.section, backend.name)
            continue
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from leaves(hint, field.name)
            continue
        metas = list(_metas(hint))
        text = next((m.description for m in metas if m.description), "")
        kind = next((str(m.extra["kind"]) for m in metas if m.extra), "")
        key = f"{section}.{field.name}" if section else field.name
        yield Leaf(key, section, field.name, hint, field.default, kind, text)


def _metas(hint: Any) -> Iterator[Meta]:
    """What is said of a field's type and, behind that, of its parts."""
    for part in reversed(get_args(hint)):
        if isinstance(part, Meta):
            yield part
        else:
            yield from _metas(part)


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        limits = [m for m in metas if isinstance(m, Meta) and m.ge is not None and m.le is not None]
        return [
            f"{word} from {m.ge} to {m.le}" for word in _words(inner) for m in limits
        ] or _words(inner)
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_args(hint):
        return [word for part in get_args(hint) for word in _words(part)]
    names = {
        int: "integer",
        bool: "true or false",
        str: "text",
        float: "number",
        type(None): "null",
    }
    return [names.get(hint, str(hint))]
