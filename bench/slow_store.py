"""TTFT with a lower tier from 50 times faster to 100 times slower than computing, beside the same
requests uncached.

On a virtual clock: vLLM's scheduling and the seconds of its steps are simulated
(``tests.rigs.virtual``), kvstow's scheduler side and engine are the real ones. So the table is the
same on every machine, and no machine's speed.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from typing import Any, Final

from kvstow.testing.memory_store import MemoryStore
from tests.rigs.paced import PacedStore
from tests.rigs.virtual import BLOCK, TIER, Model, Served, fill, request, virtual_server

MODEL: Final = Model()
# seconds to load a chunk, over seconds to compute it
SPEEDS: Final = (
    0.02,
    0.1,
    0.5,
    1.0,
    10.0,
    100.0,
)
# seconds between requests; one takes 0.18 on average
LOADS: Final = {
    "idle": 0.5,
    "busy": 0.2,
    "overloaded": 0.1,
}
SIZES: Final = (1, 2, 5, 10, 20, 40, 80, 160, 200)  # chunks of a prompt
PROMPTS: Final = 27
REQUESTS: Final = 200
POOL_CHUNKS: Final = 420  # little: what is found comes from below
DEADLINE_S: Final = 0.2
PROMISED: Final = 1.05


def _serve(
    below: MemoryStore, gap_s: float, speed: float | None
) -> tuple[list[Served], dict[str, float]]:
    """By a new server that knows nothing yet. ``speed`` None: without a cache."""
    rng, at, arrivals = random.Random(1), 0.0, []
    for i in range(REQUESTS):
        at += rng.expovariate(1 / gap_s)
        arrivals.append((at, request(f"r{i}", i % PROMPTS, SIZES[i % PROMPTS % len(SIZES)])))
    pace = PacedStore(
        below, fixed_s=0.001, probe_s=0.0002, byte_s=MODEL.chunk_byte_s * (speed or 0.0)
    )
    server = virtual_server(
        below, MODEL, pace=pace, pool_chunks=POOL_CHUNKS, loads=speed is not None
    )
    served = server.run(arrivals)
    server.engine.close(1.0)
    decisions = server.counted("fetch_decisions")
    return served, {
        name.removeprefix(f"{TIER}|"): count for name, count in sorted(decisions.items())
    }


def _mean(served: Sequence[Served]) -> float:
    return statistics.mean(each.ttft_s for each in served)


def run() -> dict[str, Any]:
    """``{"slow_store":

    {"within_promise": 1, "idle": {"x1": {"ttft_over_none": ..., "hit_share": ...}, ...}, ...}}``
    """
    below = MemoryStore()
    fill(below, MODEL, [(number, SIZES[number % len(SIZES)]) for number in range(PROMPTS)])
    result: dict[str, Any] = {}
    within = True
    for load, gap_s in LOADS.items():
        none = _mean(_serve(below, gap_s, None)[0])
        result[load] = {"none_ttft_s": none}
        for speed in SPEEDS:
            served, decisions = _serve(below, gap_s, speed)
            within &= _mean(served) <= PROMISED * none + DEADLINE_S
            tokens = sum(each.request.num_prompt_tokens // BLOCK * BLOCK for each in served)
            result[load][f"x{speed:g}"] = {
                "ttft_over_none": _mean(served) / none,
                "hit_share": sum(each.loaded_tokens for each in served) / tokens,
                "decisions": decisions,
            }
    return {"slow_store": {"within_promise": int(within), **result}}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
