"""Opening of the Redis tier's store."""

from __future__ import annotations

import os

from kvstow.backends.descriptor import OpenContext, OpenedStore
from kvstow.backends.redis import MAX_PART_BYTES, MIN_PART_BYTES, RedisOptions, Tls, parse_address
from kvstow.backends.redis.settings import RedisSettings
from kvstow.errors import SettingsError
from kvstow.fields.values import format_size


def check(section: RedisSettings, _frame_bytes: int) -> None:
    """Refuses settings that can't be used. Raises ``SettingsError``."""
    redis_options(section)


def open_store(section: RedisSettings, context: OpenContext) -> OpenedStore:
    """Makes the store, which connects when it is first called.

    Raises ``SettingsError`` when the settings can't be used, or redis-py isn't installed.
    """
    options = redis_options(section)
    try:
        from kvstow.backends.redis.envelope import chunk_name
        from kvstow.backends.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "redis":
            raise
        raise SettingsError(
            "redis.url is set, and redis-py isn't installed: pip install 'kvstow[redis]'"
        ) from error
    store = RedisStore(options, context.clock)
    return OpenedStore(
        store,
        f"Redis ({options!r})",
        retries=True,
        write_limit_bytes_s=section.write_limit,
        name_of=lambda key: chunk_name(options.prefix.encode(), key).decode(),
    )


def redis_options(section: RedisSettings) -> RedisOptions:
    """Returns the store's options. Raises ``SettingsError``, whose text never has a password."""
    url = section.url.reveal() if section.url else ""
    try:
        address = parse_address(url, section.topology)
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from error
    tls = Tls(
        section.tls_ca,
        section.tls_cert,
        section.tls_key,
        section.tls_check_hostname,
    )
    for name, path in (
        ("tls_ca", tls.ca_file),
        ("tls_cert", tls.cert_file),
        ("tls_key", tls.key_file),
    ):
        if path is not None and not address.tls:
            raise SettingsError(f"redis.{name} is set and redis.url isn't rediss://")
        if path is not None and not os.access(path, os.R_OK):
            raise SettingsError(f"redis.{name} {path} can't be read")
    if set("{}") & set(section.prefix):
        raise SettingsError(
            "redis.prefix must be without braces: they would put all chunks on one node of a Cluster"
        )
    if not MIN_PART_BYTES <= section.part_size <= MAX_PART_BYTES:
        size = format_size(section.part_size)
        raise SettingsError(f"redis.part_size {size}: set it to 64KiB at least, 512MB at most")
    if section.write_limit == 0:
        raise SettingsError(
            "redis.write_limit is 0, so nothing would be stored: leave it out for no limit"
        )
    return RedisOptions(
        address,
        topology=section.topology,
        service=section.sentinel_service,
        sentinel_username=section.sentinel_username,
        sentinel_password=password.reveal() if (password := section.sentinel_password) else None,
        tls=tls,
        prefix=section.prefix,
        ttl_s=section.ttl,
        part_bytes=section.part_size,
        timeout_s=section.timeout_ms / 1e3,
        connect_timeout_s=section.connect_timeout_ms / 1e3,
    )
