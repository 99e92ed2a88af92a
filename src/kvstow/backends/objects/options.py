"""Options of an object store, and the parser of its URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from kvstow.key import ChunkKey

Kind = Literal["s3", "gcs", "azure", "file"]

SCHEMES: Final[dict[str, Kind]] = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "file": "file",
}
DEFAULT_PART_BYTES: Final = 8 << 20
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


@dataclass(frozen=True, slots=True)
class ObjectsOptions:
    """The options of an ``ObjectsStore``.

    No credentials are among them: obstore finds these where each cloud's tools do.

    Attributes:
        bucket: Where the objects are.
        endpoint: URL of the store; None: the cloud's own.
        region: Region of an S3 bucket; None: the environment says it.
        virtual_host: Whether the bucket's name stands before the host's name, not in the path.
        profile: Profile of the AWS tools' files; None: credentials from the usual places.
        account: Azure's storage account; None: the environment says it.
        anonymous: Whether requests go unsigned.
        allow_http: Whether bytes may go unencrypted to other hosts than this one.
        ca_file: File of an additional certificate authority; None: only the system's.
        part_bytes: Longer objects are read in parts of this size.
        parallel: Requests of one call at the same time.
        timeout_s: Limit of one request, its bytes included. A call, its retries included, takes at
            most twice that.
        connect_timeout_s: Limit of connecting.
        retries: How often a failed request is repeated.
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
    parallel: int = 32
    timeout_s: float = 4.0
    connect_timeout_s: float = 1.0
    retries: int = 2

    @property
    def allows_http(self) -> bool:
        """Whether bytes may go unencrypted: to this host always, elsewhere by ``allow_http``."""
        host = urlsplit(self.endpoint).hostname if self.endpoint else None
        return self.allow_http or host in LOOPBACK


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
