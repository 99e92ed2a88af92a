"""The connector for vllm-rbln, under the name that it knows.

``{"kv_connector": "RBLNLMCacheConnectorV1", "kv_connector_module_path": "kvstow.vllm.rbln",
"kv_role": "kv_both"}``: the module's path takes precedence over the class that vllm-rbln registers under that
name, and with that name vllm-rbln sizes KV dynamically. Settings come from ``LMCACHE_*`` too, see
``kvstow.vllm.lmcache``.

It has not run on an NPU: its tests run the unmodified vllm-rbln 0.12.0 on an emulated device,
``tests/rbln``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvstow.vllm.connector import KVStowConnector, guarded
from kvstow.vllm.rbln_config import refuse_meta, refuse_unserved

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["RBLNLMCacheConnectorV1"]


class RBLNLMCacheConnectorV1(KVStowConnector):
    """``KVStowConnector`` with the hooks that vllm-rbln 0.12 has besides vLLM's.

    Layer-wise transfer cannot work there: compiled models call neither ``wait_for_layer_load`` nor
    ``save_kv_layer``. kvstow needs neither.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        refuse_unserved(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._unfinalised: dict[str, torch.Tensor] | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keeps the tensors until registration is finalised.

        Their physical views exist only after warm-up.
        vllm-rbln calls it again, with other tensors, when it has sized KV anew.
        """
        refuse_meta(kv_caches)
        self._unfinalised = dict(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., None]) -> None:
        return  # kvstow's device copies straight between pages and the pool

    def finalize_kv_cache_registration(self) -> None:
        """Recognises the tensors' layouts.

        vllm-rbln calls it after warm-up, and after it has sized KV anew. Without a warm-up, or
        eagerly, it does not; then the handshake or the first step does.
        """
        kv_caches = self._unfinalised
        self._unfinalised = None
        if kv_caches is not None:
            super().register_kv_caches(kv_caches)

    def flush_deferred_load(self) -> None:
        return  # no load is held back: no request runs before its load has ended

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        self.finalize_kv_cache_registration()
        return super().get_handshake_metadata()

    @guarded(KVStowConnector.bind_connector_metadata)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.finalize_kv_cache_registration()  # before anything of a step is transferred
        super().bind_connector_metadata(connector_metadata)
