"""One of several engines that share a Redis, the object store at an HTTP address, or the Mooncake whose master is at
``mooncake://host:port``, in a process of its own: ``python -m tests.e2e.shared_engine URL FD ALGORITHM``.

It does what lines of JSON on its standard input say, and answers each with a line on file descriptor ``FD``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from demo.model import tiny_llama
from tests.e2e.harness import BLOCK, counters, drain, make_engine, prompt, run

FRAME_BYTES = 4096 + 2 * 2 * 2 * 32 * 4 * BLOCK  # layers, K and V, KV heads, head size, float32
POOL_CHUNKS = 64  # less than half of what is asked for in all, so that it comes from Redis
AT_ONCE = 4
DEADLINE_MS = 10_000
TIMEOUT_MS = 500
BYPASSED_S = 0.5
BUCKET = "s3://kv/e2e"


def impatient() -> None:
    """A breaker that tries again soon, or the tests would wait for it most of the time."""
    from kvstow.build import tiers as build_tiers
    from kvstow.tiers import Tier, TierLimits

    def tier(*arguments: Any, limits: TierLimits | None = None, **named: Any) -> Tier:
        return Tier(
            *arguments, limits=replace(limits or TierLimits(), breaker_open_s=BYPASSED_S), **named
        )

    build_tiers.Tier = tier  # type: ignore[assignment, misc]


def vanish_after_existence() -> None:
    """From now on whatever is found to be there is gone when it is read."""
    from kvstow.backends.redis.store import RedisStore

    contains = RedisStore.contains

    def contains_and_lose(self: Any, keys: Any) -> list[bool]:
        found = contains(self, keys)
        self.delete(keys)
        return found

    RedisStore.contains = contains_and_lose  # type: ignore[method-assign]


def settings(url: str) -> dict[str, Any]:
    scheme, _, address = url.partition("://")
    impatient = {"timeout_ms": TIMEOUT_MS, "connect_timeout_ms": TIMEOUT_MS}
    tier, where = {
        "http": ("objects", {"url": BUCKET, "endpoint": url, **impatient}),
        "mooncake": ("mooncake", {"master": address, "timeout_ms": TIMEOUT_MS}),
    }.get(scheme, ("redis", {"url": url, **impatient}))
    return {
        "memory.size": POOL_CHUNKS * FRAME_BYTES,
        "chunk_size": BLOCK,
        "fetch.deadline_ms": DEADLINE_MS,
        "fetch.min_tokens": 0,
        tier: where,
    }


def main(url: str, descriptor: str, algorithm: str) -> None:
    impatient()
    with os.fdopen(int(descriptor), "w") as answers:

        def answer(what: Any) -> None:
            answers.write(json.dumps(what) + "\n")
            answers.flush()

        try:
            llm = make_engine(
                str(tiny_llama()),
                settings(url),
                enable_prefix_caching=False,
                prefix_caching_hash_algo=algorithm,
            )
        except RuntimeError as error:
            answer({"refused": str(error)})
            return
        answer({"ready": True})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "vanish":
                vanish_after_existence()
                answer({})
            elif command["do"] == "run":
                prompts = [prompt(length, seed) for length, seed in command["prompts"]]
                outputs = []
                for at in range(0, len(prompts), AT_ONCE):
                    outputs += run(llm, prompts[at : at + AT_ONCE])
                    drain(llm)
                answer({"outputs": outputs, "counters": counters(llm)})


if __name__ == "__main__":
    main(*sys.argv[1:])
