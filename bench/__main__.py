"""``make bench``: every part in turn, merged into out/bench.json.

A part is a module of this package with ``run() -> dict``. A part that is run alone (``--only copy``) replaces its
figures and leaves the others of an earlier run. Compare only figures of one run on one quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

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
    result: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.only and arguments.out.exists() else {}
    )
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
    result["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"Results: {arguments.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
