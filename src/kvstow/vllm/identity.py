"""The namespace: everything but the prompt that changes the bytes of a model's KV. One function for every tier."""

from __future__ import annotations

import json
import os.path
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstow.errors import UnsupportedError
from kvstow.key import Namespace
from kvstow.layout import GroupPages
from kvstow.settings import variable
from kvstow.vllm.fingerprint import lora_digest, weights_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = [
    "Identity",
    "attention_backends",
    "lora_digest",
    "model_identity",
    "model_namespace",
    "require_fixed_root",
    "root_hash_is_random",
]

SEED_VARIABLE: Final = "PYTHONHASHSEED"
ROOT: Final = "block hash root"
CRYPTOGRAPHIC: Final = ("sha256", "sha256_cbor")
_FROM_FILES: Final = frozenset(
    (
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "pt",
        "npcache",
        "gguf",
    )
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
_NOT_IDENTITY: Final = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
)


@dataclass(frozen=True, slots=True)
class Identity:
    """``fields`` are readable text. ``not_persistent``: why this KV must not outlive the process, None if it may."""

    fields: Mapping[str, str]
    not_persistent: str | None

    @property
    def namespace(self) -> Namespace:
        return Namespace.from_fields(self.fields)

    def root(self) -> tuple[str, str]:
        """Digest of all that the namespace is but where block hashes begin, and that. Engines that differ in it alone
        would miss each other's chunks."""
        others = {name: value for name, value in self.fields.items() if name != ROOT}
        return Namespace.from_fields(others).hex(), self.fields.get(ROOT, "")

    def describe(self) -> dict[str, str]:
        """What the namespace stands for, for people."""
        return {"namespace": self.namespace.hex(), **dict(sorted(self.fields.items()))}


def model_namespace(
    vllm_config: VllmConfig,
    shards: Sequence[Sequence[GroupPages]],
    chunk_tokens: int,
    backends: str = "",
) -> Namespace:
    """``model_identity``'s namespace."""
    return model_identity(vllm_config, shards, chunk_tokens, backends).namespace


def model_identity(
    vllm_config: VllmConfig,
    shards: Sequence[Sequence[GroupPages]],
    chunk_tokens: int,
    backends: str = "",
) -> Identity:
    """Identity of the KV that ``vllm_config``'s engine makes.

    ``shards``: of each distinct shard, in order, its groups as the device recognised them; ``backends``: the
    attention backends that the workers use. Reads samples of the weight files.
    """
    model: Any = vllm_config.model_config
    fields, problem = _model_fields(model, vllm_config.load_config)
    speculative: Any = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:  # its layers are among the groups
        draft_fields, draft_problem = _model_fields(draft, vllm_config.load_config)
        fields |= {f"draft {tag}": value for tag, value in draft_fields.items()}
        problem = problem or draft_problem
    fields |= _cache_fields(vllm_config, backends)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        problem = (
            problem
            or "the scales of its KV are computed at run time, so they differ from run to run"
        )
    fields |= _parallel_fields(vllm_config.parallel_config)
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    fields |= _hash_fields(algorithm, variable(SEED_VARIABLE))
    fields["chunk tokens"] = str(chunk_tokens)
    for shard, groups in enumerate(shards):
        for group, pages in enumerate(groups):
            layers = [[layer.name, layer.page_bytes, layer.layout] for layer in pages.layers]
            fields[f"pages {shard}/{group}"] = _canonical(
                {"block": pages.block_tokens, "layers": layers}
            )
    return Identity(fields, problem)


def _model_fields(model: ModelConfig | Any, load_config: Any) -> tuple[dict[str, str], str | None]:
    """Fields of one model, and why it has no lasting identity, if so."""
    load_format = str(getattr(load_config, "load_format", "auto")).lower()
    fields = {
        "model config": _canonical(_config(model.hf_config)),
        "model implementation": str(getattr(model, "model_impl", "auto")),
        "model dtype": str(model.dtype),
        "quantization": _canonical(
            [model.quantization, getattr(model, "quantization_config", None)]
        ),
        "rope mode": _rope_mode(model),
        "sliding window": "off"
        if getattr(model, "disable_sliding_window", False)
        else "as configured",
        "load format": "files" if load_format in _FROM_FILES else load_format,
        "multimodal processor": _canonical(
            getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)
        ),
    }
    problem = None
    folder = _local_folder(model, load_config)
    try:
        weights = weights_digest(folder, load_format) if folder else None
    except OSError as error:
        weights, problem = None, f"the weight files of {model.model} cannot be read: {error}"
    revisions = (getattr(model.hf_config, "_commit_hash", None), model.revision)
    revision = next((r for r in revisions if isinstance(r, str) and _COMMIT.fullmatch(r)), None)
    if weights is not None:
        fields["weights"] = f"{weights.digest} ({weights.files} files, {weights.size_bytes} bytes)"
    elif revision is not None:
        fields["weights"] = f"revision {revision} of {model.model}"
    else:
        fields["weights"] = f"unknown, {model.model}"
        problem = (
            problem or f"{model.model} has neither local weight files nor an immutable revision"
        )
    if load_format == "dummy":
        fields["weights"] = f"random, seed {model.seed}"
        problem = f"{model.model} is loaded with random weights (load format dummy)"
    return fields, problem


def _local_folder(model: ModelConfig | Any, load_config: Any) -> str | None:
    """Directory or file of the model's weights, None if they aren't local. Asks no network."""
    for path in (getattr(model, "model_weights", ""), model.model):
        if path and os.path.exists(path):
            return str(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(
            model.model,
            "config.json",
            cache_dir=getattr(load_config, "download_dir", None),
            revision=model.revision,
        ) or try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except HFValidationError:
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _config(config: Any) -> Any:
    """A Hugging Face configuration as plain data, without what only says where it came from."""

    def strip(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): strip(v) for k, v in value.items() if k not in _NOT_IDENTITY}
        return [strip(v) for v in value] if isinstance(value, list | tuple) else value

    return strip(config.to_dict() if hasattr(config, "to_dict") else config)


def _canonical(value: Any) -> str:
    """JSON that is the same in every process: sorted, and no object's address in it."""

    def plain(other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return sorted(map(str, other))
        if hasattr(other, "to_dict"):
            return other.to_dict()
        shown = str(other)
        return type(other).__qualname__ if " at 0x" in shown else shown

    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=plain)


def _rope_mode(model: ModelConfig | Any) -> str:
    """LongRoPE takes its long factors for the whole run where the longest served prompt needs them; no other kind
    looks at the served length."""
    config = getattr(model, "hf_text_config", model.hf_config)
    original = getattr(config, "original_max_position_embeddings", None)
    modes = []
    for rope in _ropes(
        getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)
    ):
        limit = rope.get("original_max_position_embeddings", original)
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su") and isinstance(limit, int):
            modes.append("long" if model.max_model_len > limit else "short")
    return "+".join(modes) or "as configured"


def _ropes(*found: object) -> Iterator[Mapping[str, Any]]:
    """Rope parameters, of all layers or by kind of layer."""
    for rope in found:
        if isinstance(rope, Mapping):
            yield rope
            yield from _ropes(*rope.values())


def _cache_fields(vllm_config: VllmConfig, backends: str) -> dict[str, str]:
    cache: Any = vllm_config.cache_config
    device = str(vllm_config.device_config.device_type)
    return {
        "kv dtype": str(cache.cache_dtype),
        "kv dtype of skipped layers": _canonical(getattr(cache, "kv_cache_dtype_skip_layers", [])),
        "device": _cpu() if device == "cpu" else device,
        "attention backends": backends
        or f"as asked for: {getattr(vllm_config.attention_config, 'backend', None)}",
        "model runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
    }


def attention_backends(vllm_config: VllmConfig, layers: Sequence[str]) -> str:
    """Names of the attention backends of ``layers``, in a worker once the model is built."""
    context: Any = vllm_config.compilation_config.static_forward_context
    backends = (getattr(context.get(layer), "attn_backend", None) for layer in layers)
    return "+".join(
        sorted({str(backend.get_name()) for backend in backends if backend is not None})
    )


def _cpu() -> str:
    """vLLM's CPU kernels pack a block as suits the instruction set, and the shape of its tensor doesn't show it."""
    import torch
    import vllm

    features = [
        name
        for name in ("amx_tile", "avx512", "avx2")
        if getattr(torch.cpu, f"_is_{name}_supported", bool)()
    ]
    return f"cpu {platform.machine()} {'+'.join(features)} vllm {vllm.__version__}"


def _parallel_fields(parallel: Any) -> dict[str, str]:
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
    }
    return {"parallel": _canonical(sizes)}


def _hash_fields(algorithm: str, seed: str | None) -> dict[str, str]:
    root = (
        "random"
        if root_hash_is_random(algorithm, seed)
        else "vLLM's default"
        if seed is None
        else f"seed {seed}"
    )
    fields = {"block hash": algorithm, ROOT: root}
    if not algorithm.endswith("_cbor"):
        fields["block hash pickle protocol"] = str(_pickle_protocol())
    return fields


def _pickle_protocol() -> int:
    from vllm.utils import hashing

    return int(hashing.pickle.HIGHEST_PROTOCOL)


def root_hash_is_random(algorithm: str, seed: str | None) -> bool:
    """Whether vLLM draws the root of its block hashes anew in each process (0.30 to 0.32: ``init_none_hash``).

    ``seed`` is PYTHONHASHSEED's value. Without it cryptographic algorithms have a fixed root, the others a random one;
    so does, to be safe, an algorithm that isn't known here. ``random`` is no value: it asks Python for a random one,
    and that vLLM takes it for a text like any other is nothing to rely on.
    """
    return seed in (None, "random") and algorithm not in CRYPTOGRAPHIC


def require_fixed_root(algorithm: str, seed: str | None, tier: str) -> None:
    """Raise RuntimeError where nothing that ``tier`` keeps could ever be found by another process."""
    if root_hash_is_random(algorithm, seed):
        raise UnsupportedError(
            f"tier {tier} outlives this process, but vLLM's block hashes ({algorithm}) start from a random root in "
            f"each process: nothing stored would be found again. Set {SEED_VARIABLE}=0 in the environment of every "
            "instance, the same value on all, or start vLLM with --prefix-caching-hash-algo sha256"
        )
