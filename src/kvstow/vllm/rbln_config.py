"""Reads vllm-rbln's configuration. It imports nothing of the vendor's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from kvstow.device.base import KVCache
from kvstow.device.rbln.layouts import BlockAxis
from kvstow.errors import UnsupportedError
from kvstow.settings import variable
from kvstow.vllm.identity import SEED_VARIABLE, root_hash_is_random

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEVICE_TENSOR_VARIABLE: Final = "VLLM_RBLN_USE_DEVICE_TENSOR"
TRUE: Final = ("true", "1")  # vllm-rbln's own rule; the variable's default is true
# The fields of vllm-rbln's configuration that change KV's values.
NUMERICS: Final = ("compile_dtype", "enforce_model_fp32", "use_custom_kernel", "use_w8a8")


def refuse_unserved(vllm_config: VllmConfig) -> None:
    """Raises ``UnsupportedError`` where a connector gets no KV, or every lookup would miss."""
    # vllm-rbln resets model_config.model_impl; what it chose shows in the type of its own
    # configuration.
    if not hasattr(vllm_config.additional_config, "use_custom_kernel"):
        raise UnsupportedError(
            "RBLNLMCacheConnectorV1 serves vllm-rbln's vllm model implementation, and this engine "
            "runs another. Start it with --model-impl vllm (auto picks transformers for what "
            "optimum-rbln supports), on an RBLN NPU; elsewhere the connector is KVStowConnector"
        )
    device_tensor = variable(DEVICE_TENSOR_VARIABLE)
    if device_tensor is not None and device_tensor.lower() not in TRUE:
        raise UnsupportedError(
            f"{DEVICE_TENSOR_VARIABLE}={device_tensor}: KV is inside the compiled model, where no "
            f"connector can reach it. Set {DEVICE_TENSOR_VARIABLE}=1, or leave it unset"
        )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if root_hash_is_random(algorithm, variable(SEED_VARIABLE)):
        raise UnsupportedError(
            f"{SEED_VARIABLE} is not set, and vLLM's block hashes ({algorithm}) then start from a "
            f"random root in each process, so every lookup would miss. Set {SEED_VARIABLE}=0, or "
            "any fixed value, in the environment of every instance"
        )


def refuse_meta(kv_caches: Mapping[str, KVCache]) -> None:
    """Raises ``UnsupportedError`` for tensors without memory."""
    for name, cache in kv_caches.items():
        if isinstance(cache, torch.Tensor) and cache.device.type == "meta":
            raise UnsupportedError(
                f"layer {name}: its KV is a meta tensor: it is inside the compiled model, where no "
                "connector can reach "
                f"it. Set {DEVICE_TENSOR_VARIABLE}=1, and start vLLM with --model-impl vllm"
            )


def block_axis(vllm_config: VllmConfig) -> BlockAxis:
    """Returns the axis that counts blocks in the KV of attention layers."""
    config: Any = vllm_config.additional_config
    return 1 if getattr(config, "use_custom_kernel", False) else 0


def numerics(vllm_config: VllmConfig) -> str:
    """Returns the fields of vllm-rbln's configuration that change KV's values, for the namespace.

    It is empty on other platforms.
    """
    config: Any = vllm_config.additional_config
    if not hasattr(config, "use_custom_kernel"):
        return ""
    return " rbln " + json.dumps(
        {name: str(getattr(config, name, None)) for name in NUMERICS}, sort_keys=True
    )
