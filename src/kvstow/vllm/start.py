"""Assembles either side of the connector from vLLM's configuration and kvstow's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstow import build
from kvstow.cache import Cache
from kvstow.codec.shape import KVShape
from kvstow.device.base import Device
from kvstow.direct.geometry import DirectRef
from kvstow.errors import UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.pool import PoolRef
from kvstow.pool.slots import Slots
from kvstow.runtime import SystemClock
from kvstow.settings import Effective, Settings, load, load_lmcache, variable
from kvstow.tiers import Tier
from kvstow.vllm import rbln_config
from kvstow.vllm.fingerprint import Adapters
from kvstow.vllm.groups import block_geometry, device_specs, kv_shard
from kvstow.vllm.identity import (
    SEED_VARIABLE,
    Identity,
    attention_backends,
    model_identity,
    require_fixed_root,
)
from kvstow.vllm.metadata import Hello, Mount
from kvstow.vllm.requests import Rules
from kvstow.vllm.scheduler import SchedulerSide, check_ranks
from kvstow.vllm.shapes import kv_shapes
from kvstow.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kvstow")

LMCACHE_NAMES: Final = (
    "LMCacheConnectorV1",
    "RBLNLMCacheConnectorV1",
)  # these read LMCache's settings too


class Places(NamedTuple):
    """What workers copy to and from: the slots, how they reach them, and what is due once they have."""

    slots: Slots
    ref: PoolRef | DirectRef
    what: str
    on_mounted: Callable[[], None]


def _one_line(record: logging.LogRecord) -> bool:
    """Request ids and errors are others' words: no line of the log may come out of them."""
    text = record.getMessage()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        record.msg, record.args = text, ()
    return True


def log_like_vllm() -> None:
    """vLLM configures its own logger only; kvstow's lines belong beside its, unless the user said else."""
    logger.addFilter(_one_line)
    ours, theirs = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _transfer(vllm_config: VllmConfig) -> KVTransferConfig:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None  # without it vLLM builds no connector
    return transfer


def _settings(vllm_config: VllmConfig) -> Effective:
    transfer = _transfer(vllm_config)
    if transfer.kv_connector in LMCACHE_NAMES:
        return load_lmcache(
            transfer.kv_connector_extra_config, workers=vllm_config.parallel_config.world_size
        )
    return load(transfer.kv_connector_extra_config or {})


def _make_device(vllm_config: VllmConfig, kind: str) -> Device:
    if kind == "cpu":
        from kvstow.device.cpu import CpuDevice

        return CpuDevice(build.copy_executor(), SystemClock(), toucher=build.touch_executor())
    if kind == "cuda":
        from vllm import _custom_ops

        from kvstow.device.cuda import CudaDevice

        batched = getattr(
            _custom_ops, "swap_blocks_batch", None
        )  # vLLM's own batched block copy, where it has one
        return CudaDevice(build.copy_executor(), SystemClock(), batch_copy=batched)
    if kind == "rbln":
        from kvstow.device.rbln.device import RblnDevice

        return RblnDevice(
            build.copy_executor(), SystemClock(), block_axis=rbln_config.block_axis(vllm_config)
        )
    raise UnsupportedError(
        f"kvstow has no device for torch's {kind!r} tensors; it serves cpu, cuda and rbln"
    )


def worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """The worker's side; its rank is known because vLLM has set up its process groups."""
    effective = _settings(vllm_config)  # a wrong setting is said by the first process that starts
    with effective.named():
        build.check_direct(effective.settings)
    rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
    shard = kv_shard(vllm_config, tp_rank=rank[1], pp_rank=rank[0])
    specs = device_specs(kv_cache_config)
    backends = attention_backends(vllm_config, [name for group in specs for name in group])
    backends += rbln_config.numerics(vllm_config)
    return WorkerSide(partial(_make_device, vllm_config), specs, rank, shard, _host(), backends)


def prepare_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """What must happen in the scheduler's constructor: vLLM reads the load failure policy right after it."""
    block_geometry(vllm_config, kv_cache_config)
    for tier in build.asked_for(_settings(vllm_config).settings):
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        require_fixed_root(algorithm, variable(SEED_VARIABLE), tier)
    transfer = _transfer(vllm_config)
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info(
            "kv_load_failure_policy is set to recompute: a chunk that cannot be restored is computed again"
        )
    if (
        vllm_config.scheduler_config.policy == "priority"
        and vllm_config.cache_config.enable_prefix_caching
    ):
        logger.warning(
            "Priorities with prefix caching: vLLM may reuse blocks it never computed. Use one of the two."
        )


def scheduler_side(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hellos: dict[tuple[int, int], Hello]
) -> SchedulerSide:
    """The scheduler's side, once every rank has said what its device recognised."""
    effective = _settings(vllm_config)
    settings = effective.settings
    check_ranks(hellos, vllm_config.parallel_config.world_size, _host())
    logger.info("kvstow settings: %s", effective.one_line())
    for note in effective.notes:
        logger.log(
            logging.WARNING if note.warns else logging.INFO, "LMCache settings: %s", note.text
        )
    blocks = block_geometry(vllm_config, kv_cache_config)
    groups = {hello.shard: hello.groups for hello in hellos.values()}
    order = sorted(groups)
    with effective.named():
        layout = build.chunk_layout(
            settings, blocks.block_tokens, [groups[shard][0].block_bytes for shard in order]
        )
        if settings.direct.engine is None:
            build.check(
                settings, layout, engines=vllm_config.parallel_config.data_parallel_size_local
            )
    backends = "+".join(sorted({hello.backends for hello in hellos.values()}))
    identity = model_identity(
        vllm_config, [groups[shard] for shard in order], layout.chunk_tokens, backends
    )
    metrics, clock = Metrics(), SystemClock()
    transfer = _transfer(vllm_config)
    places: Places
    with effective.named():
        if settings.direct.engine is None:
            on_cpu = vllm_config.device_config.device_type == "cpu"
            shapes = kv_shapes(
                kv_cache_config, layout, [groups[shard] for shard in order], on_cpu=on_cpu
            )
            key = build.integrity_key(settings)
            tiers = _lower_tiers(
                vllm_config, settings, layout, shapes, identity, clock, metrics, key
            )
            pool, engine = build.build_cache(
                settings,
                layout,
                name=str(transfer.engine_id),
                clock=clock,
                metrics=metrics,
                tiers=tiers,
                key=key,
            )
            places = Places(pool, pool.ref, "host pool", pool.unname)
        else:
            places, engine = _direct(vllm_config, settings, layout, identity, clock, metrics)
    slots = places.slots
    logger.info(
        "kvstow is ready: chunks of %d tokens, %.2f MB each; %s of %d chunks (%d tokens), %.2f GB; namespace %s",
        *(layout.chunk_tokens, layout.max_frame_bytes / 1e6, places.what, slots.slots),
        *(
            slots.slots * layout.chunk_tokens,
            slots.capacity_bytes / 1e9,
            identity.namespace.hex()[:16],
        ),
    )
    eagle = (speculative := vllm_config.speculative_config) is not None and speculative.use_eagle()
    lookahead, limit = 1 if eagle else 0, settings.priority_limit
    return SchedulerSide(
        engine,
        identity.namespace,
        Rules(
            blocks.block_tokens,
            blocks.hash_tokens,
            layout.chunk_tokens,
            settings.save_decode,
            lookahead,
            limit,
        ),
        _mount(places.ref, hellos, order),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        clock=clock,
        metrics=metrics,
        on_mounted=places.on_mounted,
        adapters=Adapters(build.adapter_executor()),
    )


def _direct(
    vllm_config: VllmConfig,
    settings: Settings,
    layout: ChunkLayout,
    identity: Identity,
    clock: SystemClock,
    metrics: Metrics,
) -> tuple[Places, Cache]:
    extents, ref, engine = build.build_direct(
        settings,
        layout,
        ranks=vllm_config.parallel_config.world_size,
        engine=vllm_config.parallel_config.data_parallel_rank_local or 0,
        not_persistent=identity.not_persistent,
        clock=clock,
        metrics=metrics,
    )
    return Places(extents, ref, f"direct storage ({ref.engine})", lambda: None), engine


def _lower_tiers(
    vllm_config: VllmConfig,
    settings: Settings,
    layout: ChunkLayout,
    shapes: Sequence[Sequence[KVShape]],
    identity: Identity,
    clock: SystemClock,
    metrics: Metrics,
    key: bytes | None,
) -> list[Tier]:
    def describe(namespace: bytes) -> dict[str, str]:
        """Of an adapter's namespace, or the one after a reset, it is known what it came from."""
        about = identity.describe()
        return (
            about
            if namespace == identity.namespace
            else {"parent": about.pop("namespace"), **about}
        )

    return build.lower_tiers(
        settings,
        layout,
        shapes,
        clock=clock,
        metrics=metrics,
        describe=describe,
        device=vllm_config.parallel_config.data_parallel_rank_local or 0,
        not_persistent=identity.not_persistent,
        key=key,
        namespace=identity.namespace,
        root=identity.root(),
    )


def _mount(
    pool: PoolRef | DirectRef, hellos: dict[tuple[int, int], Hello], order: list[tuple[int, int]]
) -> Mount:
    """Of the ranks that hold the same bytes the first writes them."""
    writers: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in sorted(hellos):
        writers.setdefault(hellos[rank].shard, rank)
    shards = {rank: order.index(hello.shard) for rank, hello in hellos.items()}
    return Mount(pool, shards, frozenset(writers.values()))
