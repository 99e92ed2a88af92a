"""Remote tiers of LMCache's configuration: Redis and its kin, S3, and Mooncake."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple
from urllib.parse import quote

from kvstow.errors import SettingsError
from kvstow.fields.values import MASK, redact_url
from kvstow.settings.lmcache_mooncake import MooncakeSources, translate_mooncake
from kvstow.settings.lmcache_values import Draft, is_off

CODECS: Final = {"naive": "raw", "cachegen": "quantized"}
DEFAULT_REDIS: Final = "redis://localhost:6379"
DEFAULT_TIMEOUT_S: Final = 10.0
MAX_TIMEOUT_S: Final = 60.0  # of every remote tier's timeout_ms
REDIS_SCHEMES: Final = {  # LMCache's scheme: kvstow's, and the topology if it says one
    "redis": ("redis", None),
    "rediss": ("rediss", None),
    "unix": ("unix", None),
    "valkey": ("redis", None),
    "valkeys": ("rediss", None),
    "resp": ("redis", None),
    "redis-sentinel": ("redis", "sentinel"),
    "redis-cluster": ("redis", "cluster"),
}
S3: Final = "s3"
MOONCAKE: Final = "mooncakestore"
_VIRTUAL_AMAZON: Final = re.compile(r"(.+?)\.(s3[.-].*\.amazonaws\.com)")
_AMAZON: Final = re.compile(r"s3[.-].*amazonaws\.com")


class RemoteUrl(NamedTuple):
    """The URL of a remote tier, and LMCache's key that asks for it."""

    url: str
    name: str


def translate_remote(draft: Draft, mooncake_file: str | None) -> list[str]:
    """Add the settings of all remote tiers to ``draft``. Returns their sections, such as ``redis``.

    ``mooncake_file`` is the path of Mooncake's own configuration, or None. Raises
    ``SettingsError``.
    """
    values = draft.values
    sections = [_remote(draft, remote, mooncake_file) for remote in _remote_urls(draft)]
    if len(set(sections)) < len(sections):
        raise values.error("remote_storage_plugins", "one remote tier of a kind")
    serde = values.text("remote_serde")
    if serde is not None and serde.lower() in ("null", "none"):
        serde = None
    if serde is not None and serde not in CODECS:
        raise values.error("remote_serde", "naive or cachegen")
    timeout_s = values.number("blocking_timeout_secs", DEFAULT_TIMEOUT_S)
    if sections and timeout_s > MAX_TIMEOUT_S:
        text = f"blocking_timeout_secs {timeout_s:g}: kvstow waits {MAX_TIMEOUT_S:g} s at most"
        draft.note(text, warns=True)
        timeout_s = MAX_TIMEOUT_S
    for section in sections:
        if serde is not None:
            draft.set(f"{section}.codec", CODECS[serde], "remote_serde")
        if values.is_set("blocking_timeout_secs"):
            draft.set(f"{section}.timeout_ms", round(timeout_s * 1000), "blocking_timeout_secs")
    if not sections:
        names = [name for name in ("remote_serde", "blocking_timeout_secs") if values.is_set(name)]
        if names:
            draft.note(f"{', '.join(names)}: ignored. No remote tier is set")
    return sections


def _remote_urls(draft: Draft) -> list[RemoteUrl]:
    """The remote tiers that are asked for."""
    url = draft.values.text("remote_url")
    plugins = draft.values.names("remote_storage_plugins")
    if not plugins:
        return [RemoteUrl(url, "remote_url")] if url else []
    found = []
    for plugin in plugins:
        kind = plugin.partition(".")[0]
        if kind == "redis":
            keys = (
                f"remote_storage_plugin.{plugin}.redis_url",
                "remote_storage_plugin.redis.redis_url",
                "redis_url",
            )
            urls = [str(value) for value in map(draft.pop_extra, keys) if value]
            found.append(RemoteUrl([*urls, url or DEFAULT_REDIS][0], "remote_storage_plugins"))
        elif kind == MOONCAKE:
            found.append(RemoteUrl(url or f"{MOONCAKE}://", "remote_storage_plugins"))
        else:
            shown = MASK if ":" in plugin else plugin  # a URL here by mistake may have a password
            raise SettingsError(
                "LMCache's remote_storage_plugins (from "
                f"{draft.values.source('remote_storage_plugins')}) names {shown}: kvstow has redis "
                "and mooncakestore; another store is a kvstow plug-in, see plugins.stores"
            )
    return found


def _remote(draft: Draft, remote: RemoteUrl, mooncake_file: str | None) -> str:
    """Add the settings of one remote tier. Returns its section."""
    scheme, separator, rest = remote.url.partition("://")
    if not separator:
        raise draft.values.error(remote.name, "a URL, such as redis://host:port")
    if scheme in REDIS_SCHEMES:
        return _redis(draft, remote, scheme)
    if scheme == S3:
        return _objects(draft, remote, rest)
    if scheme == MOONCAKE:
        return _mooncake(draft, remote, rest, mooncake_file)
    schemes = ", ".join(f"{one}://" for one in (*REDIS_SCHEMES, S3, MOONCAKE))
    raise SettingsError(
        f"LMCache's {remote.name} (from {draft.values.source(remote.name)}): kvstow has no "
        f"{scheme}:// tier "
        f"({redact_url(remote.url)}); it has {schemes}. For a directory set local_disk"
    )


def _redis(draft: Draft, remote: RemoteUrl, scheme: str) -> str:
    """User, password and database may be in the URL or in ``extra_config``; the URL's win."""
    written, topology = REDIS_SCHEMES[scheme]
    address = remote.url.removeprefix(f"{scheme}://").replace(f"{scheme}://", "").replace(" ", "")
    extra = {
        name: draft.pop_extra(f"valkey_{name}") or draft.pop_extra(name)
        for name in ("username", "password")
    }
    database = draft.pop_extra("valkey_database")
    mode = str(draft.pop_extra("valkey_mode") or "standalone")
    if not is_off(draft.pop_extra("tls_enable")):
        written = "rediss"
    if mode not in ("standalone", "cluster"):
        raise SettingsError("LMCache's extra_config: valkey_mode: expected standalone or cluster")
    if mode == "cluster":
        topology = "cluster"
    if any(extra.values()) and "@" not in address:
        user, password = (quote(str(extra[name] or ""), safe="") for name in extra)
        address = f"{user}:{password}@{address}"
    if database is not None and "/" not in address:
        address = f"{address}/{database}"
    draft.set("redis.url", f"{written}://{address}", remote.name)
    if topology:
        draft.set("redis.topology", topology, remote.name)
    return "redis"


def _objects(draft: Draft, remote: RemoteUrl, rest: str) -> str:
    """The bucket's name is before the host's, or the first part of the path (path style)."""
    host, _, path = rest.partition("/")
    virtual_amazon = _VIRTUAL_AMAZON.fullmatch(host)
    if _is_path_style(host):
        bucket, _, prefix = path.partition("/")
        endpoint = host
    elif virtual_amazon is not None:
        bucket, endpoint = virtual_amazon.groups()
        prefix = path
    else:
        bucket, _, endpoint = host.partition(".")
        prefix = path
    if not bucket:
        raise SettingsError(
            f"LMCache's {remote.name} (from {draft.values.source(remote.name)}) names no bucket: "
            "write s3://bucket, s3://bucket.host or s3://host:port/bucket"
        )
    parts = [bucket, prefix.strip("/"), str(draft.pop_extra("s3_file_prefix") or "").strip("/")]
    draft.set("objects.url", f"s3://{'/'.join(part for part in parts if part)}", remote.name)
    plain_http = not is_off(draft.pop_extra("disable_tls"))
    if endpoint and not endpoint.endswith(".amazonaws.com"):
        draft.set(
            "objects.endpoint", f"{'http' if plain_http else 'https'}://{endpoint}", remote.name
        )
    if plain_http:
        draft.set("objects.allow_http", True, "extra_config")
    draft.set_from_extra("s3_region", "objects.region")
    return "objects"


def _is_path_style(host: str) -> bool:
    """Whether a host's name can't begin with a bucket's name.

    That is so for an address, ``localhost``, a name of one part with a port, and a name that begins
    with ``s3``, as in ``s3.us-east-1.amazonaws.com``.
    """
    name, _, port = host.partition(":")
    first = name.partition(".")[0]
    if host.startswith("[") or name == "localhost" or (port and "." not in name):
        return True
    if _AMAZON.fullmatch(name) or (first == "s3" and name != first):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _mooncake(draft: Draft, remote: RemoteUrl, rest: str, mooncake_file: str | None) -> str:
    source = draft.values.source
    sources = MooncakeSources(rest, source(remote.name), draft.extra, source("extra_config"))
    entries, notes, used = translate_mooncake(sources, mooncake_file, draft.workers)
    draft.entries += entries
    draft.notes += notes
    draft.used_extra |= used
    return "mooncake"
