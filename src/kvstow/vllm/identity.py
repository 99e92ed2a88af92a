"""The namespace digests everything but the prompt that changes the bytes of a model's KV."""

from __future__ import annotations

import dataclasses
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
from kvstow.vllm.fingerprint import (
    code_digest,
    file_digest,
    weights_changed_since,
    weights_digest,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = [
    "Identity",
    "adapter_options",
    "attention_backends",
    "model_identity",
    "require_fixed_root",
    "root_hash_is_random",
]

SEED_VARIABLE: Final = "PYTHONHASHSEED"
ROOT: Final = "block hash root"
CRYPTOGRAPHIC: Final = ("sha256", "sha256_cbor")
# Load formats that read the same tensors from the same files.
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
    """Everything that the namespace digests, as readable text.

    ``not_persistent`` says why this KV must not outlive the process. None: it may.
    """

    fields: Mapping[str, str]
    not_persistent: str | None

    @property
    def namespace(self) -> Namespace:
        return Namespace.from_fields(self.fields)

    def root(self) -> tuple[str, str]:
        """Digest of all fields but the block hashes' root, and that root.

        Engines that differ in the root alone would miss each other's chunks.
        """
        others = {name: value for name, value in self.fields.items() if name != ROOT}
        return Namespace.from_fields(others).hex(), self.fields.get(ROOT, "")

    def describe(self) -> dict[str, str]:
        """The namespace in hexadecimal and the fields behind it, for people."""
        return {"namespace": self.namespace.hex(), **dict(sorted(self.fields.items()))}


def model_identity(
    vllm_config: VllmConfig,
    shards: Sequence[Sequence[GroupPages]],
    chunk_tokens: int,
    backends: str = "",
    *,
    since_ns: int | None = None,
) -> Identity:
    """Identity of the KV that ``vllm_config``'s engine makes. Reads samples of the weight files.

    ``shards`` holds, for each distinct shard in order, its groups as the device recognised them.
    ``backends`` names the attention backends that the workers use. ``since_ns`` is the time before
    which vLLM had read no weight file, in nanoseconds since the epoch; None skips that comparison.
    """
    model: Any = vllm_config.model_config
    fields, problem = _model_fields(model, vllm_config.load_config, since_ns)
    speculative: Any = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model.model:  # its layers are among the groups
        load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        draft_fields, draft_problem = _model_fields(draft, load_config, since_ns)
        fields |= {f"draft {tag}": value for tag, value in draft_fields.items()}
        problem = problem or draft_problem
    fields |= _cache_fields(vllm_config, backends)
    fields |= _option_fields(vllm_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        scales = "the scales of its KV are computed at run time, so they differ from run to run"
        problem = problem or scales
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


def adapter_options(vllm_config: VllmConfig) -> str:
    """The options that decide what an adapter's files do to KV; empty without LoRA.

    They are part of each adapter's namespace. KV without an adapter does not depend on them.
    """
    lora: Any = vllm_config.lora_config
    if lora is None:
        return ""
    modules = getattr(lora, "target_modules", None)
    return _canonical(
        {
            "dtype": str(lora.lora_dtype),
            "target modules": None if modules is None else sorted(modules),
            "tower": getattr(lora, "enable_tower_connector_lora", False),
            "mixed moe format": getattr(lora, "enable_mixed_moe_lora_format", False),
            "shared moe factors": getattr(lora, "enable_moe_shared_loras", False),
        }
    )


def _model_fields(
    model: ModelConfig | Any, load_config: Any, since_ns: int | None
) -> tuple[dict[str, str], str | None]:
    """Fields of one model, and the reason if it has no lasting identity."""
    load_format = str(getattr(load_config, "load_format", "auto")).lower()
    sliding = "off" if getattr(model, "disable_sliding_window", False) else "as configured"
    fields = {
        "model config": _canonical(_config(model.hf_config)),
        "model implementation": str(getattr(model, "model_impl", "auto")),
        "model class overrides": _canonical(getattr(model, "model_class_overrides", None)),
        "model dtype": str(model.dtype),
        "quantization": _canonical(
            [model.quantization, getattr(model, "quantization_config", None)]
        ),
        "rope mode": _rope_mode(model),
        "sliding window": sliding,
        "load format": "files" if load_format in _FROM_FILES else load_format,
        "loader options": _canonical(
            [
                getattr(load_config, "model_loader_extra_config", None) or {},
                getattr(load_config, "ignore_patterns", None),
            ]
        ),
    }
    folder = _local_folder(model, load_config)
    try:
        fields |= _multimodal_fields(getattr(model, "multimodal_config", None))
        fields |= _code_fields(model, folder)
        fields["weights"], problem = _weights(model, folder, load_format, since_ns)
    except OSError as error:
        fields["weights"] = f"unknown, {model.model}"
        problem = f"the weight files of {model.model} cannot be read: {error}"
    if load_format == "dummy":
        fields["weights"] = f"random, seed {model.seed}"
        problem = f"{model.model} is loaded with random weights (load format dummy)"
    return fields, problem


def _weights(
    model: Any, folder: str | None, load_format: str, since_ns: int | None
) -> tuple[str, str | None]:
    """Name of the model's weights, and the reason if it doesn't last. Raises OSError."""
    weights = weights_digest(folder, load_format) if folder else None
    if folder is not None and weights is not None:
        name = f"{weights.digest} ({weights.files} files, {weights.size_bytes} bytes)"
        if since_ns is None or not weights_changed_since(folder, load_format, since_ns):
            return name, None
        return f"{name}, or those before", (
            f"the files of {model.model} changed while this engine started, so it may have loaded "
            "them before the change. Start it again"
        )
    for revision in (getattr(model.hf_config, "_commit_hash", None), model.revision):
        if isinstance(revision, str) and _COMMIT.fullmatch(revision):
            return f"revision {revision} of {model.model}", None
    return f"unknown, {model.model}", (
        f"{model.model} has neither local weight files nor an immutable revision"
    )


def _multimodal_fields(multimodal: Any) -> dict[str, str]:
    """Options of a multimodal model's processor and encoder. Raises OSError."""
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    pruning = [
        getattr(multimodal, "video_pruning_rate", None),
        getattr(multimodal, "video_pruning_method", None),
    ]
    return {
        "multimodal processor": _canonical(getattr(multimodal, "mm_processor_kwargs", None)),
        "multimodal encoder": _canonical(
            [
                getattr(multimodal, "mm_encoder_attn_dtype", None),
                file_digest(scales) if scales else None,
                pruning if pruning[0] else None,
            ]
        ),
    }


def _code_fields(model: Any, folder: str | None) -> dict[str, str]:
    """The model's own code, where vLLM runs it. Raises OSError."""
    if not getattr(model, "trust_remote_code", False):
        return {}
    digest = code_digest(folder) if folder and os.path.isdir(folder) else None
    return {"remote code": _canonical([getattr(model, "code_revision", None), digest])}


def _local_folder(model: ModelConfig | Any, load_config: Any) -> str | None:
    """Directory or file of the model's weights. None if they aren't local. Asks no network."""
    for path in (getattr(model, "model_weights", ""), model.model):
        if path and os.path.exists(path):
            return str(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    download_dir = getattr(load_config, "download_dir", None)
    try:
        for cache_dir in (download_dir, None):
            found = try_to_load_from_cache(
                model.model, "config.json", cache_dir=cache_dir, revision=model.revision
            )
            if isinstance(found, str):
                return os.path.dirname(found)
    except HFValidationError:
        pass
    return None


def _config(config: Any) -> Any:
    """A Hugging Face configuration as plain data, without what only says where it came from."""

    def strip(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): strip(v) for k, v in value.items() if k not in _NOT_IDENTITY}
        return [strip(v) for v in value] if isinstance(value, list | tuple) else value

    return strip(config.to_dict() if hasattr(config, "to_dict") else config)


def _canonical(value: Any) -> str:
    """JSON that is the same in every process: sorted, and without any object's address."""

    def plain(other: Any) -> Any:
        if dataclasses.is_dataclass(other) and not isinstance(other, type):
            return {field.name: getattr(other, field.name) for field in dataclasses.fields(other)}
        if isinstance(other, set | frozenset):
            return sorted(map(str, other))
        if hasattr(other, "to_dict"):
            return other.to_dict()
        shown = str(other)
        return type(other).__qualname__ if " at 0x" in shown else shown

    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=plain)


def _rope_mode(model: ModelConfig | Any) -> str:
    """Which factors LongRoPE uses.

    It takes its long factors for the whole run if the longest served prompt needs them. No other
    kind of rotary embedding looks at the served length.
    """
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
    """Yields rope parameters, which a model has once or for each kind of layer."""
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


def _option_fields(vllm_config: VllmConfig | Any) -> dict[str, str]:
    """Options that choose other arithmetic for the same weights."""
    attention: Any = vllm_config.attention_config
    names = (
        [field.name for field in dataclasses.fields(attention)]
        if (dataclasses.is_dataclass(attention))
        else []
    )
    kernels: Any = getattr(vllm_config, "kernel_config", None)
    platform_options = getattr(vllm_config, "additional_config", None)
    parallel: Any = vllm_config.parallel_config
    return {
        # The backends themselves are a field of their own, as the workers chose them.
        "attention options": _canonical(
            {name: getattr(attention, name) for name in names if name != "backend"}
        ),
        "kernels": _canonical(
            [getattr(kernels, "moe_backend", None), getattr(kernels, "linear_backend", None)]
        ),
        # A plug-in platform may have a class of its own here, which says what counts by itself.
        "additional config": _canonical(
            platform_options if isinstance(platform_options, dict) else {}
        ),
        "worker classes": _canonical(
            [
                getattr(parallel, "worker_cls", None),
                getattr(parallel, "worker_extension_cls", None),
            ]
        ),
    }


def attention_backends(vllm_config: VllmConfig, layers: Sequence[str]) -> str:
    """Names of the attention backends of ``layers``. Known in a worker once the model is built."""
    context: Any = vllm_config.compilation_config.static_forward_context
    backends = (getattr(context.get(layer), "attn_backend", None) for layer in layers)
    return "+".join(
        sorted({str(backend.get_name()) for backend in backends if backend is not None})
    )


def _cpu() -> str:
    """Name of this CPU for the namespace.

    vLLM's CPU kernels pack a block as suits the instruction set, and its tensor's shape hides it.
    """
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
    if root_hash_is_random(algorithm, seed):
        root = "random"
    elif seed is None:
        root = "vLLM's default"
    else:
        root = f"seed {seed}"
    fields = {"block hash": algorithm, ROOT: root}
    if not algorithm.endswith("_cbor"):
        fields["block hash pickle protocol"] = str(_pickle_protocol())
    return fields


def _pickle_protocol() -> int:
    from vllm.utils import hashing

    return int(hashing.pickle.HIGHEST_PROTOCOL)


def root_hash_is_random(algorithm: str, seed: str | None) -> bool:
    """Whether vLLM draws the root of its block hashes anew in each process.

    ``seed`` is the value of PYTHONHASHSEED. Without it cryptographic algorithms have a fixed root,
    the others a random one. An algorithm that isn't known here counts as random, to be safe. The
    value ``random`` asks Python for a random seed, so it counts as none.
    """
    return seed in (None, "random") and algorithm not in CRYPTOGRAPHIC


def require_fixed_root(algorithm: str, seed: str | None, tier: str) -> None:
    """Raise UnsupportedError if no other process could find what ``tier`` keeps."""
    if root_hash_is_random(algorithm, seed):
        raise UnsupportedError(
            f"tier {tier} outlives this process, but vLLM's block hashes ({algorithm}) start from "
            "a random root in each process: nothing stored would be found again. Set "
            f"{SEED_VARIABLE}=0 in the environment of every instance, the same value on all, or "
            "start vLLM with --prefix-caching-hash-algo sha256"
        )
