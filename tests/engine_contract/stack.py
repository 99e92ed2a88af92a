"""Everything of kvstow around one engine, with a clock and executors that only move when told to."""

from __future__ import annotations

import json
import pickle
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.request import Request

from kvstow.cache import Cache
from kvstow.device.cpu import CpuDevice
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics, merge
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.testing.faults import FaultStore
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier
from kvstow.vllm.connector import KVStowConnector
from kvstow.vllm.groups import device_specs
from kvstow.vllm.metadata import Mount
from kvstow.vllm.requests import Rules
from kvstow.vllm.scheduler import SchedulerSide
from kvstow.vllm.worker import WorkerSide
from tests.engine_contract.direct import direct_places
from tests.rigs.sim_device import Fails, WatchedDevice
from tests.rigs.sim_pages import HEAD_SIZE, Pages
from tests.rigs.sim_worker import RunnerRules, SimWorker

LAYERS = 2
VOCAB = 64
MAX_MODEL_LEN = 1024
SAVES_ON_EMPTY = "hash_block_size" in KVCacheConfig.__dataclass_fields__  # vLLM 0.31 and later


@dataclass(frozen=True)
class Shape:
    """One engine's configuration."""

    num_blocks: int = 32
    block: int = 16
    blocks_per_chunk: int = 1
    batched_tokens: int = 64
    max_seqs: int = 4
    prefix_caching: bool = True
    async_scheduling: bool = False
    long_prefill: int = 0
    reserve_full: bool = True
    tp: int = 1
    same_bytes: bool = False  # all ranks hold the same KV, as with MLA: one span, one writer
    save_decode: bool = False
    pool_slots: int = 32
    lower_tier: bool = False
    direct_areas: int = 0  # staging areas of direct storage, which is then used instead of the pool
    loads: bool = True
    stores: bool = True
    defer_save: bool = False
    lookahead: int = 0

    @property
    def chunk(self) -> int:
        return self.block * self.blocks_per_chunk


@lru_cache
def _model() -> ModelConfig:
    path = tempfile.mkdtemp(prefix="kvstow-tiny-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-5,
        "head_dim": 8,
    }
    with open(f"{path}/config.json", "w") as file:
        json.dump(config, file)
    return ModelConfig(
        model=path,
        tokenizer=path,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
    )


def vllm_config(shape: Shape, extra: dict[str, Any] | None = None) -> VllmConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=shape.max_seqs,
        max_num_batched_tokens=max(shape.batched_tokens, shape.max_seqs),
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=shape.async_scheduling,
        long_prefill_token_threshold=shape.long_prefill,
        scheduler_reserve_full_isl=shape.reserve_full,
    )
    cache_config = CacheConfig(block_size=shape.block, enable_prefix_caching=shape.prefix_caching)
    cache_config.num_gpu_blocks = shape.num_blocks
    role = (
        "kv_both"
        if shape.loads and shape.stores
        else "kv_consumer"
        if shape.loads
        else "kv_producer"
    )
    transfer = KVTransferConfig(
        kv_connector="KVStowConnector",
        kv_connector_module_path="kvstow.vllm.connector",
        kv_role=role,
        kv_connector_extra_config=extra or {},
    )
    return VllmConfig(
        model_config=_model(),
        scheduler_config=scheduler,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=shape.block, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32
    )
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    tensors: list[KVCacheTensor] = []
    more = {"hash_block_size": shape.block} if SAVES_ON_EMPTY else {}
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        **more,
    )


@lru_cache
def _hasher(block: int) -> Any:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(block, function)


def make_request(
    shape: Shape,
    req_id: str,
    prompt: Sequence[int] | None,
    max_tokens: int = 1,
    *,
    skip_load: bool = False,
    skip_store: bool = False,
    lora: Any = None,
    salt: str | None = None,
    priority: int = 0,
    mm_features: Any = None,
    prompt_embeds: Any = None,
    **sampling: Any,
) -> Request:
    params = {"kvstow.skip_load": True} if skip_load else {}
    if skip_store:
        params["kvstow.skip_store"] = True
    return Request(
        request_id=req_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        pooling_params=None,
        lora_request=lora,
        cache_salt=salt,
        priority=priority,
        mm_features=mm_features,
        prompt_embeds=prompt_embeds,
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args={"kv_transfer_params": params} if params else None,
            **sampling,
        ),
        block_hasher=_hasher(shape.block),
    )


@dataclass
class Stack:
    """kvstow's scheduler side and one simulated rank per tensor parallel rank, with everything observable."""

    shape: Shape
    rng: random.Random
    clock: ManualClock
    copies: list[ManualExecutor]
    background: list[ManualExecutor]
    pool: Any
    cache: Cache
    side: SchedulerSide
    connector: KVStowConnector
    worker_sides: list[WorkerSide]
    workers: list[SimWorker]
    store: FaultStore | None
    namespace: Namespace
    totals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def work(self, chance: float = 0.5) -> None:
        """Let some copies and background work end, out of order; time passes."""
        self.clock.advance(0.002)
        for executor in (*self.copies, *self.background):
            while executor.pending and self.rng.random() < chance:
                executor.run(self.rng.randrange(executor.pending))

    def work_all(self) -> None:
        for executor in (*self.copies, *self.background):
            executor.run_all()

    def counter(self, name: str) -> float:
        """Total of a counter over all its labels."""
        taken = self.side.take_stats()
        if taken is not None:
            self.note_stats(taken)
        counters = self.totals.get("counters", {})
        return sum(value for series, value in counters.items() if series.split("|")[0] == name)

    def note_stats(self, data: dict[str, Any]) -> None:
        self.totals = merge(self.totals, data)

    def keys(self, request: Any) -> list[ChunkKey]:
        """Keys of a request's full chunks, built apart from the connector."""
        step = self.shape.blocks_per_chunk
        head = bytes(self.namespace) + b"\0\0"
        return [ChunkKey(head + h) for h in request.block_hashes[step - 1 :: step]]

    def check_idle(self) -> None:
        """Nothing is under way: every lease, slot, job and record must be gone."""
        self.pool.check_integrity()
        assert self.pool.leased == 0, (
            f"{self.pool.leased} slots are leased while nothing is under way"
        )
        assert not self.cache.busy()
        assert self.cache.fetcher.owners == 0, "somebody still waits for a fetch"
        assert not self.side._jobs._sent
        assert not self.side._without_room
        assert not self.side._tracked, f"still remembered: {list(self.side._tracked)}"
        assert not self.side.busy()
        for worker, side in zip(self.workers, self.worker_sides, strict=True):
            assert not worker.device.in_flight
            assert not side._open
            assert not side._storing
            assert not side._finishing
            assert not side._received

    def close(self) -> None:
        for side in self.worker_sides:
            side.close()
        self.side.close()
        self.pool.close()


def connector_of(
    config: VllmConfig, kv_config: KVCacheConfig, role: KVConnectorRole
) -> KVStowConnector:
    """A connector without the start-up that needs process groups."""
    connector = object.__new__(KVStowConnector)
    KVConnectorBase_V1.__init__(connector, config, role, kv_config)
    connector._scheduler = connector._worker = None
    connector._handshakes = {}
    return connector


def build_stack(
    shape: Shape,
    seed: int = 0,
    *,
    connector: KVStowConnector | None = None,
    config: VllmConfig | None = None,
    fails: Fails | None = None,
    fetch_deadline_s: float | None = 0.05,
    fetch_min_tokens: int | None = 0,
    adapter_of: Any = lambda lora: 0,
    make_tiers: Any = None,
    pages_of: Any = Pages,
    policy: Any = None,
    clock: ManualClock | None = None,
    worker_of: Any = SimWorker,
) -> Stack:
    """``fetch_min_tokens`` 0: whatever a lower tier has is loaded; None: as learned.

    ``connector``: the scheduler's, already built by vLLM; else one is made. ``make_tiers`` gives
    other lower tiers than the shape's, from what a ``Tier`` needs and the list of executors to add
    to."""
    config = config or vllm_config(shape)
    kv_config = kv_cache_config(shape)
    clock, metrics = clock or ManualClock(), Metrics()
    block_bytes = LAYERS * kv_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    shards = 1 if shape.same_bytes else shape.tp
    layout = ChunkLayout(
        (GroupLayout(shape.block, shape.blocks_per_chunk, (block_bytes,) * shards),)
    )
    places = (
        direct_places(shape.direct_areas, shape.pool_slots, layout, clock)
        if shape.direct_areas
        else None
    )
    pool = (
        places[0]
        if places
        else HostPool.create(layout, shape.pool_slots * layout.max_frame_bytes, name="contract")
    )
    sealer = ManualExecutor(clock, run_in_wait=True)
    background = [sealer]
    tiers, store = [], None
    if shape.lower_tier:
        disk = ManualExecutor(clock, run_in_wait=True)
        background.append(disk)
        store = FaultStore(MemoryStore(1 << 30))
        tiers.append(Tier("disk", store, disk, layout=layout, clock=clock, metrics=metrics))
    if make_tiers is not None:
        tiers = make_tiers(background, layout=layout, clock=clock, metrics=metrics)
    cache = Cache(
        pool=pool,
        policy=policy or LRU(),
        tiers=tiers,
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=sealer,
        fetch_deadline_s=fetch_deadline_s,
        fetch_min_tokens=fetch_min_tokens,
    )
    namespace = Namespace.from_fields({"model": "tiny"})
    rules = Rules(shape.block, shape.block, shape.chunk, shape.save_decode, shape.lookahead)
    ranks = [(0, rank) for rank in range(shape.tp)]
    mount = Mount(
        places[1] if places else pool.ref,
        {rank: 0 if shape.same_bytes else rank[1] for rank in ranks},
        frozenset(ranks[:1] if shape.same_bytes else ranks),
    )
    side = SchedulerSide(
        cache,
        namespace,
        rules,
        mount,
        loads=shape.loads,
        stores=shape.stores,
        clock=clock,
        metrics=metrics,
    )
    if connector is None:
        connector = connector_of(config, kv_config, KVConnectorRole.SCHEDULER)
    connector._scheduler = side
    copies, worker_sides, workers = [], [], []
    for rank in ranks:
        executor = ManualExecutor(clock, run_in_wait=True)
        pages = pages_of(shape.num_blocks, shape.block, LAYERS, 0 if shape.same_bytes else rank[1])
        device = WatchedDevice(CpuDevice(executor, clock), fails=fails, scribble=pages.scribble)
        worker_side = WorkerSide(
            lambda kind, device=device: device,
            device_specs(kv_config),
            rank,
            (0, mount.shards[rank]),
            "here",
            "",
            clock,
        )
        worker_connector = connector_of(config, kv_config, KVConnectorRole.WORKER)
        worker_connector._worker = worker_side
        runner = RunnerRules(SAVES_ON_EMPTY, shape.defer_save, VOCAB)
        copies.append(executor)
        worker_sides.append(worker_side)
        workers.append(worker_of(worker_connector, pages, device, runner, adapter_of=adapter_of))
    return Stack(
        shape,
        random.Random(seed),
        clock,
        copies,
        background,
        pool,
        cache,
        side,
        connector,
        worker_sides,
        workers,
        store,
        namespace,
    )


def sent(message: Any) -> Any:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(message))
