"""One life of an engine with a disk tier, in a process of its own: ``python -m tests.e2e.disk_engine DIR OUT DAMAGE``.

It asks the same prompts in every life, says what it saw, and dies of SIGKILL once it is idle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from demo.model import tiny_llama
from tests.e2e.harness import counters, drain, make_engine, prompt, run

PROMPTS = 20
LENGTH = 520
CHUNK_TOKENS = 128


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def replace(path: Path, make: str) -> None:
    path.unlink()
    if make == "symlink":
        path.symlink_to("/etc/hostname")
    elif make == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)


def damage(folder: Path) -> int:
    """Every kind of damage, to a file each. Returns how many."""
    chunks = sorted(folder.rglob("*.kv"))[::7]
    flip(chunks[0])
    os.truncate(chunks[1], 4096)
    os.truncate(chunks[2], 0)
    for path, make in zip(chunks[3:6], ("symlink", "directory", "fifo"), strict=True):
        replace(path, make)
    chunks[6].unlink()
    return 7


def main(folder: str, out: str, damaged: str) -> None:
    disk = {"paths": [folder], "size": "1GB", "min_free": 0, "codec": "lossless"}
    extra = {
        "memory.size": "200MB",
        "disk": disk,
        "fetch": {"deadline_ms": 20_000, "min_tokens": 0},
    }
    llm = make_engine(str(tiny_llama()), extra, enable_prefix_caching=False)
    harmed = damage(Path(folder)) if damaged == "damage" else 0
    outputs = [run(llm, [prompt(LENGTH, seed)])[0] for seed in range(PROMPTS)]
    drain(llm)
    files = len(
        [path for path in Path(folder).rglob("*.kv") if path.is_file() and not path.is_symlink()]
    )
    seen = {"outputs": outputs, "files": files, "harmed": harmed, "counters": counters(llm)}
    Path(out).write_text(json.dumps(seen))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
