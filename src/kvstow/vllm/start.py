"""Assembles either side of the connector from vLLM's configuration and kvstow's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import vllm
from packaging.version import Version
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstow import build
from kvstow.backends.descriptor import HashRoot, OpenContext
from kvstow.cache import Cache
from kvstow.device.base import Device
from kvstow.direct.geometry import DirectRef
from kvstow.errors import UnsupportedError
from kvstow.layout import ChunkLayout, GroupPages
from kvstow.metrics import Metrics
from kvstow.pool.pool import PoolRef
from kvstow.pool.slots import Slots
from kvstow.runtime import Executor, SystemClock, ThreadExecutor
from kvstow.settings import Effective, Settings, load, load_lmcache, variable
from kvstow.settings.variables import set_defaults
from kvstow.text import printable
from kvstow.tiers import Tier
from kvstow.vllm import rbln_config
from kvstow.vllm.fingerprint import Adapters, loading_began_ns
from kvstow.vllm.groups import (
    Blocks,
    block_geometry,
    device_specs,
    kv_shard,
    refuse_unserved_backends,
)
from kvstow.vllm.identity import (
    SEED_VARIABLE,
    Identity,
    adapter_options,
    attention_backends,
    model_identity,
    require_fixed_root,
)
from kvstow.vllm.media import MediaDigests, names_media_by_counters
from kvstow.vllm.metadata import Handshake
from kvstow.vllm.ranks import Rank, check_ranks, mount_of
from kvstow.vllm.requests import Rules
from kvstow.vllm.scheduler import SchedulerSide
from kvstow.vllm.shapes import kv_shapes
from kvstow.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kvstow")

# Earlier releases name an adapter in block hashes by its name only.
LORA_PATH_HASHED: Final = Version("0.32.0")

# Connectors of these names read LMCache's settings too.
LMCACHE_NAMES: Final = ("LMCacheConnectorV1", "RBLNLMCacheConnectorV1")


def _one_line(record: logging.LogRecord) -> bool:
    """Escapes a record's unprintable characters, so that no text of others begins a new line."""
    text = record.getMessage()
    if not text.isprintable():
        record.msg = printable(text)
        record.args = ()
    return True


def log_like_vllm() -> None:
    """Sends kvstow's log where vLLM's goes, unless the user has configured it."""
    logger.addFilter(_one_line)
    vllm_logger = logging.getLogger("vllm")
    if not logger.handlers and logger.level == logging.NOTSET and vllm_logger.handlers:
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level)
        logger.propagate = False


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
    # One thread: copies end in the order in which they were asked for.
    copier = ThreadExecutor("copy")
    if kind == "cpu":
        from kvstow.device.cpu import CpuDevice

        return CpuDevice(copier, SystemClock(), toucher=ThreadExecutor("touch"))
    if kind == "cuda":
        from vllm import _custom_ops

        from kvstow.device.cuda import CudaDevice

        # vLLM's own batched block copy, where it has one.
        batched = getattr(_custom_ops, "swap_blocks_batch", None)
        return CudaDevice(copier, SystemClock(), batch_copy=batched)
    if kind == "rbln":
        from kvstow.device.rbln.device import RblnDevice

        return RblnDevice(copier, SystemClock(), block_axis=rbln_config.block_axis(vllm_config))
    raise UnsupportedError(
        f"kvstow has no device for torch's {kind!r} tensors; it serves cpu, cuda and rbln"
    )


def _require_recompute_outside(vllm_config: VllmConfig) -> None:
    """Refuses a MultiConnector in which a failed load ends its request.

    Raises ``UnsupportedError``. vLLM reads the policy of the outermost connector. A connector
    inside is given another configuration, but a worker knows the whole one as vLLM's current
    configuration.
    """
    current = get_current_vllm_config_or_none()
    outer = current.kv_transfer_config if current is not None else None
    own = _transfer(vllm_config)
    if outer is None or outer.kv_connector == own.kv_connector or not own.is_kv_consumer:
        return
    if outer.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            f"kvstow is one of the connectors of {outer.kv_connector}, where a load that fails "
            "would end its request: vLLM reads the policy for failed loads there only. Add "
            '"kv_load_failure_policy": "recompute" beside '
            f'"kv_connector": "{outer.kv_connector}" in --kv-transfer-config'
        )


def worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """Builds the worker's side. vLLM has set up its process groups, so the rank is known."""
    _require_recompute_outside(vllm_config)
    effective = _settings(vllm_config)  # the first process that starts reports a wrong setting
    with effective.named():
        build.check_direct(effective.settings)
    rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
    shard = kv_shard(vllm_config, tp_rank=rank[1], pp_rank=rank[0])
    specs = device_specs(kv_cache_config)
    backends = attention_backends(vllm_config, [name for group in specs for name in group])
    backends += rbln_config.numerics(vllm_config)
    return WorkerSide(partial(_make_device, vllm_config), specs, rank, shard, _host(), backends)


def recompute_failed_loads(vllm_config: VllmConfig) -> None:
    """Makes vLLM compute what a failed load leaves.

    VLLM reads the policy after it has built the connector.
    """
    transfer = _transfer(vllm_config)
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info(
            "kv_load_failure_policy is set to recompute: a chunk that cannot be restored is "
            "computed again"
        )


def prepare_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Checks the settings and the KV cache groups, and sets vLLM's policy for failed loads."""
    block_geometry(vllm_config, kv_cache_config)
    for tier in build.asked_for(_settings(vllm_config).settings):
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        require_fixed_root(algorithm, variable(SEED_VARIABLE), tier)
    recompute_failed_loads(vllm_config)
    if (
        vllm_config.scheduler_config.policy == "priority"
        and vllm_config.cache_config.enable_prefix_caching
    ):
        logger.warning(
            "Priorities with prefix caching: vLLM may reuse blocks it never computed. Use one of "
            "the two."
        )


class Places(NamedTuple):
    """The places that workers copy to and from, and how they reach them.

    ``on_mounted`` is called once all of them do.
    """

    slots: Slots
    reference: PoolRef | DirectRef
    name: str
    on_mounted: Callable[[], None]


@dataclass(frozen=True)
class _Parts:
    """What both kinds of places are built from.

    ``pages`` holds each distinct shard's recognised pages, in order.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: Settings
    layout: ChunkLayout
    pages: list[tuple[GroupPages, ...]]
    identity: Identity
    clock: SystemClock
    metrics: Metrics

    @property
    def engine_index(self) -> int:
        """Tells the engines of one host apart; each has files and paths of its own."""
        return self.vllm_config.parallel_config.data_parallel_rank_local or 0


def scheduler_side(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, handshakes: dict[Rank, Handshake]
) -> SchedulerSide:
    """Builds the scheduler's side, once every rank has answered the handshake."""
    effective = _settings(vllm_config)
    settings = effective.settings
    check_ranks(handshakes, vllm_config.parallel_config.world_size, _host())
    _log_settings(effective)
    blocks = block_geometry(vllm_config, kv_cache_config)
    pages_of = {handshake.shard: handshake.groups for handshake in handshakes.values()}
    shards = sorted(pages_of)
    pages = [pages_of[shard] for shard in shards]
    with effective.named():
        layout = build.chunk_layout(
            settings, blocks.block_tokens, [groups[0].block_bytes for groups in pages]
        )
        if settings.direct.engine is None:
            engines = vllm_config.parallel_config.data_parallel_size_local
            build.check(settings, layout, engines=engines)
    backends = "+".join(sorted({handshake.backends for handshake in handshakes.values()}))
    refuse_unserved_backends(backends)
    clock = SystemClock()
    since_ns = loading_began_ns(clock)
    identity = model_identity(vllm_config, pages, layout.chunk_tokens, backends, since_ns=since_ns)
    parts = _Parts(
        vllm_config, kv_cache_config, settings, layout, pages, identity, clock, Metrics()
    )
    with effective.named():
        places, cache = _host_pool(parts) if settings.direct.engine is None else _direct(parts)
    _log_ready(layout, places, identity)
    transfer = _transfer(vllm_config)
    readers = ThreadExecutor("adapters")
    return SchedulerSide(
        cache,
        identity.namespace,
        _rules(vllm_config, settings, blocks, layout),
        mount_of(places.reference, handshakes, shards),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        clock=parts.clock,
        metrics=parts.metrics,
        on_mounted=places.on_mounted,
        adapters=Adapters(
            readers,
            clock,
            options=adapter_options(vllm_config),
            since_ns=since_ns,
            process_key=f"{transfer.engine_id} {since_ns}".encode(),
            hashes_have_path=Version(vllm.__version__) >= LORA_PATH_HASHED,
        ),
        media=_media(vllm_config, readers, clock),
    )


def _media(vllm_config: VllmConfig, executor: Executor, clock: SystemClock) -> MediaDigests:
    counted = names_media_by_counters(vllm_config)
    if counted:
        logger.warning(
            "Prompts are cached up to their first image, audio or video only: with "
            "--mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM numbers these instead "
            "of naming them by content. Leave out one of the two options."
        )
    return MediaDigests(executor, clock, counted=counted)


def _log_settings(effective: Effective) -> None:
    logger.info("kvstow settings: %s", effective.one_line())
    for note in effective.notes:
        level = logging.WARNING if note.warns else logging.INFO
        logger.log(level, "LMCache settings: %s", note.text)


def _log_ready(layout: ChunkLayout, places: Places, identity: Identity) -> None:
    slots = places.slots
    logger.info(
        "kvstow is ready: chunks of %d tokens, %.2f MB each; %s of %d chunks (%d tokens), %.2f GB; "
        "namespace %s",
        layout.chunk_tokens,
        layout.max_frame_bytes / 1e6,
        places.name,
        slots.slots,
        slots.slots * layout.chunk_tokens,
        slots.capacity_bytes / 1e9,
        identity.namespace.hex()[:16],
    )


def _rules(
    vllm_config: VllmConfig, settings: Settings, blocks: Blocks, layout: ChunkLayout
) -> Rules:
    speculative = vllm_config.speculative_config
    eagle = speculative is not None and speculative.use_eagle()
    return Rules(
        blocks.block_tokens,
        blocks.hash_tokens,
        layout.chunk_tokens,
        settings.save_decode,
        lookahead=1 if eagle else 0,
        priority_limit=settings.priority_limit,
    )


def _direct(parts: _Parts) -> tuple[Places, Cache]:
    extents, reference, cache = build.build_direct(
        parts.settings,
        parts.layout,
        ranks=parts.vllm_config.parallel_config.world_size,
        engine=parts.engine_index,
        not_persistent=parts.identity.not_persistent,
        clock=parts.clock,
        metrics=parts.metrics,
    )
    return Places(extents, reference, f"direct storage ({reference.engine})", lambda: None), cache


def _host_pool(parts: _Parts) -> tuple[Places, Cache]:
    key = build.integrity_key(parts.settings)
    pool, cache = build.build_cache(
        parts.settings,
        parts.layout,
        name=str(_transfer(parts.vllm_config).engine_id),
        clock=parts.clock,
        metrics=parts.metrics,
        tiers=_lower_tiers(parts, key),
        key=key,
    )
    return Places(pool, pool.ref, "host pool", pool.unname), cache


def _lower_tiers(parts: _Parts, key: bytes | None) -> list[Tier]:
    identity = parts.identity

    def describe(namespace: bytes) -> dict[str, str]:
        """Returns the identity's fields.

        Those of a derived namespace, an adapter's, name it as the parent.
        """
        about = identity.describe()
        if namespace == identity.namespace:
            return about
        return {"parent": about.pop("namespace"), **about}

    on_cpu = parts.vllm_config.device_config.device_type == "cpu"
    context = OpenContext(
        parts.layout,
        parts.clock,
        engine_index=parts.engine_index,
        integrity_key=key,
        describe=describe,
        namespace=identity.namespace,
        root=HashRoot(*identity.root()),
        set_variables=set_defaults,
    )
    return build.lower_tiers(
        parts.settings,
        kv_shapes(parts.kv_cache_config, parts.layout, parts.pages, on_cpu=on_cpu),
        context,
        metrics=parts.metrics,
        not_persistent=identity.not_persistent,
    )
