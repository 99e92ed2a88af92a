"""The unmodified vllm-rbln 0.12.0 on the emulated device, set up by the launch blocks of docs/how-to/rbln.md.

Model and sizes are reduced. The second request is restored, to the same text, by plain copies only. ``make test-rbln``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from demo.model import tiny_llama
from demo.server import Server
from tests.rbln.blocks import Launch, alias_command, launches

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
MEMORY, DIRECT = 0, 1  # the page's launch blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 30)]


class Case(NamedTuple):
    """``sized``: vllm-rbln sizes KV after the compile, and registers it then. ``drive_fails``: before the second
    request."""

    block: int = 1024
    eager: bool = True
    launch: int = MEMORY
    prefix_caching: bool = False
    sized: bool = False
    drive_fails: bool = False
    ranks: int = 1


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(length)]


def environment(launch: Launch, case: Case, folder: Path) -> dict[str, str]:
    """The block's variables, with less memory and the case's chunk size, and the emulator."""
    variables = dict(launch.variables)
    assert variables["LMCACHE_CHUNK_SIZE"] == launch.arguments["--block-size"] == "1024"
    variables["LMCACHE_CHUNK_SIZE"] = str(case.block)
    if case.launch == MEMORY:
        variables["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "0.1"
    else:
        variables["LMCACHE_EXTRA_CONFIG"] = variables["LMCACHE_EXTRA_CONFIG"].replace("2048", "64")
        variables["RBLN_EMULATED_DRIVE"] = str(folder / "drive")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSTOW_", "LMCACHE_"))
    }
    return (
        kept
        | variables
        | {
            "RBLN_EMULATE": "1",
            "PYTHONPATH": str(ROOT / "tests" / "rbln" / "boot"),
            "RBLN_VISIBLE_DEVICES": ",".join(map(str, range(case.ranks))),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forked ones would share a drive
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TMPDIR": str(folder),
        }
    )


def described(
    launch: Launch, case: Case, prompts: list[list[int]], connector: dict[str, Any] | None
) -> dict[str, Any]:
    """What ``tests.rbln.engine`` is to run."""
    assert launch.arguments["--model-impl"] == "vllm"
    return {
        "model": str(tiny_llama()),
        "block_size": case.block,
        "eager": case.eager,
        "max_model_len": 2048,
        "blocks": None if case.sized else 5120 // case.block,
        "memory": 0.55 if case.sized else 0.9,
        "ranks": case.ranks,
        "prefix_caching": case.prefix_caching,
        "prompts": prompts,
        "kv_transfer_config": connector,
        "drive_fails_from": 1 if case.drive_fails else None,
        "additional_config": {} if case.sized else {"use_dynamic_kv_cache": False},
    }


def start(case: dict[str, Any], environment: dict[str, str], folder: Path) -> Any:
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.rbln.engine", json.dumps(case), str(result)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        pytest.fail(
            f"the engine ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}"
        )
    return json.loads(result.read_text())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rbln")


@pytest.fixture(scope="session", autouse=True)
def vllm_rbln() -> None:
    try:
        version = importlib.metadata.version("vllm-rbln")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-rbln is not installed here: make test-rbln")
    assert version == "0.12.0"


@cache
def run(case: Case, folder: Path) -> Any:
    """A prompt of a chunk and a half, twice."""
    launch = launches()[case.launch]
    words = prompt(case.block * 3 // 2, seed=1)
    return start(
        described(launch, case, [words, words], launch.kv_transfer_config),
        environment(launch, case, folder),
        folder,
    )


CASES = [
    pytest.param(
        Case(block, eager, launch), id=f"{name}-{block}-{'eager' if eager else 'compiled'}"
    )
    for launch, name in ((MEMORY, "memory"), (DIRECT, "RDSBackend"))
    for block in (1024, 128)
    for eager in (True, False)
]


@pytest.mark.parametrize("case", CASES)
def test_second_request_is_restored_to_the_same_text_by_plain_copies(
    case: Case, folder: Path
) -> None:
    seen = run(case, folder)
    first, second = seen["answers"]
    assert (first["cached"], second["cached"]) == (0, case.block)
    assert first["tokens"] == second["tokens"]

    assert seen["pages"] == {"stored": 1, "loaded": 1, "wrong": []}

    counted = seen["transfers"]
    kinds = ("d2h", "h2d") if case.launch == MEMORY else ("d2d", "d2d")
    assert all(counted[f"{kind}.bytes"] > 0 and counted[f"{kind}.async"] > 0 for kind in kinds)
    assert [
        name for name in counted if name.startswith("fallback.") or name.endswith(".strided")
    ] == []
    if case.launch == MEMORY:
        assert counted["d2h.bytes"] == counted["h2d.bytes"]
        assert set(counted) == {
            f"{kind}.{what}" for kind in kinds for what in ("calls", "bytes", "async")
        }

    log = "\n".join(seen["log"])
    assert f"Retrieved {case.block} out of {case.block} required tokens" in log
    assert "batched" not in log
    assert ("direct storage (rds)" in log) == (case.launch == DIRECT)


@pytest.mark.parametrize("case", CASES)
def test_the_hooks_that_vllm_rbln_calls(case: Case, folder: Path) -> None:
    hooks = run(case, folder)["hooks"]
    assert hooks["register_kv_caches"] == hooks["set_host_xfer_buffer_ops"] == 1
    assert hooks["flush_deferred_load"] > 0
    assert hooks["handle_preemptions"] == hooks["start_load_kv"] > 0
    # Registration is finalised by a hook after the warm-up, and without one it must happen anyway.
    assert hooks.get("finalize_kv_cache_registration", 0) == (0 if case.eager else 1)
    # Compiled models have no hook a layer: layer-wise transfer cannot work.
    assert (hooks.get("save_kv_layer", 0) > 0) == case.eager


@pytest.mark.parametrize(("launch", "eager"), [(MEMORY, False), (DIRECT, True)])
def test_two_ranks_with_an_emulated_npu_each(launch: int, eager: bool, folder: Path) -> None:
    """Tensor parallelism. What workers do can't be watched from here; that each rank has its own part of the KV back
    shows in the text."""
    seen = run(Case(block=128, eager=eager, launch=launch, ranks=2), folder)
    first, second = seen["answers"]
    assert (first["cached"], second["cached"]) == (0, 128)
    assert first["tokens"] == second["tokens"]
    log = "\n".join(seen["log"])
    assert "Retrieved 128 out of 128 required tokens" in log
    assert "batched" not in log


def test_a_failed_read_is_computed_again(folder: Path) -> None:
    """Direct storage promises a hit before it has read it; the page's JSON doesn't say what to do when that fails."""
    seen = run(Case(block=128, launch=DIRECT, drive_fails=True), folder)
    first, second = seen["answers"]
    assert first["tokens"] == second["tokens"]
    assert "RDS batched read failed" in "\n".join(seen["log"])
    assert (seen["pages"]["loaded"], seen["pages"]["wrong"]) == (0, [])


def test_prefix_caching_by_sub_blocks_and_the_vendors_own_json(
    folder: Path, tmp_path: Path
) -> None:
    """With prefix caching on, a prompt that shares a block and a half: the same text as without a connector. The
    connector is found under the vendor's module, by the line of the page that puts it there."""
    case = Case(block=256, prefix_caching=True)
    launch = launches()[MEMORY]
    variables = environment(launch, case, folder)
    shared = prompt(400, seed=2)
    prompts = [
        shared + prompt(200, seed=3),
        shared + prompt(200, seed=4),
        shared + prompt(200, seed=3),
    ]
    bare = start(described(launch, case, prompts, None), variables, tmp_path)

    line = alias_command().replace('sysconfig.get_path("purelib")', f'"{tmp_path}"')
    subprocess.run(["bash", "-c", line], check=True)
    assert (tmp_path / "lmcache_rbln" / "integration" / "vllm" / "connector.py").exists()
    variables["PYTHONPATH"] += f":{tmp_path}"
    connector = {
        name: value
        for name, value in launch.kv_transfer_config.items()
        if name != "kv_connector_module_path"
    }
    seen = start(described(launch, case, prompts, connector), variables, tmp_path)
    assert [answer["tokens"] for answer in seen["answers"]] == [
        answer["tokens"] for answer in bare["answers"]
    ]
    assert [answer["cached"] for answer in seen["answers"]] == [
        answer["cached"] for answer in bare["answers"]
    ]
    assert "kvstow is ready" in "\n".join(seen["log"])


def test_kv_that_is_sized_after_the_compile(folder: Path) -> None:
    """vllm-rbln compiles with a few blocks, then sizes KV and registers it, with more than the connector was told."""
    seen = run(Case(block=1024, eager=False, sized=True), folder)
    first, second = seen["answers"]
    assert (first["cached"], second["cached"]) == (0, 1024)
    assert first["tokens"] == second["tokens"]
    assert (
        seen["hooks"]["register_kv_caches"] == seen["hooks"]["finalize_kv_cache_registration"] == 1
    )
    assert seen["pages"] == {"stored": 1, "loaded": 1, "wrong": []}


def test_a_server_is_verified_by_one_command(folder: Path) -> None:
    """As served: the engine in a process of its own, without prefix caching, as the page says to check."""
    case = Case(block=128)
    launch = launches()[MEMORY]
    arguments = [
        *(
            "--model-impl",
            launch.arguments["--model-impl"],
            "--dtype",
            "bfloat16",
            "--enforce-eager",
        ),
        *("--block-size", "128", "--max-model-len", "2048", "--num-gpu-blocks-override", "40"),
        *("--max-num-seqs", launch.arguments["--max-num-seqs"]),
        *("--max-num-batched-tokens", launch.arguments["--max-num-batched-tokens"]),
        *(
            "--additional-config",
            json.dumps({"use_custom_sampler": False, "use_dynamic_kv_cache": False}),
        ),
    ]
    server = Server(
        tiny_llama(),
        log=folder / "server.log",
        connector=launch.kv_transfer_config,
        arguments=arguments,
        environment=environment(launch, case, folder),
    )
    command = [
        sys.executable,
        "-c",
        "from kvstow.cli import main; main()",
        "verify-offload",
        "--url",
        server.url,
    ]
    with server:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr + server.log.read_text()[-3000:]
    assert "Retrieved" in server.log.read_text()


def test_the_page_has_a_block_a_tier() -> None:
    memory, direct = launches()
    assert "LMCACHE_STORAGE_PLUGINS" not in memory.variables
    assert direct.variables["LMCACHE_STORAGE_PLUGINS"] == "RDSBackend"
    assert json.loads(direct.variables["LMCACHE_EXTRA_CONFIG"])["rds_failure_policy"] == "ignore"
    for launch in (memory, direct):
        assert launch.kv_transfer_config["kv_connector_module_path"] == "kvstow.vllm.rbln"
