"""Mooncake's master absent, silent, killed or paused; its memory gone or full; wrong values.

Each of these is a miss for the engine, and nothing worse.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.errors import StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.mooncake_server import MooncakeServer
from tests.rigs.redis_server import free_port, until
from tests.store.mooncake_rig import need_mooncake, open_store
from tests.store.test_redis_faults import Node
from tests.unit.rig import key

need_mooncake()

LENT = 64 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake"), LENT).start()
    yield server
    server.kill()


class Kept:
    """A store that a node does not close: a client takes seconds to start and to close."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.contains, self.read, self.write, self.delete = (
            store.contains,
            store.read,
            store.write,
            store.delete,
        )

    def close(self) -> None:
        pass


def test_a_master_that_is_absent_is_unavailable_and_used_when_it_comes(tmp_path: Path) -> None:
    """Here the master serves the metadata too. The other tests do without."""
    server = MooncakeServer(tmp_path, LENT, metadata=True)
    store = open_store(server.master, metadata=server.metadata)
    for work in (
        store.ping,
        lambda: store.contains([make_key(0)]),
        lambda: write_one(store, make_key(0), b"x"),
    ):
        with pytest.raises(StoreUnavailable, match="refused"):
            work()
    try:
        server.start()
        assert write_one(store, make_key(0), b"hello") == Done(5)
        assert read_one(store, make_key(0), 9)[1] == b"hello"
    finally:
        store.close()
        server.kill()


def test_a_master_that_takes_connections_and_never_answers_stops_nobody() -> None:
    """The client would hold the interpreter's lock for seconds, so a child process tries it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_store(f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout_ms=1000)
        waits: list[BaseException] = []
        first = threading.Thread(target=lambda: waits.append(_raised(store.ping)))
        first.start()
        listener.accept()
        while not waits:
            with pytest.raises(StoreUnavailable, match=r"being started|didn't start"):
                store.contains([make_key(0)])  # not behind the other thread's wait
            first.join(0.05)
        assert isinstance(waits[0], StoreUnavailable)
        store.close()


def _raised(work: Any) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    return AssertionError("it did not raise")


def test_a_wrong_address_of_the_metadata_is_unavailable(server: MooncakeServer) -> None:
    store = open_store(
        server.master, metadata=f"http://127.0.0.1:{free_port()}/metadata", connect_timeout_ms=5000
    )
    with pytest.raises(StoreUnavailable, match="metadata"):
        store.ping()
    store.close()


def test_the_memory_that_is_lent_is_full_and_nothing_is_sent_for_a_while(
    server: MooncakeServer,
) -> None:
    clock = ManualClock()
    store = open_store(server.master, clock=clock)
    pool = memoryview(mmap.mmap(-1, 2 * LENT))
    assert store.write([(make_key(0), [pool[: LENT + 4096]])]) == [REJECTED]
    assert write_one(store, make_key(1), b"x") == REJECTED
    clock.advance(1.1)
    assert write_one(store, make_key(1), b"x") == Done(1)
    assert store.read([(make_key(1), pool[:8])]) == [Done(1)]
    store.close()


def test_k1_k5_from_a_master_that_is_paused_killed_restarted_empty_to_memory_that_is_gone(
    tmp_path: Path,
) -> None:
    """One server lives through it all, because each start and end takes seconds."""
    server = MooncakeServer(tmp_path, LENT).start()
    store = open_store(server.master, prefix="kvstow/")
    store.ping()
    node, other, bad = (Node(Kept(store)) for _ in range(3))
    try:
        node.put(1, 2)
        assert other.get(1, 2) == 2

        # what is no frame
        assert write_one(store, key(7), b"not ours" * 100) == Done(800)
        assert bad.get(7) == 0
        assert bad.counter("corrupt_chunks") == 1
        assert store.contains([key(7)]) == [False]

        # gone between existence and read
        node.put(3)
        assert node.tier.holds(key(3))
        store.delete([key(3)])
        node.engine.reset()
        assert node.get(3) == 0
        assert not node.tier.holds(key(3))

        # Memory that doesn't answer. Mooncake's own limits are so long that its master would give
        # the lender up meanwhile.
        slot = memoryview(mmap.mmap(-1, 9000))
        assert store.write([(make_key(50), [slot])]) == [Done(9000)]
        server.pause_lender()
        with pytest.raises(StoreUnavailable):
            store.read([(make_key(50), slot)])
        with pytest.raises(StoreUnavailable):
            store.write([(make_key(51), [slot])])
        server.resume_lender()
        assert store.read([(make_key(50), slot)]) == [Done(9000)]
        assert store.contains([make_key(51)]) == [False]

        server.pause()
        for work in (lambda: store.contains([key(1)]), lambda: write_one(store, key(9), b"x")):
            with pytest.raises(StoreUnavailable):
                work()
        server.resume()
        until(lambda: _takes(store, 100), "the resumed master to take a chunk")

        server.kill_master()
        with pytest.raises(StoreUnavailable):
            read_one(store, key(1), 1 << 20)
        server.start_master()
        until(lambda: _takes(store, 101), "memory to be lent to the new master")
        assert read_one(store, key(1), 1 << 20)[0] is MISSING
        assert write_one(store, key(1), value_of(1, 9000)) == Done(9000)

        server.kill_lender()
        with pytest.raises(StoreUnavailable):
            read_one(store, key(1), 9000)
    finally:
        for each in (node, other, bad):
            each.close()
        store.close()
        server.kill()


def _takes(store: Any, i: int) -> bool:
    try:
        return isinstance(write_one(store, make_key(i), b"x"), Done)
    except StoreUnavailable:
        return False
