"""What a Mooncake store is given, and what its client reads from the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvstow.key import ChunkKey

P2P: Final = "P2PHANDSHAKE"  # Mooncake's word for: without a metadata server
PORTS: Final = range(15000, 17001)  # where the client listens unless it is told otherwise
LEAST_PORT, MOST_PORT = "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"
OLD_PORTS: Final = {
    "MC_MIN_PRC_PORT": str(PORTS[0]),
    "MC_MAX_PRC_PORT": str(PORTS[-1]),
}  # an older spelling of both


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """``segment_bytes``: memory of this process that it lends to the store, for chunks of any engine.
    ``buffer_bytes``: through which go the values whose memory isn't registered."""

    master: str  # host:port
    metadata: str = P2P
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    local_hostname: str = "127.0.0.1"
    segment_bytes: int = 0
    buffer_bytes: int = 64 << 20
    prefix: str = "kvstow/"
    replicas: int = 1
    timeout_s: float = 2.0  # of a question to the master, and of a transfer in which nothing moves
    connect_timeout_s: float = 10.0

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)

    def variables(self, old_ports: Mapping[str, str] = OLD_PORTS) -> Mapping[str, str]:
        """What the client reads from the environment. Its own limits are 30 s for a question, 30 s for a transfer that
        stands still, and 90 s to connect. ``old_ports``: what ``OLD_PORTS`` names are set to."""
        return {
            "MC_RPC_TIMEOUT_MS": str(round(self.timeout_s * 1e3)),
            "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(self.timeout_s)),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_STORE_CLIENT_METRIC": "0",
            LEAST_PORT: old_ports["MC_MIN_PRC_PORT"],
            MOST_PORT: old_ports["MC_MAX_PRC_PORT"],
        }

    def name_of(self, key: ChunkKey) -> str:
        return self.prefix + key.digest().hex()


def rpc_ports(variables: Mapping[str, str]) -> range:
    """Where the client listens with these variables in force. It passes over what is no number, and over a range that
    is empty or ends among the ports of outgoing connections."""
    given = variables[LEAST_PORT], variables[MOST_PORT]
    least, most = (
        int(value) if value.isdecimal() else PORTS[end]
        for value, end in zip(given, (0, -1), strict=True)
    )
    valid = 1024 <= least <= most < 65536 and not any(
        32768 <= port < 61000 for port in (least, most)
    )
    return range(least, most + 1) if valid else PORTS
