"""What kvstow adds to a cold prefill, and how close a restored prompt comes to the engine's own
prefix cache.

Real servers, the real model. ``cold_over_none``: a server with kvstow and one without, the same
threads on both sides, each new prompt sent to both in alternating order. ``ram_minus_device_ms``:
one server with its prefix cache on; a prompt restored from host memory (the engine's own cache
reset before) against one that the engine still has, alternating. Prompts are whole blocks plus one
token, so that the recomputed tail covers nothing. ``hook_share`` is in ``bench.hook_share``: it
needs the engine in this process.
"""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any, Final

import psutil

from demo.client import Client
from demo.model import smollm2
from demo.server import Server

BLOCK: Final = 128
BLOCKS: Final = 19
PAIRS: Final = 7
ROUNDS: Final = 11
KV_BYTES_PER_TOKEN: Final = 30 * 2 * 3 * 64 * 4  # layers, K and V, KV heads, head size, float32
KV_CACHE_GIB: Final = 1
LOGS: Final = Path("out/bench")


def prompt(blocks: int, seed: int) -> list[int]:
    """Token ids, whole blocks plus one."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(blocks * BLOCK + 1)]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all below it."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def interval(ratios: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95 % bootstrap interval."""
    logs = [math.log(ratio) for ratio in ratios]
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(4000))
    return math.exp(statistics.fmean(logs)), math.exp(means[100]), math.exp(means[-101])


def _timed(server: Server, client: Client, tokens: list[int]) -> tuple[float, float]:
    before = cpu_seconds(server.pid)
    answer = client.complete(tokens, max_tokens=1)
    return answer.ttft_s, cpu_seconds(server.pid) - before


def cold_over_none(model: Path, pairs: int = PAIRS) -> dict[str, Any]:
    """Measures cold prefills with kvstow over cold prefills without a connector.

    Returns the ratios of wall and CPU seconds, with 95 % intervals.
    """
    wall: list[float] = []
    cpu: list[float] = []
    with (
        Server(model, log=LOGS / "ttft-with.log") as with_kvstow,
        Server(model, log=LOGS / "ttft-none.log", connector=None) as without,
    ):
        sides = [
            (with_kvstow, Client(with_kvstow.url, model.name)),
            (without, Client(without.url, model.name)),
        ]
        for server, client in sides:
            _timed(server, client, prompt(BLOCKS, seed=1))
        for pair in range(pairs):
            tokens = prompt(BLOCKS, seed=100 + pair)
            order = sides if pair % 2 else sides[::-1]
            seen = {server.pid: _timed(server, client, tokens) for server, client in order}
            ours, none = seen[with_kvstow.pid], seen[without.pid]
            wall.append(ours[0] / none[0])
            cpu.append(ours[1] / none[1])
    result: dict[str, Any] = {}
    for name, ratios in (("cold_over_none", wall), ("cold_over_none_cpu", cpu)):
        mean, low, high = interval(ratios)
        result[name] = {"ratio": mean, "low": low, "high": high, "pairs": pairs}
    return result


def memcpy_ms(bytes_: int) -> float:
    """One memcpy of ``bytes_`` bytes between touched buffers, one thread, now."""
    import time

    source, target = bytearray(bytes_), bytearray(bytes_)
    target[:] = source
    started = time.perf_counter()
    memoryview(target)[:] = source
    return (time.perf_counter() - started) * 1e3


def ram_against_device(model: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """TTFT of a host-memory hit and of the engine's own prefix-cache hit of the same prompt,
    alternating.

    Counted once every block of the engine's cache has been used: a restored prompt gets new blocks,
    and vLLM leaves the first touch of its memory to whoever uses a block first.
    """
    ram: list[float] = []
    device: list[float] = []
    copies: list[float] = []
    log = LOGS / "ttft-ram.log"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    unused = (KV_CACHE_GIB << 30) // (BLOCKS * BLOCK * KV_BYTES_PER_TOKEN) + 1
    with Server(model, log=log, prefix_caching=True, environment=environment) as server:
        client = Client(server.url, model.name)
        tokens = prompt(BLOCKS, seed=7)
        cold = client.complete(tokens, max_tokens=1).ttft_s
        client.complete(tokens, max_tokens=1)
        for _ in range(unused):
            server.post("/reset_prefix_cache")
            client.complete(tokens, max_tokens=1)
        before = server.metric("vllm:external_prefix_cache_hits_total")
        for _ in range(rounds):
            server.post("/reset_prefix_cache")
            ram.append(client.complete(tokens, max_tokens=1).ttft_s)
            device.append(client.complete(tokens, max_tokens=1).ttft_s)
            copies.append(memcpy_ms(BLOCKS * BLOCK * KV_BYTES_PER_TOKEN))
        restored = server.metric("vllm:external_prefix_cache_hits_total") - before
    if restored != rounds * BLOCKS * BLOCK:
        raise RuntimeError(
            f"{restored:.0f} tokens restored instead of {rounds * BLOCKS * BLOCK}: see {log}"
        )
    ram_s, device_s = statistics.median(ram), statistics.median(device)
    return {
        "ram_minus_device_ms": (ram_s - device_s) * 1e3,
        "memcpy_ms": statistics.median(copies),
        "ram_over_device_prefix": ram_s / device_s,
        "cold_s": cold,
        "ram_s": ram_s,
        "device_s": device_s,
        "prompt_tokens": len(tokens),
    }


def run() -> dict[str, Any]:
    """``{"ttft": {...}}``"""
    model = smollm2()
    return {"ttft": cold_over_none(model) | ram_against_device(model)}
