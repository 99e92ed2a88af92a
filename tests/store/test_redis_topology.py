"""TLS to Sentinels and Cluster nodes, and a Cluster amid the move of a slot. Slot moves and failovers themselves:
test_redis_faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.store.base import MISSING, REJECTED, Done
from kvstow.store.redis.options import Tls
from kvstow.store.redis.store import RedisStore
from kvstow.testing.redis_server import (
    RedisSentinel,
    RedisServer,
    free_port,
    join_cluster,
    start_cluster,
    stop_all,
    until,
)
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.store.redis_rig import PART_BYTES, TlsFront, make_certificates, open_store

LARGE = 3 * PART_BYTES + 5


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def works(store: RedisStore) -> None:
    for i in range(12):
        assert write_one(store, make_key(i), value_of(i, LARGE if i == 0 else 100)) == Done(LARGE if i == 0 else 100)
    assert store.contains([make_key(i) for i in range(13)]) == [True] * 12 + [False]
    for i in range(12):
        assert read_one(store, make_key(i), LARGE)[1] == value_of(i, LARGE if i == 0 else 100)


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
        announced = ("--cluster-announce-port", str(fronts[i].port), "--cluster-announce-bus-port", str(port + 10000))
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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RedisServer]]:
    nodes = start_cluster(tmp_path)
    yield nodes
    stop_all(nodes)


@pytest.mark.parametrize("size", [100, LARGE])
def test_k3_while_a_slot_moves_its_chunks_are_misses_that_lose_nothing(nodes: list[RedisServer], size: int) -> None:
    store = open_store(nodes[0].url, topology="cluster")
    one, value = make_key(0), value_of(0, size)
    assert write_one(store, one, value) == Done(size)
    source = next(node for node in nodes if node.ask("DBSIZE"))
    target = next(node for node in nodes if node is not source)
    names = source.ask("KEYS", "*")
    slot = source.ask("CLUSTER", "KEYSLOT", names[0])
    ids = {node: node.ask("CLUSTER", "MYID") for node in (source, target)}
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    moved = max(names)  # the last part, or the chunk itself
    source.ask("MIGRATE", "127.0.0.1", target.port, moved, 0, 5000)
    assert store.contains([one]) == [False]
    assert read_one(store, one, size)[0] is MISSING
    if size == 100:
        assert write_one(store, one, value) is REJECTED
    assert source.ask("DBSIZE") + target.ask("DBSIZE") == len(names), "nothing was removed or written"
    for name in set(names) - {moved}:
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    for node in nodes:
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    until(lambda: store.contains([one]) == [True], "the move to be known")
    assert read_one(store, one, size) == (Done(size), value)
    store.close()
