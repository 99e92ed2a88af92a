"""What vLLM's KV cache configuration says, in kvstow's terms; what is not served is refused here, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block geometry of the one attention group that is served, in tokens."""

    block_tokens: int
    hash_tokens: int


def layer_specs(config: KVCacheConfig) -> list[dict[str, KVCacheSpec]]:
    """Per group, each layer's own spec in vLLM's layer order, which is the same on every tensor parallel rank."""
    groups: list[dict[str, KVCacheSpec]] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            groups.append({name: spec.kv_cache_specs[name] for name in group.layer_names})
        else:
            groups.append(dict.fromkeys(group.layer_names, spec))
    return groups


def device_specs(config: KVCacheConfig) -> list[dict[str, KVSpec]]:
    """``layer_specs`` as the device contract wants them."""
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
    """Raise ``UnsupportedError`` for models and topologies whose KV cannot be kept right, before they load."""
    model = vllm_config.model_config
    name = model.model
    if model.is_attention_free or model.is_hybrid or getattr(model, "has_inner_state", False):
        raise UnsupportedError(
            f"model {name} keeps recurrent state ({', '.join(model.architectures)}); kvstow restores attention KV "
            "only, and a prefix restored without its state would be wrong. Remove --kv-transfer-config for this model."
        )
    if not model.is_prefix_caching_supported:
        raise UnsupportedError(
            f"vLLM supports no prefix caching for model {name}: its output (of mean or CLS pooling, or of an encoder) "
            "needs every token computed, and vLLM fails where a prefix was restored. Remove --kv-transfer-config for "
            "this model."
        )
    parallel: Any = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedError(
            f"kvstow shares one host's memory among the ranks of an engine; this one spans {parallel.nnodes} hosts "
            "(--nnodes)"
        )
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, size, 1) > 1:
            raise UnsupportedError(
                f"kvstow does not serve --{size.replace('_', '-')} {getattr(parallel, size)} yet"
            )


def block_geometry(vllm_config: VllmConfig, config: KVCacheConfig) -> Blocks:
    """Check the groups and give the block sizes. vLLM 0.30 has no ``hash_block_size``: it equals the block size."""
    model: Any = vllm_config.model_config
    for names in layer_specs(config):
        for name, spec in names.items():
            _refuse_unserved_layer(f"model {model.model}, layer {name}", spec, model.max_model_len)
    if len(config.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"model {vllm_config.model_config.model} has {len(config.kv_cache_groups)} KV cache groups; kvstow serves "
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
    """What is served keeps every block of a request, unchanged, for as long as the request lives: a sliding window's
    blocks are given to others while they may still be copied. By exact type: a subclass may have other rules."""
    if type(spec) is SlidingWindowSpec:
        if spec.sliding_window < max_model_len:
            raise UnsupportedError(
                f"{layer}: kvstow does not serve a sliding window of {spec.sliding_window} tokens that is shorter than "
                f"--max-model-len {max_model_len}, in a model where every layer has one. Start vLLM with "
                f"--max-model-len {spec.sliding_window}, or remove --kv-transfer-config for this model."
            )
    elif type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedError(f"{layer}: kvstow does not serve {type(spec).__name__} caches")


def kv_shard(vllm_config: VllmConfig, tp_rank: int, pp_rank: int) -> tuple[int, int]:
    """Name of the distinct bytes that a rank holds: MLA latents are the same on every tensor parallel rank, and
    with fewer KV heads than ranks vLLM gives ``tp_size / heads`` neighbours the same head."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if vllm_config.model_config.use_mla:
        return pp_rank, 0
    distinct = min(tp_size, vllm_config.model_config.get_total_num_kv_heads())
    return pp_rank, tp_rank * distinct // tp_size
