"""A served vLLM: what an operator sees, what a killed server leaves behind, what a restarted one finds."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.client import Client
from demo.model import tiny_llama, tiny_mamba
from demo.server import KVSTOW, Server, ServerError, processes_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
]

BLOCK = 32
ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--block-size",
    str(BLOCK),
    "--max-num-batched-tokens",
    "512",
)


def serve(folder: Path, **settings: Any) -> Server:
    """A server of the tiny model, its own prefix cache off; ``settings`` with two underscores for the dot."""
    extra = {key.replace("__", "."): value for key, value in settings.items()}
    connector = {
        **KVSTOW,
        "kv_connector_extra_config": {"memory.size": "100MB", "chunk_size": BLOCK, **extra},
    }
    log = folder / f"server-{time.monotonic_ns()}.log"
    return Server(tiny_llama(), log=log, connector=connector, arguments=ARGUMENTS)


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(length)]


def ask(server: Server, prompt: list[int]) -> str:
    return Client(server.url, server.model.name).complete(prompt, max_tokens=4).text


def restored(server: Server) -> float:
    return server.metric("vllm:external_prefix_cache_hits_total")


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvstow" in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    """One server for all tests that only look at it; it has answered the same prompt twice."""
    with serve(folder) as server:
        prompt = tokens(5 * BLOCK + 3, seed=1)
        assert ask(server, prompt) == ask(server, prompt)
        yield server


def test_vllms_own_counter_of_external_hits_moves(served: Server) -> None:
    assert restored(served) == 5 * BLOCK


def test_metrics_are_on_vllms_page(served: Server) -> None:
    page = served.get("/metrics")
    for name in (
        "hit_tokens_total",
        "miss_chunks_total",
        "stored_bytes_total",
        "loaded_chunks_total",
        "load_seconds_bucket",
        "store_seconds_count",
        "pool_used_bytes",
        "pool_capacity_bytes",
    ):
        assert f"kvstow_{name}{{" in page, f"kvstow_{name} is not on /metrics"
    assert served.metric("kvstow_hit_tokens_total") == 5 * BLOCK
    assert served.metric("kvstow_stored_chunks_total") == 5


def test_n2_an_idle_server_counts_nothing(served: Server) -> None:
    def counted() -> list[str]:
        return [line for line in served.get("/metrics").splitlines() if line.startswith("kvstow_")]

    before = counted()
    for _ in range(20):
        served.get("/metrics")
    assert counted() == before


def test_the_log_says_what_users_look_for(served: Server) -> None:
    log = served.log.read_text()
    assert f"Stored {5 * BLOCK} out of {5 * BLOCK + 3} total tokens" in log
    assert f"Retrieved {5 * BLOCK} out of {5 * BLOCK} required tokens" in log
    assert log.count("kvstow settings:") == 1


def test_verify_offload_sees_the_restore_and_leaves_the_server_alone(
    served: Server, tmp_path: Path
) -> None:
    """Last of those that share the server: it counts more than they expect."""
    command = [
        sys.executable,
        "-c",
        "from kvstow.cli import main; main()",
        "verify-offload",
        "--url",
        served.url,
    ]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["identical"], report["chunk_tokens"]) == (
        "restored",
        True,
        BLOCK,
    )
    assert report["restored_tokens"]["memory"] == report["external_hit_tokens"] >= 3 * BLOCK
    assert report["notes"] == []


def test_a11_o4_a_model_with_recurrent_state_is_refused_by_name(folder: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"recurrent state \(MambaForCausalLM\)"),
        Server(
            tiny_mamba(),
            log=folder / "mamba.log",
            arguments=("--enforce-eager", "--max-model-len", "512"),
        ),
    ):
        pytest.fail("a model whose prefix cannot be restored was served")


def kill(server: Server, *, everything: bool) -> None:
    family = processes_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    if everything:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=30)


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*.kv") if file.is_file()]


def test_one_request_then_idle_then_killed_every_chunk_is_on_disk_and_a_restart_finds_it(
    folder: Path,
) -> None:
    """Also J1 and J4: nothing in /dev/shm, and the next start works, while the killed one's orphans still live."""
    before = shared_memory_files()  # of other runs of this machine
    disk = folder / "disk"
    prompt = tokens(6 * BLOCK + 1, seed=3)
    settings = {"disk__paths": str(disk), "disk__size": "500MB"}
    first = serve(folder, **settings)
    with first:
        text = ask(first, prompt)
        time.sleep(2)  # the test is about an engine that nobody calls
        assert len(files_of(disk)) == 6
        kill(first, everything=False)
        with serve(folder, memory__pool_dir="/dev/shm", **settings) as second:
            assert ask(second, prompt) == text
            assert shared_memory_files() <= before, (
                "the pool's file has no name once every worker has mapped it"
            )
            assert restored(second) == 6 * BLOCK
            assert second.metric("kvstow_hit_tokens_total") == 6 * BLOCK
            kill(second, everything=True)
    assert shared_memory_files() <= before


def test_a_wrong_setting_stops_the_start_and_says_what_to_do(folder: Path) -> None:
    connector = {**KVSTOW, "kv_connector_extra_config": {"memory.sise": "1GB"}}
    server = Server(
        tiny_llama(), log=folder / "wrong.log", connector=connector, arguments=ARGUMENTS
    )
    with pytest.raises(ServerError, match=r"memory\.sise.*memory\.size"), server:
        pytest.fail(f"a server started with {json.dumps(connector)}")
