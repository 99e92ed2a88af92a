"""A cold query of a prompt whose 1,000 chunks are all in the pool: keys are built from its block
hashes, every chunk is looked up and touched, as vLLM's ``get_num_new_matched_tokens`` asks for it
the first time."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from typing import Any

from bench.side import connector_around, scheduler_side
from kvstow.key import chunk_keys
from tests.rigs.sim_requests import SimRequest

CHUNKS = 1000
BLOCKS_PER_CHUNK = 2
BLOCK_TOKENS = 16
ROUNDS = 51
WARM_UP = 5


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """``{"lookup":

    {"us_per_1000_chunks": ..., "us_again": ...}}``, medians. ``us_again``: asked again, unchanged.
    """
    side = scheduler_side(2 * CHUNKS, BLOCK_TOKENS, BLOCKS_PER_CHUNK, save_decode=False)
    connector = connector_around(side)
    hashes = [hashlib.sha256(str(i).encode()).digest() for i in range(CHUNKS * BLOCKS_PER_CHUNK)]
    engine = side._cache
    for key in chunk_keys(side._namespace, 0, hashes, BLOCKS_PER_CHUNK):
        lease = engine.reserve(key, b"", BLOCK_TOKENS * BLOCKS_PER_CHUNK)
        assert lease is not None
        engine.commit(lease)
        lease.release()
    tokens = [0] * (CHUNKS * BLOCKS_PER_CHUNK * BLOCK_TOKENS + 1)
    cold: list[float] = []
    again: list[float] = []
    for number in range(rounds + WARM_UP):
        request: Any = SimRequest(f"request {number}", [], 1, BLOCK_TOKENS)
        request.all_token_ids, request.num_prompt_tokens, request.block_hashes = (
            tokens,
            len(tokens),
            list(hashes),
        )
        for times in (cold, again):
            began = time.perf_counter()
            answer = connector.get_num_new_matched_tokens(request, 0)
            times.append(time.perf_counter() - began)
            assert answer == (len(tokens) - 1, True)
        connector.request_finished(request, [])
    side.close()
    return {
        "lookup": {
            "us_per_1000_chunks": statistics.median(cold[WARM_UP:]) * 1e6,
            "us_again": statistics.median(again[WARM_UP:]) * 1e6,
            "rounds": rounds,
        }
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
