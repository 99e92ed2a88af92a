"""The two attention operators of vllm-rbln that a causal model calls, in plain torch on the host."""

from __future__ import annotations

from typing import Final

import torch

SCHEMA: Final = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor scale, Tensor seq, Tensor bt, Tensor dummy, "
    "Tensor? sinks=None, Tensor? ks=None, Tensor? vs=None, ScalarType? dt=None) -> Tensor"
)
_kept: list[torch.library.Library] = []  # a library's operators go with it


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    """Write K and V of the queries' tokens into their blocks, then attend to all tokens so far.

    ``q`` is [batch, heads, group, tokens, size], ``kv_cache`` [blocks, 2, heads, 1, tokens, size].
    """
    host_q, host_k, host_v = q.cpu().float(), k.cpu(), v.cpu()
    batch, _heads, _group, tokens, _size = q.shape
    block_tokens = kv_cache.shape[4]
    starts = seq_idx.cpu().long().reshape(batch, -1).sum(1).tolist()
    tables = block_tables.cpu().long().reshape(batch, -1).tolist()
    out = torch.zeros(q.shape)
    for row, (start, table) in enumerate(zip(starts, tables, strict=True)):
        _write(kv_cache, host_k[row], host_v[row], start, table)
        used = table[: -(-(start + tokens) // block_tokens)]
        keys = torch.cat([kv_cache[block, 0, :, 0].cpu() for block in used], 1).float()
        values = torch.cat([kv_cache[block, 1, :, 0].cpu() for block in used], 1).float()
        seen = torch.arange(start, start + tokens)[:, None] >= torch.arange(keys.shape[1])[None]
        scores = torch.einsum("hgld,htd->hglt", host_q[row], keys) * float(scale)
        out[row] = torch.einsum(
            "hglt,htd->hgld", scores.masked_fill(~seen, float("-inf")).softmax(-1), values
        )
    return out.to(k.dtype).to(q.device)


def _write(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, table: list[int]
) -> None:
    """``k`` and ``v``: [heads, 1, tokens, size]. Tokens past the table are padding."""
    tokens, block_tokens, done = k.shape[2], kv_cache.shape[4], 0
    while done < tokens:
        index, offset = divmod(start + done, block_tokens)
        if index >= len(table):
            return
        count = min(block_tokens - offset, tokens - done)
        for plane, source in ((0, k), (1, v)):
            part = source[:, 0, done : done + count].to(kv_cache.dtype)
            kv_cache[table[index], plane, :, 0, offset : offset + count].copy_(part)
        done += count


def _shape_of(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def install() -> None:
    """Define ``rbln_custom_ops``."""
    library = torch.library.Library("rbln_custom_ops", "DEF")
    _kept.append(library)
    for phase in ("prefill", "decode"):
        name = f"flash_causal_attention_naive_{phase}"
        library.define(name + SCHEMA)
        for key in ("CPU", "PrivateUse1"):
            library.impl(name, attention, key)
        torch.library.register_fake(f"rbln_custom_ops::{name}", _shape_of, lib=library)
