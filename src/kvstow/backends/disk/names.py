"""The names in a data directory: made of digests and counters, never of text from users or models.

::

    <path>/                            0700, made by us unless it is there
      ledger                           bytes in use, and what each process has reserved
      run/<token>.lock                 held under flock while the process <token> lives
      tmp/<token>-<n>                  being written
      quarantine/<digest>.<why>.<token>-<n>
      <namespace>/namespace.json       describes the namespace, for people
      <namespace>/a/b/<digest>.kv      a frame; a and b are the digest's first two hex digits

Two hex digits make 256 directories, with 400 files in each of a hundred thousand chunks: listing a
directory costs more than reading an entry. A file that matches none of these patterns is not ours,
and is never counted, moved or removed.
"""

from __future__ import annotations

import re
from typing import Final

LEDGER: Final = "ledger"
RUN: Final = "run"
TMP: Final = "tmp"
QUARANTINE: Final = "quarantine"
NAMESPACE_JSON: Final = "namespace.json"
SCRUB_CURSOR: Final = "scrub"
OWN: Final = (LEDGER, RUN, TMP, QUARANTINE, SCRUB_CURSOR)
DIGITS: Final = "0123456789abcdef"
TOKEN_BYTES: Final = 16
DIR_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_SUFFIX: Final = ".kv"
_NAMESPACE: Final = re.compile(r"[0-9a-f]{64}")
_CHUNK: Final = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY: Final = re.compile(r"([0-9a-f]{32})-\d+")
_LOCK: Final = re.compile(r"([0-9a-f]{32})\.lock")
_QUARANTINED: Final = re.compile(r"[0-9a-f]{64}\.[a-z]+\.[0-9a-f]{32}-\d+")


def chunk_path(namespace: bytes, digest: bytes) -> str:
    """The path of a chunk's file, relative to the data directory."""
    name = digest.hex()
    return f"{namespace.hex()}/{name[0]}/{name[1]}/{name}{_SUFFIX}"


def namespace_json(namespace: bytes) -> str:
    return f"{namespace.hex()}/{NAMESPACE_JSON}"


def lock_path(token: str) -> str:
    return f"{RUN}/{token}.lock"


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def digest_of(name: str) -> bytes | None:
    """The digest that a chunk's file is named by; None if ``name`` is not a chunk's."""
    return bytes.fromhex(name[:64]) if _CHUNK.fullmatch(name) else None


def owner_of_temporary(name: str) -> str | None:
    """The token of the process that made a temporary file; None if it is no such file."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def owner_of_lock(name: str) -> str | None:
    """The token of the process that a lock file belongs to; None if it is no such file."""
    match = _LOCK.fullmatch(name)
    return match[1] if match else None


def is_quarantined(name: str) -> bool:
    return _QUARANTINED.fullmatch(name) is not None
