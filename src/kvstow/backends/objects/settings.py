"""Settings of the object store tier."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from kvstow.backends.objects.bucket import LOOPBACK, Bucket, parse_url
from kvstow.fields.codec import RAW, Codec
from kvstow.fields.kinds import Size, Threads

DEFAULT_PART_BYTES: Final = 8 << 20


class ObjectsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object store tier: a bucket that several engines share, on several hosts too.

    Credentials come from where each cloud's tools find them, from the environment first.
    """

    url: Annotated[
        str | None,
        Meta(
            description="`s3://bucket/prefix` (S3 and what speaks its protocol), `gs://bucket/prefix` (Google Cloud "
            "Storage), `az://container/prefix` (Azure Blob) or `file:///directory`. Unset: no object store tier."
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(
            description="URL of the store: `https://minio.internal:9000`. Unset: its cloud's own."
        ),
    ] = None
    region: Annotated[
        str | None, Meta(description="Region of an S3 bucket. Unset: `AWS_REGION`, else us-east-1.")
    ] = None
    addressing: Annotated[
        Literal["path", "virtual"],
        Meta(
            description="Where a request to S3 has the bucket's name: in the path, or, with "
            "`virtual`, before the host's name. With `virtual`, `endpoint` begins with that name."
        ),
    ] = "path"
    profile: Annotated[
        str | None,
        Meta(
            description="Profile in the AWS tools' files whose credentials are used. It needs "
            "boto3. Unset: none."
        ),
    ] = None
    account: Annotated[
        str | None,
        Meta(description="Azure's storage account. Unset: `AZURE_STORAGE_ACCOUNT_NAME`."),
    ] = None
    anonymous: Annotated[
        bool, Meta(description="Send unsigned requests, to a store that asks for no credentials.")
    ] = False
    allow_http: Annotated[
        bool,
        Meta(description="Send bytes and signatures unencrypted to other hosts than this one."),
    ] = False
    ca_file: Annotated[
        str | None,
        Meta(description="File with a certificate authority that is trusted beside the system's."),
    ] = None
    part_size: Annotated[
        Size, Meta(description="Longer chunks are read in parts of this size, at the same time.")
    ] = DEFAULT_PART_BYTES
    parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Requests of one lookup, or for one chunk in parts, at the same time.",
        ),
    ] = 32
    timeout_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="The longest that a request may take, its bytes included. A call, its "
            "retries included, takes at most twice this.",
        ),
    ] = 4000
    connect_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="The longest that connecting may take.")
    ] = 1000
    retries: Annotated[
        int,
        Meta(
            ge=0, le=10, description="How often a failed request is repeated before the call fails."
        ),
    ] = 2
    codec: Codec = RAW
    threads: Threads = 16

    @property
    def bucket(self) -> Bucket:
        """The bucket that ``url`` names. Raises ValueError if it names none."""
        return parse_url(self.url or "")

    @property
    def allows_http(self) -> bool:
        """Whether bytes may go unencrypted: to this host always, elsewhere by ``allow_http``."""
        host = urlsplit(self.endpoint).hostname if self.endpoint else None
        return self.allow_http or host in LOOPBACK

    @property
    def timeout_s(self) -> float:
        return self.timeout_ms / 1e3

    @property
    def connect_timeout_s(self) -> float:
        return self.connect_timeout_ms / 1e3
