"""Two real vLLM processes share one real Mooncake.

What one stores the other hits. The end of the master is a miss, and nothing worse.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

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
from tests.rigs.mooncake_server import MooncakeServer, missing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


class Story:
    """One engine stores, the other restores. The master is killed under traffic, and comes back."""

    def __init__(self, folder: Path) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._server = MooncakeServer(folder / "mooncake").start()
        url = f"mooncake://{self._server.master}"
        engines = [EngineProcess(folder, name, url=url) for name in ("one", "two")]
        self._one, self._two = engines
        try:
            for engine in engines:
                engine.ready()
            self.seen["cold"] = self._one.run(PROMPTS)
            self.seen["shared"] = self._two.run(PROMPTS)
            self.seen["killed"] = self._two.run(PROMPTS, self._server.kill_master)
            self.seen["killed, still"] = self._two.run(PROMPTS)
            self.seen["restarted"] = self._two.run(PROMPTS, self._server.start_master)
            self._recover()
            self.log = self._two.log()
        finally:
            for engine in engines:
                engine.end()
            self._server.kill()

    def _recover(self) -> None:
        """Runs prompts until one engine finds what the other has stored anew."""
        for _ in range(TRIES):
            self._one.run(PROMPTS)
            self.seen["then"] = self._two.run(PROMPTS)
            if cached(self.seen["then"]) == ALL_TOKENS:
                return


story = told_once("mooncake", Story)


def test_what_one_engine_stored_another_hits_and_says_the_same() -> None:
    told = story()
    assert cached(told.seen["cold"]) == 0
    assert cached(told.seen["shared"]) == ALL_TOKENS
    assert counted(told.seen["shared"], "loaded_chunks", "mooncake") == len(PROMPTS) * CHUNKS
    assert tokens(told.seen["shared"]) == tokens(told.seen["cold"])


@pytest.mark.parametrize("act", ["killed", "killed, still", "restarted", "then"])
def test_f4_whatever_the_master_does_the_output_stays(act: str) -> None:
    assert tokens(story().seen[act]) == tokens(story().seen["cold"])


def test_k1_without_a_master_it_is_bypassed_and_used_again_when_there_is_one() -> None:
    told = story()
    assert cached(told.seen["killed, still"]) < ALL_TOKENS
    assert "Tier mooncake is bypassed: its calls fail" in told.log
    assert "Tier mooncake is in use again" in told.log
    assert cached(told.seen["then"]) == ALL_TOKENS
