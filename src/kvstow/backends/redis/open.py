"""Opening of the Redis tier's store."""

from __future__ import annotations

import os

from kvstow.backends.descriptor import OpenContext, OpenedStore
from kvstow.backends.redis.address import MAX_PART_BYTES, MIN_PART_BYTES
from kvstow.backends.redis.settings import RedisSettings
from kvstow.errors import SettingsError
from kvstow.fields.values import format_size


def check(section: RedisSettings, _frame_bytes: int = 0) -> None:
    """Refuses settings that can't be used. Raises ``SettingsError``, whose text never has a password."""
    try:
        address = section.address
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from error
    for name, path in (
        ("tls_ca", section.tls_ca),
        ("tls_cert", section.tls_cert),
        ("tls_key", section.tls_key),
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


def open_store(section: RedisSettings, context: OpenContext) -> OpenedStore:
    """Makes the store, which connects when it is first called.

    Raises ``SettingsError`` when the settings can't be used, or redis-py isn't installed.
    """
    check(section)
    try:
        from kvstow.backends.redis.envelope import chunk_name
        from kvstow.backends.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "redis":
            raise
        raise SettingsError(
            "redis.url is set, and redis-py isn't installed: pip install 'kvstow[redis]'"
        ) from error
    store = RedisStore(section, context.clock)
    return OpenedStore(
        store,
        f"Redis ({section.address!r}, {section.topology})",
        retries=True,
        write_limit_bytes_s=section.write_limit,
        name_of=lambda key: chunk_name(section.prefix.encode(), key).decode(),
    )
