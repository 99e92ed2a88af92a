"""Fault catalogue A16: where vLLM itself restores no prefix, kvstow restores none either."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.errors import UnsupportedError
from kvstow.vllm import groups
from kvstow.vllm.groups import block_geometry, refuse_unserved_model
from tests.engine_contract.stack import Shape, kv_cache_config, vllm_config

pytestmark = pytest.mark.contract

SPEC: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}

#: Every place where vLLM switches prefix caching off by itself, and the test here that covers it.
PLACES = {
    "v1/engine/core.py": "a prompt that attends in both directions",
    "config/vllm.py": "an engine that runs the multimodal encoder only",
    "engine/arg_utils.py": "a RISC-V host",
    "model_executor/layers/attention/mla_attention.py": "batch invariance",
    "model_executor/layers/attention/attention.py": "batch invariance",
    "model_executor/models/config.py": "a window over generated tokens",
    "platforms/cpu.py": "MLA on a CPU",
}


def test_a16_every_place_where_vllm_switches_prefix_caching_off_is_known() -> None:
    root = Path(str(vllm.__file__)).parent
    pattern = re.compile(r"enable_prefix_caching\s*=\s*False\b(?!,|\))")
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if "benchmarks" not in file.parts and pattern.search(file.read_text(errors="replace"))
    }
    assert found == set(PLACES), "say in groups.py what kvstow does there, and test it below"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_a16_a_prompt_that_attends_in_both_directions(caching: bool, grouped: bool) -> None:
    config, kv = vllm_config(Shape(prefix_caching=caching)), kv_cache_config(Shape())
    spec = replace(FullAttentionSpec(**SPEC), non_causal=True)
    group = kv.kv_cache_groups[0]
    group.kv_cache_spec = spec
    if grouped:
        of_layers = dict.fromkeys(group.layer_names, FullAttentionSpec(**SPEC))
        of_layers[group.layer_names[-1]] = spec
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=of_layers)
    with pytest.raises(UnsupportedError, match=r"layer\.\d: .*both directions"):
        block_geometry(config, kv)


def test_a16_latents_of_both_directions() -> None:
    kv = kv_cache_config(Shape())
    spec = replace(MLAAttentionSpec(**SPEC), non_causal=True)
    kv.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(UnsupportedError, match="both directions"):
        block_geometry(vllm_config(Shape()), kv)


def test_a16_an_engine_that_runs_the_multimodal_encoder_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VllmConfig, "is_mm_encoder_only", True, raising=False)
    with pytest.raises(UnsupportedError, match="encoder only"):
        refuse_unserved_model(vllm_config(Shape()))


def test_a16_a_risc_v_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError, match="RISC-V"):
        refuse_unserved_model(vllm_config(Shape()))


@pytest.mark.parametrize(
    ("backends", "refused"),
    [("TRITON_MLA", True), ("FLASH_ATTN+FLASHINFER", True), ("FLASH_ATTN", False), ("", False)],
)
def test_a16_batch_invariance(
    backends: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.refuse_unserved_backends(backends)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    if not refused:
        groups.refuse_unserved_backends(backends)
        return
    with pytest.raises(UnsupportedError, match="VLLM_BATCH_INVARIANT"):
        groups.refuse_unserved_backends(backends)


def test_a16_a_window_over_generated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "rswa_window", 128, raising=False)
    with pytest.raises(UnsupportedError, match="window over generated tokens"):
        refuse_unserved_model(vllm_config(Shape()))


def test_a16_a_diffusion_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(Shape())
    monkeypatch.setitem(vars(config.model_config), "is_diffusion", True)  # a cached property
    with pytest.raises(UnsupportedError, match="canvas"):
        refuse_unserved_model(config)


def test_a16_mla_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    refuse_unserved_model(vllm_config(Shape(prefix_caching=True)))  # its kernels know prefixes
    with pytest.raises(UnsupportedError, match="MLA on a CPU"):
        refuse_unserved_model(vllm_config(Shape(prefix_caching=False)))


def test_a16_a_user_who_switches_prefix_caching_off_keeps_kvstow() -> None:
    config = vllm_config(Shape(prefix_caching=False))
    refuse_unserved_model(config)
    assert block_geometry(config, kv_cache_config(Shape())).block_tokens == 16
