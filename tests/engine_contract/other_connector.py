"""A connector that is not kvstow's: it answers the handshake with a message of its own, and has no KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass
class OtherHandshake(KVConnectorHandshakeMetadata):
    rank: int


class OtherMetadata(KVConnectorMetadata):
    pass


class OtherConnector(KVConnectorBase_V1):
    handshakes: Any = None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return OtherHandshake(0)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        assert all(isinstance(each, OtherHandshake) for each in metadata.values())
        self.handshakes = metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return OtherMetadata()
