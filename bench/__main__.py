"""``make bench``: every part in turn, merged into out/bench.json.

A part is a module of this package with ``run() -> dict``. A part that is run alone (``--only
copy``) replaces its figures and leaves the others of an earlier run on the same machine.
``machine`` in the results has the processor's model and flags. Compare only figures of one run on
one quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.machine import machine

OUT: Final = Path(__file__).resolve().parent.parent / "out" / "bench.json"
PARTS: Final = (
    "copy",
    "lookup",
    "hooks",
    "hook_share",
    "ttft",
    "disk",
    "direct",
    "redis",
    "objects",
    "mooncake",
    "gil",
    "slow_store",
    "codec",
)


def merge(into: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` over ``into``, by section, neither changed."""
    merged = dict(into)
    for key, value in new.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
        )
    return merged


def headlines(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted name and value of every number, in order."""
    found: list[tuple[str, Any]] = []
    for key, value in result.items():
        found += (
            headlines(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else [(f"{prefix}{key}", value)]
        )
    return found


def earlier(out: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The results in ``out``, or none where another processor gave them."""
    if not out.exists():
        return {}
    found: dict[str, Any] = json.loads(out.read_text())
    same = found.get("machine", {}).get("model") == here["model"]
    return found if same else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description="What kvstow costs and gains on this machine."
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="this part alone; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    console = Console()
    here = machine()
    result = earlier(arguments.out, here) if arguments.only else {}
    began_s = time.monotonic()
    for name in arguments.only or PARTS:
        started = time.monotonic()
        with console.status(f"measuring {name}"):
            part = importlib.import_module(f"bench.{name}").run()
        console.print(f"{name}  {time.monotonic() - started:.0f} s", highlight=False)
        for key, value in headlines(part):
            console.print(
                f"  {key} = {value:.4g}" if isinstance(value, float) else f"  {key} = {value}"
            )
        result = merge(result, part)
    result["machine"] = here
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"{time.monotonic() - began_s:.0f} s in all, on {here['model']}", highlight=False)
    console.print(f"Results: {arguments.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
