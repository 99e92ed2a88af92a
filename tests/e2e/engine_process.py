"""An engine that shares a tier, as the tests that start one see it; and the prompts that it is asked."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.harness import BLOCK

S = TypeVar("S")

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 240.0
CHUNKS = 6
PROMPTS = [(CHUNKS * BLOCK + 1, seed) for seed in range(24)]
NEW = [(CHUNKS * BLOCK + 1, seed) for seed in range(100, 104)]
ALL_TOKENS = len(PROMPTS) * CHUNKS * BLOCK
TRIES = 20


class EngineProcess:
    """``tests.e2e.shared_engine``; several may start at once: ``ready`` waits for that."""

    def __init__(
        self,
        folder: Path,
        name: str,
        url: str,
        seed: str | None = None,
        algorithm: str = "sha256",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        read, write = os.pipe()
        self._answers = os.fdopen(read)
        self._log = folder / f"{name}.log"
        environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("KVSTOW_") and k != "PYTHONHASHSEED"
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.shared_engine", url, str(write), algorithm],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=(write,),
                env=environment
                | ({"PYTHONHASHSEED": seed} if seed is not None else {})
                | dict(variables or {}),
            )
        os.close(write)

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], ANSWER_S)
        line = self._answers.readline() if ready else ""
        assert line, f"no answer:\n{self._log.read_text(errors='replace')[-6000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ready(self) -> None:
        assert self.answer() == {"ready": True}, self.log()[-6000:]

    def say(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def run(
        self, prompts: list[tuple[int, int]], meanwhile: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        self.say(do="run", prompts=prompts)
        if meanwhile is not None:
            meanwhile()
        return self.answer()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()


def told_once(name: str, tell: Callable[[Path], S]) -> Callable[[], S]:
    """What ``tell`` makes in a folder, told once; also when it fails, which takes as long: then the folder stays."""

    said = False

    @functools.cache
    def once() -> S | Exception:
        folder = Path(tempfile.mkdtemp(prefix=f"kvstow-{name}-"))
        try:
            told = tell(folder)
        except Exception as error:
            error.add_note(f"logs are in {folder}")
            return error
        shutil.rmtree(folder)
        return told

    def story() -> S:
        told = once()
        if isinstance(told, Exception):
            nonlocal said
            if not said:
                said = True
                raise told
            pytest.fail(
                f"{name} failed before: see its first failure; {told.__notes__[-1]}", pytrace=False
            )
        return told

    return story


def tokens(seen: dict[str, Any]) -> list[list[int]]:
    return [output["tokens"] for output in seen["outputs"]]


def cached(seen: dict[str, Any]) -> int:
    return sum(output["cached"] for output in seen["outputs"])


def counted(seen: dict[str, Any], name: str, tier: str = "redis") -> float:
    return sum(
        value for series, value in seen["counters"].items() if name in series and tier in series
    )
