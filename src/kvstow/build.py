"""The composition root: settings in, engine out. The only module that knows every concrete part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstow.engine import Engine
from kvstow.errors import SettingsError, StoreUnavailable, UnsupportedError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.policy.base import Policy
from kvstow.policy.lru import LRU
from kvstow.policy.s3fifo import S3FIFO
from kvstow.pool import HostPool, PoolError
from kvstow.runtime import Clock, Executor, ThreadExecutor
from kvstow.settings import (
    HostFacts,
    Settings,
    available_bytes,
    check_disk,
    check_host,
    check_pool,
    chunk_tokens,
    host_facts,
)
from kvstow.store.disk import DiskOptions, DiskStore, frame_check
from kvstow.tier import Tier

logger = logging.getLogger("kvstow")

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
) -> tuple[HostPool, Engine]:
    """The pool and the engine that owns it. ``name`` is shown where the system lists the pool's memory.

    Precondition: ``check`` has passed. The pool's memory is taken from the system piece by piece, in the background.
    """
    pool = HostPool.create(layout, settings.memory.size, name=f"kvstow-{name}", pool_dir=settings.memory.pool_dir)
    sealer = sealer or ThreadExecutor("seal")
    engine = Engine(
        pool=pool,
        policy=POLICIES[settings.memory.policy](),
        tiers=tiers,
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=sealer,
        fetch_deadline_s=settings.fetch_deadline_ms / 1e3,
    )
    _prefault(pool, sealer, 0)
    return pool, engine


def _prefault(pool: HostPool, executor: Executor, piece: int) -> None:
    """Take piece ``piece`` from the system, then the next: sealing gets its turn between any two."""
    if piece >= pool.pieces:
        return

    def then(_: None, error: BaseException | None) -> None:
        if error is None:
            _prefault(pool, executor, piece + 1)
        elif isinstance(error, PoolError):
            logger.error("The host pool is larger than the memory that is left: %s", error)

    executor.submit(lambda: pool.prefault(piece, available_bytes), then)
