"""Compares the object store tier with its client alone: medians for the same bytes and store.

The store is a fast fake one on loopback, in its own process (``tests.rigs.object_server``). A real
one would be slower, and hide what the tier costs. The client alone is obstore's ``get`` and ``put``
of whole frames; the bytes stay where obstore put them. The tier also takes the length before the
bytes, copies the bytes into a slot, reads frames larger than ``part_size`` in parts, and verifies
the frame's checksum.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any, Final

from bench.over_client import Client, compare, table
from bench.report import command
from kvstow.runtime import SystemClock

ROUNDS: Final = 5
BUCKET: Final = "bench"
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
}


class Alone(Client):
    """obstore."""

    def __init__(self, store: Any) -> None:
        import obstore

        self._obstore = obstore
        self._client = store._client

    def put(self, chunk: int, slot: memoryview) -> None:
        self._obstore.put(self._client, f"raw/{chunk}", slot, use_multipart=False)

    def get(self, chunk: int, slot: memoryview) -> None:
        assert len(self._obstore.get(self._client, f"raw/{chunk}").bytes()) == len(slot)

    def delete(self, chunk: int) -> None:
        self._obstore.delete(self._client, f"raw/{chunk}")


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """Returns ``{"objects": {...}}`` with ``get_over_client`` and ``put_over_client``.

    These are the least ratios of all sizes; the figures of each size are under ``mib_<n>``.
    """
    try:
        from kvstow.backends.objects.settings import ObjectsSettings
        from kvstow.backends.objects.store import ObjectsStore
    except ModuleNotFoundError:
        return {"objects": {"skipped": "obstore isn't installed: pip install 'kvstow[objects]'"}}
    os.environ.update(CREDENTIALS)
    command = [sys.executable, "-m", "tests.rigs.object_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        store = ObjectsStore(
            ObjectsSettings(url=f"s3://{BUCKET}/tier", endpoint=url), SystemClock()
        )
        try:
            found = compare(Alone(store), store, rounds)
        finally:
            store.close()
            server.kill()
    return {"objects": found}


def main() -> None:
    command(
        __doc__,
        "objects",
        ROUNDS,
        run,
        partial(table, part="objects", title="An object store on loopback"),
    )


if __name__ == "__main__":
    main()
