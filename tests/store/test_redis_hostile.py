"""Servers whose replies do not answer the command, or never come: misses in bounded time, and the next call is right.

``Front`` fakes only the replies that a test gives it. Everything else passes to a real server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.cluster import RedisCluster
from redis.connection import Connection

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.redis.about import about
from kvstow.backends.redis.envelope import chunk_name
from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.redis.store import Fullness, RedisStore
from kvstow.errors import StoreError, StoreRefused, StoreUnavailable
from kvstow.fields.values import Secret
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import parse
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.redis_server import HOST, RedisServer, start_cluster, stop_all, until
from tests.rigs.tiers import open_tier
from tests.store.redis_rig import (
    PART_BYTES,
    TlsFront,
    black_hole,
    make_certificates,
    open_store,
)
from tests.unit.rig import LAYOUT

PREFIX = "kvstow:"
LARGE = 3 * PART_BYTES + 5
SOON_S = 0.2
SECRET = "hunter2"
GREETING = (b"CLIENT", b"AUTH", b"SELECT", b"HELLO")


class Front:
    """Answers commands with ``says(words)``, and greetings with ``greets(words)``. None passes the command to the
    server, and b"" closes the connection.

    ``step`` is the number of bytes sent at once, with ``STEP_S`` in between. With ``endless`` zeros follow for ever.
    """

    STEP_S = 0.02

    def __init__(self, port: int) -> None:
        self._to = port
        self._over = threading.Event()
        self.says: Callable[[list[bytes]], bytes | None] = lambda _: None
        self.greets: Callable[[list[bytes]], bytes | None] = lambda _: None
        self.step: int | None = None
        self.endless = False
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, ValueError),
            client,
            socket.create_connection((HOST, self._to)) as server,
        ):
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()
            asked = client.makefile("rb")
            while line := asked.readline():
                words = [
                    asked.read(int(asked.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))
                ]
                said = (self.greets if words[0].upper() in GREETING else self.says)(words)
                if said == b"":
                    return
                if said is None:
                    server.sendall(
                        b"*%d\r\n" % len(words)
                        + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
                    )
                    continue
                step = self.step or len(said)
                for at in range(0, len(said), step):
                    client.sendall(said[at : at + step])
                    if self.step and self._over.wait(self.STEP_S):
                        return
                while self.endless:
                    client.sendall(bytes(65536))

    @staticmethod
    def _pass(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)

    def close(self) -> None:
        self._over.set()
        self._listener.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def server(real: RedisServer) -> RedisServer:
    real.ask("FLUSHALL")
    return real


@pytest.fixture
def front(server: RedisServer) -> Iterator[Front]:
    front = Front(server.port)
    yield front
    front.close()


@pytest.fixture
def store(front: Front) -> Iterator[RedisStore]:
    store = open_store(front.url, prefix=PREFIX, timeout_s=SOON_S, connect_timeout_s=SOON_S)
    yield store
    store.close()


def in_time(work: Callable[[], Any]) -> Any:
    """Ten tries: the machine may be busy for longer than ``SOON_S``."""
    for _ in range(9):
        with contextlib.suppress(StoreUnavailable):
            return work()
    return work()


# --- what is said ----------------------------------------------------------------------------------------------------

REPLIES = {
    "negative length": b"$-5\r\n",
    "huge length": b"$99999999999999\r\n",
    "length beyond all digits": b"$" + b"9" * 4400 + b"\r\n",
    "no number": b"$abc\r\n",
    "number with signs": b"$--1\r\n",
    "no text": b"\r\n",
    "integer": b":5\r\n",
    "no integer": b":x\r\n",
    "other word": b"+PONG\r\n",
    "array": b"*2\r\n+a\r\n+b\r\n",
    "push": b">3\r\n+message\r\n+a\r\n+b\r\n",
    "null of RESP 3": b"_\r\n",
    "less than said": b"$50\r\nshort\r\n",
    "more than said": b"$3\r\nabcdef\r\n",
    "half a line": b"$5",
    "half an envelope": b"$32\r\nKVSTOWR1",
    "endless line": b"x" * 10_000,
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nulls": bytes(100),
    "no reason": b"-\r\n",
    "hangs up": b"",
    "moved nowhere": b"-MOVED\r\n",
    "moved to no address": b"-MOVED 5 nowhere\r\n",
    "moved where nobody listens": b"-MOVED 5 127.0.0.1:1\r\n",
    "ask nobody": b"-ASK 5 :\r\n",
    "ask where nobody listens": b"-ASK 5 127.0.0.1:1\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "busy": b"-BUSY Redis is busy running a script\r\n",
    "read only": b"-READONLY You can't write against a read only replica.\r\n",
    "not authenticated": b"-NOAUTH Authentication required.\r\n",
    "full": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "cluster is down": b"-CLUSTERDOWN Hash slot not served\r\n",
    "try again": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    "master is down": b"-MASTERDOWN Link with MASTER is down\r\n",
    "too many clients": b"-ERR max number of clients reached\r\n",
    "wrong type": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "unknown": b"-ERR unknown command\r\n",
}


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_k1_whatever_the_server_says_is_no_hit_and_the_next_call_is_right(
    front: Front, store: RedisStore, reply: bytes, size: int
) -> None:
    one, value = make_key(0), value_of(0, size)
    in_time(lambda: write_one(store, one, value))
    for work, none in (
        (lambda: store.contains([one, make_key(9)]), [False, False]),
        (lambda: read_one(store, one, size)[0], None),
        (lambda: write_one(store, make_key(5), value), None),
        (lambda: store.delete([make_key(5)]), None),
    ):
        front.says = lambda _: reply
        with contextlib.suppress(StoreError):
            got = work()
            assert not isinstance(got, Done)
            assert got is None or none is None or got == none
        front.says = lambda _: None
        store._fullness = Fullness(SystemClock())
        assert in_time(lambda: store.contains([one])) == [True]
        assert in_time(lambda: read_one(store, one, size)) == (Done(size), value)


@pytest.mark.parametrize(
    "command", [b"GETRANGE", b"TOUCH", b"GET", b"SET", b"EXISTS", b"PERSIST", b"UNLINK"]
)
@pytest.mark.parametrize(
    "reply", ["push", "less than said", "hangs up", "more than said", "negative length"]
)
def test_k1_also_amid_a_chunk_in_parts(
    front: Front, store: RedisStore, command: bytes, reply: str
) -> None:
    one, value = make_key(0), value_of(0, LARGE)
    calls = iter(range(100))
    front.says = lambda words: (
        REPLIES[reply] if words[0].upper() == command and next(calls) == 1 else None
    )
    for _ in range(2):
        with contextlib.suppress(StoreError):
            write_one(store, one, value)
        with contextlib.suppress(StoreError):
            outcome, got = read_one(store, one, LARGE)
            assert outcome is MISSING or got == value
        with contextlib.suppress(StoreError):
            assert store.contains([make_key(9)]) == [False]
    front.says = lambda _: None
    in_time(lambda: store.delete([one]))
    assert in_time(lambda: store.contains([one])) == [False]
    assert in_time(lambda: write_one(store, one, value)) == Done(LARGE)
    assert in_time(lambda: read_one(store, one, LARGE)) == (Done(LARGE), value)


@pytest.mark.parametrize("name", REPLIES)
def test_what_an_error_means_for_those_who_ask_again(
    front: Front, store: RedisStore, name: str
) -> None:
    """A fault that may heal is unavailable, and so is a reply of another form. A string that is no envelope is
    rejected."""
    front.says = lambda _: REPLIES[name]
    if name in ("wrong type", "other word", "more than said"):
        assert read_one(store, make_key(1), 100)[0] is REJECTED
    else:
        with pytest.raises(StoreRefused if name in ("unknown", "no reason") else StoreUnavailable):
            read_one(store, make_key(1), 100)


def test_k6_a_clusters_node_that_was_taken_for_a_server_is_told_by_name(
    front: Front, store: RedisStore
) -> None:
    front.says = lambda _: REPLIES["moved where nobody listens"]
    with pytest.raises(StoreUnavailable, match=r"redis\.topology to cluster"):
        store.ping()


def slow_works(store: RedisStore) -> list[Callable[[], Any]]:
    return [
        lambda: store.contains([make_key(1)]),
        lambda: read_one(store, make_key(1), 100),
        lambda: write_one(store, make_key(1), b"x"),
        lambda: store.delete([make_key(1)]),
        store.ping,
    ]


@pytest.mark.parametrize(
    "reply", [b"$32\r\n" + bytes(32), b"+" + b"x" * 4000, b"$60000\r\n" + bytes(60000)]
)
def test_h4_a_reply_that_comes_byte_by_byte_has_no_more_time(
    front: Front, store: RedisStore, reply: bytes
) -> None:
    """Each byte within the socket's timeout: 0.8 s to 20 minutes."""
    front.says, front.step = lambda _: reply, 1
    for work in slow_works(store):
        with pytest.raises(StoreUnavailable, match=r"not done in 0\.2 s"):
            work()


def test_h4_a_reply_without_end_is_given_up(front: Front, store: RedisStore) -> None:
    """It keeps coming, faster than any timeout of a socket."""
    front.says, front.endless = lambda _: b"$99999999999999\r\n", True
    for work in slow_works(store):
        with pytest.raises(StoreUnavailable, match=r"not done in 0\.2 s"):
            work()
    front.says, front.endless = lambda _: None, False
    assert in_time(lambda: store.contains([make_key(1)])) == [False]


def test_h4_a_greeting_that_comes_byte_by_byte_is_given_up(front: Front) -> None:
    front.greets, front.step = lambda _: b"+" + b"x" * 4000, 1
    store = open_store(front.url, timeout_s=0.1, connect_timeout_s=0.1)
    with pytest.raises(StoreUnavailable, match=r"not done in 1\.2 s"):
        store.contains([make_key(1)])
    store.close()


def test_h4_nodes_of_a_cluster_that_answer_byte_by_byte_are_given_up(front: Front) -> None:
    front.says, front.step = lambda _: b"+" + b"x" * 4000, 1
    store = open_store(front.url, topology="cluster", timeout_s=0.1, connect_timeout_s=0.1)
    with pytest.raises(StoreUnavailable, match=r"not done in 1\.2 s"):
        store.contains([make_key(1)])
    store.close()


@pytest.mark.parametrize("size", [100, 32 << 20])
def test_h4_a_server_that_takes_nothing_is_given_up(server: RedisServer, size: int) -> None:
    store = open_store(server.url, prefix=PREFIX, part_bytes=64 << 20, timeout_s=SOON_S)
    assert store.contains([make_key(1)]) == [False]  # connected
    server.pause()
    try:
        with pytest.raises(StoreUnavailable):
            write_one(store, make_key(1), bytes(size))
    finally:
        server.resume()
    store.close()


def test_of_a_value_that_is_too_long_no_more_is_read_than_shows_it(
    server: RedisServer, store: RedisStore
) -> None:
    def sent() -> int:
        return int(server.ask("INFO", "stats")["total_net_output_bytes"])

    server.ask("SET", chunk_name(PREFIX.encode(), make_key(1)), bytes(32 << 20))
    before = sent()
    assert in_time(lambda: read_one(store, make_key(1), 4096))[0] is REJECTED
    assert sent() - before < 1 << 20


# --- connections -----------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As KeyboardInterrupt, or what a debugger or a signal handler throws into a thread."""


@pytest.mark.parametrize("size", [100, 2 * PART_BYTES + 5])
@pytest.mark.parametrize("way", ["contains", "read", "write", "delete"])
def test_a2_a_thread_interrupted_anywhere_leaves_no_half_read_reply_to_others(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int, way: str
) -> None:
    steps: Iterator[int] = iter(())

    def step() -> None:
        if next(steps, 1) == 0:
            raise Interrupted

    def interruptible(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            step()
            value = method(*arguments, **named)
            step()
            return value

        return run

    for name in ("connect", "send_packed_command", "can_read", "read_response"):
        monkeypatch.setattr(Connection, name, interruptible(getattr(Connection, name)))
    store = open_store(server.url, prefix=PREFIX, timeout_s=5.0)
    one, two = make_key(0), make_key(1)
    values = {key: value_of(i, size) for i, key in enumerate((one, two))}
    for key, value in values.items():
        write_one(store, key, value)
    works: dict[str, Callable[[], Any]] = {
        "contains": lambda: store.contains([one, two]),
        "read": lambda: store.read([(key, memoryview(bytearray(size))) for key in values]),
        "write": lambda: write_one(store, make_key(7), values[one]),
        "delete": lambda: store.delete([make_key(7), make_key(8)]),
    }
    for last in range(200):
        steps = iter(range(last, -1, -1))
        try:
            works[way]()
        except Interrupted:
            steps = iter(())
            assert read_one(store, two, size) == (Done(size), values[two])
            assert store.contains([make_key(9), one]) == [False, True]
            continue
        break
    else:
        pytest.fail("it never ends")
    assert last > 2
    steps = iter(())
    store.close()


def test_k1_connections_that_fail_at_once_are_given_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py lends 100 at most, in some versions."""
    failures = iter(range(150))
    connect = Connection.connect

    def fail(self: Connection) -> None:
        if next(failures, None) is not None:
            raise OSError("the descriptor is gone")
        connect(self)

    monkeypatch.setattr(Connection, "connect", fail)
    store = open_store(server.url, prefix=PREFIX)
    for _ in range(150):
        with pytest.raises(StoreUnavailable, match="the descriptor is gone"):
            store.contains([make_key(0)])
    assert store.contains([make_key(0)]) == [False]
    store.close()


def test_k1_a_rotated_password_is_unavailable_until_it_is_known_and_never_shown(
    server: RedisServer,
) -> None:
    server.ask("ACL", "SETUSER", "engine", "on", "resetpass", f">{SECRET}", "~*", "+@all")
    store = open_store(f"redis://engine:{SECRET}@{HOST}:{server.port}", prefix=PREFIX)
    assert write_one(store, make_key(0), b"x") == Done(1)
    server.ask("ACL", "SETUSER", "engine", "resetpass", ">another")
    server.ask("CLIENT", "KILL", "USER", "engine")
    with pytest.raises(StoreUnavailable, match="Authentication") as caught:
        read_one(store, make_key(0), 1)
    assert_no_secret(caught.value)
    server.ask("ACL", "SETUSER", "engine", f">{SECRET}")
    assert read_one(store, make_key(0), 1)[1] == b"x"
    store.close()


def test_k1_a_certificate_that_expires_is_unavailable_until_it_is_renewed(
    server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "good").mkdir()
    tls = make_certificates(tmp_path / "good")
    front = TlsFront(tls, server.port)
    server.ask("ACL", "SETUSER", "u", "on", "resetpass", f">{SECRET}", "~*", "+@all")
    store = open_store(f"rediss://u:{SECRET}@{HOST}:{front.port}", tls=tls, prefix=PREFIX)
    assert write_one(store, make_key(0), b"x") == Done(1)
    front.show_certificate(make_certificates(tmp_path / "good", name="old", days=0))
    server.ask("CLIENT", "KILL", "USER", "u")
    said = []
    for _ in range(3):  # the first may still have a connection that is about to be closed
        with pytest.raises(StoreUnavailable) as caught:
            read_one(store, make_key(0), 1)
        assert_no_secret(caught.value)
        said.append(str(caught.value))
    assert "certificate" in said[-1].lower()
    front.show_certificate(tls)
    assert read_one(store, make_key(0), 1)[1] == b"x"
    store.close()
    front.close()


# --- values that are not ours ----------------------------------------------------------------------------------------


def test_k8_a_name_of_another_type_does_not_harm_the_chunks_beside_it(
    server: RedisServer, store: RedisStore
) -> None:
    values = {make_key(i): value_of(i, LARGE if i else 100) for i in range(3)}
    for key, value in values.items():
        write_one(store, key, value)
    server.ask("RPUSH", chunk_name(PREFIX.encode(), make_key(8)), "a list")
    part = next(
        name for name in server.ask("KEYS", chunk_name(PREFIX.encode(), make_key(2)) + b":*")
    )
    server.ask("UNLINK", part)
    server.ask("HSET", part, "a", "hash")
    assert store.contains([*values, make_key(8)]) == [True, True, True, False]
    buffers = [memoryview(bytearray(LARGE)) for _ in range(4)]
    got = store.read(list(zip([*values, make_key(8)], buffers, strict=True)))
    assert got == [Done(100), Done(LARGE), MISSING, REJECTED]
    assert write_one(store, make_key(8), b"x") is REJECTED
    store.delete([make_key(8)])
    assert write_one(store, make_key(8), b"x") == Done(1)


@pytest.mark.parametrize(
    ("writes", "reads"), [(64 << 10, 64 << 20), (64 << 20, 64 << 10), (1 << 20, 3 << 20)]
)
def test_k8_engines_with_other_part_sizes_share_chunks(
    server: RedisServer, writes: int, reads: int
) -> None:
    writer = open_store(server.url, prefix=PREFIX, part_bytes=writes)
    reader = open_store(server.url, prefix=PREFIX, part_bytes=reads)
    assert write_one(writer, make_key(0), value_of(0, LARGE)) == Done(LARGE)
    assert reader.contains([make_key(0)]) == [True]
    assert read_one(reader, make_key(0), LARGE) == (Done(LARGE), value_of(0, LARGE))
    assert write_one(reader, make_key(0), value_of(1, LARGE)) is REJECTED
    reader.delete([make_key(0)])
    assert server.ask("DBSIZE") == 0
    for store in (writer, reader):
        store.close()


# --- servers that are not there --------------------------------------------------------------------------------------


def assert_no_secret(error: BaseException | None) -> None:
    """Nor in what a traceback prints above it."""
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("topology", ["single", "sentinel", "cluster"])
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("where", ["127.0.0.1:1", "nowhere.invalid", "black hole"])
def test_k6_nobody_there_is_unavailable_at_start_and_later_and_shows_no_secret(
    topology: Any, scheme: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with black_hole() as port:
        host = f"127.0.0.1:{port}" if where == "black hole" else where
        url = f"{scheme}://u{SECRET}:{SECRET}@{host}"
        given = {
            "redis.url": url,
            "redis.topology": topology,
            "redis.connect_timeout_ms": 100,
            "redis.timeout_ms": 100,
            "redis.sentinel_username": SECRET,
            "redis.sentinel_password": SECRET,
        }
        settings = parse(None, {}, given).settings
        tier = open_tier(
            settings, LAYOUT, clock=SystemClock(), metrics=Metrics(), root=("model", "seed 0")
        )
        assert tier is not None
        assert "can't be used now" in caplog.text
        assert SECRET not in caplog.text
        for work in (
            lambda: tier._store.contains([make_key(0)]),
            lambda: write_one(tier._store, make_key(0), b"x"),
            lambda: about(settings.section(RedisSettings), SystemClock()),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                work()
            assert_no_secret(caught.value)
        assert tier.close(5.0)


def test_k3_a_cluster_that_is_down_as_a_whole_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    nodes = start_cluster(tmp_path)
    store = open_store(nodes[0].url, topology="cluster", timeout_s=SOON_S, connect_timeout_s=SOON_S)
    try:
        write_one(store, make_key(0), b"x")
        for node in nodes:
            node.pause()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.contains([make_key(i) for i in range(20)])
        for node in nodes:
            node.resume()
        until(lambda: store.contains([make_key(0)]) == [True], "the nodes")
        stop_all(nodes)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                read_one(store, make_key(0), 1)
        for node in nodes:
            node.start()
        until(lambda: _works(store), "the nodes, empty")
    finally:
        store.close()
        stop_all(nodes)


def _works(store: RedisStore) -> bool:
    try:
        return all(isinstance(write_one(store, make_key(i), b"x"), Done) for i in range(5)) or True
    except StoreUnavailable:
        return False


TOPOLOGIES = {
    "of nobody": b"*0\r\n",
    "no list": b"+OK\r\n",
    "nil": b"$-1\r\n",
    "of numbers": b"*1\r\n:5\r\n",
    "without nodes": b"*1\r\n*2\r\n:0\r\n:16383\r\n",
    "of a node without a port": b"*1\r\n*3\r\n:0\r\n:16383\r\n*1\r\n$9\r\n127.0.0.1\r\n",
    "without end": b"*1\r\n" * 5000,
    "no Cluster": b"-ERR This instance has cluster support disabled\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("slots", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_k3_a_cluster_that_says_no_sense_of_itself_is_unavailable(
    front: Front, slots: bytes
) -> None:
    front.says = lambda words: slots if words[0].upper() == b"CLUSTER" else b"*0\r\n"
    store = open_store(front.url, topology="cluster", timeout_s=SOON_S, connect_timeout_s=SOON_S)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.contains([make_key(0)])
    store.close()


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
@pytest.mark.parametrize("to", ["itself", "127.0.0.1:1"])
def test_k3_nodes_that_redirect_to_each_other_are_followed_so_often_and_no_longer(
    front: Front, word: bytes, to: str
) -> None:
    asked: list[bytes] = []
    where = b"%s:%d" % (HOST.encode(), front.port) if to == "itself" else to.encode()

    def says(words: list[bytes]) -> bytes | None:
        name = words[0].upper()
        if name == b"CLUSTER":
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % front.port
        if name == b"COMMAND":
            return None
        if name == b"ASKING":
            return b"+OK\r\n"
        asked.append(name)
        return b"-%s 5 %s\r\n" % (word, where)

    front.says = says
    store = open_store(front.url, topology="cluster", timeout_s=1.0, connect_timeout_s=SOON_S)
    for work in (
        lambda: store.contains([make_key(0)]),
        lambda: read_one(store, make_key(0), 100),
        lambda: write_one(store, make_key(0), b"x"),
    ):
        asked.clear()
        with pytest.raises(StoreUnavailable) as caught:
            work()
        if to == "itself":
            assert "redirect to each other" in str(caught.value)
        assert 1 <= len(asked) <= 1 + RedisCluster.RedisClusterRequestTTL, asked
    store.close()


def test_no_text_of_what_a_store_is_made_of_has_a_secret() -> None:
    options = RedisSettings(url=Secret(f"redis://u:{SECRET}@h"), sentinel_password=Secret(SECRET))
    assert (
        SECRET
        not in f"{options!r} {options} {options.address!r} {RedisStore(options, SystemClock())!r}"
    )


def test_h7_a_greeting_without_end_does_not_hold_up_the_start(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front.greets = lambda _: b"+" + b"x" * 100_000
    front.step = 1
    monkeypatch.setattr("kvstow.build.tiers.FIRST_CALL_S", SOON_S)
    settings = parse(None, {}, {"redis.url": front.url}).settings
    tier = open_tier(settings, LAYOUT, clock=SystemClock(), metrics=Metrics())
    assert tier is not None
    assert "no answer within 0.2 s" in caplog.text
    front.close()
    assert tier.close(5.0)
