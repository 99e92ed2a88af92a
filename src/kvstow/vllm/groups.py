"""Translates vLLM's KV cache configuration, and refuses by name models that are not served."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm import envs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.device.base import KVSpec
from kvstow.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# vLLM restores no prefix for these where VLLM_BATCH_INVARIANT is set.
NOT_BATCH_INVARIANT: Final = ("FLASHINFER", "TRITON_MLA")
WITHOUT_KVSTOW: Final = "Remove --kv-transfer-config for this model."


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block geometry of the one attention group that is served, in tokens."""

    block_tokens: int
    hash_tokens: int


def layer_specs(config: KVCacheConfig) -> list[dict[str, KVCacheSpec]]:
    """Each group's layers with their own specs.

    They are in vLLM's layer order, which is the same on every tensor parallel rank.
    """
    groups: list[dict[str, KVCacheSpec]] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            groups.append({name: spec.kv_cache_specs[name] for name in group.layer_names})
        else:
            groups.append(dict.fromkeys(group.layer_names, spec))
    return groups


def device_specs(config: KVCacheConfig) -> list[dict[str, KVSpec]]:
    """``layer_specs`` in the types of the device contract."""
    return [
        {name: _device_spec(name, spec, config.num_blocks) for name, spec in group.items()}
        for group in layer_specs(config)
    ]


def _device_spec(name: str, spec: KVCacheSpec, num_blocks: int) -> KVSpec:
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedError(f"layer {name}: kvstow does not serve {type(spec).__name__} caches")
    return KVSpec(
        num_blocks=num_blocks,
        block_tokens=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        element_bytes=spec.dtype.itemsize,
        page_bytes=spec.page_size_bytes,
        mla=isinstance(spec, MLAAttentionSpec),
    )


def refuse_unserved_model(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError for models and topologies whose KV cannot be kept right.

    It needs no loaded model.
    """
    model: Any = vllm_config.model_config
    name = model.model
    if model.is_attention_free or model.is_hybrid or getattr(model, "has_inner_state", False):
        raise UnsupportedError(
            f"model {name} keeps recurrent state ({', '.join(model.architectures)}); kvstow "
            "restores attention KV only, and a prefix restored without its state would be wrong. "
            + WITHOUT_KVSTOW
        )
    _refuse_without_prefixes(vllm_config, name)
    parallel: Any = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedError(
            f"kvstow shares one host's memory among the ranks of an engine; this one spans "
            f"{parallel.nnodes} hosts (--nnodes)"
        )
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, size, 1) > 1:
            option = size.replace("_", "-")
            raise UnsupportedError(
                f"kvstow does not serve --{option} {getattr(parallel, size)} yet"
            )


def _refuse_without_prefixes(vllm_config: VllmConfig, name: str) -> None:
    """Raise UnsupportedError where vLLM itself would restore no prefix, as far as settings show it.

    A user who only switches vLLM's prefix caching off is served.
    """
    model: Any = vllm_config.model_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if not model.is_prefix_caching_supported:
        raise UnsupportedError(
            f"vLLM supports no prefix caching for model {name}: its output (of mean or CLS pooling, "
            "or of an encoder) needs every token computed, and vLLM fails where a prefix was "
            "restored. " + WITHOUT_KVSTOW
        )
    if getattr(model, "rswa_window", None) is not None:
        raise UnsupportedError(
            f"model {name} has a window over generated tokens, whose KV depends on more than the "
            "prefix; vLLM switches prefix caching off for it. " + WITHOUT_KVSTOW
        )
    if getattr(model, "is_diffusion", False):
        raise UnsupportedError(
            f"model {name} denoises a canvas of tokens that attend in both directions; kvstow does "
            "not serve such models. " + WITHOUT_KVSTOW
        )
    if getattr(vllm_config, "is_mm_encoder_only", False):
        raise UnsupportedError(
            f"this engine runs the multimodal encoder only of model {name}, which has no KV. "
            "Remove --kv-transfer-config"
        )
    if on_cpu and platform.machine().startswith("riscv"):
        raise UnsupportedError(
            "vLLM supports no prefix caching on RISC-V CPUs. Remove --kv-transfer-config"
        )
    if on_cpu and model.use_mla and not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            f"vLLM's kernels for MLA on a CPU without AMX compute a prompt as a whole and ignore a "
            f"restored prefix, so it switches prefix caching off (model {name}). Where they can, "
            "start vLLM with --enable-prefix-caching; else remove --kv-transfer-config"
        )


def refuse_unserved_backends(backends: str) -> None:
    """Raise UnsupportedError for attention backends that vLLM restores no prefix for.

    ``backends`` are names joined with ``+``, as the workers reported them.
    """
    found = sorted(set(backends.split("+")) & set(NOT_BATCH_INVARIANT))
    if envs.VLLM_BATCH_INVARIANT and found:
        raise UnsupportedError(
            f"vLLM supports no prefix caching with VLLM_BATCH_INVARIANT and {found[0]}. Choose "
            "another --attention-backend, unset VLLM_BATCH_INVARIANT, or remove "
            "--kv-transfer-config"
        )


def block_geometry(vllm_config: VllmConfig, config: KVCacheConfig) -> Blocks:
    """Block sizes of the one group that is served. Raises UnsupportedError for other groups.

    vLLM 0.30 has no ``hash_block_size``: it equals the block size.
    """
    model: Any = vllm_config.model_config
    for names in layer_specs(config):
        for name, spec in names.items():
            _refuse_unserved_layer(f"model {model.model}, layer {name}", spec, model.max_model_len)
    if len(config.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"model {model.model} has {len(config.kv_cache_groups)} KV cache groups; kvstow serves "
            "one. Start vLLM with --disable-hybrid-kv-cache-manager."
        )
    block = config.kv_cache_groups[0].kv_cache_spec.block_size
    hashed = getattr(config, "hash_block_size", None) or block
    if block % hashed:
        raise UnsupportedError(
            f"block size {block} is not a multiple of the hash block size {hashed}"
        )
    return Blocks(block, hashed)


def _refuse_unserved_layer(layer: str, spec: KVCacheSpec, max_model_len: int) -> None:
    """Raise UnsupportedError for a layer whose blocks change or whose KV is no prefix's.

    A request keeps every block of a served layer, unchanged, for as long as it lives. vLLM gives a
    sliding window's blocks to others while they may still be copied. Specs are recognised by exact
    type, because a subclass may have other rules.
    """
    if type(spec) is SlidingWindowSpec:
        if spec.sliding_window < max_model_len:
            raise UnsupportedError(
                f"{layer}: kvstow does not serve a sliding window of {spec.sliding_window} tokens "
                f"that is shorter than --max-model-len {max_model_len}, in a model where every "
                f"layer has one. Start vLLM with --max-model-len {spec.sliding_window}, or remove "
                "--kv-transfer-config for this model."
            )
    elif type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedError(f"{layer}: kvstow does not serve {type(spec).__name__} caches")
    if getattr(spec, "non_causal", False):
        raise UnsupportedError(
            f"{layer}: a prompt attends in both directions, so a prefix's KV depends on what "
            "follows it; vLLM switches prefix caching off for this model. " + WITHOUT_KVSTOW
        )


def kv_shard(vllm_config: VllmConfig, tp_rank: int, pp_rank: int) -> tuple[int, int]:
    """Name of the distinct bytes that a rank holds.

    MLA latents are the same on every tensor parallel rank. With fewer KV heads than ranks vLLM
    gives ``tp_size / heads`` neighbours the same head.
    """
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if vllm_config.model_config.use_mla:
        return pp_rank, 0
    distinct = min(tp_size, vllm_config.model_config.get_total_num_kv_heads())
    return pp_rank, tp_rank * distinct // tp_size
