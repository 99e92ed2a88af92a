"""The Redis tier against plain sockets that move the same bytes, same server, sides alternating,
medians.

Raw is GET and SET of whole frames over blocking sockets, each thread one socket and one slot, nothing else. The tier
goes through redis-py, which copies each value several times. It keeps to its time limits, writes envelopes, splits what
is larger than ``part_size``, and verifies the checksum of a frame that it reads.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.over_client import (
    DEPTH,
    FIRST_ROUNDS_DROPPED,
    SIZES_MIB,
    WAYS,
    Tier,
    Work,
    frames,
    timed,
)
from bench.report import command
from kvstow import frame
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.redis.store import RedisStore
from kvstow.fields.values import Secret
from kvstow.runtime import SystemClock, ThreadExecutor
from tests.rigs.redis_server import RedisServer, program

ROUND_BYTES: Final = 256 << 20
ROUNDS: Final = 9


class Raw:
    """One socket. SET and GET of whole values."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, chunk: int, slot: memoryview) -> None:
        name = b"raw:%d" % chunk
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(slot))
        left: list[Any] = [memoryview(head), slot, memoryview(b"\r\n")]
        while left:
            sent = self._sock.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]
        assert self._sock.recv(64) == b"+OK\r\n"

    def get(self, chunk: int, slot: memoryview) -> None:
        name = b"raw:%d" % chunk
        self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        expected = b"$%d\r\n" % len(slot)
        head = self._sock.recv(len(expected), socket.MSG_WAITALL)
        assert head == expected
        at = 0
        while at < len(slot):
            at += self._sock.recv_into(slot[at:])
        assert self._sock.recv(2, socket.MSG_WAITALL) == b"\r\n"

    def close(self) -> None:
        self._sock.close()


def measure(server: RedisServer, mib: int, rounds: int) -> dict[str, float]:
    """GB/s of both sides and ways for frames of ``mib`` MiB, and the tier's shares of raw."""
    group, slots = frames(mib)
    chunks = ROUND_BYTES // group.frame_bytes
    store, executor = _open(server), ThreadExecutor("bench", threads=DEPTH)
    raw, tier = [Raw(server.port) for _ in range(DEPTH)], Tier(store, group)
    took: dict[str, list[float]] = {f"{who}_{way}": [] for who in ("raw", "tier") for way in WAYS}

    def run(name: str, works: Sequence[Work]) -> None:
        took[name].append(timed(executor, works, slots, chunks))

    for round_ in range(rounds + FIRST_ROUNDS_DROPPED):
        sides = ("raw", "tier") if round_ % 2 else ("tier", "raw")
        for way in ("put", "get"):
            for side in sides:
                works = [getattr(raw[i] if side == "raw" else tier, way) for i in range(DEPTH)]
                run(f"{side}_{way}", works)
                # each side writes into an emptied server; frames of their own are read
                if way == "put":
                    server.ask("FLUSHALL", "SYNC")
            if way == "put":
                for chunk in range(chunks):
                    frame.seal(slots[0], tier.key(chunk), group, 32, b"", 0.0)
                    tier.put(chunk, slots[0])
                    raw[0].put(chunk, slots[0])
        server.ask("FLUSHALL", "SYNC")
    for one in raw:
        one.close()
    executor.close(5.0)
    store.close()
    result = {
        f"{name}_gb_s": chunks
        * group.frame_bytes
        / 1e9
        / statistics.median(times[FIRST_ROUNDS_DROPPED:])
        for name, times in took.items()
    }
    return result | {
        f"{way}_over_raw": result[f"tier_{way}_gb_s"] / result[f"raw_{way}_gb_s"] for way in WAYS
    }


def _open(server: RedisServer) -> RedisStore:
    return RedisStore(RedisSettings(url=Secret(server.url)), SystemClock())


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """``{"redis":

    {"get_over_raw": ..., "put_over_raw": ..., "mib_4": {...}}}``: the least of the sizes, and each.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            sizes = {f"mib_{mib}": measure(server, mib, rounds) for mib in SIZES_MIB}
        finally:
            server.kill()
    least = {
        f"{way}_over_raw": min(size[f"{way}_over_raw"] for size in sizes.values()) for way in WAYS
    }
    shape = {"depth": DEPTH, "rounds": rounds, "server": Path(program() or "").name}
    return {"redis": {**least, **sizes, **shape}}


def table(result: dict[str, Any]) -> Table:
    """The result for people."""
    redis = result["redis"]
    title = f"{redis['server']} on loopback, {redis['depth']} chunks at a time, GB/s"
    view = Table(title=title, title_justify="left")
    for column in ("chunk", "get raw", "tier", "tier/raw", "put raw", "tier", "tier/raw"):
        view.add_column(column, justify="right")
    for mib in SIZES_MIB:
        size = redis[f"mib_{mib}"]
        cells = [
            size[name]
            for way in WAYS
            for name in (f"raw_{way}_gb_s", f"tier_{way}_gb_s", f"{way}_over_raw")
        ]
        view.add_row(f"{mib} MiB", *(f"{cell:.2f}" for cell in cells))
    return view


def main() -> None:
    command(__doc__, "redis", ROUNDS, run, table)


if __name__ == "__main__":
    main()
