"""One life of an engine over direct storage, in a process of its own: ``python -m tests.e2e.direct_engine DIR OUT``.

It asks the same prompts twice in every life, in the second one with an extent damaged in between, says what it saw,
and dies of SIGKILL once it is idle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from demo.model import tiny_llama
from tests.e2e.harness import (
    PageOracle,
    counters,
    drain,
    make_engine,
    prompt,
    run,
    scheduler_of,
    side_of,
)

PROMPTS = 10
LENGTH = 520
CHUNK_TOKENS = 128
DAMAGED = 3  # the prompt whose second chunk is harmed


def damage(llm: Any, folder: Path) -> None:
    """Flip a bit of a chunk's payload."""
    cache = side_of(llm)._cache
    [file] = folder.iterdir()
    keys = list(cache.index._resident)
    slot = cache.index._resident[keys[DAMAGED * (LENGTH // CHUNK_TOKENS) + 1]]
    geometry = cache._pool._geometry
    with file.open("r+b") as opened:
        opened.seek(geometry.offsets[0] + slot * geometry.extent_bytes[0] + 9000)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


def main(folder: str, out: str) -> None:
    warm = Path(folder).exists()
    direct = {"engine": "file", "path": [folder], "size": "300MB"}
    llm = make_engine(str(tiny_llama()), {"direct": direct}, enable_prefix_caching=False)
    oracle = PageOracle()
    first = [run(llm, [prompt(LENGTH, seed)])[0] for seed in range(PROMPTS)]
    drain(llm)
    if warm:
        damage(llm, Path(folder))
    second = [run(llm, [prompt(LENGTH, seed)])[0] for seed in range(PROMPTS)]
    drain(llm)
    after = run(llm, [prompt(LENGTH, DAMAGED)])[0]
    drain(llm)
    pool = side_of(llm)._cache._pool
    pool.check_integrity()
    seen = {
        "first": first,
        "second": second,
        "after": after,
        "counters": counters(llm),
        "leased": pool.leased,
        "used": pool.slots - pool.free,
        "kind": type(pool).__name__,
        "pages_loaded": oracle.loaded,
        "wrong_pages": [] if warm else oracle.wrong,
        "policy": scheduler_of(llm).vllm_config.kv_transfer_config.kv_load_failure_policy,
        "mode": oct(next(iter(Path(folder).iterdir())).stat().st_mode & 0o777),
    }
    Path(out).write_text(json.dumps(seen))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
