"""``KVStowConnector``: vLLM's hooks, handed to the scheduler's or the worker's side.

This is kvstow's outer edge: an exception that nobody foresaw switches kvstow off in this engine and is logged; it
never fails a request.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvstow.vllm import start
from kvstow.vllm.groups import refuse_unserved_model
from kvstow.vllm.metadata import Hello, StepMeta, WorkerMeta
from kvstow.vllm.metrics import KVStowPromMetrics, KVStowStats
from kvstow.vllm.scheduler import SchedulerSide
from kvstow.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvstow")

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(
    otherwise: Callable[Concatenate[KVStowConnector, P], R],
) -> Callable[
    [Callable[Concatenate[KVStowConnector, P], R]], Callable[Concatenate[KVStowConnector, P], R]
]:
    """When a scheduler hook raises: switch kvstow off, then answer ``otherwise`` of the same arguments."""

    def wrap(
        hook: Callable[Concatenate[KVStowConnector, P], R],
    ) -> Callable[Concatenate[KVStowConnector, P], R]:
        @functools.wraps(hook)
        def guarded(self: KVStowConnector, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                logger.exception("kvstow: %s failed", hook.__name__)
                if self._scheduler is not None:
                    self._scheduler.disable(f"{hook.__name__}: {error!r}")
                return otherwise(self, *args, **kwargs)

        return guarded

    return wrap


def _no_hit(
    _: KVStowConnector, request: Request, num_computed_tokens: int
) -> tuple[int | None, bool]:
    return 0, False


def _free_now(
    _: KVStowConnector, request: Request, block_ids: list[int]
) -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _not_reset(_: KVStowConnector) -> bool | None:
    return False


class KVStowConnector(KVConnectorBase_V1):
    """Selected with ``--kv-transfer-config '{"kv_connector":"KVStowConnector","kv_role":"kv_both"}'``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        start.log_like_vllm()
        refuse_unserved_model(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = start.worker_side(vllm_config, kv_cache_config)
        else:
            start.prepare_scheduler(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a store that is dropped is a miss later, never a reason to recompute now

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        refuse_unserved_model(vllm_config)  # vLLM asks this before it has loaded anything
        return None

    # --- worker ------------------------------------------------------------------------------------------------------

    @property
    def _my_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._my_worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.hello() if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMeta)
        self._my_worker.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._my_worker.bind(self._step())

    def _step(self) -> StepMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._my_worker.submit_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are asynchronous: the request is not scheduled before its load has ended

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return  # whole chunks are copied after the forward

    def wait_for_save(self) -> None:
        self._my_worker.submit_stores(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata() and not self._step().has_forward:
            self._my_worker.submit_stores(
                self._step()
            )  # vLLM 0.30 does not call wait_for_save on empty steps
        return self._my_worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._my_worker.take_lost_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._my_worker.take_report()

    # --- scheduler -------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        hellos = {rank: hello for rank, hello in metadata.items() if isinstance(hello, Hello)}
        self._scheduler = start.scheduler_side(self._vllm_config, self._kv_cache_config, hellos)

    @_guarded(_no_hit)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import (
            CacheHitSource,
        )  # vLLM 0.30 has none, and never calls this

        known = {
            "memory": CacheHitSource.HOST,
            "disk": CacheHitSource.DISK,
            "direct": CacheHitSource.DISK,
        }
        counts: dict[Any, int] = {}
        for tier, tokens in (
            self._scheduler.hit_sources(request) if self._scheduler else {}
        ).items():
            source = known.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            counts[source] = counts.get(source, 0) + tokens
        return counts

    def _lose_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM waits for a load that it was promised: have it reported as failed."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.lose(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    @_guarded(_lose_load)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            block_ids = list(blocks.get_block_ids()[0]) if num_external_tokens else []
            self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def _build_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return (
            StepMeta() if self._scheduler is None else self._scheduler.build_meta(scheduler_output)
        )

    @_guarded(
        _build_meta
    )  # switched off, it passes on what was promised and what must be reported, nothing new
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._build_meta(scheduler_output)

    @_guarded(lambda self, connector_output: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerMeta):
            self._scheduler.update_from_workers(meta)

    @_guarded(_free_now)
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.request_finished(request, block_ids), None

    @_guarded(lambda self: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy()

    @_guarded(_not_reset)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVStowStats | None:
        data = self._scheduler.take_stats() if self._scheduler is not None else None
        return KVStowStats(data=data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStowStats:
        return KVStowStats(data=data) if data is not None else KVStowStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStowPromMetrics:
        return KVStowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
