"""The Redis tier, from settings."""

from __future__ import annotations

import logging
import os
import random
from typing import Final

from kvstow.backends.base import Store
from kvstow.backends.redis import MAX_PART_BYTES, MIN_PART_BYTES, RedisOptions, Tls, parse_address
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, ThreadExecutor, run_within
from kvstow.settings import Settings, format_size
from kvstow.text import printable
from kvstow.tiers import Tier
from kvstow.tiers.limit import WriteLimit
from kvstow.tiers.retry import Retry

START_S: Final = 10.0  # names may be resolved, Sentinels asked one by one, greetings answered byte by byte, for longer

logger = logging.getLogger("kvstow")


def build_redis(
    settings: Settings,
    layout: ChunkLayout,
    *,
    clock: Clock,
    metrics: Metrics,
    root: tuple[str, str] | None = None,
) -> Tier | None:
    """The Redis tier; None: not set. A server that can't be used now is logged, and asked again later.

    ``root``: where this engine's block hashes begin, behind a digest of all else that KV depends on.

    Raises ``SettingsError`` when the settings can't be used, or redis-py isn't installed, ``UnsupportedError`` where
    the engines that share the server begin elsewhere.
    """
    if settings.redis.url is None:
        return None
    options = redis_options(settings)
    try:
        from kvstow.backends.redis.root import Root
        from kvstow.backends.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "redis":
            raise
        raise SettingsError(
            "redis.url is set, and redis-py isn't installed: pip install 'kvstow[redis]'"
        ) from error
    differs: list[str] = []

    def other_root(name: bytes, word: str) -> None:
        differs.append(
            _other_root(printable(word), root[1] if root else "", name.decode(errors="replace"))
        )
        logger.error("Redis (%r): %s", options, differs[0])

    own = Root(options.prefix.encode(), *root, clock, other_root) if root else None
    redis = RedisStore(options, clock, own)
    ended = run_within("redis-start", redis.ping, START_S)
    if fault := ended[1] if ended else f"no answer within {START_S:g} s":
        logger.warning(
            "Redis (%r) can't be used now, kvstow goes on without it: %s", options, fault
        )
    if differs:
        redis.close()
        raise UnsupportedError(f"tier redis: {differs[0]}")
    store: Store = Retry(redis, clock, random.Random(os.urandom(16)))
    if settings.redis.write_limit is not None:
        store = WriteLimit(store, clock, bytes_s=settings.redis.write_limit)
    executor = ThreadExecutor("redis", threads=settings.redis.threads)
    return Tier("redis", store, executor, layout=layout, clock=clock, metrics=metrics)


def _other_root(word: str, ours: str, entry: str) -> str:
    return (
        f"the block hashes of the engines that share it begin with another root ({word}; here {ours}): nothing would "
        "be shared. Give PYTHONHASHSEED the same value on all of them, or on none. If none of those runs any more, set "
        f"another redis.prefix, or remove the entry {entry}, which is gone an hour after its last use"
    )


def redis_options(settings: Settings) -> RedisOptions:
    """What a Redis store is given. Raises ``SettingsError``, never with a password."""
    url = settings.redis.url.reveal() if settings.redis.url else ""
    try:
        address = parse_address(url, settings.redis.topology)
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from error
    tls = Tls(
        settings.redis.tls_ca,
        settings.redis.tls_cert,
        settings.redis.tls_key,
        settings.redis.tls_check_hostname,
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
    if set("{}") & set(settings.redis.prefix):
        raise SettingsError(
            "redis.prefix must be without braces: they would put all chunks on one node of a Cluster"
        )
    if not MIN_PART_BYTES <= settings.redis.part_size <= MAX_PART_BYTES:
        size = format_size(settings.redis.part_size)
        raise SettingsError(f"redis.part_size {size}: set it to 64KiB at least, 512MB at most")
    if settings.redis.write_limit == 0:
        raise SettingsError(
            "redis.write_limit is 0, so nothing would be stored: leave it out for no limit"
        )
    return RedisOptions(
        address,
        topology=settings.redis.topology,
        service=settings.redis.sentinel_service,
        sentinel_username=settings.redis.sentinel_username,
        sentinel_password=password.reveal()
        if (password := settings.redis.sentinel_password)
        else None,
        tls=tls,
        prefix=settings.redis.prefix,
        ttl_s=settings.redis.ttl,
        part_bytes=settings.redis.part_size,
        timeout_s=settings.redis.timeout_ms / 1e3,
        connect_timeout_s=settings.redis.connect_timeout_ms / 1e3,
    )
