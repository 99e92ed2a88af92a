"""The Mooncake tier against its client alone, moving the same bytes with the same store; medians.

Master and lending process are on loopback, bytes go over TCP. The client alone is its ``get_into``
and ``put_from`` on registered slots, which wait in a busy loop: on few cores they hold up their own
transfers, each run as it happens. The tier uses the client's ranged calls, which don't. It also
keeps deletes and reads of a key apart, sees that nothing follows the bytes that it reads, and
verifies the frame's checksum.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.over_client import ROUND_BYTES, Client, compare, table
from bench.report import command
from kvstow.runtime import SystemClock
from tests.rigs.mooncake_server import MooncakeServer, missing, quiet

ROUNDS: Final = 5


class Alone(Client):
    """Mooncake's client. The slots are registered: the tier has seen them."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, chunk: int, slot: memoryview) -> None:
        assert self._client.put_from(f"raw/{chunk}", _address(slot), len(slot)) == 0

    def get(self, chunk: int, slot: memoryview) -> None:
        assert self._client.get_into(f"raw/{chunk}", _address(slot), len(slot)) == len(slot)

    def delete(self, chunk: int) -> None:
        self._client.remove(f"raw/{chunk}", True)


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """``{"mooncake":

    {"get_over_client": ..., "put_over_client": ..., "mib_4": {...}}}``: the least, and each size.
    """
    if (why := missing()) is not None:
        return {"mooncake": {"skipped": why}}
    quiet()
    from kvstow.backends.mooncake.connect import connect
    from kvstow.backends.mooncake.options import MooncakeOptions
    from kvstow.backends.mooncake.store import MooncakeStore

    with tempfile.TemporaryDirectory() as folder:
        server = MooncakeServer(Path(folder), 4 * ROUND_BYTES).start()
        try:
            options = MooncakeOptions(server.master)
            client, replicas = connect(options)
            store = MooncakeStore(options, SystemClock(), lambda: (client, replicas))
            found = compare(Alone(client), store, rounds)
            store.close()
        finally:
            server.kill()
    return {"mooncake": found}


def main() -> None:
    command(
        __doc__,
        "mooncake",
        ROUNDS,
        run,
        partial(table, part="mooncake", title="Mooncake on loopback, TCP"),
    )


if __name__ == "__main__":
    main()
