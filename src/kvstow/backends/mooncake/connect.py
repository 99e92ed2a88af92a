"""Starts Mooncake's client without letting it stop the process.

Its ``setup`` holds the interpreter's lock while it waits for the master: 4 s where no master
listens, 90 s with the client's own limits. Meanwhile no thread of the engine runs. So kvstow first
tries whether it would succeed: the master's port, then the whole ``setup`` in a child process,
which can be waited for with a limit and ended.

    python -m kvstow.backends.mooncake.connect    the child; arguments of ``setup`` come as JSON on
                                                  its standard input
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from typing import Any, Final

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.errors import StoreUnavailable

logger = logging.getLogger("kvstow")

PORT_TIMEOUT_S: Final = 1.0
CHILD_BUFFER_BYTES: Final = 16 << 20

if not hasattr(MooncakeDistributedStore, "batch_put_session_start"):
    raise ImportError("it is older than 0.3.13.post1")


def connect(options: MooncakeSettings) -> tuple[Any, Any]:
    """Returns a connected client, and the configuration of replicas for its writes.

    Raises ``StoreUnavailable``, after ``connect_timeout_s`` and a second at most.
    """
    try:
        socket.create_connection(options.address, timeout=PORT_TIMEOUT_S).close()
    except OSError as error:
        raise StoreUnavailable(f"Mooncake's master {options.master}: {error}") from error
    _try_in_child(options)
    client = MooncakeDistributedStore()
    code = client.setup(*_arguments(options, options.segment_size, options.buffer_size))
    if code:
        raise StoreUnavailable(
            f"Mooncake's client can't start (code {code}): master {options.master}"
        )
    logger.warning(
        "Mooncake's client listens on two ports of every interface, whatever "
        "mooncake.local_hostname is. Who reaches them may read and write the KV in this process: "
        "see docs/how-to/mooncake.md for how to confine it"
    )
    replicas = ReplicateConfig()
    replicas.replica_num = options.replicas
    return client, replicas


def _arguments(options: MooncakeSettings, segment_bytes: int, buffer_bytes: int) -> tuple[Any, ...]:
    return (
        options.local_hostname,
        options.metadata,
        segment_bytes,
        buffer_bytes,
        options.protocol,
        options.device or "",
        options.master,
    )


def _try_in_child(options: MooncakeSettings) -> None:
    """Runs ``setup`` in a child process. Raises ``StoreUnavailable`` if it fails there."""
    command = [sys.executable, "-m", "kvstow.backends.mooncake.connect"]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(_arguments(options, 0, CHILD_BUFFER_BYTES)).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=options.connect_timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StoreUnavailable(
            f"Mooncake's client didn't start within {options.connect_timeout_s:g} s: does "
            f"{options.master} answer, and {options.metadata}?"
        ) from error
    if child.returncode:
        raise StoreUnavailable(
            f"Mooncake's client can't start (exit {child.returncode}): master {options.master}, "
            f"metadata {options.metadata}, protocol {options.protocol}, "
            f"device {options.device or 'any'}"
        )


def main() -> int:
    client = MooncakeDistributedStore()
    if client.setup(*json.loads(sys.stdin.read())):
        return 1
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
