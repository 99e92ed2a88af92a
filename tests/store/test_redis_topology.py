"""TLS to Sentinels and Cluster nodes, and a Cluster amid the move of a slot. Slot moves and failovers themselves:
test_redis_faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.redis.envelope import chunk_name
from kvstow.backends.redis.store import RedisStore
from kvstow.key import ChunkKey
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.redis_server import (
    RedisSentinel,
    RedisServer,
    free_port,
    join_cluster,
    start_cluster,
    stop_all,
)
from tests.store.redis_rig import (
    PART_BYTES,
    Tls,
    TlsFront,
    forbid_copies,
    make_certificates,
    open_store,
)

PREFIX = "kvstow:"
LARGE = 3 * PART_BYTES + 5


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_copies(monkeypatch)


def works(store: RedisStore) -> None:
    for i in range(12):
        assert write_one(store, make_key(i), value_of(i, LARGE if i == 0 else 100)) == Done(
            LARGE if i == 0 else 100
        )
    assert store.contains([make_key(i) for i in range(13)]) == [True] * 12 + [False]
    for i in range(12):
        assert read_one(store, make_key(i), LARGE)[1] == value_of(i, LARGE if i == 0 else 100)


def test_one_server_by_tcp_and_by_a_unix_socket(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "server", "--unixsocket", str(tmp_path / "socket")).start()
    try:
        for url in (server.url, f"unix://{tmp_path / 'socket'}"):
            store = open_store(url)
            works(store)
            store.close()
    finally:
        server.kill()


def test_k3_sentinels_and_the_master_they_name_over_tls(tmp_path: Path, tls: Tls) -> None:
    """The front passes what comes without TLS, so the Sentinel, whose build knows none, watches the master through
    it and names it."""
    master = RedisServer(tmp_path / "master").start()
    front = TlsFront(tls, master.port)
    sentinel = RedisSentinel(tmp_path / "sentinel", master, port_of_master=front.port)
    sentinel.start()
    sentinels_front = TlsFront(tls, sentinel.port)
    store = open_store(f"rediss://127.0.0.1:{sentinels_front.port}", topology="sentinel", tls=tls)
    try:
        works(store)
        assert front.tls > 0
        assert sentinels_front.tls > 0
        assert master.ask("DBSIZE") == 16
    finally:
        store.close()
        stop_all([sentinel, master])
        for each in (front, sentinels_front):
            each.close()


def test_k3_every_node_of_a_cluster_over_tls(tmp_path: Path, tls: Tls) -> None:
    """Each node announces its front's port."""
    nodes, fronts = [], []
    for i in range(3):
        port = free_port()
        fronts.append(TlsFront(tls, port))
        announced = (
            "--cluster-announce-port",
            str(fronts[i].port),
            "--cluster-announce-bus-port",
            str(port + 10000),
        )
        settings = ("--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1", *announced)
        nodes.append(RedisServer(tmp_path / str(i), *settings, port=port).start())
    store = open_store(f"rediss://127.0.0.1:{fronts[0].port}", topology="cluster", tls=tls)
    try:
        join_cluster(nodes)
        works(store)
        assert min(front.tls for front in fronts) > 0
        assert min(node.ask("DBSIZE") for node in nodes) > 0
    finally:
        store.close()
        stop_all(nodes)
        for front in fronts:
            front.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    nodes = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield nodes
    stop_all(nodes)


class Move:
    """Of the slot of a chunk, ``one``, from the node that has it to another."""

    def __init__(self, nodes: list[RedisServer], one: ChunkKey) -> None:
        self.nodes = nodes
        self.name = chunk_name(PREFIX.encode(), one)
        self.slot = nodes[0].ask("CLUSTER", "KEYSLOT", self.name)
        self.source = next(node for node in nodes if node.ask("KEYS", self.name))
        self.target = next(node for node in nodes if node is not self.source)
        self.ids = {node: node.ask("CLUSTER", "MYID") for node in nodes}

    def names(self) -> list[bytes]:
        """Of the chunk and its parts, at either node."""
        return sorted(name for node in self.nodes for name in node.ask("KEYS", self.name + b"*"))

    def begin(self) -> None:
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.ids[self.source])
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.ids[self.target])

    def move(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.source.ask("MIGRATE", "127.0.0.1", self.target.port, name, 0, 5000)

    def end(self) -> None:
        for node in (self.target, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self.ids[self.target])


@pytest.mark.parametrize("moved", ["nothing", "the chunk", "some parts", "everything"])
@pytest.mark.parametrize("size", [100, LARGE])
def test_k3_while_a_slot_moves_its_chunks_are_found_where_they_are(
    cluster: list[RedisServer], size: int, moved: str
) -> None:
    store = open_store(cluster[0].url, topology="cluster", prefix=PREFIX)
    one, value = make_key(size), value_of(0, size)
    assert write_one(store, one, value) == Done(size)
    move = Move(cluster, one)
    names = move.names()
    move.begin()
    sets = {"nothing": [], "the chunk": [move.name], "some parts": names[2::2], "everything": names}
    move.move(sets[moved])
    assert store.contains([one, make_key(1)]) == [True, False]
    assert read_one(store, one, size) == (Done(size), value)
    assert write_one(store, one, value_of(1, size)) is REJECTED
    assert read_one(store, make_key(1), size)[0] is MISSING
    assert move.names() == names, "nothing was taken away, nor left behind"
    store.delete([one])
    assert move.names() == []
    assert store.contains([one]) == [False]
    assert read_one(store, one, size)[0] is MISSING
    assert write_one(store, one, value_of(2, size)) == Done(size)
    assert len(move.target.ask("KEYS", move.name + b"*")) == len(names), (
        "what is new is written where the slot goes"
    )
    assert store.contains([one]) == [True]
    assert read_one(store, one, size) == (Done(size), value_of(2, size))
    move.end()
    assert read_one(store, one, size) == (Done(size), value_of(2, size))
    store.delete([one])
    assert move.names() == []
    store.close()


def test_k3_a_part_that_is_at_no_node_while_a_slot_moves_is_a_miss_and_the_rest_is_removed(
    cluster: list[RedisServer],
) -> None:
    """A part that moves is at one of the two nodes at any time."""
    store = open_store(cluster[0].url, topology="cluster", prefix=PREFIX)
    one = make_key(2)
    assert write_one(store, one, value_of(0, LARGE)) == Done(LARGE)
    move = Move(cluster, one)
    move.source.ask("UNLINK", move.names()[-1])
    move.begin()
    assert store.contains([one]) == [False]
    assert read_one(store, one, LARGE)[0] is MISSING
    assert move.names() == []
    move.end()
    store.close()
