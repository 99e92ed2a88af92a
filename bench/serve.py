"""vLLM's own serving benchmark, the same command twice: cold, then with what kvstow kept.

Wraps ``vllm bench serve``. The engine's prefix cache is off, so that the second run shows kvstow
alone. Sizes are small here; give a real server's with the options, or an address with
``--base-url`` (then nothing is started).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from demo.model import smollm2
from demo.server import KVSTOW, Server, ServerError, engine_environment

OUT: Final = Path(__file__).resolve().parent.parent / "out"
SERVER_ARGUMENTS: Final = ("--enforce-eager", "--max-model-len", "4096")

# `vllm bench serve` without the `vllm` command, which looks for a distribution of that name; the
# CPU build has another.
COMMAND: Final = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""

# Result fields of `vllm bench serve`, and what they are called here.
FIELDS: Final = {
    "mean_ttft_ms": "mean TTFT ms",
    "p99_ttft_ms": "P99 TTFT ms",
    "output_throughput": "output tokens/s",
}


def bench_serve(
    base_url: str, model: Path, name: str, options: Sequence[str], log: Path
) -> dict[str, float]:
    """Run ``vllm bench serve`` once; its three headline figures.

    Raises ServerError with the log's path.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-c", COMMAND),
            *(
                "--base-url",
                base_url,
                "--model",
                name,
                "--tokenizer",
                str(model),
                "--dataset-name",
                "random",
            ),
            *(
                "--ignore-eos",
                "--temperature",
                "0",
                "--percentile-metrics",
                "ttft",
                "--metric-percentiles",
                "99",
            ),
            *(
                "--save-result",
                "--result-dir",
                scratch,
                "--result-filename",
                "result.json",
                *options,
            ),
        ]
        with log.open("w") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=engine_environment(), check=False
            )
        if done.returncode:
            raise ServerError(
                f"vllm bench serve ended with exit code {done.returncode}. Log: {log}"
            )
        result: dict[str, Any] = json.loads((Path(scratch) / "result.json").read_text())
    if result["completed"] == 0:
        raise ServerError(f"vllm bench serve completed no request. Log: {log}")
    return {field: result[field] for field in FIELDS}


def twice(
    base_url: str, model: Path, name: str, options: Sequence[str], console: Console
) -> dict[str, Any]:
    """``{"cold": {...}, "warm":

    {...}}``: the same command, with the same seed and so the same prompts.
    """
    runs: dict[str, Any] = {}
    for run in ("cold", "warm"):
        with console.status(f"vllm bench serve, {run}"):
            runs[run] = bench_serve(base_url, model, name, options, OUT / f"serve-{run}.log")
    return runs


def table(runs: dict[str, Any]) -> Table:
    shown = Table(title="vllm bench serve, the same command twice")
    for column in ("", *FIELDS.values()):
        shown.add_column(column, justify="right")
    for name, run in runs.items():
        shown.add_row(name, *(f"{run[field]:,.1f}" for field in FIELDS))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--base-url", help="a server that runs already; default: start one")
    parser.add_argument(
        "--model", type=Path, help="directory or name of its model; default: SmolLM2-135M"
    )
    parser.add_argument(
        "--connector", type=json.loads, default=KVSTOW, help="vLLM's --kv-transfer-config, as JSON"
    )
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--request-rate", default="inf")
    parser.add_argument("--max-concurrency", type=int, default=2)
    parser.add_argument("--random-input-len", type=int, default=1000)
    parser.add_argument("--random-output-len", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT / "serve.json")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    console = Console()
    names = (
        "num_prompts",
        "request_rate",
        "max_concurrency",
        "random_input_len",
        "random_output_len",
    )
    options = [
        text
        for name in names
        for text in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    ]
    try:
        with ExitStack() as stack:
            model = arguments.model or smollm2()
            url, name = arguments.base_url, str(model)
            if url is None:
                with console.status("Starting vLLM with kvstow"):
                    log = OUT / "serve-server.log"
                    started = Server(
                        model, log=log, connector=arguments.connector, arguments=SERVER_ARGUMENTS
                    )
                    server = stack.enter_context(started)
                url, name = server.url, model.name
            runs = twice(url, model, name, options, console)
    except ServerError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(table(runs))
    arguments.out.write_text(json.dumps(runs, indent=2) + "\n")
    console.print(f"Results: {arguments.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
