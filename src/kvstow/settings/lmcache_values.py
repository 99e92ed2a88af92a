"""Values of LMCache's keys, read by type, and the draft of kvstow's settings that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from kvstow.errors import SettingsError
from kvstow.fields.values import format_size
from kvstow.settings.lmcache_keys import EXTRA_MAPPED, Entry, SourcedValue
from kvstow.settings.sources import Note, shown

GIB: Final = 1 << 30  # LMCache calls it GB
MAX_NUMBER: Final = 1e9  # GiB or seconds: more is a mistake
SECRET_KEYS: Final = ("remote_url", "remote_storage_plugins", "extra_config")  # may hold a password

_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(?:i?b)?")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}  # of 1,024, as LMCache and Mooncake count


def parse_binary_size(text: str) -> int | None:
    """Returns the bytes of a size such as ``4GB`` or ``1.5 GiB`` (2^30 each), or None if it is
    none.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        return None
    return int(Decimal(found[1]) * 1024 ** _POWERS[found[2]])


def is_off(value: object) -> bool:
    """Whether a value of LMCache's asks for nothing."""
    return not value or str(value).strip().lower() in ("", "false", "0", "none", "null", "[]")


class LMCacheValues:
    """Reads the values of LMCache's keys by type.

    An empty text is as good as no value. Every method raises ``SettingsError``, which names key and
    source, for a value of another type. A message repeats no value that may hold a password.
    """

    def __init__(self, values: Mapping[str, SourcedValue]) -> None:
        self._values = values

    def source(self, name: str) -> str:
        """Where the value of a key is from, for messages."""
        return self._values[name].source if name in self._values else "LMCache's default"

    def is_set(self, name: str) -> bool:
        """Whether a key has a value."""
        return self._raw(name) is not None

    def error(self, name: str, expected: str) -> SettingsError:
        """The error that says what a key's value should have been."""
        value = "" if name in SECRET_KEYS else f" = {shown(self._raw(name))}"
        return SettingsError(
            f"LMCache's {name}{value} (from {self.source(name)}): expected {expected}"
        )

    def switch(self, name: str) -> bool | None:
        """A boolean, or None for any other value and for none."""
        text = str(self._raw(name)).strip().lower()
        return {"true": True, "1": True, "false": False, "0": False}.get(text)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        if not self.is_set(name):
            return default
        value = self.switch(name)
        if value is None:
            raise self.error(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        """A number from 0 up to ``MAX_NUMBER``."""
        value = self._raw(name)
        if value is None:
            return default
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.error(name, "a number") from None
        if isinstance(value, bool) or not 0 <= number <= MAX_NUMBER:
            raise self.error(name, f"a number from 0 up to {MAX_NUMBER:g}")
        return number

    def size_bytes(self, name: str, default_gib: float) -> int:
        """Bytes of a size: a number of GiB, or text with a unit."""
        value = self._raw(name)
        size = None
        if isinstance(value, str) and value.strip()[-1:].isalpha():
            size = parse_binary_size(value)
        if size is None:
            try:
                return int(self.number(name, default_gib) * GIB)
            except SettingsError:
                expected = f"a number of GiB from 0 up to {MAX_NUMBER:g}, or text such as 20 GB"
                raise self.error(name, expected) from None
        if size > MAX_NUMBER * GIB:
            raise self.error(name, f"at most {MAX_NUMBER:g} GiB")
        return size

    def integer(self, name: str) -> int:
        """An integer, which must be set."""
        value = self._raw(name)
        if isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(ValueError):
                return int(value)
        raise self.error(name, "an integer")

    def text(self, name: str) -> str | None:
        """A text without spaces around it, or None if it is not set."""
        value = self._raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "text")
        return value.strip() if value is not None else None

    def names(self, name: str) -> list[str]:
        """Texts of a list, or of a text with commas."""
        value = self._raw(name)
        parts = value.split(",") if isinstance(value, str) else value or []
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise self.error(name, "names, a list or comma-separated")
        return [part.strip() for part in parts if part.strip()]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping, or a text of JSON that holds one."""
        value = self._raw(name)
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            raise self.error(name, "a JSON object") from None
        if parsed is not None and not isinstance(parsed, Mapping):
            raise self.error(name, "a mapping")
        return {str(key): inner for key, inner in (parsed or {}).items()}

    def _raw(self, name: str) -> Any:
        value = self._values[name].value if name in self._values else None
        return None if isinstance(value, str) and not value.strip() else value


class Draft:
    """Entries for kvstow's settings and notes for the log, as the translation adds them.

    ``extra`` is LMCache's ``extra_config``. ``used_extra`` holds its keys that are dealt with
    already. ``workers`` is the number of ranks of an engine.
    """

    def __init__(self, values: LMCacheValues, workers: int) -> None:
        self.values = values
        self.workers = workers
        self.entries: list[Entry] = []
        self.notes: list[Note] = []
        self.used_extra: set[str] = set()
        self.extra: dict[str, Any] = {  # LMCache writes null for a mapped key that is not set
            name: value
            for name, value in values.mapping("extra_config").items()
            if value is not None or name.removeprefix("mooncake_") not in EXTRA_MAPPED
        }

    def set(self, key: str, value: object, name: str) -> None:
        """Set kvstow's ``key``, because of LMCache's key ``name``."""
        self.entries.append(Entry(key, self.values.source(name), value))

    def note(self, text: str, *, warns: bool = False) -> None:
        """Add a line for the log."""
        self.notes.append(Note(warns, text))

    def pop_extra(self, name: str) -> Any:
        """Returns a value of ``extra_config``, or None, and marks its key as dealt with."""
        self.used_extra.add(name)
        return self.extra.get(name)

    def set_from_extra(self, name: str, key: str) -> None:
        """Set kvstow's ``key`` to the value of ``name`` in ``extra_config``, if that is set."""
        value = self.pop_extra(name)
        if value is not None:
            self.set(key, value, "extra_config")

    def set_engine_size(self, key: str, worker_bytes: int, name: str) -> None:
        """Set a size of an engine from LMCache's ``name``, a size of each worker."""
        total = worker_bytes * self.workers
        self.note(
            f"{name} is of each worker, kvstow's sizes are per engine: {worker_bytes / GIB:g} GiB "
            f"x {self.workers} = {key} {format_size(total)}"
        )
        self.set(key, total, name)
