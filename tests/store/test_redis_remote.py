"""A remote that misbehaves, seen through a proxy: start-up and serving go on; and what lookups cost in round trips."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.backends.redis.envelope import chunk_name
from kvstow.cache import Lookup
from kvstow.errors import StoreUnavailable
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import parse
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from kvstow.tiers.retry import Retry
from tests.rigs.redis_server import RedisServer
from tests.rigs.tiers import open_tier
from tests.store.redis_node import Node
from tests.store.redis_rig import FaultProxy, open_store
from tests.unit.rig import LAYOUT, NAMESPACE, key, keys

PREFIX = "kvstow:"
SOON_S = 0.3
MODES = ("refuse", "swallow", "reset", "cut", "slow")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.port)
    yield proxy
    proxy.close()


def node_over(url: str, **limits: int) -> Node:
    """As ``kvstow.build`` composes it, with short times."""
    store = open_store(url, prefix=PREFIX, timeout_s=SOON_S, connect_timeout_s=SOON_S)
    return Node(Retry(store, SystemClock(), random.Random(0)), **limits)


@pytest.fixture
def node(proxy: FaultProxy) -> Iterator[Node]:
    node = node_over(proxy.url)
    yield node
    node.close()


@pytest.fixture
def other(server: RedisServer) -> Iterator[Node]:
    """Without the proxy."""
    other = node_over(server.url)
    yield other
    other.close()


# --- start and service -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_h7_a_remote_that_is_not_ready_does_not_hold_up_the_start(
    proxy: FaultProxy, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.mode = mode
    given = {"redis.url": proxy.url, "redis.timeout_ms": 300, "redis.connect_timeout_ms": 300}
    settings = parse(None, {}, given).settings
    tier = open_tier(
        settings, LAYOUT, clock=SystemClock(), metrics=Metrics(), root=("model", "seed 0")
    )
    assert tier is not None
    assert ("can't be used now" in caplog.text) is (mode != "slow")
    assert tier.close(10.0)


@pytest.mark.parametrize("mode", MODES)
def test_k1_k2_whatever_the_remote_does_serving_goes_on_and_recovers(
    proxy: FaultProxy, node: Node, other: Node, mode: str
) -> None:
    other.put(1, 2, 3)
    node.put(4)
    proxy.mode = mode
    found = node.get(1, 2, 3)
    assert found in (0, 3) if mode == "slow" else found == 0
    node.put(5, 6)
    proxy.mode = "pass"
    node.tier.executor.wait(0.3)
    for _ in range(20):  # a breaker that opened is tried again after a while
        node.settle()
        if node.get(1, 2, 3) == 3:
            break
        node.tier.executor.wait(0.1)
    else:
        pytest.fail("the tier does not recover")
    node.put(7)
    assert other.get(7) == 1
    assert other.get(4) == 1


def test_f5_what_came_before_the_connection_broke_is_used(
    proxy: FaultProxy, node: Node, other: Node
) -> None:
    """Two reads of one prompt; the second is cut, with every retry."""
    other.put(1)
    assert node.get(1) == 1
    other.put(2)
    proxy.mode = "cut"
    assert node.get(1, 2) == 1


def test_k1_a_connection_that_was_closed_while_idle_costs_nothing(
    server: RedisServer, node: Node, other: Node
) -> None:
    other.put(1, 2)
    assert node.get(1) == 1
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert node.get(2) == 1
    assert node.counter("failed_chunks") == 0


def test_k1_an_idle_connection_that_was_closed_is_not_used(server: RedisServer) -> None:
    """Without a retry."""
    store = open_store(server.url, prefix=PREFIX)
    write_one(store, make_key(0), b"x")
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert read_one(store, make_key(0), 1)[1] == b"x"
    store.close()


def test_k3_after_a_fault_no_connection_of_before_is_used(server: RedisServer) -> None:
    """The server may no longer be the master, and answer all the same."""

    def connections() -> int:
        return int(server.ask("INFO", "stats")["total_connections_received"])

    store = open_store(server.url, prefix=PREFIX)
    with store._clients.session() as one, store._clients.session() as two:
        for session in (one, two):
            session.run("EXISTS", b"x")
    before = connections()
    assert store.contains([make_key(0)]) == [False]
    assert connections() == before, "connections serve one call after the other"
    server.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable, match=r"(?i)read.?only"):
        write_one(store, make_key(1), b"x")
    before = connections()
    assert store.contains([make_key(0)]) == [False]
    assert connections() == before + 1
    store.close()


def test_k1_a_server_that_restarts_empty_is_filled_again(
    server: RedisServer, node: Node, other: Node
) -> None:
    node.put(1)
    assert node.tier.holds(key(1))
    server.restart()
    assert other.get(1) == 0
    node.engine.reset()
    assert node.get(1) == 0, "and it is no longer believed to be there"
    assert not node.tier.holds(key(1))
    node.put(1)
    assert other.get(1) == 1


# --- what is believed, and what asking costs -------------------------------------------------------------------------


def test_m4_misses_cost_one_round_trip_and_no_memory(
    proxy: FaultProxy, node: Node, other: Node
) -> None:
    other.put(1)
    assert node.get(1) == 1  # connected
    for numbers in ([*range(1000, 1100)], [*range(2000, 2400)]):
        before, free = proxy.round_trips, node.pool.free
        assert node.get(*numbers) == 0
        assert proxy.round_trips - before == 1
        assert node.pool.free == free


def test_m4_five_hits_and_ninety_five_misses(proxy: FaultProxy, node: Node, other: Node) -> None:
    other.put(*range(6))
    assert node.get(5) == 1
    before = proxy.round_trips
    assert node.get(*range(5), *range(1000, 1095)) == 5
    assert proxy.round_trips - before <= 3, "one for existence, and the reads of two threads"


def test_k5_a_probe_that_failed_says_nothing(proxy: FaultProxy, node: Node, other: Node) -> None:
    node.put(1)
    other.put(2)
    node.engine.reset()
    proxy.mode = "reset"
    assert node.get(1, 2) == 0
    assert node.tier.holds(key(1)), "unknown is not absent"
    proxy.mode = "pass"
    node.tier.executor.wait(0.3)
    assert node.get(1, 2) == 2


def test_k5_what_is_believed_is_bounded_and_healed_by_a_read_that_falls_short(
    server: RedisServer,
) -> None:
    node = node_over(server.url, known_keys=3)
    for i in range(1, 6):
        node.put(i)
    assert [node.tier.holds(key(i)) for i in range(1, 6)] == [False, False, True, True, True]
    server.ask("UNLINK", chunk_name(PREFIX.encode(), key(4)))
    node.engine.reset()
    assert node.get(4) == 0
    assert not node.tier.holds(key(4))
    node.close()


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_b5_b9_names_are_digests_alone(server: RedisServer) -> None:
    """Whatever is in a key, a salt with separators too, none of it is in a name, and no two keys have one."""
    store = open_store(server.url, prefix=PREFIX)
    spaces = [NAMESPACE.derive("salt", salt) for salt in ("", "a", "b", "a@b/c%d", "{x}", "a\r\nb")]
    for i, space in enumerate(spaces):
        write_one(store, make_key(1, namespace=space), b"%d" % i)
    got = [read_one(store, make_key(1, namespace=space), 1)[1] for space in spaces]
    assert got == [b"0", b"1", b"2", b"3", b"4", b"5"]
    found = server.ask("KEYS", "*")
    assert len(found) == len(spaces)
    assert all(
        len(name) == len(PREFIX) + 66 and name[len(PREFIX) + 1 : -1].isalnum() for name in found
    )
    store.close()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_c2_names_do_not_depend_on_the_process(seed: str) -> None:
    program = (
        "from kvstow.testing.store_suite import make_key; from kvstow.backends.redis.envelope import chunk_name;"
        "print(chunk_name(b'p:', make_key(7, group=3)).decode())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == chunk_name(b"p:", make_key(7, group=3)).decode()


def test_b10_after_one_engines_reset_it_finds_nothing_and_others_still_theirs(
    node: Node, other: Node
) -> None:
    """A reset is a namespace, so the engine asks for other keys then."""
    node.put(1, 2)
    after = NAMESPACE.derive("reset", b"1")
    mine = [type(one).build(after, 0, one.prefix_hash) for one in keys(1, 2)]
    node.engine.reset()
    assert node.engine.lookup(mine) == Lookup(node.engine.lookup(mine).state, 0)
    assert node.tier._store.contains(mine) == [False, False]
    assert other.get(1, 2) == 2


def test_c9_a_chunk_is_offered_again_once_a_full_server_has_room(
    server: RedisServer, node: Node, other: Node
) -> None:
    server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
    node.put(1)
    assert not node.tier.holds(key(1))
    server.ask("CONFIG", "SET", "maxmemory", "0")
    node.tier.executor.wait(1.1)  # the pause after a refusal
    node.engine.reset()
    node.put(1)
    assert other.get(1) == 1


def test_a9_a_value_replaced_during_its_read_is_never_mixed(server: RedisServer) -> None:
    """GET answers with one value, whole; a chunk in parts is replaced under other part names."""
    store = open_store(server.url, prefix=PREFIX)
    size = (3 << 20) + 7
    values = [value_of(i, size) for i in range(2)]
    for round_ in range(6):
        write_one(store, make_key(0), values[round_ % 2])
        outcome, got = read_one(store, make_key(0), size)
        assert got == values[round_ % 2], outcome
        store.delete([make_key(0)])
    assert server.ask("DBSIZE") == 0
    store.close()
