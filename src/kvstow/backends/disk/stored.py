"""Where the block hashes of the chunks in a directory begin, and where vLLM's would here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from kvstow.backends.disk.other_roots import roots_in
from kvstow.backends.result import Result, ok, warning

SEED: Final = "PYTHONHASHSEED"
ROOT: Final = "block hash root"  # as the connector calls it in namespace.json
DEFAULT: Final = "vLLM's default"
SEEDED: Final = "seed "


def check_stored(path: str, seed: str | None) -> Iterator[Result]:
    """``seed``: PYTHONHASHSEED's value here."""
    own = DEFAULT if seed is None else f"{SEEDED}{seed}"
    if not (roots := roots_in(path, ROOT)):
        return
    shown = " and ".join(map(_said, roots))
    if own in roots:
        yield ok("stored chunks", f"{path}: stored with {shown}; here with {_said(own)}")
        return
    found = f"{path}: what is there was stored with {shown}; with {_said(own)}, as here, none of it is found"
    fix = f"give {SEED} the value that this model's chunks were stored with"
    if len(roots) == 1:
        fix = f"unset {SEED}" if roots[0] == DEFAULT else f"export {shlex.quote(_said(roots[0]))}"
    yield warning(
        "stored chunks",
        f"{found}, and vLLM does not start if any is of its model and --prefix-caching-hash-algo",
        f"if so, {fix}; or, if it was changed on purpose, remove those chunks: kvstow disk ls and clear --namespace",
    )


def _said(root: str) -> str:
    return f"{SEED} unset" if root == DEFAULT else f"{SEED}={root.removeprefix(SEEDED)}"
