"""Names in a data directory. They are made of digests and counters only, never of text from users or models.

::

    <path>/                            0700, made by us unless it is there
      ledger                           bytes in use, and what each process has reserved
      run/<token>.lock                 held under flock while the process <token> lives
      tmp/<token>-<n>                  being written
      quarantine/<digest>.<why>.<token>-<n>
      <namespace>/namespace.json       says what the namespace is
      <namespace>/a/b/<digest>.kv      a frame; a and b are the digest's first two hex digits

Two hex digits are 256 directories: a hundred thousand chunks are 400 in each, and listing a directory costs more
than reading an entry. What matches none of these patterns is not ours: it is never counted, moved or removed.
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
    """Path of a chunk's file, below the data directory."""
    name = digest.hex()
    return f"{namespace.hex()}/{name[0]}/{name[1]}/{name}{_SUFFIX}"


def namespace_json(namespace: bytes) -> str:
    return f"{namespace.hex()}/{NAMESPACE_JSON}"


def lock_path(token: str) -> str:
    return f"{RUN}/{token}.lock"


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def digest_of(name: str) -> bytes | None:
    """The digest that a chunk's file is named by; None: not a chunk's name."""
    return bytes.fromhex(name[:64]) if _CHUNK.fullmatch(name) else None


def owner_of_temporary(name: str) -> str | None:
    """Token of the process that made a temporary file; None: not one of ours."""
    return match[1] if (match := _TEMPORARY.fullmatch(name)) else None


def owner_of_lock(name: str) -> str | None:
    return match[1] if (match := _LOCK.fullmatch(name)) else None


def is_quarantined(name: str) -> bool:
    return _QUARANTINED.fullmatch(name) is not None
