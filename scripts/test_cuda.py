"""What ``make test-cuda`` runs: the tests in tests/cuda, then copy bandwidth over the link's own in the same run."""

from __future__ import annotations

import importlib
import json
import mmap
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEST_TIMEOUT_S = 170
PIN_TIMEOUT_S = 30
ROUNDS = 9
WORKING_SET_BYTES = 1 << 30
# name, layers, tokens a block, KV heads, head size, blocks a chunk; bfloat16
CASES = (
    ("8B, block 16 (64 KiB pages)", 32, 16, 8, 128, 2),
    ("8B, block 128 (512 KiB pages)", 32, 128, 8, 128, 1),
    ("small, block 16 (8 KiB pages)", 16, 16, 2, 64, 8),
)


def batch_copies() -> dict[str, Any]:
    """The ways to copy that this machine has."""
    ways: dict[str, Any] = {"range": None}
    try:
        ways["vllm"] = importlib.import_module("vllm._custom_ops").swap_blocks_batch
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        print(f"vLLM's batched copy op is not here: {error}")
    return ways


def timed(run: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth(case: tuple[str, int, int, int, int, int], batch_copy: Any) -> dict[str, float]:
    """GB/s of the device's copies and of one pinned memcpy of the same bytes, in turn; medians."""
    import torch

    from kvstow.device.base import Transfer
    from kvstow.device.cuda import CudaDevice
    from kvstow.layout import HEADER_BYTES, Place, Span, align_up
    from kvstow.runtime import SystemClock, ThreadExecutor
    from kvstow.testing.kv_layouts import LAYOUTS, Shape

    _, layers, tokens, heads, size, per = case
    block_bytes = layers * tokens * heads * size * 2 * 2
    chunk_bytes = block_bytes * per
    chunks = WORKING_SET_BYTES // chunk_bytes
    built = LAYOUTS["packed_lbnhc"](
        Shape(layers, 2 * chunks * per, tokens, heads, size, torch.bfloat16, "cuda")
    )
    pitch = HEADER_BYTES + align_up(chunk_bytes)
    pool = memoryview(mmap.mmap(-1, chunks * pitch))
    executor = ThreadExecutor("copy")
    device = CudaDevice(executor, SystemClock(), batch_copy=batch_copy)
    device.attach(built.caches, [built.specs])
    device.map_pool(pool, 0)
    deadline = time.monotonic() + PIN_TIMEOUT_S
    while (
        device.pinned_bytes < len(pool) and device.pin_error is None and time.monotonic() < deadline
    ):
        executor.wait(1.0)
        device.finished()
    if device.pinned_bytes < len(pool):
        raise RuntimeError(device.pin_error or "pinning took too long")
    ids = random.Random(0).sample(range(2 * chunks * per), chunks * per)
    transfers = [
        Transfer(
            Place("pool", (Span(i * pitch + HEADER_BYTES, chunk_bytes),)),
            ids[i * per : (i + 1) * per],
        )
        for i in range(chunks)
    ]

    def through(start: Callable[[int, list[Transfer]], None]) -> None:
        start(1, transfers)
        torch.cuda.synchronize()
        [finished] = device.finished()
        assert not finished.failed, finished.error

    total = chunks * chunk_bytes
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(total, dtype=torch.uint8, device="cuda")
    sides: dict[str, Callable[[], object]] = {
        "link_out": lambda: pinned.copy_(there, non_blocking=True),
        "out": lambda: through(device.copy_out),
        "link_in": lambda: there.copy_(pinned, non_blocking=True),
        "in": lambda: through(device.copy_in),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS + 1):
        for name, run in sides.items():
            seconds[name].append(timed(run))
    device.close()
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    result = {f"{name}_gb_s": total / took / 1e9 for name, took in median.items()}
    return result | {
        f"{way}_over_link": median[f"link_{way}"] / median[way] for way in ("out", "in")
    }


def main() -> int:
    try:
        import torch
    except ImportError:
        print(
            "test-cuda: skipped: this Python has no torch. Say PYTHON=/path/to/python with torch for CUDA."
        )
        return 0
    if not torch.cuda.is_available():
        print("test-cuda: skipped: torch finds no CUDA device here.")
        return 0
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    where = ROOT / "tests" / "cuda"
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-c",
        str(where / "pytest.ini"),
        str(where),
    ]
    began = time.monotonic()
    passed = subprocess.run(tests, timeout=TEST_TIMEOUT_S, check=False).returncode == 0
    result: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests_passed": passed,
        "tests_s": round(time.monotonic() - began, 1),
        "copy": {},
    }
    print(
        f"\n{'pages':32}{'by':>8}{'out GB/s':>10}{'link':>8}{'ratio':>7}{'in GB/s':>10}{'link':>8}{'ratio':>7}"
    )
    for way, batch_copy in batch_copies().items():
        for case in CASES:
            row = bandwidth(case, batch_copy)
            result["copy"].setdefault(way, {})[case[0]] = row
            out = f"{row['out_gb_s']:10.1f}{row['link_out_gb_s']:8.1f}{row['out_over_link']:7.2f}"
            into = f"{row['in_gb_s']:10.1f}{row['link_in_gb_s']:8.1f}{row['in_over_link']:7.2f}"
            print(f"{case[0]:32}{way:>8}{out}{into}", flush=True)
    target = ROOT / "out" / "cuda.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\ntests {'passed' if passed else 'FAILED'}; written to {target.relative_to(ROOT)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
