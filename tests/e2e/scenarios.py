"""Scenarios on a real vLLM, each the whole life of one process: ``python -m tests.e2e.scenarios NAME RESULT.json``.

The tests next door judge the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.model import tiny_gemma3, tiny_llama, tiny_mla
from kvstow.errors import UnsupportedError
from tests.e2e.harness import (
    BLOCK,
    PageOracle,
    counters,
    drain,
    likely,
    make_engine,
    prompt,
    run,
    scheduler_of,
    side_of,
)

TOKENS = 4


def _passes(llm: Any, oracle: PageOracle, lengths: list[int]) -> dict[str, Any]:
    """Each prompt cold, warm, and warm after the engine's own cache was reset; one at a time."""
    prompts = {length: prompt(length, seed=length) for length in lengths}
    rows: dict[int, list[dict[str, Any]]] = {length: [] for length in lengths}
    for name in ("cold", "warm", "reset"):
        if name == "reset":
            assert scheduler_of(llm).reset_prefix_cache()
        for length, tokens in prompts.items():
            rows[length] += run(llm, [tokens], TOKENS)
            drain(llm)
    return {
        "different": [
            n for n, r in rows.items() if not r[0]["tokens"] == r[1]["tokens"] == r[2]["tokens"]
        ],
        "unlike_prefix_cache": [n for n, r in rows.items() if r[1]["tokens"] != r[2]["tokens"]],
        "tokens": {n: [p["tokens"] for p in r] for n, r in rows.items()},
        "restored": {n: r[2]["cached"] for n, r in rows.items()},
        "wrong_pages": oracle.wrong,
        "pages_stored": oracle.stored,
        "pages_loaded": oracle.loaded,
        "counters": counters(llm),
    }


def lengths() -> dict[str, Any]:
    """Every length from one chunk - 1 to three chunks + 1, chunk = block."""
    llm = make_engine(str(tiny_llama()), {"memory.size": "500MB", "chunk_size": BLOCK})
    oracle = PageOracle()
    result = _passes(llm, oracle, list(range(BLOCK - 1, 3 * BLOCK + 2)))
    result["opt_outs"] = _opt_outs(llm)
    result["reset"] = _reset(llm)
    return result


def _opt_outs(llm: Any) -> dict[str, int]:
    tokens = prompt(2 * BLOCK + 1, seed=-1)
    run(llm, [tokens], params={"kv_transfer_params": {"kvstow.skip_store": True}})
    drain(llm)
    scheduler_of(llm).reset_prefix_cache()
    [after_skip_store] = run(llm, [tokens])
    drain(llm)
    scheduler_of(llm).reset_prefix_cache()
    [skip_load] = run(llm, [tokens], params={"kv_transfer_params": {"kvstow.skip_load": True}})
    scheduler_of(llm).reset_prefix_cache()
    [plain] = run(llm, [tokens])
    return {
        "after_skip_store": after_skip_store["cached"],
        "skip_load": skip_load["cached"],
        "plain": plain["cached"],
    }


def _reset(llm: Any) -> dict[str, int]:
    tokens = prompt(2 * BLOCK + 1, seed=-2)
    run(llm, [tokens])
    while (
        llm.llm_engine.engine_core.engine_core.scheduler.has_requests()
    ):  # as docs/how-to/weight-updates.md says
        llm.llm_engine.step()
    assert llm.reset_prefix_cache(reset_connector=True)
    [after] = run(llm, [tokens])
    drain(llm)
    scheduler_of(llm).reset_prefix_cache()
    [again] = run(llm, [tokens])
    return {"after": after["cached"], "again": again["cached"]}


def pressure() -> dict[str, Any]:
    """32 concurrent mixed prompts, five passes, over a pool that holds a third of what they need.

    With ``save_decode``, and so a conversation's second turn as well: a start of vLLM is dear.
    """
    prompts = [prompt(BLOCK + 37 * i % (5 * BLOCK), seed=i % 24) for i in range(32)]
    need = sum(len(p["prompt_token_ids"]) // BLOCK for p in prompts)
    reference = make_reference(prompts)
    extra = {"memory.size": need // 3 * _frame_bytes(), "chunk_size": BLOCK, "save_decode": True}
    llm = make_engine(str(tiny_llama()), extra)
    oracle = PageOracle()
    different: list[list[int]] = []
    for _ in range(5):
        outputs = run(llm, prompts, TOKENS)
        different.append([i for i, o in enumerate(outputs) if o["tokens"] != reference[i]])
        drain(llm)
        assert scheduler_of(llm).reset_prefix_cache()
    side_of(llm)._cache._pool.check_integrity()
    return {
        "different": different,
        "wrong_pages": oracle.wrong,
        "pages_loaded": oracle.loaded,
        "leased": side_of(llm)._cache._pool.leased,
        "counters": counters(llm),
        "chunks_needed": need,
        "second_turn": _second_turn(llm),
        "wrong_pages_then": oracle.wrong,
    }


def _frame_bytes() -> int:
    return 4096 + 2 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, KV heads, head size, float32


def make_reference(prompts: list[dict[str, Any]]) -> list[list[int]]:
    """The same prompts without kvstow, in a process of their own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, "-m", "tests.e2e.scenarios", "reference", result.name]
        subprocess.run(
            command,
            input=json.dumps(prompts),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        tokens: list[list[int]] = json.load(result)
    return tokens


def reference() -> Any:
    """What vLLM answers without a connector to the prompts on standard input."""
    prompts = json.load(sys.stdin)
    llm = make_engine(str(tiny_llama()), {}, kvstow=False, enable_prefix_caching=False)
    return [o["tokens"] for o in run(llm, prompts, TOKENS)]


def mla() -> dict[str, Any]:
    """DeepSeek-V2: latents, no heads.

    vLLM's reference kernels for them on CPUs ignore a restored prefix, so vLLM restores none. They
    are named, as processors with AMX have other kernels, which don't compute in float32.
    """
    extra = {"memory.size": "200MB", "chunk_size": 64}
    options = {"block_size": 16, "enable_prefix_caching": False, "attention_backend": "CPU_MLA"}
    try:
        make_engine(str(tiny_mla()), extra, **options)
    except UnsupportedError as error:
        return {"refused": str(error)}
    return {"refused": None}


def gemma3() -> dict[str, Any]:
    """Sliding and full attention: vLLM's one-group fallback. With a lossy tier below, which only its last part uses."""
    with tempfile.TemporaryDirectory() as folder:
        disk = {"paths": [folder], "size": "100MB", "min_free": 0, "codec": "quantized"}
        fetch = {"deadline_ms": 20_000, "min_tokens": 0}
        extra = {"memory.size": "200MB", "chunk_size": BLOCK, "disk": disk, "fetch": fetch}
        llm = make_engine(str(tiny_gemma3()), extra)
        result = _passes(llm, PageOracle(), [BLOCK, 3 * BLOCK + 5])
        result["wrong_pages"] = list(result["wrong_pages"])  # the lossy ones are not of it
        result["lossy"] = _lossy(llm, Path(folder))
    return result


def _lossy(llm: Any, folder: Path) -> dict[str, Any]:
    """A prompt computed, restored from the tier with a lossy codec, and continued; how far its outputs went astray."""
    tokens = prompt(5 * BLOCK + 3, seed=-3)
    longer = {
        "prompt_token_ids": tokens["prompt_token_ids"]
        + prompt(2 * BLOCK, seed=-4)["prompt_token_ids"]
    }
    computed = likely(llm, tokens)
    drain(llm)
    files = {path: path.stat().st_size for path in folder.rglob("*.kv")}
    rows = {}
    anew = {"kv_transfer_params": {"kvstow.skip_load": True}}
    for name, params in (("restored", {}), ("continued", {}), ("exact", anew)):
        if name != "continued":
            side_of(llm)._cache.index.reset()
            assert scheduler_of(llm).reset_prefix_cache()
        rows[name] = likely(llm, longer if name == "continued" else tokens, params)
        drain(llm)
        rows[name]["files"] = len(list(folder.rglob("*.kv")))
    return {
        "computed": computed,
        **rows,
        "bytes": max(files.values()),
        "raw_bytes": counters(llm)["stored_raw_bytes|disk"],
        "stored_bytes": counters(llm)["stored_bytes|disk"],
        "files": len(files),
    }


def tensor_parallel() -> dict[str, Any]:
    """Two CPU workers in processes of their own; one object a chunk."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    llm = make_engine(
        str(tiny_llama()), {"memory.size": "200MB", "chunk_size": BLOCK}, tensor_parallel_size=2
    )
    tokens = [prompt(n, seed=n) for n in (BLOCK, 2 * BLOCK + 1, 3 * BLOCK)]
    rows = []
    for index in range(3):
        if index == 2:
            scheduler_of(llm).reset_prefix_cache()
        rows.append([run(llm, [p], TOKENS)[0] for p in tokens])
        drain(llm)
    pool = side_of(llm)._cache._pool
    return {
        "different": [
            i
            for i in range(3)
            if not rows[0][i]["tokens"] == rows[1][i]["tokens"] == rows[2][i]["tokens"]
        ],
        "restored": [row["cached"] for row in rows[2]],
        "objects": pool.slots - pool.free,
        "counters": counters(llm),
    }


def _second_turn(llm: Any) -> dict[str, Any]:
    """It restores what the first turn generated."""
    first = prompt(BLOCK + 5, seed=1)
    [answer] = run(llm, [first], tokens=2 * BLOCK)
    drain(llm)
    scheduler_of(llm).reset_prefix_cache()
    second = {"prompt_token_ids": first["prompt_token_ids"] + answer["tokens"] + [77] * 3}
    [warm] = run(llm, [second])
    drain(llm)
    scheduler_of(llm).reset_prefix_cache()
    [cold] = run(llm, [second], params={"kv_transfer_params": {"kvstow.skip_load": True}})
    return {"restored": warm["cached"], "warm": warm["tokens"], "cold": cold["tokens"]}


SCENARIOS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (lengths, pressure, reference, mla, gemma3, tensor_parallel)
}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(SCENARIOS[sys.argv[1]]()))
