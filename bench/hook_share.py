"""``ttft.hook_share``: seconds inside kvstow's hooks and copies, over the seconds of a cold
prefill.

One process holds vLLM's scheduler and its worker, so that every hook can be timed where it is
called. Copies run on a thread of their own beside the computation; their seconds are added as if
they did not.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

ROUNDS: Final = 5
HOOKS: Final = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


class Spent:
    """Seconds inside the connector's hooks, and of its copies."""

    def __init__(self) -> None:
        self.hooks_s = self.copies_s = 0.0
        from kvstow.vllm.connector import KVStowConnector
        from kvstow.vllm.worker import WorkerSide

        for name in HOOKS:
            setattr(KVStowConnector, name, self._timed(getattr(KVStowConnector, name)))
        end = WorkerSide._end

        def ended(side: WorkerSide, finished: Any) -> None:
            self.copies_s += finished.seconds
            end(side, finished)

        setattr(WorkerSide, "_end", ended)  # noqa: B010  (typed otherwise)

    def _timed(self, hook: Any) -> Any:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.hooks_s += time.perf_counter() - started

        return timed


def measure() -> dict[str, Any]:
    """In this process; it must not have loaded vLLM before."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from demo.server import engine_environment

    os.environ.update(engine_environment())
    from vllm import LLM, SamplingParams

    from bench.ttft import BLOCKS, prompt
    from demo.model import smollm2

    spent = Spent()
    llm = LLM(
        model=str(smollm2()),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        kv_transfer_config={
            "kv_connector": "KVStowConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"memory.size": "2GB"},
        },
    )
    once = SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate({"prompt_token_ids": prompt(1, seed=0)}, once, use_tqdm=False)
    shares, hooks, copies, prefills = [], [], [], []
    for seed in range(ROUNDS):
        spent.hooks_s = spent.copies_s = 0.0
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt(BLOCKS, seed=1000 + seed)}, once, use_tqdm=False)
        prefill_s = time.perf_counter() - started
        shares.append((spent.hooks_s + spent.copies_s) / prefill_s)
        hooks.append(spent.hooks_s * 1e3)
        copies.append(spent.copies_s * 1e3)
        prefills.append(prefill_s)
    return {
        "hook_share": statistics.median(shares),
        "hooks_ms": statistics.median(hooks),
        "copies_ms": statistics.median(copies),
        "cold_prefill_s": statistics.median(prefills),
    }


def run() -> dict[str, Any]:
    """``{"ttft": {"hook_share":

    ..., "hooks_ms": ..., "copies_ms": ..., "cold_prefill_s": ...}}``
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        done = subprocess.run(
            [sys.executable, "-m", "bench.hook_share", result.name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"bench.hook_share ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return {"ttft": json.load(result)}


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        json.dump(measure(), out)
