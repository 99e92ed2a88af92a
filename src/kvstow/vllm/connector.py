"""``KVStowConnector``: vLLM's hooks, handed to the scheduler's or the worker's side.

This is kvstow's outer edge. Hooks that vLLM calls while it starts raise what is wrong. Every later
hook is guarded: an exception that was not foreseen is logged and switches kvstow off in this
engine; it never fails a request.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvstow.errors import FailurePolicyError
from kvstow.vllm import start
from kvstow.vllm.groups import refuse_unserved_model
from kvstow.vllm.metadata import Handshake, StepMeta, WorkerMeta
from kvstow.vllm.metrics import KVStowPromMetrics, KVStowStats, contained
from kvstow.vllm.ranks import Rank, own_handshakes
from kvstow.vllm.scheduler import SchedulerSide
from kvstow.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvstow")

Hook = TypeVar("Hook", bound=Callable[..., Any])

GUARD: Final = "kvstow_guarded"  # an attribute of guarded hooks


def guarded(answer: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """Makes a hook safe for vLLM: if it raises, kvstow is switched off.

    Then ``answer`` is called in its place, with the same arguments. Only ``FailurePolicyError``
    passes: the user has asked for it.
    """

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: KVStowConnector, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except FailurePolicyError:
                raise
            except Exception as error:
                logger.exception("kvstow: %s failed", hook.__name__)
                self.switch_off(f"{hook.__name__}: {error!r}")
                return answer(self, *args, **kwargs)

        setattr(call, GUARD, True)
        return cast(Hook, call)

    return wrap


def _nothing(self: KVStowConnector, *args: Any, **kwargs: Any) -> None:
    return None


def _false(self: KVStowConnector, *args: Any, **kwargs: Any) -> bool:
    return False


class KVStowConnector(KVConnectorBase_V1):
    """The connector that ``"kv_connector": "KVStowConnector"`` selects."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        start.log_like_vllm()
        refuse_unserved_model(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._handshakes: dict[Rank, Handshake] = {}
        if role is KVConnectorRole.WORKER:
            self._worker = start.worker_side(vllm_config, kv_cache_config)
        else:
            start.prepare_scheduler(vllm_config, kv_cache_config)

    def switch_off(self, why: str) -> None:
        """Takes no further part in this process.

        The scheduler's side hears of a worker that is off.
        """
        if self._scheduler is not None:
            self._scheduler.disable(why)
        if self._worker is not None:
            try:
                self._worker.close_device()
            except Exception:
                logger.exception("kvstow: the device could not be closed")
            self._worker.disable(why)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later, never a reason to recompute now

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        refuse_unserved_model(vllm_config)  # vLLM asks this before it has loaded anything
        return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    # --- worker -----------------------------------------------------------------------------------

    @property
    def _my_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._my_worker.register_kv_caches(kv_caches)

    @guarded(_nothing)
    def unregister_kv_caches(self) -> None:
        self._my_worker.unregister_kv_caches()

    @guarded(_nothing)
    def restore_kv_caches(self) -> None:
        self._my_worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake() if self._worker is not None else None

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMeta)
        self._my_worker.handle_preemptions(kv_connector_metadata)

    @guarded(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._my_worker.bind(self._step())

    def _step(self) -> StepMeta:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        return meta

    def _submit_loads(self, forward_context: Any, **kwargs: Any) -> None:
        self._my_worker.submit_loads(self._step())

    @guarded(_submit_loads)  # switched off, the worker's side reports them as failed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._submit_loads(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are asynchronous: the request is not scheduled before its load has ended

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return  # whole chunks are copied after the forward pass

    def _submit_stores(self) -> None:
        self._my_worker.submit_stores(self._step())

    @guarded(_submit_stores)
    def wait_for_save(self) -> None:
        self._submit_stores()

    def _finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # vLLM 0.30 does not call wait_for_save on steps without a forward pass.
        if self.has_connector_metadata() and not self._step().has_forward:
            self._submit_stores()
        return self._my_worker.take_finished()

    @guarded(_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._finished(finished_req_ids)

    @guarded(lambda self: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._my_worker.take_lost_blocks()

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._my_worker.take_report()

    # --- scheduler --------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[Rank, KVConnectorHandshakeMetadata]
    ) -> None:
        handshakes = own_handshakes(metadata)
        if self._scheduler is None:
            self._scheduler = start.scheduler_side(
                self._vllm_config, self._kv_cache_config, handshakes
            )
            self._handshakes = handshakes
        elif handshakes != self._handshakes:  # vLLM 0.33 asks again after each wake-up
            self._scheduler.disable("after vLLM's wake-up the workers recognise other KV pages")

    @guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.num_new_matched_tokens(request, num_computed_tokens)

    @guarded(lambda self, request, num_external_tokens: {})
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        # vLLM 0.30 has no such module, and never calls this.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        known = {
            "memory": CacheHitSource.HOST,
            "disk": CacheHitSource.DISK,
            "direct": CacheHitSource.DISK,
        }
        counts: dict[Any, int] = {}
        if self._scheduler is not None:
            for tier, tokens in self._scheduler.hit_sources(request).items():
                source = known.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                counts[source] = counts.get(source, 0) + tokens
        return counts

    def _fail_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Has a promised load reported as failed: vLLM waits for it."""
        if self._scheduler is not None and num_external_tokens:
            block_ids = list(blocks.get_block_ids()[0])
            self._scheduler.fail_load(request, block_ids, num_external_tokens)

    @guarded(_fail_load)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            block_ids = list(blocks.get_block_ids()[0]) if num_external_tokens else []
            self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def _reporting_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMeta()
        return self._scheduler.reporting_meta(scheduler_output)

    @guarded(_reporting_meta)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMeta()
        return self._scheduler.build_meta(scheduler_output)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerMeta):
            self._scheduler.update_from_workers(meta)

    @guarded(lambda self, request, block_ids: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.request_finished(request, block_ids), None

    @guarded(_false)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy()

    @guarded(_false)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- both -------------------------------------------------------------------------------------

    @contained(None)  # metrics that fail are no reason to switch kvstow off
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

    @guarded(_nothing)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
