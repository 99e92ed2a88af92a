"""Options of a Mooncake store, and variables for its client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvstow.key import ChunkKey

P2P: Final = "P2PHANDSHAKE"  # Mooncake's word for: without a metadata server


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The options of a ``MooncakeStore`` and its client.

    Attributes:
        master: Host and port of the master, ``host:port``.
        metadata: Where clients find each other.
        protocol: How bytes move.
        device: RDMA devices, with commas between them; empty: all.
        local_hostname: What other clients are told as this client's address.
        segment_bytes: Memory of this process that it lends to the store, for chunks of any engine.
        buffer_bytes: The client's own buffer, for values whose memory is not registered.
        prefix: Begins every name.
        replicas: Copies of each value, on different clients.
        timeout_s: Limit of a question to the master, and of a transfer in which nothing moves.
        connect_timeout_s: Limit of the trial start in a child process.
    """

    master: str
    metadata: str = P2P
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    local_hostname: str = "127.0.0.1"
    segment_bytes: int = 0
    buffer_bytes: int = 64 << 20
    prefix: str = "kvstow/"
    replicas: int = 1
    timeout_s: float = 2.0
    connect_timeout_s: float = 10.0

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
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
