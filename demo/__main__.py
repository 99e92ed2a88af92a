"""``make demo``: the same long prompt cold and warm, and what kvstow restored.

Two vLLM servers with kvstow, one after the other: the first with vLLM's own prefix cache off, so that every
token that is not computed came from kvstow; the second with it on, for comparison. Writes out/demo.json.
Exits 1 when nothing was restored or the text differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo import model as models
from demo.client import Answer, Client
from demo.progress import step
from demo.prompt import long_prompt
from demo.server import KVSTOW, Server, ServerError

OUT: Final = Path(__file__).resolve().parent.parent / "out"
REPEATS: Final = 3
MEMORY_SIZE: Final = "1GB"
RESTORED: Final = "vllm:external_prefix_cache_hits_total"
ARGUMENTS: Final = ("--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8")


@dataclass(frozen=True, slots=True)
class Side:
    """One server's answers: the first to a prompt it never saw, and the repeats; tokens restored a repeat."""

    cold: Answer
    warm: list[Answer]
    restored_tokens: int

    @property
    def ttft_s(self) -> float:
        return statistics.median(answer.ttft_s for answer in self.warm)

    @property
    def identical(self) -> bool:
        return all(answer.text == self.cold.text for answer in self.warm)


def measure(console: Console, name: str, title: str, *, prefix_caching: bool, kvstow: bool) -> Side:
    """Start a server, ask once cold and ``REPEATS`` times warm, stop it."""
    model = models.smollm2()
    with ExitStack() as stack:
        with step(console, f"Starting vLLM, {title}") as detail:
            server = stack.enter_context(
                Server(
                    model,
                    log=OUT / f"demo-server-{name}.log",
                    connector=KVSTOW if kvstow else None,
                    prefix_caching=prefix_caching,
                    arguments=ARGUMENTS,
                    environment={"KVSTOW_MEMORY_SIZE": MEMORY_SIZE},
                    progress=detail,
                )
            )
        return ask(console, server)


def ask(console: Console, server: Server) -> Side:
    """The long prompt, cold and warm, after a first word that loads what is loaded lazily and checks the model."""
    client = Client(server.url, server.model.name)
    first = client.complete("The capital of France is", max_tokens=4)
    if "Paris" not in first.text:
        raise ServerError(f"the model answers nonsense ({first.text!r}): remove {server.model} and run again")
    prompt = long_prompt(server.model)
    with step(console, f"Asking {len(prompt):,} tokens, cold"):
        cold = client.complete(prompt)
    before = server.metric(RESTORED)
    with step(console, f"Asking the same again, {REPEATS} times"):
        warm = [client.complete(prompt) for _ in range(REPEATS)]
    return Side(cold, warm, round((server.metric(RESTORED) - before) / REPEATS))


def table(ram: Side, device: Side) -> Table:
    shown = Table(title="One prompt, asked again: SmolLM2-135M on vLLM's CPU build")
    shown.add_column("", no_wrap=True)
    for column in ("prompt tokens", "TTFT", "tokens restored", "speed-up", "same text"):
        shown.add_column(column, justify="right")

    def row(name: str, side: Side, ttft_s: float, restored: str, same: bool | None) -> None:
        speed_up = f"{side.cold.ttft_s / ttft_s:.1f} ×" if same is not None else ""
        text = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[same]
        shown.add_row(name, f"{side.cold.prompt_tokens:,}", f"{ttft_s:.3f} s", restored, speed_up, text)

    row("cold: computed", ram, ram.cold.ttft_s, "", None)
    row("kvstow from RAM", ram, ram.ttft_s, f"{ram.restored_tokens:,}", ram.identical)
    row("vLLM prefix cache", device, device.ttft_s, "", device.identical)
    return shown


def report(ram: Side, device: Side) -> dict[str, Any]:
    return {
        "prompt_tokens": ram.cold.prompt_tokens,
        "cold": {"ttft_s": ram.cold.ttft_s},
        "ram": {"ttft_s": ram.ttft_s, "restored_tokens": ram.restored_tokens, "identical": ram.identical},
        "device_prefix": {"ttft_s": device.ttft_s},
    }


def run(console: Console, *, kvstow: bool) -> int:
    with step(console, "Preparing SmolLM2-135M-Instruct"):
        models.smollm2()
    ram = measure(console, "ram", "its prefix cache off", prefix_caching=False, kvstow=kvstow)
    device = measure(console, "device", "its prefix cache on", prefix_caching=True, kvstow=kvstow)
    OUT.mkdir(exist_ok=True)
    (OUT / "demo.json").write_text(json.dumps(report(ram, device), indent=2) + "\n")
    console.print()
    console.print(table(ram, device))
    console.print(f"Results: {OUT / 'demo.json'}", f"Logs: {OUT}/demo-server-*.log", sep="\n", soft_wrap=True)
    if not ram.restored_tokens or not ram.identical:
        what = "the text differs" if ram.restored_tokens else "kvstow restored no token"
        console.print(f"[red]error:[/red] {what}. Log: {OUT / 'demo-server-ram.log'}", soft_wrap=True)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="The same prompt cold and warm through kvstow.")
    parser.add_argument("--no-kvstow", action="store_true", help="without kvstow, to try the demo itself")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console()
    try:
        return run(console, kvstow=not arguments.no_kvstow)
    except ServerError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted; all servers are stopped")
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
