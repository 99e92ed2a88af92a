"""The pool and the engine that owns it, from settings; and what they need of this host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvstow.build.tiers import check_tiers
from kvstow.cache import Cache
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.policy import POLICIES
from kvstow.pool.pool import HostPool, PoolError
from kvstow.runtime import Clock, Executor, ThreadExecutor, rest
from kvstow.settings import (
    HostFacts,
    Settings,
    available_bytes,
    check_host,
    check_pool,
    chunk_tokens,
    host_facts,
)
from kvstow.tiers import Tier

logger = logging.getLogger("kvstow")

PREFAULT_AT_ONCE: Final = 4  # pieces of 64 MiB
# Of one core; 100 GB take one to four minutes, where a host must find them half an hour.
PREFAULT_SHARE: Final = 0.1


def chunk_layout(
    settings: Settings, block_tokens: int, shard_block_bytes: Sequence[int]
) -> ChunkLayout:
    """Layout of one group's chunks. ``shard_block_bytes``: of each distinct shard, bytes of a block over its layers.

    Raises ``SettingsError`` when ``chunk_size`` isn't a multiple of the block size.
    """
    tokens = chunk_tokens(settings, block_tokens, shard_block_bytes)
    return ChunkLayout(
        (GroupLayout(block_tokens, tokens // block_tokens, tuple(shard_block_bytes)),)
    )


def check(
    settings: Settings, layout: ChunkLayout, *, facts: HostFacts | None = None, engines: int = 1
) -> None:
    """Raise ``SettingsError`` when this host can't serve ``settings``: see ``kvstow.settings.checks``.

    ``facts`` are this host's own by default; ``engines``: data parallel engines that share the host.
    """
    check_pool(settings, layout.max_frame_bytes, layout.chunk_tokens)
    check_tiers(settings, layout.max_frame_bytes)
    check_host(settings, facts or host_facts(settings.memory.pool_dir), engines)


def fetch_deadline_s(settings: Settings) -> float | None:
    """The fixed bound on a request's wait; None: it is learned."""
    return None if settings.fetch.deadline_ms == "auto" else settings.fetch.deadline_ms / 1e3


def build_cache(
    settings: Settings,
    layout: ChunkLayout,
    *,
    name: str,
    clock: Clock,
    metrics: Metrics,
    key: bytes | None,
    tiers: Sequence[Tier] = (),
    sealer: Executor | None = None,
    background: Executor | None = None,
) -> tuple[HostPool, Cache]:
    """The pool and the engine that owns it. ``name`` is shown where the system lists the pool's memory.

    ``key``: the integrity key. Precondition: ``check`` has passed. The pool's memory is taken from the system piece by
    piece, on a thread of ``background``: nobody need poll for that, so an idle engine's pool is taken too, and no chunk
    waits for it.
    """
    pool = HostPool.create(
        layout, settings.memory.size, name=f"kvstow-{name}", pool_dir=settings.memory.pool_dir
    )
    engine = Cache(
        pool=pool,
        policy=POLICIES[settings.memory.policy](),
        tiers=tiers,
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=sealer or ThreadExecutor("seal"),
        fetch_deadline_s=fetch_deadline_s(settings),
        fetch_min_tokens=None if settings.fetch.min_tokens == "auto" else settings.fetch.min_tokens,
        integrity_key=key,
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
            if piece >= PREFAULT_AT_ONCE and rest(
                pool.closed, clock.monotonic() - began_s, PREFAULT_SHARE
            ):
                return
    except PoolError as error:
        logger.error("The host pool is larger than the memory that is left: %s", error)
