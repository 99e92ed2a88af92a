"""kvstow's settings for the values of LMCache's keys, part by part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvstow.errors import SettingsError
from kvstow.fields.values import format_size
from kvstow.settings.lmcache_keys import (
    EXTRA_KEYS,
    EXTRA_MAPPED,
    KEYS,
    Entry,
    Fate,
    Key,
    SourcedValue,
)
from kvstow.settings.lmcache_remote import translate_remote
from kvstow.settings.lmcache_values import GIB, Draft, LMCacheValues, is_off
from kvstow.settings.sources import Note, nearest, shown_name

MIB: Final = 1 << 20
DEFAULT_POOL_GIB: Final = 5.0
MINIMAL_POOL_GIB: Final = 1.0  # for max_local_cpu_size 0: some prompts of common models fit
RDS: Final = "RDSBackend"
POLICIES: Final = {"LRU": "lru", "FIFO": "lru", "LFU": "s3fifo"}
INTEGERS: Final = {
    "chunk_size": "chunk_size",
    "min_retrieve_tokens": "fetch.min_tokens",
    "priority_limit": "priority_limit",
}


class Translation(NamedTuple):
    """Entries for kvstow's settings, and notes for the log."""

    entries: list[Entry]
    notes: list[Note]


def translate(
    values: Mapping[str, SourcedValue], workers: int, mooncake_file: str | None = None
) -> Translation:
    """Returns kvstow's settings for LMCache's. Raises ``SettingsError``.

    ``workers`` is the number of ranks of an engine. ``mooncake_file`` is the path of Mooncake's own
    configuration, or None.
    """
    draft = Draft(LMCacheValues(values), workers)
    _refuse_and_note(draft, values)
    _general(draft)
    direct, plugins = _plugins(draft)
    lower_tiers = [*plugins, *_disk(draft), *translate_remote(draft, mooncake_file)]
    if direct:
        draft.note(f"{RDS} is direct storage: KV doesn't pass host memory, and no pool is made")
    else:
        _memory(draft, has_lower_tier=bool(lower_tiers))
    _rest_of_extra(draft)
    return Translation(draft.entries, draft.notes)


def _refuse_and_note(draft: Draft, values: Mapping[str, SourcedValue]) -> None:
    """Refuse what kvstow can't do; note what has no effect, a line for each reason."""
    ignored: dict[str, list[str]] = {}
    off = []
    for name, (value, source) in values.items():
        key = KEYS[name]
        if key.fate is Fate.IGNORED:
            ignored.setdefault(key.why, []).append(source)
        elif key.fate is Fate.MAPPED:
            continue
        elif is_off(value):
            off.append(name)
        else:
            _refuse_or_warn(draft, key, source)
    for why, sources in ignored.items():
        draft.note(f"{', '.join(sources)}: ignored. {_sentence(why)}")
    if off:
        draft.note(f"LMCache's {', '.join(off)}: off, as in kvstow")


def _refuse_or_warn(draft: Draft, key: Key, source: str) -> None:
    """Refuse or warn of a key that is set and not off."""
    if key.fate is Fate.REFUSED:
        raise SettingsError(
            f"LMCache's {key.name} (from {source}) can't be served: {key.why}. Remove it"
        )
    draft.note(f"LMCache's {key.name} (from {source}) has no effect: {key.why}", warns=True)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _general(draft: Draft) -> None:
    values = draft.values
    for name, key in INTEGERS.items():
        if values.is_set(name):
            draft.set(key, values.integer(name), name)
    if values.is_set("save_decode_cache"):
        draft.set("save_decode", values.flag("save_decode_cache", False), "save_decode_cache")
    policy = values.text("cache_policy")
    if policy is None:
        return
    if policy.upper() not in POLICIES:
        raise values.error("cache_policy", "LRU, LFU or FIFO")
    for key in ("memory.policy", "disk.policy"):
        draft.set(key, POLICIES[policy.upper()], "cache_policy")
    if policy.upper() != "LRU":
        draft.note(f"cache_policy {policy} is served by {POLICIES[policy.upper()]}")


def _plugins(draft: Draft) -> tuple[bool, list[str]]:
    """Returns whether direct storage is asked for, and the plug-in tiers."""
    direct = False
    stores: list[str] = []
    options: dict[str, dict[str, Any]] = {}
    for name in draft.values.names("storage_plugins"):
        start = f"storage_plugin.{name}."
        own = {
            key.removeprefix(start): draft.pop_extra(key)
            for key in list(draft.extra)
            if key.startswith(start)
        }
        module = own.pop("module_path", None)
        factory = own.pop("class_name", None)
        if RDS in (name, factory):
            direct = True
            _direct_storage(draft)
            continue
        if (module is None) != (factory is None):
            near = f"storage_plugin.{shown_name(name)}."
            raise SettingsError(
                f"LMCache's storage_plugins: extra_config needs {near}module_path and class_name"
            )
        stores.append(f"{name}={module}:{factory}" if module else name)
        if own:
            options[name] = own
    if stores:
        draft.set("plugins.stores", stores, "storage_plugins")
    if options:
        draft.set("plugins.options", options, "extra_config")
    return direct, stores


def _direct_storage(draft: Draft) -> None:
    draft.set("direct.engine", "rds", "storage_plugins")
    draft.set_from_extra("rds_max_chunks", "direct.max_chunks")
    draft.set_from_extra("rds_failure_policy", "direct.failure_policy")
    size = draft.pop_extra("rds_buffer_size")
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SettingsError(
            "LMCache's extra_config: rds_buffer_size: expected MiB, an integer from 1 up"
        )
    total = size * MIB * draft.workers
    draft.set("direct.staging_size", total, "extra_config")
    draft.note(
        f"rds_buffer_size is MiB of each worker: {size} x {draft.workers} = direct.staging_size "
        f"{format_size(total)}"
    )


def _disk(draft: Draft) -> list[str]:
    """Returns the disk tier's section, or nothing if there is no disk tier."""
    values = draft.values
    sharding = values.text("local_disk_path_sharding")
    if sharding not in (None, "by_gpu"):
        raise values.error("local_disk_path_sharding", "by_gpu")
    size = values.size_bytes("max_local_disk_size", 0.0)
    switch = values.switch("local_disk")
    if switch:
        draft.note(
            "local_disk is true and names no directory: no disk tier. Set it to one", warns=True
        )
        return []
    paths = (
        [_disk_path(draft, part) for part in values.names("local_disk")] if switch is None else []
    )
    if not paths:
        if size or sharding:
            draft.note("local_disk isn't set: no disk tier")
        return []
    if not size:
        text = "local_disk is set and max_local_disk_size is 0: no disk tier, as in LMCache"
        draft.note(text, warns=True)
        return []
    draft.set("disk.paths", paths, "local_disk")
    draft.set_engine_size("disk.size", size, "max_local_disk_size")
    draft.set_from_extra("disk_io_threads", "disk.threads")
    if sharding:
        draft.set("disk.spread", "device", "local_disk_path_sharding")
    return ["disk"]


def _disk_path(draft: Draft, written: str) -> str:
    path = written.removeprefix("file://").rstrip("/") or "/"
    if not path.startswith("~"):
        return path
    home = os.path.expanduser(path)
    draft.note(f"local_disk {path} is {home}")
    return home


def _memory(draft: Draft, *, has_lower_tier: bool) -> None:
    values = draft.values
    if not values.flag("local_cpu", True):
        if not has_lower_tier:
            raise SettingsError(
                f"LMCache's local_cpu is false (from {values.source('local_cpu')}) and no other "
                "tier is set: nothing would be kept. Set local_cpu to true, or local_disk and "
                "max_local_disk_size, or remote_url"
            )
        draft.note(
            "local_cpu false: the pool stays, as the way to the other tiers; what is in it is a hit"
        )
    size = values.size_bytes("max_local_cpu_size", DEFAULT_POOL_GIB)
    if not size and not has_lower_tier:
        raise values.error("max_local_cpu_size", "more than 0: no other tier is set")
    if not size:
        text = (
            "max_local_cpu_size is 0, and KV passes host memory on its way to every other tier: "
            f"each worker has {MINIMAL_POOL_GIB:g} GiB. To set more or less, set memory.size"
        )
        draft.note(text, warns=True)
        size = int(MINIMAL_POOL_GIB * GIB)
    draft.set_engine_size("memory.size", size, "max_local_cpu_size")


def _rest_of_extra(draft: Draft) -> None:
    """Note what becomes of the keys of ``extra_config`` that no tier has used."""
    for name, value in draft.extra.items():
        if name in draft.used_extra:
            continue
        key = EXTRA_KEYS.get(name)
        source = f"{shown_name(name)} in {draft.values.source('extra_config')}"
        if name in EXTRA_MAPPED or name.startswith(("storage_plugin.", "remote_storage_plugin.")):
            draft.note(f"{source}: ignored. No tier that it belongs to is asked for", warns=True)
        elif key is None:
            near = nearest(name, [*EXTRA_KEYS, *EXTRA_MAPPED])
            draft.note(f"{source} is unknown and is ignored; {near}", warns=True)
        elif key.fate is Fate.IGNORED or is_off(value):
            draft.note(f"{source}: ignored. {_sentence(key.why)}")
        else:
            _refuse_or_warn(draft, key, draft.values.source("extra_config"))
