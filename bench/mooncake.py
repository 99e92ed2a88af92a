"""Compares the Mooncake tier with its client alone: medians for the same bytes and store.

Master and lending process are on loopback, bytes go over TCP. The client alone is its ``get_into``
and ``put_from`` on registered slots. These wait in a busy loop, and on few cores they delay their
own transfers. The tier uses the client's calls by ranges, which sleep. It also keeps deletes and
reads of a key apart, checks that the value ends where its frame does, and verifies the frame's
checksum.
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
    """Mooncake's client alone. The tier has registered the slots before."""

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
    """Returns ``{"mooncake": {...}}`` with ``get_over_client`` and ``put_over_client``.

    These are the least ratios of all sizes; the figures of each size are under ``mib_<n>``.
    """
    why = missing()
    if why is not None:
        return {"mooncake": {"skipped": why}}
    quiet()
    from kvstow.backends.mooncake.connect import connect
    from kvstow.backends.mooncake.settings import MooncakeSettings
    from kvstow.backends.mooncake.store import MooncakeStore

    with tempfile.TemporaryDirectory() as folder:
        server = MooncakeServer(Path(folder), 4 * ROUND_BYTES).start()
        try:
            options = MooncakeSettings(master=server.master)
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
