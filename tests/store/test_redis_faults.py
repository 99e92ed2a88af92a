"""Redis killed, restarted, flushed, paused, filled; keys gone, values corrupted, servers replaced: misses, no more."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.redis.envelope import chunk_name
from kvstow.backends.redis.store import RedisStore
from kvstow.cache import Lookup, LookupState
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey
from kvstow.runtime import ThreadExecutor
from kvstow.testing.faults import FaultStore, unavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.redis_server import RedisSentinel, RedisServer, start_cluster, stop_all, until
from tests.store.redis_node import Node
from tests.store.redis_rig import PART_BYTES, black_hole, open_store
from tests.unit.rig import TOKENS, fill, key, keys

PREFIX = "kvstow:"
LARGE = 3 * PART_BYTES + 5
SOON_S = 0.3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = open_store(server.url, prefix=PREFIX, timeout_s=SOON_S, connect_timeout_s=SOON_S)
    yield store
    store.close()


def names(server: RedisServer) -> list[bytes]:
    return sorted(server.ask("KEYS", "*"))


@pytest.fixture
def nodes(server: RedisServer) -> Iterator[list[Node]]:
    """Three engines: each has what it stored or fetched in memory, so later tests of a fault ask the next one."""
    nodes = [
        Node(open_store(server.url, prefix=PREFIX, timeout_s=SOON_S, connect_timeout_s=SOON_S))
        for _ in range(3)
    ]
    yield nodes
    for node in nodes:
        node.close()


# --- one server, several engines -------------------------------------------------------------------------------------


def test_what_one_engine_stored_another_restores(nodes: list[Node]) -> None:
    nodes[0].put(1, 2, 3)
    assert nodes[1].get(1, 2, 3, 4) == 3


def test_k1_a_killed_server_is_a_miss_and_a_restarted_one_takes_puts_again(
    server: RedisServer, nodes: list[Node]
) -> None:
    nodes[0].put(1, 2)
    server.kill()
    nodes[0].put(3)
    assert nodes[0].counter("failed_chunks", "unavailable") == 1
    assert nodes[1].get(1, 2) == 0
    server.start()
    nodes[0].put(4)
    assert nodes[2].get(4) == 1
    assert nodes[2].get(1, 2) == 0


def test_k2_with_three_in_ten_calls_failing_everything_restored_is_right(
    server: RedisServer,
) -> None:
    inner = open_store(server.url, prefix=PREFIX)
    faulty = FaultStore(
        inner, [unavailable("write", calls=range(i, i + 1)) for i in range(0, 200, 3)]
    )
    node, other = Node(faulty), Node(open_store(server.url, prefix=PREFIX))
    for i in range(12):
        node.put(i)
    found = sum(other.get(i) for i in range(12))
    assert found + node.counter("failed_chunks") + node.counter("refused_chunks") == 12
    assert 0 < found < 12
    node.close()
    other.close()


def test_a_flushed_server_is_a_miss(server: RedisServer, nodes: list[Node]) -> None:
    nodes[0].put(1, 2)
    server.ask("FLUSHALL")
    assert nodes[1].get(1, 2) == 0
    nodes[1].put(1)
    assert nodes[2].get(1) == 1


def test_a_paused_server_is_waited_for_only_so_long(server: RedisServer, nodes: list[Node]) -> None:
    nodes[0].put(1)
    server.pause()
    assert nodes[1].get(1) == 0
    assert (
        nodes[1].counter("failed_chunks", "unavailable") > 0
        or nodes[1].counter("fetch_deadline_exceeded") > 0
    )
    server.resume()
    assert nodes[2].get(1) == 1


def test_k5_a_key_that_is_gone_between_existence_and_read_is_no_false_hit(
    server: RedisServer, nodes: list[Node]
) -> None:
    nodes[0].put(1)
    assert nodes[0].tier.holds(key(1))
    server.ask("FLUSHALL")
    nodes[0].engine.reset()
    assert nodes[0].get(1) == 0
    assert not nodes[0].tier.holds(key(1))


def test_k5_existence_is_asked_of_the_server_each_time(
    server: RedisServer, store: RedisStore
) -> None:
    write_one(store, make_key(1), b"x")
    assert store.contains([make_key(1)]) == [True]
    server.ask("FLUSHALL")
    assert store.contains([make_key(1)]) == [False]
    assert read_one(store, make_key(1), 8)[0] is MISSING


@pytest.mark.parametrize("at", [40, 4096 + 100, -1])
def test_a_corrupted_value_is_a_miss_and_taken_away(
    server: RedisServer, nodes: list[Node], at: int
) -> None:
    nodes[0].put(1)
    [name] = names(server)
    value = bytearray(server.ask("GET", name))
    at = at if at >= 0 else 32 + 4096 + 4096 + 7
    value[at] ^= 0xFF
    server.ask("SET", name, bytes(value))
    assert nodes[1].get(1) == 0
    assert nodes[1].counter("corrupt_chunks") == 1
    assert names(server) == []


def test_a_foreign_value_is_a_miss_and_taken_away(server: RedisServer, nodes: list[Node]) -> None:
    server.ask("SET", chunk_name(PREFIX.encode(), key(1)), b"not ours" * 100)
    assert nodes[0].get(1) == 0
    assert nodes[0].tier.holds(key(1)) is False


def test_k9_a_chunk_whose_write_is_not_done_is_found_in_memory(
    server: RedisServer, nodes: list[Node]
) -> None:
    server.pause()
    lease = nodes[0].engine.reserve(key(1), b"", TOKENS)
    assert lease is not None
    fill(lease, key(1))
    nodes[0].engine.commit(lease)
    lease.release()
    assert nodes[0].engine.lookup(keys(1)) == Lookup(LookupState.HIT, 1)
    server.resume()
    nodes[0].settle()
    assert nodes[0].get(1) == 1


# --- room ------------------------------------------------------------------------------------------------------------


def test_k7_a_full_server_is_not_stormed_and_goes_on_serving_reads(server: RedisServer) -> None:
    clock = ManualClock()
    store = open_store(server.url, prefix=PREFIX, clock=clock)
    assert write_one(store, make_key(0), value_of(0, PART_BYTES)) == Done(PART_BYTES)
    server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")

    def sets() -> int:
        return int(server.ask("INFO", "commandstats")["cmdstat_set"]["rejected_calls"])

    assert write_one(store, make_key(1), value_of(1, PART_BYTES)) is REJECTED
    assert sets() == 1
    for i in range(2, 50):
        assert write_one(store, make_key(i), value_of(1, LARGE if i % 2 else 100)) is REJECTED
    assert sets() == 1
    assert read_one(store, make_key(0), PART_BYTES)[0] == Done(PART_BYTES)
    clock.advance(1.0)
    assert write_one(store, make_key(1), b"x") is REJECTED
    assert sets() == 2
    clock.advance(1.9)
    assert write_one(store, make_key(1), b"x") is REJECTED
    assert sets() == 2
    server.ask("CONFIG", "SET", "maxmemory", "0")
    clock.advance(0.2)
    assert write_one(store, make_key(1), b"x") == Done(1)
    assert write_one(store, make_key(2), b"x") == Done(1)
    store.close()


def test_k7_rejected_puts_are_counted(server: RedisServer, nodes: list[Node]) -> None:
    nodes[0].put(1)
    server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
    nodes[0].put(2, 3)
    assert nodes[0].counter("refused_chunks", "rejected") == 2
    assert nodes[1].get(1) == 1


def test_a_server_that_evicts_takes_everything_and_parts_without_the_rest_are_misses(
    server: RedisServer, store: RedisStore
) -> None:
    server.ask("CONFIG", "SET", "maxmemory", str(24 << 20), "maxmemory-policy", "allkeys-lru")
    values = {i: value_of(i, LARGE) for i in range(16)}
    for i, value in values.items():
        assert write_one(store, make_key(i), value) == Done(LARGE)
    outcomes = {i: read_one(store, make_key(i), LARGE) for i in values}
    whole = [i for i, (outcome, _) in outcomes.items() if isinstance(outcome, Done)]
    assert 0 < len(whole) < 16
    assert all(outcomes[i][1] == values[i] for i in whole)
    assert all(outcomes[i][0] is MISSING for i in values if i not in whole)


# --- parts -----------------------------------------------------------------------------------------------------------


def parts_of(server: RedisServer, one: ChunkKey) -> tuple[bytes, list[bytes]]:
    name = chunk_name(PREFIX.encode(), one)
    return name, [other for other in names(server) if other != name]


@pytest.mark.parametrize("lost", range(5))
def test_k8_half_a_set_is_a_miss_and_taken_away(
    server: RedisServer, store: RedisStore, lost: int
) -> None:
    one = make_key(0)
    write_one(store, one, value_of(0, LARGE))
    name, parts = parts_of(server, one)
    assert len(parts) == 4
    server.ask("DEL", [*parts, name][lost])
    assert store.contains([one]) == [False]
    assert read_one(store, one, LARGE)[0] is MISSING
    if lost < 4:
        assert names(server) == []
    assert write_one(store, one, value_of(1, LARGE)) == Done(LARGE)
    assert read_one(store, one, LARGE)[1] == value_of(1, LARGE)


@pytest.mark.parametrize("change", [b"short", bytes(PART_BYTES + 1)])
def test_a_part_of_another_length_is_a_miss(
    server: RedisServer, store: RedisStore, change: bytes
) -> None:
    write_one(store, make_key(0), value_of(0, LARGE))
    _, parts = parts_of(server, make_key(0))
    server.ask("SET", parts[1], change)
    assert read_one(store, make_key(0), LARGE + 64)[0] is MISSING
    assert names(server) == []


def test_k8_a_value_above_the_servers_limit_is_refused_with_the_fix_and_reads_go_on(
    server: RedisServer, store: RedisStore
) -> None:
    server.ask(
        "CONFIG", "SET", "proto-max-bulk-len", str(1 << 20)
    )  # 32 bytes less than a part with its envelope
    write_one(store, make_key(1), b"small")
    for _ in range(3):
        with pytest.raises(StoreRefused, match=r"redis\.part_size"):
            write_one(store, make_key(0), value_of(0, PART_BYTES))
    assert read_one(store, make_key(1), 8)[1] == b"small"
    assert write_one(store, make_key(2), value_of(0, LARGE)) == Done(LARGE)


def test_parts_whose_writer_died_go_away_by_themselves(
    server: RedisServer, store: RedisStore
) -> None:
    write_one(store, make_key(0), value_of(0, LARGE))
    name, parts = parts_of(server, make_key(0))
    assert {server.ask("PTTL", each) for each in (name, *parts)} == {-1}
    before = store._set
    calls: list[bytes] = []

    def die_in_the_third(session: Any, name: bytes, *rest: Any) -> bool:
        calls.append(name)
        if len(calls) == 3:
            raise ConnectionResetError("died")
        return before(session, name, *rest)

    store._set = die_in_the_third  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        write_one(store, make_key(1), value_of(1, LARGE))
    assert store.contains([make_key(1)]) == [False]
    assert all(0 < server.ask("PTTL", each) <= 600_000 for each in calls[:2])


def test_a_lifetime_is_of_everything(server: RedisServer) -> None:
    store = open_store(server.url, prefix=PREFIX, ttl_s=100)
    write_one(store, make_key(0), value_of(0, LARGE))
    write_one(store, make_key(1), b"small")
    assert all(90_000 < server.ask("PTTL", each) <= 100_000 for each in names(server))
    assert len(names(server)) == 6
    store.close()


# --- no answer -------------------------------------------------------------------------------------------------------


def test_a_connection_that_is_never_taken_is_given_up() -> None:
    with black_hole() as port:
        store = open_store(f"redis://127.0.0.1:{port}", connect_timeout_s=0.1)
        with pytest.raises(StoreUnavailable):
            store.contains([make_key(0)])
        store.close()


def test_a_server_that_is_paused_amid_a_value_is_given_up_and_comes_back(
    server: RedisServer, store: RedisStore
) -> None:
    write_one(store, make_key(0), value_of(0, LARGE))
    server.pause()
    for work in (
        lambda: store.contains([make_key(0)]),
        lambda: read_one(store, make_key(0), LARGE),
        lambda: write_one(store, make_key(1), value_of(1, LARGE)),
        lambda: store.delete([make_key(0)]),
    ):
        with pytest.raises(StoreUnavailable):
            work()
    server.resume()
    assert read_one(store, make_key(0), LARGE)[1] == value_of(0, LARGE)


@pytest.mark.parametrize(
    "said", [b"", b"$100\r\nshort", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 10_000]
)
def test_what_is_no_redis_is_unavailable(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        executor = ThreadExecutor("other")

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(said)

        executor.submit(serve, lambda _value, _error: None)
        store = open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        with pytest.raises((StoreUnavailable, StoreRefused)):
            read_one(store, make_key(0), 1000)
        store.close()


def test_a_wrong_password_is_unavailable_and_a_missing_right_refused(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+get")
    wrong = open_store(f"redis://reader:other-secret@127.0.0.1:{server.port}")
    with pytest.raises(StoreUnavailable) as caught:
        wrong.ping()
    assert "other-secret" not in str(caught.value)
    reader = open_store(f"redis://reader:pw@127.0.0.1:{server.port}")
    with pytest.raises(StoreRefused, match=r"permission|NOPERM"):
        write_one(reader, make_key(0), b"x")
    for store in (wrong, reader):
        store.close()


# --- several servers -------------------------------------------------------------------------------------------------


def test_k3_after_a_sentinel_failover_the_new_master_is_used(tmp_path: Path) -> None:
    master = RedisServer(tmp_path / "a").start()
    replica = RedisServer(
        tmp_path / "b", "--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0"
    ).start()
    sentinel = RedisSentinel(tmp_path / "s", master)
    store = open_store(
        f"redis://127.0.0.1:{sentinel.port}",
        topology="sentinel",
        timeout_s=SOON_S,
        connect_timeout_s=SOON_S,
    )
    try:
        until(
            lambda: replica.ask("INFO", "replication")["master_link_status"] == "up", "replication"
        )
        sentinel.start()
        assert write_one(store, make_key(0), value_of(0, LARGE)) == Done(LARGE)
        master.ask("WAIT", 1, 5000)
        until(
            lambda: sentinel.ask("SENTINEL", "REPLICAS", "mymaster"),
            "the Sentinel to know the replica",
        )
        master.kill()
        until(lambda: sentinel.master_port() == replica.port, "failover")
        until(lambda: _takes(store, make_key(1)), "the new master to take a chunk")
        assert read_one(store, make_key(0), LARGE)[1] == value_of(0, LARGE)
        assert replica.ask("DBSIZE") == 6
        replica.ask("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable):
            write_one(store, make_key(2), b"x")
    finally:
        store.close()
        stop_all([sentinel, master, replica])


def _takes(store: RedisStore, one: ChunkKey) -> bool:
    try:
        return isinstance(write_one(store, one, b"x"), Done)
    except StoreUnavailable:
        return False


def test_k3_a_cluster_whose_slots_move_and_whose_node_dies(tmp_path: Path) -> None:
    nodes = start_cluster(tmp_path)
    store = open_store(
        f"{nodes[0].url},127.0.0.1:{nodes[1].port}",
        topology="cluster",
        timeout_s=SOON_S,
        connect_timeout_s=SOON_S,
    )
    try:
        one = make_key(0)
        assert write_one(store, one, value_of(0, LARGE)) == Done(LARGE)
        name = next(found for node in nodes for found in node.ask("KEYS", "*}"))
        slot = nodes[0].ask("CLUSTER", "KEYSLOT", name)
        owner = next(node for node in nodes if node.ask("DBSIZE"))
        other = next(node for node in nodes if node is not owner)
        owner.ask("FLUSHALL")
        other_id = other.ask("CLUSTER", "MYID")
        for node in nodes:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", other_id)
        assert store.contains([one]) == [False]
        assert write_one(store, one, value_of(1, LARGE)) == Done(LARGE)
        assert read_one(store, one, LARGE)[1] == value_of(1, LARGE)
        assert other.ask("DBSIZE") == 5
        other.kill()
        with pytest.raises(StoreUnavailable):
            read_one(store, one, LARGE)
        other.start()
        until(lambda: _takes(store, one), "the restarted node")
    finally:
        store.close()
        stop_all(nodes)
