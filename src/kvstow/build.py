"""The composition root: settings in, engine out. The only module that knows every concrete part."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstow.engine import Engine
from kvstow.errors import SettingsError, StoreRefused, StoreUnavailable, UnsupportedError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.policy.base import Policy
from kvstow.policy.lru import LRU
from kvstow.policy.s3fifo import S3FIFO
from kvstow.pool import HostPool, PoolError
from kvstow.runtime import Clock, Executor, ThreadExecutor, rest
from kvstow.settings import (
    HostFacts,
    Settings,
    available_bytes,
    check_disk,
    check_host,
    check_pool,
    chunk_tokens,
    format_size,
    host_facts,
)
from kvstow.store.disk import DiskOptions, DiskStore, frame_check
from kvstow.store.redis import MAX_PART_BYTES, MIN_PART_BYTES, RedisOptions, Tls, parse_address
from kvstow.tier import Tier

logger = logging.getLogger("kvstow")

PREFAULT_AT_ONCE: Final = 4  # pieces of 64 MiB
PREFAULT_SHARE: Final = 0.1  # of one core; 100 GB take some three minutes
POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"lru": LRU, "s3fifo": S3FIFO}


def chunk_layout(settings: Settings, block_tokens: int, shard_block_bytes: Sequence[int]) -> ChunkLayout:
    """Layout of one group's chunks. ``shard_block_bytes``: of each distinct shard, bytes of a block over its layers.

    Raises ``SettingsError`` when ``chunk_size`` isn't a multiple of the block size.
    """
    tokens = chunk_tokens(settings, block_tokens, shard_block_bytes)
    return ChunkLayout((GroupLayout(block_tokens, tokens // block_tokens, tuple(shard_block_bytes)),))


def check(settings: Settings, layout: ChunkLayout, *, facts: HostFacts | None = None, engines: int = 1) -> None:
    """Raise ``SettingsError`` when this host can't serve ``settings``: see ``kvstow.settings.checks``.

    ``facts`` are this host's own by default; ``engines``: data parallel engines that share the host.
    """
    check_pool(settings, layout.max_frame_bytes, layout.chunk_tokens)
    check_disk(settings, layout.max_frame_bytes)
    check_host(settings, facts or host_facts(settings.memory.pool_dir), engines)


def copy_executor() -> Executor:
    """The one thread of a worker's device: copies end in the order in which they were asked for."""
    return ThreadExecutor("copy")


def touch_executor() -> Executor:
    """A thread on which a CPU worker touches the pool for the first time, so that no copy has to."""
    return ThreadExecutor("touch")


def build_disk(
    settings: Settings,
    layout: ChunkLayout,
    *,
    clock: Clock,
    metrics: Metrics,
    describe: Callable[[bytes], Mapping[str, object]],
    device: int = 0,
) -> Tier | None:
    """The disk tier; None: not set. ``describe`` says for people what a namespace is; ``device``: which of this
    host's engines it is. Raises ``SettingsError`` when a directory can't be used."""
    paths, size = settings.disk.paths, settings.disk.size
    if not paths or size is None:
        return None
    options = DiskOptions(
        size_bytes=size,
        min_free_bytes=settings.disk.min_free,
        volume=device if settings.disk.spread == "device" else None,
        admission=settings.disk.admission,
        scrub_bytes_s=settings.disk.scrub_rate,
    )
    order = POLICIES[settings.disk.policy]
    try:
        store = DiskStore(paths, options, order=order, clock=clock, describe=describe, check=frame_check())
    except (OSError, UnsupportedError, StoreUnavailable) as error:
        raise SettingsError(f"disk.paths {','.join(paths)} can't be used: {error}") from error
    store.start(ThreadExecutor("disk-background"))
    executor = ThreadExecutor("disk", threads=settings.disk.threads)
    return Tier(
        *("disk", store, executor),
        layout=layout,
        clock=clock,
        metrics=metrics,
        set_aside=store.quarantine,
        take_corrupt=store.take_corrupt,
        paths_down=store.paths_down,
    )


def build_redis(settings: Settings, layout: ChunkLayout, *, clock: Clock, metrics: Metrics) -> Tier | None:
    """The Redis tier; None: not set. A server that can't be used now is logged, and asked again later.

    Raises ``SettingsError`` when the settings can't be used, or redis-py isn't installed.
    """
    if settings.redis.url is None:
        return None
    options = redis_options(settings)
    try:
        from kvstow.store.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "redis":
            raise
        raise SettingsError("redis.url is set, and redis-py isn't installed: pip install 'kvstow[redis]'") from error
    store = RedisStore(options, clock)
    try:
        store.ping()
    except (StoreUnavailable, StoreRefused) as error:
        logger.warning("Redis (%r) can't be used now, kvstow goes on without it: %s", options, error)
    executor = ThreadExecutor("redis", threads=settings.redis.threads)
    return Tier("redis", store, executor, layout=layout, clock=clock, metrics=metrics)


def redis_options(settings: Settings) -> RedisOptions:
    """What a Redis store is given. Raises ``SettingsError``, never with a password."""
    url = settings.redis.url.reveal() if settings.redis.url else ""
    try:
        address = parse_address(url, settings.redis.topology)
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from error
    tls = Tls(
        settings.redis.tls_ca, settings.redis.tls_cert, settings.redis.tls_key, settings.redis.tls_check_hostname
    )
    for name, path in (("tls_ca", tls.ca_file), ("tls_cert", tls.cert_file), ("tls_key", tls.key_file)):
        if path is not None and not address.tls:
            raise SettingsError(f"redis.{name} is set and redis.url isn't rediss://")
        if path is not None and not os.access(path, os.R_OK):
            raise SettingsError(f"redis.{name} {path} can't be read")
    if set("{}") & set(settings.redis.prefix):
        raise SettingsError("redis.prefix must be without braces: they would put all chunks on one node of a Cluster")
    if not MIN_PART_BYTES <= settings.redis.part_size <= MAX_PART_BYTES:
        size = format_size(settings.redis.part_size)
        raise SettingsError(f"redis.part_size {size}: set it to 64KiB at least, 512MB at most")
    return RedisOptions(
        address,
        topology=settings.redis.topology,
        service=settings.redis.sentinel_service,
        sentinel_username=settings.redis.sentinel_username,
        sentinel_password=password.reveal() if (password := settings.redis.sentinel_password) else None,
        tls=tls,
        prefix=settings.redis.prefix,
        ttl_s=settings.redis.ttl,
        part_bytes=settings.redis.part_size,
        timeout_s=settings.redis.timeout_ms / 1e3,
        connect_timeout_s=settings.redis.connect_timeout_ms / 1e3,
    )


def build_engine(
    settings: Settings,
    layout: ChunkLayout,
    *,
    name: str,
    clock: Clock,
    metrics: Metrics,
    tiers: Sequence[Tier] = (),
    sealer: Executor | None = None,
    background: Executor | None = None,
) -> tuple[HostPool, Engine]:
    """The pool and the engine that owns it. ``name`` is shown where the system lists the pool's memory.

    Precondition: ``check`` has passed. The pool's memory is taken from the system piece by piece, on a thread of
    ``background``: nobody need poll for that, so an idle engine's pool is taken too, and no chunk waits for it.
    """
    pool = HostPool.create(layout, settings.memory.size, name=f"kvstow-{name}", pool_dir=settings.memory.pool_dir)
    engine = Engine(
        pool=pool,
        policy=POLICIES[settings.memory.policy](),
        tiers=tiers,
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=sealer or ThreadExecutor("seal"),
        fetch_deadline_s=settings.fetch_deadline_ms / 1e3,
    )
    background = background or ThreadExecutor("prefault")
    background.submit(lambda: _prefault(pool, clock), lambda _value, _error: None)
    return pool, engine


def _prefault(pool: HostPool, clock: Clock) -> None:
    """Take the whole pool from the system, the first pieces at once and the rest at leisure: on a virtual machine the
    host may have to find each page, and requests are being served. Of a pool that is closed nothing more is taken."""
    try:
        for piece in range(pool.pieces):
            began_s = clock.monotonic()
            pool.prefault(piece, available_bytes)
            if piece >= PREFAULT_AT_ONCE and rest(pool.closed, clock.monotonic() - began_s, PREFAULT_SHARE):
                return
    except PoolError as error:
        logger.error("The host pool is larger than the memory that is left: %s", error)
