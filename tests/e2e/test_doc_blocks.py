"""The launch and settings blocks of the documentation's page for users of LMCache, taken out of it and run.

What is changed of a block: the model is a small one, sizes, paths, ports and addresses are the test's, and options that
only GPUs have are left out. Everything else, the connector above all, is as the page has it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import yaml

from demo.model import smollm2, tiny_llama
from demo.server import Server, engine_environment
from tests.docs.launches import Command, commands
from tests.docs.pages import ROOT, blocks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: run `make test`"
    ),
]

PAGE = "from-lmcache.md"
GPU_ONLY = {"--gpu-memory-utilization": 2, "--port": 2}  # and what the server object says itself
CHUNK = 256  # as the page has it
LENGTH = 3 * CHUNK - 100
RESTORED = 2 * CHUNK
TOKENS = 16
SIZES = {"max_local_cpu_size": 0.1, "max_local_disk_size": 0.1}  # GiB
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
BENCH_SIZES = {"--random-input-len": "600", "--random-output-len": "4", "--num-prompts": "4"}


def launches() -> list[Command]:
    found = [c for b in blocks("bash") if b.page.name == PAGE for c in commands(b.body)]
    return [command for command in found if command.words[:2] == ["vllm", "serve"]]


def settings_file(name: str, folder: Path, **changes: Any) -> Path:
    """The page's YAML file ``name``, reduced."""
    [body] = [
        b.body for b in blocks("yaml") if b.page.name == PAGE and b.body.startswith(f"# {name}\n")
    ]
    content = yaml.safe_load(body)
    for key, value in {**SIZES, **changes}.items():
        if key in content:
            content[key] = value
    assert content["chunk_size"] == CHUNK
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return path


def serve(
    command: Command, folder: Path, log: str, *, model: Path | None = None, **changes: Any
) -> Server:
    file = settings_file(command.environment["LMCACHE_CONFIG_FILE"], folder, **changes)
    arguments = command.words[3:]
    at = arguments.index("--kv-transfer-config")
    del arguments[at : at + 2]
    for option, words in GPU_ONLY.items():
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + words]
    environment = {
        **{
            name: value
            for name, value in command.environment.items()
            if not name.startswith("CUDA_")
        },
        "LMCACHE_CONFIG_FILE": str(file),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A small model may compute a prompt faster than it is loaded: load nevertheless.
        "KVSTOW_FETCH_MIN_TOKENS": "0",
        "KVSTOW_FETCH_DEADLINE_MS": "20000",
    }
    arguments += ["--enforce-eager", "--max-model-len", "1024"]
    return Server(
        model or tiny_llama(),
        log=folder / log,
        connector=command.connector,
        arguments=arguments,
        environment=environment,
    )


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(length)]


class Answer(NamedTuple):
    """Greedy. ``first_logprob`` is its first token's log-probability, which no other token disturbs."""

    tokens: list[str]
    first_logprob: float


def ask(server: Server, tokens: list[int]) -> Answer:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    choice = client.completions.create(
        model=server.model.name, prompt=tokens, max_tokens=TOKENS, temperature=0.0, logprobs=1
    ).choices[0]
    assert choice.logprobs is not None
    return Answer(
        list(choice.logprobs.tokens or []), (choice.logprobs.token_logprobs or [0.0])[0] or 0.0
    )


def restored(server: Server) -> float:
    return server.metric("vllm:external_prefix_cache_hits_total")


def of_tier(server: Server, metric: str, tier: str) -> float:
    lines = [
        line
        for line in server.get("/metrics").splitlines()
        if line.startswith(metric) and f'"{tier}"' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def until(server: Server, metric: str, tier: str, least: float) -> None:
    """A write to a lower tier ends a little after the answer; every look at ``/metrics`` gives it time."""
    for _ in range(500):
        if of_tier(server, metric, tier) >= least:
            return
    log = server.log.read_text()[-3000:]
    pytest.fail(f"{metric} of {tier} is {of_tier(server, metric, tier)}, wanted {least}\n{log}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


def test_k6_host_memory_hits_with_the_same_text_and_the_benchmark_runs(folder: Path) -> None:
    with serve(launches()[0], folder, "cpu.log") as server:
        cold = ask(server, prompt(1))
        assert restored(server) == 0
        warm = ask(server, prompt(1))
        assert (restored(server), warm.tokens) == (RESTORED, cold.tokens)
        log = server.log.read_text()
        assert f"Retrieved {RESTORED} out of {RESTORED} required tokens" in log
        assert "Creating v1 connector with name: LMCacheConnectorV1" in log
        assert "LMCache settings: max_local_cpu_size is of each worker" in log
        assert log.count("kvstow settings:") == 1
        before = restored(server)
        bench(server, folder)
        once = restored(server) - before
        bench(server, folder)
        assert restored(server) - before - once >= 4 * RESTORED, (
            "the second run's prompts are the first's"
        )


def bench(server: Server, folder: Path) -> None:
    """The page's ``vllm bench serve``. vLLM's CPU build has no such command: the same function, called."""
    found = (c for b in blocks("bash") if b.page.name == PAGE for c in commands(b.body))
    [command] = [c for c in found if c.words[:3] == ["vllm", "bench", "serve"]]
    words = command.words[3:]
    changes = {**BENCH_SIZES, "--model": str(server.model), "--port": server.url.rpartition(":")[2]}
    for option, value in changes.items():
        words[words.index(option) + 1] = value
    done = subprocess.run(
        [sys.executable, "-c", BENCH, *words, "--served-model-name", server.model.name],
        cwd=folder,
        env=engine_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Mean TTFT" in done.stdout
    assert "P99 TTFT" in done.stdout


def test_k6_what_memory_drops_comes_back_from_the_disk_with_the_same_text(folder: Path) -> None:
    disk = folder / "nvme"
    disk.mkdir()
    small = 0.003  # GiB: a dozen chunks
    with serve(
        launches()[1], folder, "disk.log", local_disk=f"file://{disk}", max_local_cpu_size=small
    ) as server:
        cold = [ask(server, prompt(seed)).tokens for seed in range(10)]
        until(server, "kvstow_stored_chunks_total", "disk", 10 * 2)
        assert len(list(disk.rglob("*.kv"))) == 10 * 2
        assert restored(server) == 0
        warm = [ask(server, prompt(seed)).tokens for seed in range(10)]
        assert warm == cold
        assert restored(server) == 10 * RESTORED
        assert of_tier(server, "kvstow_hit_tokens_total", "disk") >= 5 * RESTORED


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    from tests.rigs.redis_server import RedisServer

    server = RedisServer(folder / "redis").start()
    try:
        yield server.url
    finally:
        server.kill()


def texts(model: Path) -> list[list[int]]:
    """Beginnings of the benchmark's texts, and a part from the middle of each: a lossy codec's error is the model's
    to forgive, and a random model on random tokens forgives nothing."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    whole = [
        tokenizer(path.read_text())["input_ids"]
        for path in sorted((ROOT / "bench" / "texts").glob("*.txt"))
    ]
    return [tokens[at : at + LENGTH] for tokens in whole for at in (0, (len(tokens) - LENGTH) // 2)]


def test_k6_two_instances_share_a_redis_with_cachegen_and_how_far_it_is_off(folder: Path) -> None:
    """What B restores was computed by A, and the other way round. How the answers differ is written down, not asserted:
    its codec is lossy. In its own memory each has the exact KV."""
    first, second = launches()[2:4]
    assert first.environment["PYTHONHASHSEED"] == second.environment["PYTHONHASHSEED"] == "0"
    model = smollm2()
    *prompts, other = texts(model)
    assert all(len(tokens) == LENGTH for tokens in prompts)
    changes: dict[str, Any] = {"model": model, "max_local_cpu_size": 0.5}
    with (
        redis(folder) as url,
        serve(first, folder, "a.log", remote_url=url, **changes) as a,
        serve(second, folder, "b.log", remote_url=url, **changes) as b,
    ):
        cold = [ask(a, tokens) for tokens in prompts]
        assert [ask(a, tokens).tokens for tokens in prompts] == [
            answer.tokens for answer in cold
        ], "A's own are exact"
        until(a, "kvstow_stored_chunks_total", "redis", 2 * len(prompts))
        from_a = [ask(b, tokens) for tokens in prompts]
        assert restored(b) == len(prompts) * RESTORED
        assert of_tier(b, "kvstow_hit_tokens_total", "redis") == len(prompts) * RESTORED
        ask(b, other)
        until(b, "kvstow_stored_chunks_total", "redis", 2)
        before = restored(a)
        ask(a, other)
        assert restored(a) - before == RESTORED, "and A has what B computed"
    divergence = diverged(cold, from_a)
    out = ROOT / "out" / "doc_blocks.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"shared_redis_cachegen": divergence}, indent=2) + "\n")
    print(f"cachegen through Redis, restored against computed: {divergence}")
    assert all(math.isfinite(value) for value in divergence.values())


def diverged(exact: list[Answer], near: list[Answer]) -> dict[str, float]:
    """How far answers from lossy KV are from those from exact KV."""
    off = [abs(a.first_logprob - b.first_logprob) for a, b in zip(exact, near, strict=True)]
    pairs = [list(zip(a.tokens, b.tokens, strict=True)) for a, b in zip(exact, near, strict=True)]
    leading = [next((i for i, (x, y) in enumerate(pair) if x != y), len(pair)) for pair in pairs]
    return {
        "prompts": len(exact),
        "answers_identical": sum(a.tokens == b.tokens for a, b in zip(exact, near, strict=True))
        / len(exact),
        "leading_tokens_identical_mean": sum(leading) / len(leading),
        "tokens": TOKENS,
        "first_token_logprob_difference_mean": sum(off) / len(off),
        "first_token_logprob_difference_max": max(off),
    }


def test_the_page_has_the_four_launches_of_this_test() -> None:
    named = [command.environment.get("LMCACHE_CONFIG_FILE") for command in launches()]
    assert named[:4] == [
        "lmcache_cpu.yaml",
        "lmcache_disk.yaml",
        "lmcache_shared.yaml",
        "lmcache_shared.yaml",
    ]
    for command in launches()[:4]:
        assert command.connector["kv_connector"] == "LMCacheConnectorV1"
        assert command.connector["kv_connector_module_path"] == "kvstow.vllm.lmcache"
    assert "LMCACHE_CONFIG_FILE" not in os.environ, "the page's blocks must be all that is read"
