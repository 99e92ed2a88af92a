"""The demo's model: what GGUF did to it is undone, and a directory that exists is whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from demo.model import hugging_face_name, once, unpermuted


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it, row by row."""
    rows, size = weight.shape[0], weight.shape[0] // heads
    order = []
    for head in range(heads):
        for i in range(size // 2):
            order += [head * size + i, head * size + size // 2 + i]
    assert sorted(order) == list(range(rows))
    return weight[order]


@pytest.mark.parametrize(("heads", "size"), [(9, 64), (3, 64), (1, 2)])
def test_unpermuted_inverts_llama_cpp(heads: int, size: int) -> None:
    weight = np.arange(heads * size * 5).reshape(heads * size, 5)
    assert (unpermuted(permuted(weight, heads), heads) == weight).all()


def test_names() -> None:
    assert hugging_face_name("blk.12.attn_k.weight") == "model.layers.12.self_attn.k_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        hugging_face_name("rope_freqs.weight")


def test_once_leaves_no_half_written_model(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        once("m", fail, tmp_path)
    assert list(tmp_path.iterdir()) == []
    calls = []

    def write(directory: Path) -> None:
        calls.append(directory)
        (directory / "config.json").write_text("{}")

    assert once("m", write, tmp_path) == once("m", write, tmp_path) == tmp_path / "m"
    assert len(calls) == 1
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
