"""Entry point of group ``vllm.general_plugins``.

vLLM calls it in every process, before it looks up connectors and before it loads a model.
"""

from __future__ import annotations

import contextlib
from typing import Final

from kvstow.runtime import SystemClock

CONNECTOR: Final = "KVStowConnector"

#: When vLLM loaded its plug-ins in this process, in seconds since the epoch; 0 if it has not.
registered_s = 0.0


def register() -> None:
    """Registers ``"kv_connector": "KVStowConnector"`` with vLLM. A second call changes nothing."""
    global registered_s
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not registered_s:
        registered_s = SystemClock().wall()
    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, "kvstow.vllm.connector", CONNECTOR)
