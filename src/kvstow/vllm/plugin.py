"""Entry point of group ``vllm.general_plugins``: vLLM calls it in every process before it looks up connectors."""

from __future__ import annotations

import contextlib
from typing import Final

CONNECTOR: Final = "KVStowConnector"


def register() -> None:
    """Registers ``"kv_connector": "KVStowConnector"`` with vLLM. Safe to call again in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, "kvstow.vllm.connector", CONNECTOR)
