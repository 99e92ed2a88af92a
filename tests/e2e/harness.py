"""Runs one scenario on a real vLLM inside this process and prints what it saw as JSON on the last line.

Each scenario is a process of its own (vLLM's process groups are global), started by the tests. The primary oracle is
a digest of each page at store and after load; token identity is the second, because batching may flip near-ties.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BLOCK = 32


def make_engine(model: str, extra: dict[str, Any], **options: Any) -> Any:
    """A vLLM ``LLM`` in this process with kvstow as ``extra`` says; the option ``kvstow=False`` leaves it out."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "seed": 0,
        "disable_log_stats": False,
        "generation_config": "vllm",
    }
    if options.pop("kvstow", True):
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVStowConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        keep_counters()
    return LLM(**arguments | options)


def scheduler_of(llm: Any) -> Any:
    """vLLM's scheduler, in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def side_of(llm: Any) -> Any:
    """kvstow's scheduler side."""
    return scheduler_of(llm).connector._scheduler


class PageOracle:
    """Digests the device's pages when a store and when a load has ended; a place must give back what it was given."""

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.stored = self.loaded = 0
        self.wrong: list[str] = []
        self._worker = get_kv_transfer_group()._worker
        self._at: dict[tuple[int, int], bytes] = {}
        self._pages = [layer.planes for plan in self._worker.device._plans for layer in plan.layers]
        self._wrap()

    def _digest(self, block: int) -> bytes:
        hasher = hashlib.blake2b(digest_size=16)
        for planes in self._pages:
            for plane in planes:
                hasher.update(plane[block].numpy().tobytes())
        return hasher.digest()

    def _wrap(self) -> None:
        worker = self._worker
        end = worker._end

        def ended(finished: Any) -> None:
            opened = worker._open.get(finished.ticket)
            if opened is not None:
                for index, copy in enumerate(opened.job.copies):
                    if index not in finished.failed:
                        self._check(opened.load, copy)
            end(finished)

        worker._end = ended

    def _check(self, load: bool, copy: Any) -> None:
        for offset, block in enumerate(copy.block_ids, start=copy.first_block):
            where, digest = (copy.place.spans[0].offset, offset), self._digest(block)
            if not load:
                self._at[where] = digest
                self.stored += 1
            else:
                self.loaded += 1
                if self._at.get(where) != digest:
                    self.wrong.append(f"place {where}, block {block}")


def prompt(length: int, seed: int) -> dict[str, Any]:
    """``length`` random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(length)]}


def run(
    llm: Any, prompts: list[dict[str, Any]], tokens: int = 4, params: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Greedy outputs, and how many prompt tokens were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=params
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [
        {"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens or 0}
        for o in outputs
    ]


def likely(
    llm: Any, tokens: dict[str, Any], params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Eight greedy tokens after a prompt, the logarithm of each one's probability, and how many were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, extra_args=params or None
    )
    [output] = llm.generate([tokens], sampling, use_tqdm=False)
    chosen = output.outputs[0]
    logs = [
        step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)
    ]
    return {
        "tokens": list(chosen.token_ids),
        "log_p": logs,
        "cached": output.num_cached_tokens or 0,
    }


def drain(llm: Any) -> None:
    """Step an idle engine until kvstow has nothing on its way, as vLLM's own loop does."""
    core = llm.llm_engine.engine_core.engine_core
    give_up_s = time.monotonic() + 60
    while core.scheduler.has_requests():
        core.step()
        if time.monotonic() > give_up_s:
            raise AssertionError("kvstow kept an idle engine stepping for a minute")


def counters(llm: Any) -> dict[str, float]:
    """kvstow's counters since the engine started."""
    totals: dict[str, float] = dict(_taken)
    for series, value in ((side_of(llm)._metrics.take() or {}).get("counters", {})).items():
        totals[series] = totals.get(series, 0) + value
    return totals


_taken: dict[str, float] = {}


def keep_counters() -> None:
    """Remember what vLLM takes from kvstow's metrics, so that ``counters`` can say all of it."""
    from kvstow.vllm.scheduler import SchedulerSide

    take = SchedulerSide.take_stats

    def taken(self: Any) -> Any:
        snapshot = take(self)
        for series, value in ((snapshot or {}).get("counters", {})).items():
            _taken[series] = _taken.get(series, 0) + value
        return snapshot

    SchedulerSide.take_stats = taken  # type: ignore[method-assign]
