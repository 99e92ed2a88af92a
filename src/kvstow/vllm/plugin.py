"""Entry point of group ``vllm.general_plugins``: vLLM calls it in every process before it looks up connectors."""

from __future__ import annotations

import logging
from typing import Final

CONNECTOR: Final = "KVStowConnector"


def register() -> None:
    """Make ``"kv_connector": "KVStowConnector"`` known to vLLM. Safe to call again in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvstow.vllm.connector", CONNECTOR)
    _log_like_vllm()


def _log_like_vllm() -> None:
    """vLLM configures its own logger only; kvstow's lines belong beside its, at its level, unless the user said else."""
    ours, theirs = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
