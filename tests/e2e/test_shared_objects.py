"""A real vLLM uses an object store.

Chunks that left memory are restored from there. Whatever the store does, output stays the same.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from kvstow.layout import HEADER_BYTES
from tests.e2e.engine_process import (
    ALL_TOKENS,
    CHUNKS,
    PROMPTS,
    TRIES,
    EngineProcess,
    cached,
    counted,
    tokens,
    told_once,
)
from tests.e2e.shared_engine import POOL_CHUNKS
from tests.rigs.object_server import ObjectServer, Reply, Request

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
]

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "very-secret",
    "AWS_REGION": "us-east-1",
}
GONE = Reply("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>")
HELD_S = 30.0  # longer than any request may take
ACTS = ["killed", "silent", "failing now and then", "bucket gone", "emptied", "corrupt"]


class Story:
    """Runs every act once. ``seen`` has what each act showed."""

    def __init__(self, folder: Path) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._counters: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.server = ObjectServer().start()
        self.engine = EngineProcess(folder, "engine", self.server.url, variables=CREDENTIALS)
        try:
            self.engine.ready()
            self.seen["cold"] = self.engine.run(PROMPTS)
            self.expected = tokens(self.seen["cold"])
            self.seen["again"] = self.engine.run(PROMPTS)
            self.unsigned = [
                request.method
                for request in self.server.requests
                if "authorization" not in request.headers
            ]
            self._faults()
            self.log = self.engine.log()
        finally:
            self.engine.end()
            self.server.stop()

    def _faults(self) -> None:
        self._act("killed", self._kill, self._restart)
        release = threading.Event()
        self._act(
            "silent", lambda: self._answer(lambda _: release.wait(HELD_S) and None), release.set
        )
        turns = cycle([Reply("503 Slow Down"), None, Reply("500 Internal", b"x" * 99), None, None])
        self._act("failing now and then", lambda: self._answer(lambda _: next(turns)))
        self._act("bucket gone", lambda: self._answer(lambda _: GONE))
        self._act("emptied", self.server.objects.clear)
        self._act("corrupt", self._corrupt)

    def _act(
        self, name: str, begin: Callable[[], object], end: Callable[[], object] = lambda: None
    ) -> None:
        """Lets a fault begin under traffic, last another round, and end."""
        before = self.engine.run([])
        self.seen[name] = self.engine.run(PROMPTS, begin)
        self.seen[f"{name}, still"] = self.engine.run(PROMPTS)
        self._counters[name] = (before, self.seen[f"{name}, still"])
        end()
        self._answer(lambda _: None)
        for _ in range(TRIES):
            self.seen[f"{name}, then"] = self.engine.run(PROMPTS)
            if cached(self.seen[f"{name}, then"]) == ALL_TOKENS:
                return

    def rose(self, act: str, name: str) -> float:
        before, after = self._counters[act]
        return counted(after, name, "objects") - counted(before, name, "objects")

    def _answer(self, hook: Callable[[Request], Reply | None]) -> None:
        self.server.hook = hook

    def _kill(self) -> None:
        self.kept = self.server.objects
        self.server.stop()

    def _restart(self) -> None:
        self.server = ObjectServer(self.server.port).start()
        self.server.objects.update(self.kept)

    def _corrupt(self) -> None:
        chunks = {n: v for n, v in self.server.objects.items() if len(v) > HEADER_BYTES}
        for name, value in chunks.items():
            self.server.objects[name] = value[:-100] + bytes([value[-100] ^ 0xFF]) + value[-99:]


story = told_once("objects", Story)


def test_what_left_the_pool_is_restored_from_the_store() -> None:
    told = story()
    assert cached(told.seen["cold"]) == 0
    assert cached(told.seen["again"]) == ALL_TOKENS
    assert (
        counted(told.seen["again"], "loaded_chunks", "objects")
        >= len(PROMPTS) * CHUNKS - POOL_CHUNKS
    )
    assert tokens(told.seen["again"]) == told.expected
    assert not told.unsigned


@pytest.mark.parametrize("act", [act + when for act in ACTS for when in ("", ", still")])
def test_f4_whatever_the_store_does_the_output_stays(act: str) -> None:
    told = story()
    assert tokens(told.seen[act]) == told.expected


@pytest.mark.parametrize("act", ACTS)
def test_k1_afterwards_everything_is_found_again(act: str) -> None:
    told = story()
    assert tokens(told.seen[f"{act}, then"]) == told.expected
    assert cached(told.seen[f"{act}, then"]) == ALL_TOKENS


def test_faults_were_met_and_counted() -> None:
    """Without this the tests above would show nothing."""
    told = story()
    for act in ("killed", "silent", "bucket gone"):
        assert cached(told.seen[f"{act}, still"]) < ALL_TOKENS
    assert told.rose("killed", "failed_chunks") > 0
    assert told.rose("silent", "failed_chunks") > 0
    assert told.rose("bucket gone", "refused") > 0
    assert told.rose("corrupt", "corrupt_chunks") > 0
    assert "Tier objects is bypassed" in told.log
    assert "Tier objects is in use again" in told.log


def test_no_log_has_a_signature() -> None:
    assert "X-Amz" not in story().log
    assert "very-secret" not in story().log
