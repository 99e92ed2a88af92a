"""kvstow under the name of LMCache's connector, with LMCache's configuration.

``{"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": "kvstow.vllm.lmcache",
"kv_role": "kv_both"}``: the module's path takes precedence over the connector that vLLM registers
under that name. ``kvstow.vllm.start`` reads LMCache's settings for connectors of this name;
``kvstow.settings.lmcache`` translates them.
"""

from __future__ import annotations

from kvstow.vllm.connector import KVStowConnector

__all__ = ["LMCacheConnectorV1"]


class LMCacheConnectorV1(KVStowConnector):
    """Reads ``LMCACHE_CONFIG_FILE``, ``LMCACHE_*`` and ``lmcache.*`` too.

    Kvstow's own settings win over them.
    """
