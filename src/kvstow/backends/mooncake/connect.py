"""Starting Mooncake's client without letting it stop the process.

Its ``setup`` holds the interpreter's lock while it waits for the master: 4 s here where nobody listens, 90 s with the
client's own limits, and meanwhile no thread of the engine runs. So whether it would succeed is tried first: the
master's port, then the whole of ``setup`` in a child process, which can be waited for with a limit and ended.

    python -m kvstow.backends.mooncake.connect    the child: arguments of ``setup`` as JSON, on its standard input
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Container
from typing import Any, Final

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvstow.backends.mooncake.listen import listening, only_to
from kvstow.backends.mooncake.options import PORTS, MooncakeOptions
from kvstow.errors import StoreUnavailable

logger = logging.getLogger("kvstow")

PORT_TIMEOUT_S: Final = 1.0
CHILD_BUFFER_BYTES: Final = 16 << 20
LISTENS_ON: Final = {"tcp": 2, "rdma": 1}  # ports, at least


GLOG_LEVEL: Final = "_ZN3fLI17FLAGS_minloglevelE"  # glog's FLAGS_minloglevel, an int
FATAL: Final = 3


def _hush() -> None:
    """The client's log goes to standard error: each step and, while the master is away, a line a second. What matters
    reaches kvstow's log by the results of calls. The variable that glog has for this is overridden by the client."""
    with open("/proc/self/maps") as maps, contextlib.suppress(OSError, ValueError, StopIteration):
        path = next(line.split()[-1] for line in maps if "libglog" in line)
        ctypes.c_int.in_dll(ctypes.CDLL(path), GLOG_LEVEL).value = FATAL


_hush()
if not hasattr(MooncakeDistributedStore, "batch_put_session_start"):
    raise ImportError("it is older than 0.3.13.post1")


def connect(options: MooncakeOptions, ports: range = PORTS) -> Any:
    """A client that is connected, and listens on some of ``ports``. Raises ``StoreUnavailable``, after
    ``connect_timeout_s`` and a second at most."""
    try:
        socket.create_connection(options.address, timeout=PORT_TIMEOUT_S).close()
    except OSError as error:
        raise StoreUnavailable(f"Mooncake's master {options.master}: {error}") from error
    _rehearse(options)
    before = listening()
    client = MooncakeDistributedStore()
    code = client.setup(*_arguments(options, options.segment_bytes, options.buffer_bytes))
    if code:
        raise StoreUnavailable(
            f"Mooncake's client can't start (code {code}): master {options.master}"
        )
    _narrow(options, ports, before)
    return client


def _narrow(options: MooncakeOptions, ports: range, before: Container[int]) -> None:
    """Let in to the client, which wasn't there ``before``, only what is sent to ``local_hostname`` or to loopback."""
    try:
        closed = only_to(options.local_hostname, ports, before)
    except OSError as error:
        logger.warning(
            "Mooncake's client listens on every interface, and this kernel can't filter that: %s",
            error,
        )
        return
    if closed is None:
        return
    logger.info(
        "Mooncake's client listens on every interface: on its ports %s only what is sent to %s or loopback is let in",
        closed,
        options.local_hostname,
    )
    if len(closed) < LISTENS_ON[options.protocol]:
        logger.warning(
            "Mooncake's client listens on every interface, on ports that are not all between %d and %d: whoever "
            "reaches the others is let in",
            ports[0],
            ports[-1],
        )


def replicas(count: int) -> Any:
    config = ReplicateConfig()
    config.replica_num = count
    return config


def _arguments(options: MooncakeOptions, segment_bytes: int, buffer_bytes: int) -> tuple[Any, ...]:
    return (
        options.local_hostname,
        options.metadata,
        segment_bytes,
        buffer_bytes,
        options.protocol,
        options.device,
        options.master,
    )


def _rehearse(options: MooncakeOptions) -> None:
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
            f"Mooncake's client didn't start within {options.connect_timeout_s:g} s: does {options.master} answer, and "
            f"{options.metadata}?"
        ) from error
    if child.returncode:
        raise StoreUnavailable(
            f"Mooncake's client can't start (exit {child.returncode}): master {options.master}, metadata "
            f"{options.metadata}, protocol {options.protocol}, device {options.device or 'any'}"
        )


def main() -> int:
    client = MooncakeDistributedStore()
    if client.setup(*json.loads(sys.stdin.read())):
        return 1
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
