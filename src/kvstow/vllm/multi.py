"""vLLM's MultiConnector for engines where kvstow is one of several connectors.

``{"kv_connector": "MultiConnector", "kv_connector_module_path": "kvstow.vllm.multi", ...}``: vLLM's
own passes on the handshake of its first connector only, and does not know the load failure policy
that a connector in it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)

from kvstow.vllm.ranks import Rank
from kvstow.vllm.start import recompute_failed_loads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["MultiConnector"]


@dataclass
class Handshakes(KVConnectorHandshakeMetadata):
    """One rank's answers, one for each connector in the order of the configuration.

    None where it has none.
    """

    answers: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(multi_connector.MultiConnector):
    """Passes on each connector's handshake, and makes vLLM compute what a failed load leaves."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        recompute_failed_loads(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshakes(tuple(c.get_handshake_metadata() for c in self.sub_connectors))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[Rank, KVConnectorHandshakeMetadata]
    ) -> None:
        for index, connector in enumerate(self.sub_connectors):
            own: dict[Rank, KVConnectorHandshakeMetadata] = {}
            for rank, bundle in metadata.items():
                assert isinstance(bundle, Handshakes)
                answer = bundle.answers[index]
                if answer is not None:
                    own[rank] = answer
            if own:
                connector.set_xfer_handshake_metadata_pp_aware(own)
