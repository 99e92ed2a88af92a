"""The unmodified vllm-rbln on the emulated device with kvstow's connector: ``python -m tests.rbln.engine CASE RESULT``.

CASE is JSON, and the environment has the emulator (``tests/rbln/boot``). The tests next door judge the result.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

HOOKS = (
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "finalize_kv_cache_registration",
    "flush_deferred_load",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "wait_for_layer_load",
    "save_kv_layer",
)
TOKENS = 6


def watch_hooks() -> dict[str, int]:
    """Count the calls of the connector's worker hooks."""
    from kvstow.vllm.rbln import RBLNLMCacheConnectorV1 as Connector

    calls: dict[str, int] = collections.Counter()

    def watch(name: str) -> None:
        hook = getattr(Connector, name)

        def counted(self: object, *args: Any, **kwargs: Any) -> Any:
            if (
                sys._getframe(1).f_globals["__name__"] != "kvstow.vllm.rbln"
            ):  # only what the engine calls
                calls[name] += 1
            return hook(self, *args, **kwargs)

        setattr(Connector, name, counted)

    for name in HOOKS:
        watch(name)
    return calls


def watch_transfers() -> dict[str, int]:
    """What the emulated device counts while a transfer of kvstow's runs, and nothing else does."""
    from kvstow.device.rbln.device import RblnDevice
    from tests.rbln import emulator

    seen: dict[str, int] = collections.Counter()
    start = RblnDevice._start

    def watched(self: RblnDevice, ticket: int, transfers: Any, *, load: bool) -> None:
        before = emulator.counted()
        start(self, ticket, transfers, load=load)
        self.fence([ticket])
        for name, value in emulator.counted().items():
            if value != before.get(name, 0):
                seen[name] += value - before.get(name, 0)

    RblnDevice._start = watched  # type: ignore[method-assign]
    return seen


class PageOracle:
    """Digests of pages when a store and when a load has ended: a place gives back what it was given."""

    def __init__(self) -> None:
        self.stored = self.loaded = 0
        self.wrong: list[str] = []
        self._at: dict[tuple[int, int], bytes] = {}
        self._caches: list[Any] = []

    def watch(self) -> None:
        """Before the engine is made."""
        from kvstow.vllm.worker import WorkerSide

        register, end = WorkerSide.register_kv_caches, WorkerSide._end

        def registered(side: WorkerSide, kv_caches: Any) -> None:
            self._caches = list(kv_caches.values())
            register(side, kv_caches)

        def ended(side: WorkerSide, finished: Any) -> None:
            opened = side._open.get(finished.ticket)
            if opened is not None:
                for index, copy in enumerate(opened.job.copies):
                    if index not in finished.failed:
                        self._check(opened.load, copy)
            end(side, finished)

        WorkerSide.register_kv_caches = registered  # type: ignore[method-assign]
        WorkerSide._end = ended  # type: ignore[method-assign]

    def _check(self, load: bool, copy: Any) -> None:
        import torch

        for offset, block in enumerate(copy.block_ids, start=copy.first_block):
            pages = [
                cache[block].cpu().view(torch.int16).numpy().tobytes() for cache in self._caches
            ]
            where, digest = (
                (copy.place.spans[0].offset, offset),
                hashlib.sha256(b"".join(pages)).digest(),
            )
            if not load:
                self._at[where] = digest
                self.stored += 1
                continue
            self.loaded += 1
            if self._at.get(where) != digest:
                self.wrong.append(f"place {where}, block {block}")


class Lines(logging.Handler):
    """kvstow's log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def make_engine(case: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        str(case["model"]),
        model_impl="vllm",
        dtype="bfloat16",
        seed=0,
        max_model_len=case["max_model_len"],
        block_size=case["block_size"],
        max_num_batched_tokens=128,
        max_num_seqs=4,
        enforce_eager=case["eager"],
        tensor_parallel_size=case["ranks"],
        num_gpu_blocks_override=case["blocks"],
        gpu_memory_utilization=case["memory"],
        enable_prefix_caching=case["prefix_caching"],
        kv_transfer_config=case["kv_transfer_config"],
        additional_config={"use_custom_sampler": False} | case["additional_config"],
    )


def drain(llm: Any) -> None:
    """Step an idle engine until nothing is on its way."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(100_000):
        if not core.scheduler.has_requests():
            return
        core.step()
    raise AssertionError("an idle engine was kept stepping")


def main(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    log = Lines()
    ours = logging.getLogger("kvstow")
    ours.addHandler(log)
    ours.setLevel(logging.INFO)
    calls, seen, oracle = watch_hooks(), watch_transfers(), PageOracle()
    oracle.watch()
    llm = make_engine(case)
    answers = []
    for number, prompt in enumerate(case["prompts"]):
        if number == case["drive_fails_from"]:
            sys.modules["rebel.rds"].drive.fail = "SYS_EIO"  # type: ignore[attr-defined]
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append(
            {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0}
        )
        drain(llm)
    pages = {"stored": oracle.stored, "loaded": oracle.loaded, "wrong": oracle.wrong}
    return {"answers": answers, "hooks": calls, "transfers": seen, "pages": pages, "log": log.lines}


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result))
