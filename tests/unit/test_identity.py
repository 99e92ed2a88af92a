"""The namespace: every field that changes KV bytes makes a new one, nothing else does. Digests of files."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import AttentionConfig

from kvstow.errors import UnsupportedError
from kvstow.layout import GroupPages, LayerPages
from kvstow.settings import sources as settings_sources
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.vllm import fingerprint, plugin
from kvstow.vllm.fingerprint import SAMPLE_BYTES, Adapters, lora_digest, weights_digest
from kvstow.vllm.identity import (
    Identity,
    adapter_options,
    attention_backends,
    model_identity,
    require_fixed_root,
    root_hash_is_random,
)


class HFConfig:
    """As much of a Hugging Face configuration as identity looks at."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


def engine(folder: Path) -> SimpleNamespace:
    hf = HFConfig(
        _name_or_path=str(folder),
        transformers_version="5.16.1",
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        text_config={"_name_or_path": "x", "width": 8},
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            model_weights="",
            hf_config=hf,
            hf_text_config=hf,
            dtype="torch.bfloat16",
            seed=0,
            quantization=None,
            quantization_config=None,
            revision=None,
            max_model_len=4096,
            model_impl="auto",
            disable_sliding_window=False,
            served_model_name="m",
            multimodal_config=None,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            kv_cache_dtype_skip_layers=[],
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            master_port=29500,
        ),
        attention_config=AttentionConfig(),
        kernel_config=SimpleNamespace(moe_backend="auto", linear_backend="auto"),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
        use_v2_model_runner=False,
        log_level="INFO",
    )


def pages(
    name: str = "model.layers.0", page_bytes: int = 4096, layout: str = "packed_heads.hnc"
) -> LayerPages:
    return LayerPages(name, page_bytes, layout)


TENSORS = {"a": b"a" * 50_000, "b": b"b" * 100, "c": b"c" * 9_000}
SHARDS = [(GroupPages(16, (pages(), pages("model.layers.1"))),)]


def safetensors(
    path: Path, tensors: dict[str, bytes], metadata: dict[str, str] | None = None
) -> None:
    """Write the format by hand: length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings_sources.os, "environ", {})
    monkeypatch.setattr(fingerprint, "_remembered", {})
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors(folder / "model.safetensors", TENSORS)
    return folder


def identity(
    config: Any, shards: Any = SHARDS, chunk: int = 128, backends: str = "FLASH_ATTN"
) -> Identity:
    return model_identity(config, shards, chunk, backends)


def set_path(config: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        config = config[parent] if isinstance(config, dict) else getattr(config, parent)
    if isinstance(config, dict):
        config[last] = value
    else:
        setattr(config, last, value)


HF = "model_config.hf_config."

#: One field each that changes what the KV's bytes are or mean (B6, B7, B8, C3).
CHANGES: list[tuple[str, Any]] = [
    (HF + "num_hidden_layers", 3),
    (HF + "num_key_value_heads", 1),
    (HF + "head_dim", 64),
    (HF + "sliding_window", 128),
    (HF + "rope_parameters.rope_theta", 10001.0),
    (HF + "rope_parameters.rope_type", "yarn"),
    (HF + "rope_parameters.factor", 2.0),
    (HF + "text_config.width", 9),
    (HF + "quantization_config", {"kv_cache_scheme": {"type": "float"}}),
    ("model_config.dtype", "torch.float16"),
    ("model_config.quantization", "fp8"),
    ("model_config.quantization_config", {"x": 1}),
    ("model_config.model_impl", "transformers"),
    ("model_config.disable_sliding_window", True),
    ("model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"num_crops": 4})),
    ("model_config.multimodal_config", SimpleNamespace(mm_encoder_attn_dtype="fp8")),
    ("model_config.multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
    ("model_config.model_class_overrides", {"LlamaForCausalLM": "mine:Model"}),
    ("model_config.trust_remote_code", True),
    ("attention_config", AttentionConfig(use_non_causal=True)),
    ("attention_config", AttentionConfig(use_prefill_query_quantization=True)),
    ("kernel_config", SimpleNamespace(moe_backend="marlin", linear_backend="auto")),
    ("kernel_config", SimpleNamespace(moe_backend="auto", linear_backend="marlin")),
    ("additional_config", {"numerics": "other"}),
    ("parallel_config.worker_cls", "mine.Worker"),
    ("parallel_config.worker_extension_cls", "mine.Extension"),
    ("load_config.model_loader_extra_config", {"shard": 1}),
    ("load_config.ignore_patterns", ["*.bin"]),
    ("load_config.load_format", "bitsandbytes"),
    ("cache_config.cache_dtype", "fp8"),
    ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    ("cache_config.prefix_caching_hash_algo", "xxhash"),
    ("parallel_config.tensor_parallel_size", 2),
    ("parallel_config.pipeline_parallel_size", 2),
    ("parallel_config.decode_context_parallel_size", 2),
    ("parallel_config.prefill_context_parallel_size", 2),
    ("parallel_config.cp_kv_cache_interleave_size", 16),
    ("device_config.device_type", "xpu"),
    ("use_v2_model_runner", True),
]

IRRELEVANT: list[tuple[str, Any]] = [
    ("parallel_config.master_port", 1234),
    ("parallel_config.data_parallel_size", 8),
    ("log_level", "DEBUG"),
    ("model_config.served_model_name", "other"),
    ("model_config.seed", 7),
    ("model_config.max_model_len", 8192),
    ("cache_config.gpu_memory_utilization", 0.5),
    ("cache_config.enable_prefix_caching", False),
    ("load_config.load_format", "safetensors"),
    (HF + "_name_or_path", "elsewhere"),
    (HF + "transformers_version", "6.0"),
    (HF + "text_config._name_or_path", "y"),
]


@pytest.mark.parametrize(("path", "value"), CHANGES)
def test_b7_b8_c3_every_field_that_matters_is_a_new_namespace(
    path: str, value: Any, folder: Path
) -> None:
    before, config = identity(engine(folder)), engine(folder)
    set_path(config, path, value)
    after = identity(config)
    assert after.namespace != before.namespace
    assert before.fields != after.fields
    assert identity(engine(folder)).namespace == before.namespace


@pytest.mark.parametrize(("path", "value"), IRRELEVANT)
def test_b7_what_does_not_matter_is_the_same_namespace(path: str, value: Any, folder: Path) -> None:
    config = engine(folder)
    set_path(config, path, value)
    assert identity(config).namespace == identity(engine(folder)).namespace


def test_no_two_changes_share_a_namespace(folder: Path) -> None:
    seen = {identity(engine(folder)).namespace}
    for path, value in CHANGES:
        config = engine(folder)
        set_path(config, path, value)
        seen.add(identity(config).namespace)
    assert len(seen) == len(CHANGES) + 1


@pytest.mark.parametrize(
    "shards",
    [
        [(GroupPages(32, SHARDS[0][0].layers),)],
        [(GroupPages(16, (pages(layout="kv_first.knhc"), pages("model.layers.1"))),)],
        [(GroupPages(16, (pages(page_bytes=8192), pages("model.layers.1"))),)],
        [(GroupPages(16, (pages("model.layers.1"), pages())),)],
        [(GroupPages(16, (pages(),)),)],
        [SHARDS[0], SHARDS[0]],
        [(GroupPages(16, (pages(),)), GroupPages(16, (pages("model.layers.1"),)))],
        [(GroupPages(16, (pages(),)),), (GroupPages(16, (pages("model.layers.1"),)),)],
        [],
    ],
)
def test_b8_pages_as_recognised_are_part_of_it(shards: Any, folder: Path) -> None:
    assert identity(engine(folder), shards).namespace != identity(engine(folder)).namespace


def test_b8_chunk_and_backend_are_part_of_it(folder: Path) -> None:
    base = identity(engine(folder)).namespace
    assert identity(engine(folder), chunk=256).namespace != base
    assert identity(engine(folder), backends="FLASHINFER").namespace != base


def test_b8_cpu_pages_depend_on_the_instruction_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    config = engine(folder)
    config.device_config.device_type = "cpu"
    found = set()
    for supported in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda s=supported: s)
        found.add(identity(config).namespace)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("rope", "outer", "lengths", "namespaces"),
    [
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 4096},
            None,
            [2048, 4096],
            1,
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 4096},
            None,
            [4096, 4097],
            2,
        ),
        ({"rope_type": "longrope"}, 4096, [4096, 4097], 2),
        ({"type": "su"}, 4096, [4096, 4097], 2),
        (
            {"full": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
            None,
            [4096, 4097],
            2,
        ),
        ({"rope_type": "yarn", "original_max_position_embeddings": 4096}, None, [4096, 131072], 1),
        ({"rope_type": "yarn"}, 4096, [4096, 131072], 1),
    ],
)
def test_b7_max_model_len_matters_where_it_selects_the_rope_mode(
    rope: dict[str, Any], outer: int | None, lengths: list[int], namespaces: int, folder: Path
) -> None:
    found = set()
    for length in lengths:
        config = engine(folder)
        config.model_config.hf_config.rope_parameters = rope
        if outer:
            config.model_config.hf_config.original_max_position_embeddings = outer
        config.model_config.max_model_len = length
        found.add(identity(config).namespace)
    assert len(found) == namespaces


# --- weights (B6) ----------------------------------------------------------------------------------------------------


def test_b6_changed_weights_are_a_new_namespace_and_the_old_returns(folder: Path) -> None:
    file = folder / "model.safetensors"
    original, before = file.read_bytes(), identity(engine(folder)).namespace
    changed = bytearray(original)
    changed[-9_000 - 100 - 25_000] ^= 1  # the middle of the first tensor
    file.write_bytes(changed)
    os.utime(file, ns=(1, 1))
    assert identity(engine(folder)).namespace != before
    file.write_bytes(original)
    os.utime(file, ns=(2, 2))
    assert identity(engine(folder)).namespace == before


def test_b6_the_same_weights_elsewhere_are_the_same_namespace(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    before = identity(engine(folder)).namespace
    folder.rename(moved)
    assert identity(engine(moved)).namespace == before


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_is_sampled_in_its_middle(seed: int, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    sizes = [
        random_.choice([1, 100, SAMPLE_BYTES, SAMPLE_BYTES + 1, 60_000])
        for _ in range(random_.randint(1, 12))
    ]
    tensors = {f"t{i}": random_.randbytes(size) for i, size in enumerate(sizes)}
    file = tmp_path / "a.safetensors"
    safetensors(file, tensors)
    before = weights_digest(str(file))
    name = random_.choice(list(tensors))
    data = bytearray(tensors[name])
    data[len(data) // 2] ^= 0xFF
    safetensors(file, {**tensors, name: bytes(data)})
    os.utime(file, ns=(seed, seed))
    assert weights_digest(str(file)) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda f: safetensors(
            f / "model.safetensors", {name.replace("a", "x"): d for name, d in TENSORS.items()}
        ),
        lambda f: safetensors(f / "model.safetensors", {**TENSORS, "c": b"c" * 9_001}),
        lambda f: safetensors(f / "model.safetensors", TENSORS, {"k": "v"}),
        lambda f: safetensors(f / "more.safetensors", {"d": b"d"}),
        lambda f: (f / "model.safetensors").rename(f / "renamed.safetensors"),
    ],
)
def test_b6_names_shapes_and_files_are_part_of_it(
    change: Callable[[Path], Any], folder: Path
) -> None:
    before = weights_digest(str(folder))
    change(folder)
    os.utime(folder / os.listdir(folder)[0], ns=(5, 5))
    assert weights_digest(str(folder)) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "odd.safetensors"])
@pytest.mark.parametrize("at", [0, 700_000, 2_999_999])
def test_other_formats_are_sampled_at_both_ends_and_between(
    name: str, at: int, tmp_path: Path
) -> None:
    data = bytearray(random.Random(1).randbytes(3_000_000))
    (tmp_path / name).write_bytes(data)
    before = weights_digest(str(tmp_path))
    assert before is not None
    data[at] ^= 1
    (tmp_path / name).write_bytes(data)
    os.utime(tmp_path / name, ns=(1, 1))
    assert weights_digest(str(tmp_path)) != before


def test_the_files_that_vllm_loads_are_the_ones_that_count(folder: Path) -> None:
    before = weights_digest(str(folder))
    assert before is not None
    assert before.files == 1
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "readme.md"):
        (folder / name).write_bytes(b"x")
    assert weights_digest(str(folder)) == before
    assert weights_digest(str(folder), "npcache") != before
    assert weights_digest(str(folder / "empty")) is None
    (folder / "model.safetensors").unlink()
    assert weights_digest(str(folder)) != before


def test_asking_again_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights_digest(str(folder))
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("read again"))
    assert weights_digest(str(folder)) == before


@pytest.mark.parametrize("header", [b"{not json", b'{"a": {"x": 1}}', b"{}", b'{"a": 5}'])
def test_a_damaged_header_is_no_identity_or_a_digest_never_a_crash(
    header: bytes, folder: Path
) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    found = identity(engine(folder))
    assert found.not_persistent is not None or header == b"{}"


# --- what may outlive the process ------------------------------------------------------------------------------------


def test_local_files_are_an_identity_that_lasts(folder: Path) -> None:
    found = identity(engine(folder))
    assert found.not_persistent is None
    assert "1 files" in found.fields["weights"]


def test_without_files_the_immutable_revision_counts() -> None:
    config = engine(Path("no/such"))
    assert "neither local weight files nor an immutable revision" in str(
        identity(config).not_persistent
    )
    config.model_config.revision = "main"
    assert identity(config).not_persistent is not None
    config.model_config.revision = "a" * 40
    pinned = identity(config)
    assert pinned.not_persistent is None
    config.model_config.revision = "main"
    config.model_config.hf_config._commit_hash = "b" * 40
    committed = identity(config)
    assert committed.not_persistent is None
    assert committed.namespace != pinned.namespace


def test_unreadable_weights_do_not_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("kvstow.vllm.identity.weights_digest", refuse)
    config = engine(folder)
    config.model_config.revision = "a" * 40
    assert "cannot be read" in str(identity(config).not_persistent)


def test_random_weights_and_run_time_scales_do_not_last(folder: Path) -> None:
    config = engine(folder)
    config.load_config.load_format = "dummy"
    assert "random weights" in str(identity(config).not_persistent)
    config = engine(folder)
    config.cache_config.calculate_kv_scales = True
    assert "scales" in str(identity(config).not_persistent)


def test_a_draft_model_of_its_own_is_part_of_it(folder: Path, tmp_path: Path) -> None:
    base = identity(engine(folder)).namespace
    same = engine(folder)
    same.speculative_config = SimpleNamespace(
        draft_model_config=engine(folder).model_config
    )  # n-gram: no other model
    assert identity(same).namespace == base
    draft = tmp_path / "draft"
    draft.mkdir()
    safetensors(draft / "model.safetensors", {"a": b"1"})
    found = []
    for content in (b"1", b"2"):
        safetensors(draft / "model.safetensors", {"a": content})
        os.utime(draft / "model.safetensors", ns=(1, content[0]))
        config = engine(folder)
        config.speculative_config = SimpleNamespace(draft_model_config=engine(draft).model_config)
        found.append(identity(config).namespace)
    assert len({base, *found}) == 3


def test_fields_are_the_same_text_in_every_process(folder: Path) -> None:
    class Odd:
        pass

    config = engine(folder)
    found = set()
    for _ in range(2):
        config.model_config.quantization_config = {
            "odd": Odd(),
            "set": {"b", "a"},
            "path": Path("x"),
        }
        fields = identity(config).fields
        assert all("0x" not in value for value in fields.values())
        found.add(identity(config).namespace)
    assert len(found) == 1


def test_describe_says_what_the_namespace_stands_for(folder: Path) -> None:
    described = identity(engine(folder)).describe()
    assert described["namespace"] == identity(engine(folder)).namespace.hex()
    assert described["chunk tokens"] == "128"
    assert json.loads(described["pages 0/0"])["layers"][0] == [
        "model.layers.0",
        4096,
        "packed_heads.hnc",
    ]
    assert all(isinstance(value, str) for value in described.values())


def test_attention_backends_are_named_once() -> None:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    other = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CUTLASS_MLA"))
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a": layer, "b": layer, "c": other, "d": object()}
        )
    )
    assert attention_backends(config, ["a", "b", "c", "d", "missing"]) == "CUTLASS_MLA+FLASH_ATTN"


# --- root hash -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "seed", "random_root"),
    [
        ("sha256", None, False),
        ("sha256_cbor", None, False),
        ("sha256", "0", False),
        ("xxhash", None, True),
        ("xxhash_cbor", None, True),
        ("xxhash", "0", False),
        ("xxhash", "random", True),
        ("sha256", "random", False),
        ("xxhash", "", False),
        ("new_in_a_later_release", None, True),
    ],
)
def test_c1_the_root_is_random_exactly_where_vllm_draws_it(
    algorithm: str, seed: str | None, random_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert root_hash_is_random(algorithm, seed) is random_root
    if random_root:
        with pytest.raises(
            RuntimeError, match=r"disk.*PYTHONHASHSEED=0 in the environment of every instance"
        ):
            require_fixed_root(algorithm, seed, "disk")
        with pytest.raises(UnsupportedError):
            require_fixed_root(algorithm, seed, "disk")
    else:
        require_fixed_root(algorithm, seed, "disk")
    if algorithm.startswith("new") or seed == "random":
        return
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    assert (resolve_none_hash_seed(function) != resolve_none_hash_seed(function)) is random_root


def test_c1_the_seed_is_part_of_the_namespace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for env in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": ""}):
        monkeypatch.setattr(settings_sources.os, "environ", env)
        found.add(identity(engine(folder)).namespace)
    assert len(found) == 4


def test_hashes_over_pickles_name_the_protocol(folder: Path) -> None:
    config = engine(folder)
    assert identity(config).fields["block hash pickle protocol"] == "5"
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    assert "block hash pickle protocol" not in identity(config).fields


# --- adapters (B4) ---------------------------------------------------------------------------------------------------


def request(name: str, path: Path | str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(path), **more)


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_b4_adapters_are_told_apart_by_content(tmp_path: Path) -> None:
    one = lora_digest(str(adapter(tmp_path / "one", b"1" * 3_000_000)))
    two = lora_digest(str(adapter(tmp_path / "two", b"1" * 2_999_999 + b"2")))
    assert one is not None
    assert two is not None
    assert one != two
    assert lora_digest(str(adapter(tmp_path / "same", b"1" * 3_000_000))) == one


def test_b4_an_adapter_reloaded_with_changed_files_is_another(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "x", b"1" * 100)
    before = lora_digest(str(folder))
    assert lora_digest(str(folder)) == before
    (folder / "adapter_model.safetensors").write_bytes(b"2" * 100)
    os.utime(folder / "adapter_model.safetensors", ns=(7, 7))
    assert lora_digest(str(folder)) != before
    config = lora_digest(str(folder))
    (folder / "adapter_config.json").write_text('{"r": 9}')
    os.utime(folder / "adapter_config.json", ns=(7, 7))
    assert lora_digest(str(folder)) != config


def test_b4_where_hashes_have_no_path_a_name_stands_for_one_content(tmp_path: Path) -> None:
    old = adapter(tmp_path / "v1", b"1" * 100)
    new = adapter(tmp_path / "v2", b"2" * 100)
    copy = adapter(tmp_path / "copy", b"1" * 100)
    by_name = Adapters(hashes_have_path=False)
    first = by_name.digest(request("x", old))
    assert first is not None
    assert by_name.digest(request("x", copy)) == first
    assert by_name.digest(request("x", new)) is None
    assert by_name.digest(request("x", old)) is None, "vLLM may compute with either"
    assert by_name.digest(request("y", new)) is not None
    by_path = Adapters()
    assert by_path.digest(request("x", old)) == first
    assert by_path.digest(request("x", new)) not in (None, first)


def test_b4_an_adapter_that_changed_has_no_digest_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "MAX_REMEMBERED", 4)
    adapters, folder = Adapters(), adapter(tmp_path / "x", b"1" * 100)
    first = adapters.digest(request("x", folder))
    assert first is not None
    adapter(folder, b"2" * 101)
    assert adapters.digest(request("x", folder)) is None
    adapter(folder, b"1" * 100)
    assert adapters.digest(request("x", folder)) is None, "vLLM may have loaded the others"
    for i in range(20):
        assert (
            adapters.digest(request("x", adapter(tmp_path / f"version {i}", bytes([i]))))
            is not None
        )
        assert len(adapters._first) <= 4
    assert adapters.digest(request("x", "/nul\0")) is None


def test_an_adapters_files_are_read_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_remembered", {})
    clock = ManualClock()
    executor = ManualExecutor(clock)
    adapters, folder = Adapters(executor, clock), str(adapter(tmp_path / "x", b"1" * 100))
    assert adapters.reading(folder)
    assert adapters.digest(request("x", folder)) is None, "nothing is read here"
    assert adapters.reading(folder)
    assert executor.pending == 1
    executor.run_all()
    assert not adapters.reading(folder)
    assert adapters.digest(request("x", folder)) is not None
    assert not adapters.reading("org/name-of-a-repo")
    assert not adapters.reading("/nul\0")

    other = str(adapter(tmp_path / "y", b"2" * 100))
    assert adapters.reading(other)
    clock.advance(fingerprint.MAX_READING_S)
    assert not adapters.reading(other), "nobody waits longer"
    assert adapters.digest(request("y", other)) is None
    executor.run_all()
    assert not adapters.reading(other)
    assert adapters.digest(request("y", other)) is not None
    executor.close(0.0)
    assert not adapters.reading(str(adapter(tmp_path / "z", b"3")))


def test_an_adapter_without_readable_files_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lora_digest(str(tmp_path / "none")) is None
    assert lora_digest("org/name-of-a-repo") is None
    (tmp_path / "no_config").mkdir()
    (tmp_path / "no_config" / "adapter_model.safetensors").write_bytes(b"1")
    assert lora_digest(str(tmp_path / "no_config")) is None
    folder = adapter(tmp_path / "big", b"1" * 100)
    monkeypatch.setattr(fingerprint, "MAX_ADAPTER_BYTES", 99)
    assert lora_digest(str(folder)) is None


def test_digests_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_remembered", {})
    monkeypatch.setattr(fingerprint, "MAX_REMEMBERED", 4)
    for i in range(20):
        assert lora_digest(str(adapter(tmp_path / f"a{i}", bytes([i])))) is not None
        assert len(fingerprint._remembered) <= 4


# --- files that change while they are in use -------------------------------------------------------


def began(offset_s: float = 0.0) -> int:
    """Time at which an engine began to load, ``offset_s`` from now."""
    return int((time.time() + offset_s) * 1e9)


def rewrite(file: Path) -> None:
    """Other content of the same size under the same times that a program can set."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-4_500 % len(data)] ^= 1  # a byte that samples see
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file: Path) -> None:
    """A file that was prepared long ago is renamed over this one."""
    other = file.with_name("prepared.tmp")
    other.write_bytes(file.read_bytes()[:-1] + b"?")
    os.utime(other, ns=(1, 1))
    other.rename(file)


WAYS = [
    pytest.param(rewrite, id="rewritten"),
    pytest.param(replace, id="renamed over"),
    pytest.param(lambda file: file.with_name("a" + file.name).write_bytes(b"x"), id="added"),
    pytest.param(lambda file: (file.parent / "spare.bin").unlink(), id="removed"),
]


@pytest.mark.parametrize("change", WAYS)
def test_b6_weights_that_changed_since_the_engine_began_have_no_lasting_identity(
    change: Callable[[Path], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CLOCK_SKEW_NS", 0)
    (folder / "spare.bin").write_bytes(b"x")
    time.sleep(0.02)  # the file system's clock ticks
    since = began()
    before = model_identity(engine(folder), SHARDS, 128, since_ns=since)
    assert before.not_persistent is None
    time.sleep(0.02)
    change(folder / "model.safetensors")
    after = model_identity(engine(folder), SHARDS, 128, since_ns=since)
    assert "changed while this engine started" in str(after.not_persistent)
    later = model_identity(engine(folder), SHARDS, 128, since_ns=began(1.0))
    assert later.not_persistent is None
    assert later.namespace != after.namespace, "what was loaded before has another name"


def snapshot(parent: Path) -> Path:
    """A snapshot as in a Hugging Face cache: links to blobs."""
    repository = parent / "models--org--name"
    commit = repository / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    (repository / "blobs").mkdir()
    safetensors(repository / "blobs" / "1234", TENSORS)
    (commit / "model.safetensors").symlink_to("../../blobs/1234")
    return commit


def test_b6_a_snapshot_that_vllm_downloads_during_its_start_lasts(tmp_path: Path) -> None:
    commit = snapshot(tmp_path)
    found = model_identity(engine(commit), SHARDS, 128, since_ns=began(-60.0))
    assert found.not_persistent is None


def test_an_engine_begins_when_its_process_or_its_plugins_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "registered_s", 0.0)
    script = (
        "import time; began = time.time(); from kvstow.runtime import SystemClock;"
        "from kvstow.vllm.fingerprint import loading_began_ns;"
        "print(began - loading_began_ns(SystemClock()) / 1e9)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert -0.2 < float(shown.stdout) < 5.0
    now = time.time()
    monkeypatch.setattr(plugin, "registered_s", now)
    assert fingerprint.loading_began_ns(ManualClock()) >= int(now * 1e9)


@pytest.mark.parametrize("change", WAYS)
def test_b4_an_adapter_that_changed_since_the_engine_began_is_this_processs_only(
    change: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fingerprint, "CLOCK_SKEW_NS", 0)
    folder = adapter(tmp_path / "x", b"1" * 100)
    (folder / "spare.bin").write_bytes(b"x")
    time.sleep(0.02)
    since = began()
    lasting = Adapters(since_ns=since, process_key=b"1").digest(request("x", folder))
    assert lasting is not None
    assert lasting == Adapters(since_ns=since, process_key=b"2").digest(request("y", folder))
    assert not caplog.records
    time.sleep(0.02)
    change(folder / "adapter_model.safetensors")
    adapters = Adapters(since_ns=since, process_key=b"1")
    one = adapters.digest(request("x", folder))
    assert one is not None
    assert one == adapters.digest(request("x", folder))
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    assert one != Adapters(since_ns=since, process_key=b"2").digest(request("x", folder))
    restarted = Adapters(since_ns=began(1.0), process_key=b"3").digest(request("x", folder))
    assert restarted not in (None, one, lasting)
    assert restarted == Adapters(since_ns=began(1.0)).digest(request("x", folder))


def test_b4_an_adapter_that_was_first_seen_unchanged_keeps_its_identity(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "x", b"1" * 100)
    adapters = Adapters(since_ns=began(2.0), process_key=b"1")
    first = adapters.digest(request("x", folder))
    rewrite(folder / "adapter_model.safetensors")
    assert first is not None
    assert adapters.digest(request("x", folder)) is None
    adapter(folder, b"1" * 100)
    assert adapters.digest(request("x", folder)) is None


def test_b4_an_adapter_that_changed_and_is_loaded_again_has_no_digest(tmp_path: Path) -> None:
    """Both versions may have been computed with, under the same files."""
    folder = adapter(tmp_path / "x", b"1" * 100)
    changed = Adapters(since_ns=began(-60.0), process_key=b"1")
    assert changed.digest(request("x", folder, lora_int_id=1)) is not None
    assert changed.digest(request("x", folder, lora_int_id=1)) is not None
    assert changed.digest(request("x", folder, lora_int_id=2)) is None
    lasting = Adapters(since_ns=began(60.0), process_key=b"1")
    first = lasting.digest(request("x", folder, lora_int_id=1))
    assert first == lasting.digest(request("x", folder, lora_int_id=2))


def move(new: Path, path: Path) -> None:
    path.rename(path.with_name("old"))
    new.rename(path)


def swap(new: Path, path: Path) -> None:
    """What a deployment does: the link is replaced by one to another folder."""
    spare = path.with_name("spare")
    spare.symlink_to(new)
    spare.rename(path)


@pytest.mark.parametrize("below", ["", "deep/er"])
@pytest.mark.parametrize("linked", [False, True])
def test_b6_a_path_that_leads_to_another_folder_changed(
    linked: bool, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CLOCK_SKEW_NS", 0)
    for version in (b"1", b"2"):
        folder = tmp_path / f"v{version.decode()}" / below
        folder.mkdir(parents=True)
        adapter(folder, version * 100)
    path = tmp_path / "current"
    if linked:
        path.symlink_to("v1")
    else:
        (tmp_path / "v1").rename(path)
    time.sleep(0.02)
    since = began()
    served = str(path / below)
    assert not fingerprint.adapter_changed_since(served, since)
    time.sleep(0.02)
    (tmp_path / "neighbour").mkdir()
    assert not fingerprint.adapter_changed_since(served, since)
    (swap if linked else move)(tmp_path / "v2", path)
    assert fingerprint.adapter_changed_since(served, since)
    assert not fingerprint.adapter_changed_since(served, began(1.0))


def test_b6_a_branch_that_moved_on_counts_as_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CLOCK_SKEW_NS", 0)
    commit = snapshot(tmp_path)
    refs = commit.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit.name)
    time.sleep(0.02)
    assert not fingerprint.weights_changed_since(str(commit), "auto", began(-60.0))
    (commit.parent / ("b" * 40)).mkdir()
    since = began()
    assert not fingerprint.weights_changed_since(str(commit), "auto", since)
    time.sleep(0.02)
    (refs / "main").write_text(commit.name)
    assert fingerprint.weights_changed_since(str(commit), "auto", since)
    (refs / "main").write_text("b" * 40)
    assert not fingerprint.weights_changed_since(str(commit), "auto", since)


def test_b6_code_and_edited_snapshots_count_as_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CLOCK_SKEW_NS", 0)
    (folder / "modeling.py").write_text("a = 1")
    time.sleep(0.02)
    since = began()
    time.sleep(0.02)
    assert not fingerprint.weights_changed_since(str(folder), "auto", since)
    (folder / "modeling.py").write_text("a = 2")
    assert fingerprint.weights_changed_since(str(folder), "auto", since)

    commit = snapshot(tmp_path)
    assert not fingerprint.weights_changed_since(str(commit), "auto", since)
    (commit / "model.safetensors").unlink()
    safetensors(commit / "model.safetensors", TENSORS)  # no link to a blob any more
    assert fingerprint.weights_changed_since(str(commit), "auto", since)


def test_b6_files_are_told_apart_that_only_the_kernel_can_tell_apart(folder: Path) -> None:
    before = weights_digest(str(folder))
    time.sleep(0.02)
    rewrite(folder / "model.safetensors")
    assert weights_digest(str(folder)) != before


# --- how vLLM applies an adapter -------------------------------------------------------------------

LORA_CHANGES: list[tuple[str, Any]] = [
    ("lora_dtype", "float32"),
    ("target_modules", ["o_proj"]),
    ("target_modules", []),
    ("enable_tower_connector_lora", True),
    ("enable_mixed_moe_lora_format", True),
    ("enable_moe_shared_loras", True),
]


def lora_engine(**options: Any) -> Any:
    defaults: dict[str, Any] = {
        "lora_dtype": "bfloat16",
        "target_modules": None,
        "enable_tower_connector_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
        "max_loras": 4,
    }
    return SimpleNamespace(lora_config=SimpleNamespace(**{**defaults, **options}))


def test_b7_options_that_change_what_an_adapter_does_change_its_digest(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "x", b"1")

    def digest(config: Any, **more: Any) -> bytes | None:
        return Adapters(options=adapter_options(config)).digest(request("x", folder, **more))

    base = digest(lora_engine())
    seen = {base, digest(lora_engine(), is_3d_lora_weight=True)}
    seen |= {digest(lora_engine(**{name: value})) for name, value in LORA_CHANGES}
    assert len(seen) == len(LORA_CHANGES) + 2
    assert None not in seen
    assert digest(lora_engine(max_loras=8)) == base
    one, other = (digest(lora_engine(target_modules=names)) for names in (["a", "b"], ["b", "a"]))
    assert one == other
    assert digest(lora_engine(), tensorizer_config_dict={"uri": "s3://x"}) is None
    assert adapter_options(SimpleNamespace(lora_config=None)) == ""
