"""kvstow's settings for the values of LMCache's keys, part by part. ``kvstow.settings.lmcache`` gathers them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kvstow.errors import SettingsError
from kvstow.settings.lmcache_keys import (
    EXTRA_KEYS,
    EXTRA_MAPPED,
    KEYS,
    REMOTE_SCHEMES,
    Entry,
    Fate,
    Given,
)
from kvstow.settings.lmcache_mooncake import MooncakeSources, translate_mooncake
from kvstow.settings.sources import Note, nearest, shown, shown_name
from kvstow.settings.values import MASK, format_size, redact_url

GIB: Final = 1 << 30  # LMCache calls it GB
MIB: Final = 1 << 20
MAX_NUMBER: Final = 1e9  # GiB or seconds: more is a mistake
URL_KEYS: Final = (
    "remote_url",
    "remote_storage_plugins",
)  # a password may be in what is written there
DEFAULT_POOL_GIB: Final = 5.0
DEFAULT_REDIS: Final = "redis://localhost:6379"
RDS: Final = "RDSBackend"
POLICIES: Final = {"LRU": "lru", "FIFO": "lru", "LFU": "s3fifo"}
AMAZON: Final = re.compile(r"(.+?)\.(s3[.-].*\.amazonaws\.com)")
CODECS: Final = {"naive": "raw", "cachegen": "cachegen"}


class Translation(NamedTuple):
    entries: list[Entry]
    notes: list[Note]


def translate(
    given: Mapping[str, Given], workers: int, mooncake_file: str | None = None
) -> Translation:
    """Returns kvstow's settings for LMCache's. Raises ``SettingsError``.

    ``mooncake_file``: path of Mooncake's own configuration; None: it has none.
    """
    work = _Translator(given, workers, mooncake_file)
    work.unserved()
    work.plain()
    work.plugins()
    work.disk()
    work.remote()
    work.memory()
    work.rest_of_extra()
    return Translation(work.entries, work.notes)


class _Translator:
    def __init__(self, given: Mapping[str, Given], workers: int, mooncake_file: str | None) -> None:
        self.entries: list[Entry] = []
        self.notes: list[Note] = []
        self._given = given
        self._workers = workers
        self._mooncake_file = mooncake_file
        extra = self._mapping("extra_config")
        self._extra: dict[str, Any] = {  # LMCache writes null for what is unset
            name: value
            for name, value in extra.items()
            if value is not None or name.removeprefix("mooncake_") not in EXTRA_MAPPED
        }
        self._used: set[str] = set()
        self._direct = False
        self._lower: list[str] = []

    # --- what is given, by type -----------------------------------------------------------------------------------

    def _raw(self, name: str) -> Any:
        value = self._given[name].value if name in self._given else None
        return None if isinstance(value, str) and not value.strip() else value

    def _wrong(self, name: str, wanted: str, *, secret: bool = False) -> SettingsError:
        value = "" if secret or name in URL_KEYS else f" = {shown(self._raw(name))}"
        return SettingsError(
            f"LMCache's {name}{value} (from {self._source(name)}): expected {wanted}"
        )

    def _source(self, name: str) -> str:
        return self._given[name].source if name in self._given else "LMCache's default"

    def _flag(self, name: str, default: bool) -> bool:
        value = self._raw(name)
        text = "" if value is None else str(value).strip().lower()
        if text in ("true", "1"):
            return True
        if text in ("false", "0"):
            return False
        if text:
            raise self._wrong(name, "true or false")
        return default

    def _number(self, name: str, default: float) -> float:
        value = self._raw(name)
        try:
            number = default if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, "a number") from None
        if isinstance(value, bool) or not 0 <= number <= MAX_NUMBER:
            raise self._wrong(name, f"a number from 0 up to {MAX_NUMBER:g}")
        return number

    def _integer(self, name: str) -> int:
        value = self._raw(name)
        if isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(ValueError):
                return int(value)
        raise self._wrong(name, "an integer")

    def _text(self, name: str) -> str | None:
        value = self._raw(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "text")
        return value.strip() if value is not None else None

    def _names(self, name: str) -> list[str]:
        value = self._raw(name)
        parts = value.split(",") if isinstance(value, str) else value or []
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise self._wrong(name, "names, a list or comma-separated")
        return [part.strip() for part in parts if part.strip()]

    def _mapping(self, name: str) -> Mapping[str, Any]:
        value = self._raw(name)
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            raise self._wrong(name, "a JSON object", secret=True) from None
        if parsed is not None and not isinstance(parsed, Mapping):
            raise self._wrong(name, "a mapping", secret=True)
        return {str(key): inner for key, inner in (parsed or {}).items()}

    def _set(self, key: str, value: object, name: str) -> None:
        self.entries.append(Entry(key, self._source(name), value))

    def _say(self, text: str, *, warns: bool = False) -> None:
        self.notes.append(Note(warns, text))

    # --- part by part ---------------------------------------------------------------------------------------------

    def unserved(self) -> None:
        """Refuse what is asked for and not there; name what has no counterpart, a line for each reason."""
        ignored: dict[str, list[str]] = {}
        off = []
        for name, (value, source) in self._given.items():
            key = KEYS[name]
            if key.fate is Fate.REFUSED:
                if not _is_off(value):
                    raise SettingsError(
                        f"LMCache's {name} (from {source}) can't be served: {key.why}. Remove it"
                    )
                off.append(name)
            elif key.fate is Fate.IGNORED:
                ignored.setdefault(key.why, []).append(source)
        for why, sources in ignored.items():
            self._say(f"{', '.join(sources)}: ignored. {why[0].upper()}{why[1:]}")
        if off:
            self._say(f"LMCache's {', '.join(off)}: off, as in kvstow")

    def plain(self) -> None:
        for name, key in (
            ("chunk_size", "chunk_size"),
            ("min_retrieve_tokens", "fetch.min_tokens"),
            ("priority_limit", "priority_limit"),
        ):
            if self._raw(name) is not None:
                self._set(key, self._integer(name), name)
        if self._raw("save_decode_cache") is not None:
            self._set("save_decode", self._flag("save_decode_cache", False), "save_decode_cache")
        policy = self._text("cache_policy")
        if policy is not None:
            if policy.upper() not in POLICIES:
                raise self._wrong("cache_policy", "LRU, LFU or FIFO")
            for key in ("memory.policy", "disk.policy"):
                self._set(key, POLICIES[policy.upper()], "cache_policy")
            if policy.upper() != "LRU":
                self._say(f"cache_policy {policy} is served by {POLICIES[policy.upper()]}")

    def plugins(self) -> None:
        stores: list[str] = []
        options: dict[str, dict[str, Any]] = {}
        for name in self._names("storage_plugins"):
            start = f"storage_plugin.{name}."
            own = {
                key.removeprefix(start): value
                for key, value in self._extra.items()
                if key.startswith(start)
            }
            self._used |= {start + key for key in own}
            module, factory = own.pop("module_path", None), own.pop("class_name", None)
            if RDS in (name, factory):
                self._rds()
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
            self._set("plugins.stores", stores, "storage_plugins")
            self._lower.append("storage_plugins")
        if options:
            self._set("plugins.options", options, "extra_config")

    def _rds(self) -> None:
        self._direct = True
        self._set("direct.engine", "rds", "storage_plugins")
        self._from_extra("rds_max_chunks", "direct.max_chunks")
        self._from_extra("rds_failure_policy", "direct.failure_policy")
        size = self._extra.get("rds_buffer_size")
        if size is not None:
            self._used.add("rds_buffer_size")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SettingsError(
                    "LMCache's extra_config: rds_buffer_size: expected MiB, an integer from 1 up"
                )
            self._set("direct.staging_size", size * MIB * self._workers, "extra_config")
            total = format_size(size * MIB * self._workers)
            self._say(
                f"rds_buffer_size is MiB of each worker: {size} x {self._workers} = direct.staging_size {total}"
            )

    def _from_extra(self, name: str, key: str) -> None:
        if name in self._extra:
            self._used.add(name)
            self._set(key, self._extra[name], "extra_config")

    def _size(self, name: str, default: float, key: str) -> int:
        """Bytes of all workers."""
        each = self._number(name, default)
        total = int(each * GIB) * self._workers
        if total:
            self._say(
                f"{name} is GiB of each worker, kvstow's sizes are per engine: {each:g} GiB x {self._workers} = "
                f"{key} {format_size(total)}"
            )
        return total

    def disk(self) -> None:
        paths = [
            part.removeprefix("file://").rstrip("/") or "/" for part in self._names("local_disk")
        ]
        sharding = self._text("local_disk_path_sharding")
        if sharding not in (None, "by_gpu"):
            raise self._wrong("local_disk_path_sharding", "by_gpu")
        if not paths:
            if self._number("max_local_disk_size", 0.0) or sharding:
                self._say("local_disk isn't set: no disk tier")
            return
        size = self._size("max_local_disk_size", 0.0, "disk.size")
        if not size:
            self._say(
                "local_disk is set and max_local_disk_size is 0: no disk tier, as in LMCache",
                warns=True,
            )
            return
        self._lower.append("local_disk")
        self._set("disk.paths", paths, "local_disk")
        self._set("disk.size", size, "max_local_disk_size")
        self._from_extra("disk_io_threads", "disk.threads")
        if sharding:
            self._set("disk.spread", "device", "local_disk_path_sharding")

    def remote(self) -> None:
        sections = [self._remote(url, name) for url, name in self._remote_urls()]
        if len(set(sections)) < len(sections):
            raise self._wrong("remote_storage_plugins", "one remote tier of a kind", secret=True)
        self._lower += sections
        serde = self._text("remote_serde")
        if serde is not None and serde not in CODECS:
            raise self._wrong("remote_serde", "naive or cachegen")
        timeout_ms = round(self._number("blocking_timeout_secs", 10) * 1000)
        for section in sections:
            if serde is not None:
                self._set(f"{section}.codec", CODECS[serde], "remote_serde")
            if "blocking_timeout_secs" in self._given:
                self._set(f"{section}.timeout_ms", timeout_ms, "blocking_timeout_secs")
        idle = [
            name
            for name in ("remote_serde", "blocking_timeout_secs")
            if name in self._given and not sections
        ]
        if idle:
            self._say(f"{', '.join(idle)}: ignored. No remote tier is set")

    def _remote_urls(self) -> list[tuple[str, str]]:
        """Of each remote tier its URL, and LMCache's key that asks for it."""
        url = self._text("remote_url")
        plugins = self._names("remote_storage_plugins")
        if not plugins:
            return [(url, "remote_url")] if url else []
        found = []
        for name in plugins:
            kind = name.partition(".")[0]
            if kind == "redis":
                keys = (
                    f"remote_storage_plugin.{name}.redis_url",
                    "remote_storage_plugin.redis.redis_url",
                    "redis_url",
                )
                self._used |= {key for key in keys if key in self._extra}
                own = next((str(self._extra[key]) for key in keys if self._extra.get(key)), None)
                found.append((own or url or DEFAULT_REDIS, "remote_storage_plugins"))
            elif kind == "mooncakestore":
                found.append((url or "mooncakestore://", "remote_storage_plugins"))
            else:
                named = (
                    MASK if ":" in name else name
                )  # a URL in the wrong place may have a password
                raise SettingsError(
                    f"LMCache's remote_storage_plugins (from {self._source('remote_storage_plugins')}) names {named}: "
                    "kvstow has redis and mooncakestore; another store is a kvstow plug-in, see plugins.stores"
                )
        return found

    def _remote(self, url: str, name: str) -> str:
        """The settings of the remote tier at ``url``. Returns its section."""
        scheme, separator, rest = url.partition("://")
        if not separator:  # what it is isn't known, and a password may be in it
            raise self._wrong(name, "a URL, such as redis://host:port", secret=True)
        if scheme not in REMOTE_SCHEMES:
            raise SettingsError(
                f"LMCache's {name} (from {self._source(name)}): kvstow has no {scheme}:// tier "
                f"({redact_url(url)}); it has {', '.join(f'{one}://' for one in REMOTE_SCHEMES)}. For a directory set "
                "local_disk"
            )
        section, written, topology = REMOTE_SCHEMES[scheme]
        if section != "redis":
            return (
                self._mooncake(rest, name) if section == "mooncake" else self._objects(rest, name)
            )
        self._set("redis.url", f"{written}://{rest.replace(f'{scheme}://', '')}", name)
        if topology:
            self._set("redis.topology", topology, name)
        return section

    def _objects(self, rest: str, name: str) -> str:
        """LMCache's S3 URL has the bucket before the host's name, as in ``bucket.s3.us-east-1.amazonaws.com``."""
        host, _, prefix = rest.partition("/")
        amazon = AMAZON.fullmatch(host)
        bucket, where = amazon.groups() if amazon else host.partition(".")[::2]
        self._used.add("disable_tls")
        plain = not _is_off(self._extra.get("disable_tls"))
        self._set("objects.url", f"s3://{bucket}/{prefix}".rstrip("/"), name)
        if where and not where.endswith(".amazonaws.com"):
            self._set("objects.endpoint", f"{'http' if plain else 'https'}://{where}", name)
        if plain:
            self._set("objects.allow_http", True, "extra_config")
        self._from_extra("s3_region", "objects.region")
        return "objects"

    def _mooncake(self, rest: str, name: str) -> str:
        sources = MooncakeSources(
            rest, self._source(name), self._extra, self._source("extra_config")
        )
        entries, notes, used = translate_mooncake(sources, self._mooncake_file, self._workers)
        self.entries += entries
        self.notes += notes
        self._used.update(used)
        return "mooncake"

    def memory(self) -> None:
        if self._direct:
            self._say(f"{RDS} is direct storage: KV doesn't pass host memory, and no pool is made")
            return
        if not self._flag("local_cpu", True):
            if not self._lower:
                raise SettingsError(
                    f"LMCache's local_cpu is false (from {self._source('local_cpu')}) and no other tier is set: "
                    "nothing would be kept. Set local_cpu to true, or local_disk and max_local_disk_size, or remote_url"
                )
            self._say(
                "local_cpu false: the pool stays, as the way to the other tiers; what is in it is a hit"
            )
        size = self._size("max_local_cpu_size", DEFAULT_POOL_GIB, "memory.size")
        if not size:
            raise self._wrong(
                "max_local_cpu_size",
                "more than 0: KV passes host memory on its way to every other tier",
            )
        self._set("memory.size", size, "max_local_cpu_size")

    def rest_of_extra(self) -> None:
        for name in self._extra:
            if name in self._used:
                continue
            key = EXTRA_KEYS.get(name)
            source = f"{shown_name(name)} in {self._source('extra_config')}"
            if name in EXTRA_MAPPED or name.startswith(
                ("storage_plugin.", "remote_storage_plugin.")
            ):
                self._say(f"{source}: ignored. No tier that it belongs to is asked for", warns=True)
            elif key is None:
                near = nearest(name, [*EXTRA_KEYS, *EXTRA_MAPPED])
                self._say(f"{source} is unknown and is ignored; {near}", warns=True)
            elif key.fate is Fate.REFUSED and not _is_off(self._extra[name]):
                raise SettingsError(f"LMCache's {source} can't be served: {key.why}. Remove it")
            else:
                self._say(f"{source}: ignored. {key.why[0].upper()}{key.why[1:]}")


def _is_off(value: object) -> bool:
    """Whether it asks for nothing."""
    return not value or str(value).strip().lower() in ("", "false", "0", "none", "null", "[]")
