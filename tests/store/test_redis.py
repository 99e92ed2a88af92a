"""The Store contract, over every way to a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from kvstow.backends.base import Store
from kvstow.testing.store_suite import StoreSuite
from tests.rigs.redis_server import RedisSentinel, RedisServer, start_cluster, stop_all
from tests.store.redis_rig import Tls, TlsFront, make_certificates, open_store

USER, PASSWORD = "kv:stow@", "p@ss/w:rd?#%"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RedisServer]:
    socket = ("--unixsocket", str(folder / "sock"))
    server = RedisServer(folder / "server", *socket).start()
    server.ask(
        *(
            "ACL",
            "SETUSER",
            USER,
            "on",
            f">{PASSWORD}",
            "~kvstow:*",
            "+get",
            "+set",
            "+getrange",
            "+touch",
            "+exists",
        ),
        *("+unlink", "+getdel", "+persist", "+pexpire"),
    )
    yield server
    server.kill()


@pytest.fixture(scope="module")
def tls(folder: Path) -> Tls:
    return make_certificates(folder)


@pytest.fixture(scope="module")
def front(server: RedisServer, tls: Tls) -> Iterator[TlsFront]:
    front = TlsFront(tls, server.port)
    yield front
    front.close()


@pytest.fixture(scope="module")
def sentinel(server: RedisServer, folder: Path) -> Iterator[RedisSentinel]:
    sentinel = RedisSentinel(folder / "sentinel", server)
    sentinel.start()
    yield sentinel
    sentinel.kill()


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[list[RedisServer]]:
    nodes = start_cluster(folder / "cluster")
    yield nodes
    stop_all(nodes)


class TestTcp(StoreSuite):
    """Large values in eight parts."""

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.server = server

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(self.server.url)


class TestUnixSocketAsAclUser(StoreSuite):
    """With the rights that the documentation names and no others; values whole; a lifetime."""

    rounds = 10

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer, folder: Path) -> None:
        server.ask("FLUSHALL")
        self.url = f"unix://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@{folder}/sock"

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(self.url, prefix="kvstow:", part_bytes=64 << 20, ttl_s=1000)


class TestTls(StoreSuite):
    rounds = 5

    @pytest.fixture(autouse=True)
    def _front(self, front: TlsFront, tls: Tls) -> None:
        self.front, self.tls = front, tls

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"rediss://127.0.0.1:{self.front.port}", tls=self.tls)


class TestSentinel(StoreSuite):
    rounds = 5

    @pytest.fixture(autouse=True)
    def _sentinel(self, sentinel: RedisSentinel) -> None:
        self.sentinel = sentinel

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"redis://127.0.0.1:{self.sentinel.port}", topology="sentinel")


class TestCluster(StoreSuite):
    rounds = 10

    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(self.nodes[1].url, topology="cluster")

    def test_every_node_has_a_share(self, store: Store) -> None:
        for node in self.nodes:
            node.ask("FLUSHALL")
        self.test_keys_of_every_length_and_any_bytes(store)
        sizes = [node.ask("DBSIZE") for node in self.nodes]
        assert min(sizes) > 10
