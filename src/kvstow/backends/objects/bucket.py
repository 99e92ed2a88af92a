"""A bucket, and the parser of its URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from kvstow.key import ChunkKey

Kind = Literal["s3", "gcs", "azure", "file"]

SCHEMES: Final[dict[str, Kind]] = {"s3": "s3", "gs": "gcs", "az": "azure", "file": "file"}
MIN_PART_BYTES: Final = 1 << 20
MAX_PART_BYTES: Final = 1 << 30
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

_BUCKET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._/=+-]*")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket and a prefix in it.

    Attributes:
        kind: Which store has the bucket.
        name: Name of the bucket or container; of ``file`` the directory.
        prefix: Begins every object's name, without slashes at its ends. Empty for ``file``.
    """

    kind: Kind
    name: str
    prefix: str = ""

    def path_of(self, key: ChunkKey) -> str:
        """Returns the object's name, ``<prefix>/<namespace>/<xx>/<digest>.kv``.

        All of it but the prefix is hex digits of digests; ``xx`` are the digest's first two. They
        keep a file system's directories small, and let a store spread names over its servers.
        """
        digest = key.digest().hex()
        start = f"{self.prefix}/" if self.prefix else ""
        return f"{start}{key.namespace.hex()}/{digest[:2]}/{digest}.kv"


def parse_url(url: str) -> Bucket:
    """Parses ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``file:///directory``.

    Raises ``ValueError``, whose message repeats no part of the URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("it is no URL") from None
    kind = SCHEMES.get(parts.scheme)
    if kind is None:
        raise ValueError(
            "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
            "file:///directory"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it has no user, password, ? or #: credentials come from the environment")
    if kind == "file":
        path = unquote(parts.path)
        if parts.netloc or len(path) < 2 or ".." in path.split("/"):
            raise ValueError("expected file:///directory, an absolute path")
        return Bucket(kind, path)
    if not _BUCKET_NAME.fullmatch(parts.netloc):
        raise ValueError("expected the name of a bucket after ://")
    prefix = parts.path.strip("/")
    if not _PREFIX.fullmatch(prefix) or "//" in prefix or {".", ".."} & set(prefix.split("/")):
        raise ValueError("expected a prefix of letters, digits and . _ / = + -")
    return Bucket(kind, parts.netloc, prefix)
