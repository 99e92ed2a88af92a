"""Object stores that are killed, emptied, silent, slow, cut off, or answer with errors.

Each of these is a miss for the engine, and nothing worse.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.objects.bucket import parse_url
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.testing.manual import ManualClock
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.object_server import ObjectServer, Reply, Request
from tests.store.objects_rig import (
    BUCKET,
    CREDENTIALS,
    PART_BYTES,
    Moto,
    Wire,
    as_user,
    need_obstore,
    open_store,
)
from tests.store.test_redis_faults import Node
from tests.unit.rig import FRAME_BYTES, key

need_obstore()

LARGE = 3 * PART_BYTES + 5
URL = f"s3://{BUCKET}/p"


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    server = ObjectServer().start()
    yield server
    server.stop()


@pytest.fixture
def store(server: ObjectServer) -> Iterator[Any]:
    store = open_store(URL, endpoint=server.url)
    yield store
    store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moto")


@pytest.fixture(scope="module")
def moto(folder: Path) -> Iterator[Moto]:
    moto = Moto(folder)
    yield moto
    moto.kill()


def path_of(i: int) -> str:
    return f"/{BUCKET}/{parse_url(URL).path_of(make_key(i))}"


def every_call(store: Any) -> list[Callable[[], Any]]:
    """Returns a call of each method, and calls that send several requests."""
    return [
        lambda: store.contains([make_key(0)]),
        lambda: store.contains([make_key(0), make_key(1)]),
        lambda: read_one(store, make_key(0), 100),
        lambda: read_one(store, make_key(0), LARGE),
        lambda: write_one(store, make_key(1), value_of(1, 100)),
        lambda: store.delete([make_key(0)]),
    ]


def times_asked(server: ObjectServer) -> int:
    """Returns how often the most frequent request came."""
    return max(
        Counter((request.method, request.path) for request in list(server.requests)).values()
    )


# --- S3 as moto has it: one server, several engines -------------------------------------------


def test_k1_a_killed_server_is_a_miss_and_one_restarted_empty_takes_chunks_again(
    moto: Moto,
) -> None:
    nodes = [Node(open_store(URL, endpoint=moto.url, timeout_s=2.0)) for _ in range(3)]
    nodes[0].put(1, 2)
    assert nodes[1].get(1, 2) == 2
    moto.kill()
    nodes[0].put(3)
    assert nodes[0].counter("failed_chunks", "unavailable") == 1
    assert nodes[2].get(1, 2) == 0
    moto.start()
    nodes[0].put(4)
    assert nodes[2].get(4) == 1
    assert nodes[2].get(1, 2) == 0
    for node in nodes:
        node.close()


def test_f4_k5_an_object_that_is_deleted_between_head_and_read_is_no_false_hit(moto: Moto) -> None:
    node = Node(open_store(URL, endpoint=moto.url, timeout_s=5.0))
    node.put(20)
    assert node.tier.holds(key(20))
    name = parse_url(URL).path_of(key(20))
    assert moto.ask("DELETE", f"/{BUCKET}/{name}")[0] == 204
    node.engine.reset()
    assert node.get(20) == 0
    assert not node.tier.holds(key(20))
    node.close()


def test_a_corrupted_object_is_a_miss_and_taken_away(moto: Moto) -> None:
    node, other = (Node(open_store(URL, endpoint=moto.url, timeout_s=5.0)) for _ in range(2))
    node.put(30)
    name = f"/{BUCKET}/{parse_url(URL).path_of(key(30))}"
    value = bytearray(moto.ask("GET", name)[1])
    assert len(value) == FRAME_BYTES
    value[5000] ^= 0xFF
    moto.ask("PUT", name, bytes(value))
    assert other.get(30) == 0
    assert other.counter("corrupt_chunks") == 1
    assert moto.ask("GET", name)[0] == 404
    for each in (node, other):
        each.close()


def test_a_bucket_that_is_not_there_is_refused_not_missed(moto: Moto) -> None:
    store = open_store("s3://no-such-bucket/p", endpoint=moto.url, timeout_s=5.0)
    for work in (
        store.ping,
        lambda: read_one(store, make_key(0), 9),
        lambda: write_one(store, make_key(0), b"x"),
    ):
        with pytest.raises(StoreRefused, match="NoSuchBucket"):
            work()
    store.close()


@pytest.mark.parametrize("politely", [False, True])
@pytest.mark.parametrize("cut_at", [10, 200, 60_000])
def test_a_connection_that_ends_amid_an_answer_is_unavailable(
    moto: Moto, cut_at: int, politely: bool
) -> None:
    whole = open_store(f"{URL}/cut{cut_at}{politely}", endpoint=moto.url, timeout_s=5.0)
    write_one(whole, make_key(0), value_of(0, 200_000))
    wire = Wire(moto.port)
    wire.cut_at, wire.politely = cut_at, politely
    store = open_store(f"{URL}/cut{cut_at}{politely}", endpoint=wire.url, timeout_s=1.0)
    with pytest.raises(StoreUnavailable):
        read_one(store, make_key(0), 200_000)
    wire.cut_at = None
    assert read_one(store, make_key(0), 200_000) == (Done(200_000), value_of(0, 200_000))
    for each in (store, whole):
        each.close()
    wire.close()


def test_h4_a_server_that_takes_connections_and_never_answers_is_given_up(moto: Moto) -> None:
    wire = Wire(moto.port)
    wire.hold = True
    store = open_store(URL, endpoint=wire.url, timeout_s=0.2)
    for work in every_call(store):
        with pytest.raises(StoreUnavailable):
            work()
    wire.hold = False
    wire.drop()
    assert store.contains([make_key(99)]) == [False]
    store.close()
    wire.close()


# --- a fake server, told what to do -----------------------------------------------------------


@pytest.mark.parametrize(
    "status", ["500 Internal Server Error", "503 Slow Down", "429 Too Many", "408 Timeout"]
)
def test_k2_errors_that_may_pass_are_unavailable_after_few_tries(
    server: ObjectServer, store: Any, status: str
) -> None:
    server.hook = lambda _: Reply(status)
    for work in every_call(store):
        server.requests.clear()
        with pytest.raises(StoreUnavailable, match=status[:3]):
            work()
        assert times_asked(server) <= 2  # and once again
    server.hook = lambda _: None
    assert write_one(store, make_key(1), b"x") == Done(1)


def test_an_error_that_passes_at_once_is_not_seen(server: ObjectServer, store: Any) -> None:
    failures = iter([Reply("503 Slow Down")])
    server.hook = lambda _: next(failures, None)
    assert write_one(store, make_key(0), b"hello") == Done(5)


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "401 Unauthorized", "403 Forbidden", "405 Not Allowed"]
)
def test_k2_errors_that_will_not_pass_are_refused_and_not_repeated(
    server: ObjectServer, store: Any, status: str
) -> None:
    key = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    secret = f"<Error><Code>AccessDenied</Code><Message>{key}</Message></Error>"
    server.hook = lambda _: Reply(status, secret.encode())
    for work in every_call(store):
        server.requests.clear()
        with pytest.raises(StoreRefused, match=status[:3]) as caught:
            work()
        assert times_asked(server) <= 1
        assert not [
            text
            for text in CREDENTIALS.values()
            if text != "us-east-1" and text in str(caught.value)
        ]


def test_a_slow_body_is_given_up(server: ObjectServer, store: Any) -> None:
    write_one(store, make_key(0), value_of(0, LARGE))
    gate = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                client, _ = listener.accept()
                client.recv(65536)
                client.sendall(
                    b"HTTP/1.1 206 P\r\nContent-Length: 1000\r\nContent-Range: bytes 0-999/1000\r\n"
                    b'ETag: "1"\r\nLast-Modified: Mon, 02 Nov 2026 00:00:00 GMT\r\n\r\nabc'
                )
                held.append(client)
                gate.set()

        held: list[socket.socket] = []
        threading.Thread(target=lambda: _quietly(serve), daemon=True).start()
        slow = open_store(
            URL, endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2
        )
        with pytest.raises(StoreUnavailable):
            read_one(slow, make_key(0), 1000)
        assert gate.is_set()
        slow.close()
        for client in held:
            client.close()


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError:
        return


@pytest.mark.parametrize("room", [LARGE, 100])
def test_f5_a_body_that_is_cut_off_is_unavailable(
    server: ObjectServer, store: Any, room: int
) -> None:
    length = LARGE if room == LARGE else 90
    write_one(store, make_key(0), value_of(0, length))
    server.hook = lambda request: _cut(server, request, 40)
    with pytest.raises(StoreUnavailable):
        read_one(store, make_key(0), room)


def _cut(server: ObjectServer, request: Request, at: int) -> Reply | None:
    value = server.objects.get(request.path)
    if request.method != "GET" or value is None:
        return None
    return server._read(request, value)._replace(cut_at=at)


def test_f5_an_object_that_is_replaced_amid_its_parts_is_a_miss(
    server: ObjectServer, store: Any
) -> None:
    write_one(store, make_key(0), value_of(0, LARGE))
    ranges: list[str] = []

    def replace_after_the_first(request: Request) -> Reply | None:
        if request.method == "GET":
            ranges.append(request.headers["range"])
            if len(ranges) == 2:
                server.objects[request.path] = value_of(9, LARGE)
                server._versions[request.path] += 1
        return None

    server.hook = replace_after_the_first
    assert read_one(store, make_key(0), LARGE)[0] is MISSING
    assert ranges[0] == f"bytes=0-{PART_BYTES - 1}"
    assert len(set(ranges)) == len(ranges)


@pytest.mark.parametrize("longer", [1, 5 * PART_BYTES])
def test_an_object_longer_than_the_slot_is_not_taken(
    server: ObjectServer, store: Any, longer: int
) -> None:
    for room in (LARGE, 1000):
        server.objects[path_of(0)] = bytes(room + longer)
        buffer = bytearray(b"\xaa" * room)
        server.requests.clear()
        assert store.read([(make_key(0), memoryview(buffer))]) == [REJECTED]
        assert buffer == b"\xaa" * room
        assert len(server.requests) == 1


def test_an_empty_object_is_no_chunk(server: ObjectServer, store: Any) -> None:
    server.objects[path_of(0)] = b""
    assert read_one(store, make_key(0), 1000)[0] is REJECTED
    assert read_one(store, make_key(0), LARGE)[0] is REJECTED


def test_what_is_no_object_store_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                client, _ = listener.accept()
                client.recv(4096)
                client.sendall(b"220 mail ready\r\n" * 10)
                client.close()

        threading.Thread(target=lambda: _quietly(serve), daemon=True).start()
        store = open_store(URL, endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreUnavailable):
            read_one(store, make_key(0), 100)
        store.close()


def test_a_name_that_leads_nowhere_is_unavailable() -> None:
    store = open_store(URL, endpoint="http://127.0.0.1:1")
    for work in every_call(store):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 cannot connect"):
            work()
    store.close()


# --- how much is asked ------------------------------------------------------------------------


def test_m4_a_lookup_of_misses_is_one_request_a_key_and_nothing_is_listed(
    server: ObjectServer, store: Any
) -> None:
    assert store.contains([make_key(i) for i in range(50)]) == [False] * 50
    assert sorted(request.method for request in server.requests) == ["HEAD"] * 50
    assert len({request.path for request in server.requests}) == 50


def test_at_most_so_many_requests_are_under_way(server: ObjectServer) -> None:
    store = open_store(URL, endpoint=server.url, parallel=3, timeout_s=10.0)
    lock, under_way, most = threading.Lock(), [0], [0]
    turn = threading.Barrier(3)

    def count(request: Request) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        turn.wait(10.0)  # three are under way at once, or this breaks
        with lock:
            under_way[0] -= 1

    server.hook = count
    assert store.contains([make_key(i) for i in range(12)]) == [False] * 12
    assert most == [3]
    store.close()


def test_a_long_call_ends_between_two_chunks(server: ObjectServer) -> None:
    clock = ManualClock()
    store = open_store(URL, endpoint=server.url, clock=clock, timeout_s=2.0)
    server.hook = lambda _: clock.advance(2.5)
    with pytest.raises(StoreUnavailable, match="twice 2 s"):
        store.write([(make_key(i), [memoryview(b"x")]) for i in range(9)])
    assert len(server.requests) == 2
    store.close()


def test_without_conditional_writes_it_asks_first_and_says_so_once(server: ObjectServer) -> None:
    said: list[str] = []
    store = open_store(URL, endpoint=server.url, warn=said.append, retries=0)
    server.hook = lambda r: Reply("501 Not Implemented") if "if-none-match" in r.headers else None
    assert write_one(store, make_key(0), b"first") == Done(5)
    assert write_one(store, make_key(0), b"second") == REJECTED
    assert write_one(store, make_key(1), b"other") == Done(5)
    assert read_one(store, make_key(0), 10)[1] == b"first"
    assert len(said) == 1
    assert [r.method for r in server.requests[:5]] == ["PUT", "HEAD", "PUT", "HEAD", "HEAD"]
    store.close()


def test_l4_names_are_digests(server: ObjectServer, store: Any) -> None:
    write_one(store, make_key(0), b"x")
    [name] = server.objects
    one = make_key(0)
    digest = one.digest().hex()
    assert name == f"/{BUCKET}/p/{one.namespace.hex()}/{digest[:2]}/{digest}.kv"


def test_a_directory_that_was_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a/chunks")
    assert write_one(store, make_key(0), b"x") == Done(1)
    assert (tmp_path / "a" / "chunks").stat().st_mode & 0o777 == 0o700
    store.close()


def test_a_directory_that_is_gone_is_made_again_and_a_file_in_its_place_is_a_fault(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}/chunks")
    (tmp_path / "chunks").rmdir()
    assert store.contains([make_key(0)]) == [False]
    assert read_one(store, make_key(0), 9)[0] is MISSING
    (tmp_path / "chunks").write_bytes(b"")
    with pytest.raises((StoreUnavailable, StoreRefused)):
        write_one(store, make_key(0), b"x")
    store.close()
