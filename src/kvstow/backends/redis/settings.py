"""Settings of the Redis tier."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvstow.backends.redis.address import Address, parse_address
from kvstow.fields.codec import RAW, Codec
from kvstow.fields.kinds import SecretText, Size, Threads

DEFAULT_PART_BYTES: Final = 5 << 20  # a chunk of 4 MiB and its header are one value


class RedisSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Redis or Valkey tier: a server that several engines, on several hosts, share."""

    url: Annotated[
        SecretText | None,
        Meta(
            description="`redis://`, `rediss://` (TLS) or `unix://`, with user and password percent-encoded: "
            "`redis://user:password@host:6379/0`. Several hosts, with commas between them, for Sentinels or a "
            "Cluster's nodes. Unset: no Redis tier."
        ),
    ] = None
    topology: Annotated[
        Literal["single", "sentinel", "cluster"],
        Meta(
            description="What the URL's hosts are: a server, Sentinels that know it, or nodes of a Cluster."
        ),
    ] = "single"
    sentinel_service: Annotated[str, Meta(description="What the Sentinels call the server.")] = (
        "mymaster"
    )
    sentinel_username: Annotated[
        str | None, Meta(description="User at the Sentinels; the URL's is the server's.")
    ] = None
    sentinel_password: Annotated[
        SecretText | None, Meta(description="Password at the Sentinels; the URL's is the server's.")
    ] = None
    tls_ca: Annotated[
        str | None,
        Meta(
            description="File of the authorities that the server's certificate may be of. Unset: the system's."
        ),
    ] = None
    tls_cert: Annotated[str | None, Meta(description="File of the client's certificate.")] = None
    tls_key: Annotated[str | None, Meta(description="File of the client's key.")] = None
    tls_check_hostname: Annotated[
        bool, Meta(description="The server's certificate must be of the host's name in the URL.")
    ] = True
    prefix: Annotated[
        str,
        Meta(
            description="Begins the name of every key. Engines share what they store under the same prefix."
        ),
    ] = "kvstow:"
    ttl: Annotated[
        Annotated[int, Meta(ge=1, le=10**9)] | None,
        Meta(description="Seconds after which a chunk is gone. Unset: until the server evicts it."),
    ] = None
    part_size: Annotated[
        Size,
        Meta(
            description="What is larger is stored in parts of this size; it must be below the server's "
            "proto-max-bulk-len (512MiB unless changed)."
        ),
    ] = DEFAULT_PART_BYTES
    write_limit: Annotated[
        Size | None,
        Meta(
            description="The most that is written, a second, by this engine; chunks beyond are not stored this time. "
            "Keeps the network free for reading. Unset: no limit."
        ),
    ] = None
    timeout_ms: Annotated[
        int,
        Meta(
            ge=1, le=60_000, description="The longest that a command may take, its bytes included."
        ),
    ] = 2000
    connect_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="The longest that connecting to a server may take.")
    ] = 1000
    codec: Codec = RAW
    threads: Threads = 4

    @property
    def address(self) -> Address:
        """The address in ``url``. Raises ValueError, whose text never has a password."""
        return parse_address(self.url.reveal() if self.url else "", self.topology)

    @property
    def timeout_s(self) -> float:
        return self.timeout_ms / 1e3

    @property
    def connect_timeout_s(self) -> float:
        return self.connect_timeout_ms / 1e3
