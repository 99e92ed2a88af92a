"""Settings of the Mooncake tier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvstow.fields.codec import RAW, Codec
from kvstow.fields.kinds import Size, Threads
from kvstow.key import ChunkKey

P2P: Final = "P2PHANDSHAKE"  # Mooncake's word for: without a metadata server
DEFAULT_BUFFER_BYTES: Final = 64 << 20


class MooncakeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Mooncake tier: memory that processes on several hosts lend each other, over RDMA or TCP."""

    master: Annotated[
        str | None,
        Meta(
            description="Host and port of `mooncake_master`: `master.internal:50051`. Unset: no Mooncake tier."
        ),
    ] = None
    metadata: Annotated[
        str,
        Meta(
            description="Where clients find each other: `http://host:8080/metadata`, `etcd://host:2379`, or "
            "`P2PHANDSHAKE`, from each other. The same for all clients of a master."
        ),
    ] = P2P
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="How bytes move.")] = "tcp"
    device: Annotated[
        str | None,
        Meta(description="RDMA devices, with commas between them: `mlx5_0,mlx5_1`. Unset: all."),
    ] = None
    local_hostname: Annotated[
        str,
        Meta(
            description="Address of this host that other clients are told. Where this engine "
            "lends memory they must reach it. The client listens on every interface all the same."
        ),
    ] = "127.0.0.1"
    segment_size: Annotated[
        Size,
        Meta(
            description="Memory that this engine lends to the store, beside `memory.size`. Chunks "
            "in it are gone when the engine ends. 0: only other processes lend memory."
        ),
    ] = 0
    buffer_size: Annotated[
        Size,
        Meta(
            description="Memory of the client for values that are not in the pool, such as those "
            "of a codec. It must hold several chunks."
        ),
    ] = DEFAULT_BUFFER_BYTES
    prefix: Annotated[
        str,
        Meta(
            description="Begins the name of every key. Engines share what they store under the same prefix."
        ),
    ] = "kvstow/"
    replicas: Annotated[
        int, Meta(ge=1, le=16, description="Copies of each chunk, on different clients.")
    ] = 1
    timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=60_000,
            description="The longest wait for the master and, over TCP, for a byte to move.",
        ),
    ] = 2000
    connect_timeout_ms: Annotated[
        int, Meta(ge=1000, le=120_000, description="The longest that starting the client may take.")
    ] = 10_000
    codec: Codec = RAW
    threads: Threads = 4

    @property
    def timeout_s(self) -> float:
        return self.timeout_ms / 1e3

    @property
    def connect_timeout_s(self) -> float:
        return self.connect_timeout_ms / 1e3

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = (self.master or "").rpartition(":")
        return host.strip("[]"), int(port)

    def variables(self) -> Mapping[str, str]:
        """Returns environment variables that Mooncake's client reads when it is loaded.

        Its own limits are 30 s for a question, 30 s for a transfer that stands still, and 90 s to
        connect. It logs every step to standard error unless told otherwise.
        """
        return {
            "MC_RPC_TIMEOUT_MS": str(round(self.timeout_s * 1e3)),
            "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(self.timeout_s)),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_STORE_CLIENT_METRIC": "0",
            "MC_LOG_LEVEL": "ERROR",
        }

    def name_of(self, key: ChunkKey) -> str:
        return self.prefix + key.digest().hex()
