"""Mooncake's part of LMCache's configuration: keys of ``extra_config``, or Mooncake's JSON file.

LMCache reads the file if ``MOONCAKE_CONFIG_PATH`` names one, and then no key of ``extra_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from kvstow.errors import SettingsError
from kvstow.fields.values import MAX_BYTES, format_size
from kvstow.settings.lmcache_keys import Entry, SourcedValue
from kvstow.settings.lmcache_values import parse_binary_size
from kvstow.settings.sources import Note, shown, shown_name
from kvstow.settings.yamlfile import read_bytes

CONFIG_PATH: Final = "MOONCAKE_CONFIG_PATH"
MASTER: Final = "master_server_address"
DEVICE: Final = "device_name"
PROTOCOL: Final = "protocol"
SEGMENT_SIZE: Final = "global_segment_size"
SETTINGS: Final = {  # Mooncake's keys, and kvstow's settings for them
    MASTER: "mooncake.master",
    "metadata_server": "mooncake.metadata",
    PROTOCOL: "mooncake.protocol",
    DEVICE: "mooncake.device",
    "local_hostname": "mooncake.local_hostname",
}
DEFAULT_SEGMENT_BYTES: Final = 3_355_443_200  # that LMCache lends, for each worker


class MooncakeSources(NamedTuple):
    """Where LMCache's configuration says something of Mooncake.

    Attributes:
        url: What stands behind ``mooncakestore://`` in the URL.
        url_source: Where the URL is from, for messages.
        extra: The mapping ``extra_config``.
        extra_source: Where ``extra_config`` is from, for messages.
    """

    url: str
    url_source: str
    extra: Mapping[str, Any]
    extra_source: str


def translate_mooncake(
    sources: MooncakeSources, config_file: str | None, workers: int
) -> tuple[list[Entry], list[Note], set[str]]:
    """Returns kvstow's settings, notes for the log, and the keys of ``extra_config`` dealt with.

    ``config_file`` is the path of Mooncake's own file; None or empty: there is none. The URL's
    address and device win over what file and ``extra_config`` say. Raises ``SettingsError``.
    """
    notes: list[Note] = []
    names = _names_in_extra(sources.extra)
    used = {key for key in sources.extra if key.removeprefix("mooncake_") in names}
    if config_file:
        values, others = read_config_file(config_file)
        file = f"{config_file} (named by {CONFIG_PATH})"
        if used:
            replaced = ", ".join(sorted(used))
            text = f"{replaced} in extra_config: ignored. As in LMCache, {file} takes their place"
            notes.append(Note(True, text))
        if others:
            text = (
                f"{', '.join(others)} in {file}: ignored. Set mooncake.buffer_size for its buffer"
            )
            notes.append(Note(False, text))
    else:
        values = {
            key: SourcedValue(sources.extra[name], sources.extra_source)
            for key, name in names.items()
            if sources.extra[name] or key == SEGMENT_SIZE
        }
    address, _, query = sources.url.partition("?")
    if address.strip("/"):
        values[MASTER] = SourcedValue(address.strip("/"), sources.url_source)
    for device in parse_qs(query).get("device", [])[:1]:
        values[DEVICE] = SourcedValue(device, sources.url_source)
    if MASTER not in values:
        raise SettingsError(
            f"LMCache's remote URL (from {sources.url_source}) names no master: write "
            f"mooncakestore://host:port, or {MASTER} into extra_config or into the file that "
            f"{CONFIG_PATH} names"
        )
    if DEVICE in values and (PROTOCOL not in values or values[PROTOCOL].value == "tcp"):
        source = values.pop(DEVICE).source
        notes.append(Note(False, f"{DEVICE} (from {source}): ignored. It is for the protocol rdma"))
    entries = [
        Entry(setting, values[key].source, values[key].value)
        for key, setting in SETTINGS.items()
        if key in values
    ]
    segment = values.get(SEGMENT_SIZE, SourcedValue(DEFAULT_SEGMENT_BYTES, "LMCache's default"))
    lent = _segment_bytes(segment) * workers
    entries.append(Entry("mooncake.segment_size", segment.source, lent))
    text = f"{SEGMENT_SIZE} is what each worker lends to Mooncake: mooncake.segment_size "
    notes.append(Note(False, text + format_size(lent)))
    return entries, notes, used


def read_config_file(path: str) -> tuple[dict[str, SourcedValue], list[str]]:
    """Reads Mooncake's JSON file.

    Returns the keys that kvstow serves and that are set, and the names of all others. Raises
    ``SettingsError``, which names file and key, when the file can't be read or a value is of a
    wrong type.
    """
    named_by = f" (named by {CONFIG_PATH})"
    content = _parse(read_bytes(path, named_by, "Mooncake's file"), f"{path}{named_by}")
    values: dict[str, SourcedValue] = {}
    others: list[str] = []
    for key, value in content.items():
        source = f"{key} in {path}{named_by}"
        if key not in SETTINGS and key != SEGMENT_SIZE:
            others.append(shown_name(key))
        elif value is None or value == "":  # Mooncake's default
            continue
        elif key == SEGMENT_SIZE:
            values[key] = SourcedValue(value, source)
        elif not isinstance(value, str):
            raise SettingsError(f"{source}: expected text, not {shown(value)}")
        else:
            values[key] = SourcedValue(value.lower() if key == PROTOCOL else value, source)
    return values, others


def _names_in_extra(extra: Mapping[str, Any]) -> dict[str, str]:
    """Maps Mooncake's keys to the names under which ``extra_config`` has them.

    A key may have ``mooncake_`` before it; the name with it wins.
    """
    names = {}
    for key in (*SETTINGS, SEGMENT_SIZE):
        for name in (key, f"mooncake_{key}"):
            if name in extra:
                names[key] = name
    return names


def _segment_bytes(segment: SourcedValue) -> int:
    """Returns the bytes of ``global_segment_size``, an integer or text such as ``4GB`` (2^30)."""
    value = segment.value
    size = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        size = parse_binary_size(value)
    if size is None or not 0 <= size <= MAX_BYTES:
        raise SettingsError(
            f"{SEGMENT_SIZE} (from {segment.source}): expected a size: bytes, or text such as "
            "4GB (2^30)"
        )
    return size


def _parse(content: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object. ``where`` is for messages, which repeat none of the content."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise SettingsError(f"{shown_name(name)} is given twice in {where}")
            found[name] = value
        return found

    try:
        parsed = json.loads(content, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise SettingsError(f"{where} isn't valid JSON: {place}: {error.msg}") from None
    except SettingsError:
        raise  # a ValueError too
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where} isn't valid JSON: {type(error).__name__}") from None
    if not isinstance(parsed, dict):
        raise SettingsError(f"{where} must hold a JSON object")
    return parsed
