"""Entry point of group ``vllm.general_plugins``: vLLM calls it in every process before it looks up connectors."""

from __future__ import annotations

from typing import Final

CONNECTOR: Final = "KVStowConnector"


def register() -> None:
    """Make ``"kv_connector": "KVStowConnector"`` known to vLLM. Safe to call again in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvstow.vllm.connector", CONNECTOR)
