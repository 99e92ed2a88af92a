"""The connector's scheduler side with a host pool, without workers, lower tiers or a vLLM engine."""

from __future__ import annotations

from typing import Any

from kvstow.cache import Cache
from kvstow.key import Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.vllm.connector import KVStowConnector
from kvstow.vllm.metadata import Mount, WorkerMeta
from kvstow.vllm.requests import Rules
from kvstow.vllm.scheduler import SchedulerSide

BLOCK_BYTES = 4096  # no byte of it is touched here


def scheduler_side(
    slots: int, block_tokens: int, blocks_per_chunk: int, *, save_decode: bool
) -> SchedulerSide:
    """Ready to serve: its one rank has mapped the pool."""
    clock, metrics = SystemClock(), Metrics()
    layout = ChunkLayout((GroupLayout(block_tokens, blocks_per_chunk, (BLOCK_BYTES,)),))
    pool = HostPool.create(layout, slots * layout.max_frame_bytes, name="bench")
    engine = Cache(
        pool=pool,
        policy=LRU(),
        tiers=(),
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=ThreadExecutor("seal"),
    )
    rules = Rules(
        block_tokens, block_tokens, block_tokens * blocks_per_chunk, save_decode, lookahead=0
    )
    rank = (0, 0)
    side = SchedulerSide(
        engine,
        Namespace.from_fields({"model": "bench"}),
        rules,
        Mount(pool.ref, {rank: 0}, frozenset({rank})),
        loads=True,
        stores=True,
        clock=clock,
        metrics=metrics,
    )
    side.update_from_workers(WorkerMeta(mounted=1))
    return side


def connector_around(side: SchedulerSide) -> KVStowConnector:
    """vLLM's view of it, without the configuration that only start-up reads."""
    connector: Any = object.__new__(KVStowConnector)
    connector._scheduler, connector._worker = side, None
    result: KVStowConnector = connector
    return result
