"""What an object store is given, and how its URL is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from kvstow.key import ChunkKey

Kind = Literal["s3", "gcs", "azure", "file", "memory"]

SCHEMES: Final[dict[str, Kind]] = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "file": "file",
    "memory": "memory",
}
DEFAULT_PART_BYTES: Final = 8 << 20
MIN_PART_BYTES: Final = 1 << 20
MAX_PART_BYTES: Final = 1 << 30
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._/=+-]*")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where objects are. ``name``: of the bucket or container; the directory of ``file``. ``prefix`` without slashes at
    its ends."""

    kind: Kind
    name: str
    prefix: str = ""

    def path_of(self, key: ChunkKey) -> str:
        """``<prefix>/<namespace>/<a>/<digest>.kv``, where ``a`` is the digest's first two hex digits: made of digests
        only. So many directories keep a file system's small, and let a store spread the names over its servers."""
        digest = key.digest().hex()
        return f"{self.prefix}{'/' if self.prefix else ''}{key.namespace.hex()}/{digest[:2]}/{digest}.kv"


@dataclass(frozen=True, slots=True)
class ObjectsOptions:
    """``timeout_s`` bounds one request, its bytes included; a call, retries included, takes at most twice that.

    No credentials are here: obstore finds them where each cloud's tools do.
    """

    bucket: Bucket
    endpoint: str | None = None
    region: str | None = None
    virtual_host: bool = False
    profile: str | None = None
    account: str | None = None
    anonymous: bool = False
    allow_http: bool = False
    ca_file: str | None = None
    part_bytes: int = DEFAULT_PART_BYTES
    parallel: int = 32  # requests that one call has under way
    timeout_s: float = 4.0
    connect_timeout_s: float = 1.0
    retries: int = 2

    @property
    def http(self) -> bool:
        """Whether bytes may go unencrypted: as told, or to this host."""
        host = urlsplit(self.endpoint).hostname if self.endpoint else None
        return self.allow_http or host in LOOPBACK


def parse_url(url: str) -> Bucket:
    """``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, ``file:///directory``.

    Raises ValueError, whose message has no part of the URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("it is no URL") from None
    kind = SCHEMES.get(parts.scheme)
    if kind is None:
        raise ValueError(
            "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it has no user, password, ? or #: credentials come from the environment")
    if kind in ("file", "memory"):
        path = unquote(parts.path)
        if parts.netloc or (kind == "file" and (len(path) < 2 or ".." in path.split("/"))):
            raise ValueError("expected file:///directory, an absolute path")
        return Bucket(kind, path)
    if not _BUCKET.fullmatch(parts.netloc):
        raise ValueError("expected the name of a bucket after ://")
    prefix = parts.path.strip("/")
    if not _PREFIX.fullmatch(prefix) or "//" in prefix or {".", ".."} & set(prefix.split("/")):
        raise ValueError("expected a prefix of letters, digits and . _ / = + -")
    return Bucket(kind, parts.netloc, prefix)
