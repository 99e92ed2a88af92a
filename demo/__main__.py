"""``make demo``: the same long prompt cold and warm, and what kvstow restored.

Three vLLM servers with kvstow, one after the other: the first with vLLM's own prefix cache off, so that every
token that is not computed came from kvstow; the second the same over what the first left on disk; the third shares
nothing with them but a Redis, and has the prefix cache on: its first answer comes from Redis, the next ones from the
prefix cache, for comparison. Writes out/demo.json. Exits 1 when nothing was restored or the text differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from tests.rigs.redis_server import RedisServer

OUT: Final = Path(__file__).resolve().parent.parent / "out"
REPEATS: Final = 3
MEMORY_SIZE: Final = "1GB"
DISK: Final = OUT / "demo-disk"
DISK_ENVIRONMENT: Final = {
    "KVSTOW_DISK_PATHS": str(DISK),
    "KVSTOW_DISK_SIZE": "1GB",
    "KVSTOW_DISK_MIN_FREE": "0",
}
REDIS: Final = OUT / "demo-redis"
REDIS_LIMITS: Final = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
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


@contextmanager
def served(
    console: Console,
    name: str,
    title: str,
    tiers: dict[str, str],
    *,
    prefix_caching: bool,
    kvstow: bool,
) -> Iterator[Server]:
    """A server that answers, stopped at the end."""
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
                    environment={"KVSTOW_MEMORY_SIZE": MEMORY_SIZE, **tiers},
                    progress=detail,
                )
            )
        yield server


@contextmanager
def redis(console: Console) -> Iterator[dict[str, str]]:
    """A server on loopback, stopped at the end, and what kvstow needs to find it."""
    server = RedisServer(REDIS, *REDIS_LIMITS)
    try:
        with step(console, "Starting a Redis or Valkey server"):
            server.start()
        yield {"KVSTOW_REDIS_URL": server.url}
    finally:
        server.kill()
        shutil.rmtree(REDIS, ignore_errors=True)


def first_word(server: Server) -> Client:
    """A client, after a first word that loads what is loaded lazily and checks the model."""
    client = Client(server.url, server.model.name)
    first = client.complete("The capital of France is", max_tokens=4)
    if "Paris" not in first.text:
        raise ServerError(
            f"the model answers nonsense ({first.text!r}): remove {server.model} and run again"
        )
    return client


def ask(console: Console, server: Server) -> Side:
    """The long prompt, once cold and ``REPEATS`` times warm."""
    client = first_word(server)
    prompt = long_prompt(server.model)
    with step(console, f"Asking {len(prompt):,} tokens, cold"):
        cold = client.complete(prompt)
    return ask_again(console, server, cold)


def ask_again(console: Console, server: Server, cold: Answer) -> Side:
    """``REPEATS`` times what the server has answered before."""
    client, prompt = Client(server.url, server.model.name), long_prompt(server.model)
    before = server.metric(RESTORED)
    with step(console, f"Asking the same again, {REPEATS} times"):
        warm = [client.complete(prompt) for _ in range(REPEATS)]
    return Side(cold, warm, round((server.metric(RESTORED) - before) / REPEATS))


def ask_once(console: Console, server: Server, before: Side, which: str) -> Side:
    """The long prompt to a server that never saw it; what it has is what another left on disk or in Redis."""
    client = first_word(server)
    restored = server.metric(RESTORED)
    with step(console, f"Asking the same of the {which} server"):
        answer = client.complete(long_prompt(server.model))
    return Side(before.cold, [answer], round(server.metric(RESTORED) - restored))


def table(ram: Side, disk: Side, shared: Side, device: Side) -> Table:
    shown = Table(title="One prompt, asked again: SmolLM2-135M on vLLM's CPU build")
    shown.add_column("", no_wrap=True)
    for column in ("prompt tokens", "TTFT", "tokens restored", "speed-up", "same text"):
        shown.add_column(column, justify="right")

    def row(name: str, side: Side, ttft_s: float, restored: str, same: bool | None) -> None:
        speed_up = f"{side.cold.ttft_s / ttft_s:.1f} ×" if same is not None else ""
        text = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[same]
        shown.add_row(
            name, f"{side.cold.prompt_tokens:,}", f"{ttft_s:.3f} s", restored, speed_up, text
        )

    row("cold: computed", ram, ram.cold.ttft_s, "", None)
    row("kvstow from RAM", ram, ram.ttft_s, f"{ram.restored_tokens:,}", ram.identical)
    row("from disk, restarted", disk, disk.ttft_s, f"{disk.restored_tokens:,}", disk.identical)
    row(
        "from Redis, shared", shared, shared.ttft_s, f"{shared.restored_tokens:,}", shared.identical
    )
    row("vLLM prefix cache", device, device.ttft_s, "", device.identical)
    return shown


def report(ram: Side, disk: Side, shared: Side, device: Side) -> dict[str, Any]:
    def restored(side: Side) -> dict[str, Any]:
        return {
            "ttft_s": side.ttft_s,
            "restored_tokens": side.restored_tokens,
            "identical": side.identical,
        }

    return {
        "prompt_tokens": ram.cold.prompt_tokens,
        "cold": {"ttft_s": ram.cold.ttft_s},
        "ram": restored(ram),
        "disk_restart": restored(disk),
        "shared": restored(shared),
        "device_prefix": {"ttft_s": device.ttft_s},
    }


def run(console: Console, *, kvstow: bool) -> int:
    with step(console, "Preparing SmolLM2-135M-Instruct"):
        models.smollm2()
    shutil.rmtree(DISK, ignore_errors=True)
    off = "its prefix cache off"
    with redis(console) as remote:
        both = DISK_ENVIRONMENT | remote
        with served(console, "ram", off, both, prefix_caching=False, kvstow=kvstow) as server:
            ram = ask(console, server)
        with served(
            console, "disk", f"again, {off}", DISK_ENVIRONMENT, prefix_caching=False, kvstow=kvstow
        ) as server:
            disk = ask_once(console, server, ram, "restarted")
        with served(
            console, "shared", "a second server", remote, prefix_caching=True, kvstow=kvstow
        ) as server:
            shared = ask_once(console, server, ram, "second")
            device = ask_again(console, server, ram.cold)
    shutil.rmtree(DISK, ignore_errors=True)
    OUT.mkdir(exist_ok=True)
    (OUT / "demo.json").write_text(json.dumps(report(ram, disk, shared, device), indent=2) + "\n")
    console.print()
    console.print(table(ram, disk, shared, device))
    console.print(
        "The last line is vLLM's own cache while it still holds the prompt. With your vLLM: see README.md."
    )
    console.print(
        f"Results: {OUT / 'demo.json'}", f"Logs: {OUT}/demo-server-*.log", sep="\n", soft_wrap=True
    )
    for side, where in ((ram, "ram"), (disk, "disk"), (shared, "shared")):
        if not side.restored_tokens or not side.identical:
            what = "the text differs" if side.restored_tokens else "kvstow restored no token"
            console.print(
                f"[red]error:[/red] {what}. Log: {OUT / f'demo-server-{where}.log'}", soft_wrap=True
            )
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="The same prompt cold and warm through kvstow."
    )
    parser.add_argument(
        "--no-kvstow", action="store_true", help="without kvstow, to try the demo itself"
    )
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
