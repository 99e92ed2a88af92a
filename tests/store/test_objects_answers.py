"""Object stores that answer wrongly, slowly, or too much.

A read of them is a miss or an error, and a buffer that is said to be filled has the value's bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstow.backends.base import MISSING, Done
from kvstow.errors import StoreError, StoreUnavailable
from kvstow.testing.store_suite import make_key, read_one, value_of, write_one
from tests.rigs.object_server import ObjectServer, Reply, Request
from tests.store.objects_rig import BUCKET, PART_BYTES, as_user, open_store

pytest.importorskip("obstore", reason="obstore isn't installed: pip install 'kvstow[objects]'")

URL = f"s3://{BUCKET}/p"
PATIENT_S = 20.0
SMALL, LARGE = 5000, 3 * PART_BYTES + 5
HOST = "127.0.0.1"
HEAD = b"HTTP/1.1 206 Partial Content\r\n"


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch)
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    server = ObjectServer().start()
    yield server
    server.stop()


@pytest.fixture
def store(server: ObjectServer) -> Iterator[Any]:
    store = open_store(URL, endpoint=server.url, timeout_s=PATIENT_S)
    for i, length in enumerate((SMALL, LARGE)):
        assert write_one(store, make_key(i), value_of(i, length)) == Done(length)
    server.requests.clear()
    yield store
    store.close()


def test_an_object_that_changes_between_its_parts_is_a_miss(
    server: ObjectServer, store: Any
) -> None:
    server.hook = lambda r: Reply("412 No") if "if-match" in r.headers else None
    assert read_one(store, make_key(1), LARGE)[0] is MISSING


def test_a_server_that_hung_up_on_idle_connections_is_asked_on_new_ones(
    server: ObjectServer, store: Any
) -> None:
    for _ in range(2):
        assert read_one(store, make_key(1), LARGE) == (Done(LARGE), value_of(1, LARGE))
        for client in list(server._clients):
            with contextlib.suppress(OSError):  # it is closed already
                client.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("status", ["302 Found", "307 Elsewhere", "308 Elsewhere"])
def test_a_redirection_is_followed_without_the_signature(
    server: ObjectServer, store: Any, status: str
) -> None:
    other = ObjectServer().start()
    other.objects.update(server.objects)
    server.hook = lambda r: Reply(status, b"", {"Location": f"{other.url}{r.path}"})
    assert read_one(store, make_key(0), SMALL) == (Done(SMALL), value_of(0, SMALL))
    assert other.requests
    assert not [request for request in other.requests if "authorization" in request.headers]
    other.stop()


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_an_impossible_host_name_is_an_error(host: str) -> None:
    store = open_store(URL, endpoint=f"http://{host}:9", allow_http=True, retries=0)
    with pytest.raises(StoreError):
        read_one(store, make_key(0), SMALL)
    store.close()


# --- servers that answer as they like ---------------------------------------------------------


class RudeServer:
    """Calls ``answer`` for each request, with the connection, until that fails.

    Attributes:
        heads: What the clients sent.
        gone: Is set when the server ends.
    """

    def __init__(
        self, answer: Callable[[socket.socket], object], listener: socket.socket | None = None
    ) -> None:
        self.heads: list[bytes] = []
        self.gone = threading.Event()
        self._answer = answer
        self._listener = listener or socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []

    def __enter__(self) -> RudeServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gone.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while head := client.recv(65536):
                self.heads.append(head)
                self._answer(client)

    def drip(self, client: socket.socket, data: bytes) -> None:
        """Sends a byte at a time until the server ends."""
        for at in range(len(data)):
            client.sendall(data[at : at + 1])
            if self.gone.wait(0.02):
                return


def answer(fields: str, body: bytes, status: bytes = HEAD) -> bytes:
    """Returns an answer with these fields, and with those that obstore insists on."""
    extra = 'ETag: "1"\nLast-Modified: Mon, 02 Nov 2026 00:00:00 GMT'
    return status + "\r\n".join([*fields.splitlines(), *extra.splitlines(), "", ""]).encode() + body


def whole(body: bytes) -> bytes:
    size = len(body)
    return answer(f"Content-Length: {size}\nContent-Range: bytes 0-{size - 1}/{size}", body)


WRONG = {
    "shorter than it says, then an end": (
        answer("Content-Length: 90\nContent-Range: bytes 0-89/90", b"x" * 80),
        True,
    ),
    "less than the range": (
        answer("Content-Length: 80\nContent-Range: bytes 0-89/90", b"x" * 90),
        True,
    ),
    "more than the range": (
        answer("Content-Length: 95\nContent-Range: bytes 0-89/90", b"x" * 95),
        True,
    ),
    "another range": (answer("Content-Length: 80\nContent-Range: bytes 10-89/90", b"x" * 80), True),
    "a range that ends elsewhere": (
        answer("Content-Length: 90\nContent-Range: bytes 0-79/90", b"x" * 90),
        True,
    ),
    "a range beyond the end": (
        answer("Content-Length: 90\nContent-Range: bytes 0-89/80", b"x" * 90),
        True,
    ),
    "a range without a length": (
        answer("Content-Length: 90\nContent-Range: bytes 0-89/*", b"x" * 90),
        True,
    ),
    "no length": (answer("Content-Range: bytes 0-89/90", b"x" * 90), True),
    "no range": (answer("Content-Length: 90", b"x" * 90), True),
    "two lengths": (
        answer("Content-Length: 9\nContent-Length: 90\nContent-Range: bytes 0-89/90", b"x" * 90),
        True,
    ),
    "a length beyond measure": (
        answer(f"Content-Length: {'9' * 6000}\nContent-Range: bytes 0-89/90", b""),
        True,
    ),
    "minus one": (answer("Content-Length: -1\nContent-Range: bytes 0--1/90", b"x" * 90), True),
    "all instead of a part": (
        answer("Content-Length: 90", b"x" * 90, b"HTTP/1.1 200 OK\r\n"),
        True,
    ),
    "a head without an end": (HEAD + b"A: b\r\n" * 1_000_000, True),
    "a field without an end": (HEAD + b"A: " + b"b" * 5_000_000, True),
    "no HTTP": (b"220 mail ready\r\n\r\n" * 3, True),
    "a status of its own": (b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", False),
    "nothing": (b"", True),
    "silence": (b"", False),
}


@pytest.mark.parametrize("room", [100, LARGE])
@pytest.mark.parametrize("wrong", WRONG)
def test_k2_what_is_no_answer_is_a_fault(wrong: str, room: int) -> None:
    data, ends = WRONG[wrong]

    def how(client: socket.socket) -> None:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_RDWR)

    with RudeServer(how) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=0.3, retries=0)
        with pytest.raises(StoreError) as caught:
            read_one(store, make_key(0), room)
        assert no_secret(caught.value)
        store.close()


@pytest.mark.parametrize("from_byte", [0, 40, 400])
def test_f5_h4_bytes_that_drip_are_given_up(from_byte: int) -> None:
    data = whole(b"x" * 100_000)

    def how(client: socket.socket) -> None:
        client.sendall(data[:from_byte])
        rude.drip(client, data[from_byte:])

    with RudeServer(how) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=0.3)
        with pytest.raises(StoreUnavailable, match=r"timed out|no answer in time"):
            read_one(store, make_key(0), 200_000)
        store.close()
    assert len(rude.heads) <= 2


def test_f5_parts_of_which_one_never_comes_are_given_up(server: ObjectServer, store: Any) -> None:
    gate = threading.Event()

    def hold_the_third(request: Request) -> None:
        if request.headers["range"].startswith("bytes=2"):
            gate.wait(PATIENT_S)

    server.hook = hold_the_third
    hasty = open_store(URL, endpoint=server.url, timeout_s=0.5)
    with pytest.raises(StoreUnavailable, match=r"timed out|no answer in time"):
        read_one(hasty, make_key(1), LARGE)
    hasty.close()
    gate.set()
    server.hook = lambda _: None
    assert read_one(store, make_key(1), LARGE) == (Done(LARGE), value_of(1, LARGE))


@pytest.mark.parametrize("i", [0, 1])
def test_f5_a_reset_amid_the_bytes_is_asked_again(server: ObjectServer, store: Any, i: int) -> None:
    once = iter([60])

    def cut(request: Request) -> Reply | None:
        last = request.headers["range"].startswith(f"bytes={i * 2 * PART_BYTES}-")
        at = next(once, None) if last else None
        return (
            server._read(request, server.objects[request.path])._replace(cut_at=at) if at else None
        )

    server.hook = cut
    length = (SMALL, LARGE)[i]
    assert read_one(store, make_key(i), length) == (Done(length), value_of(i, length))
    assert next(once, None) is None


def test_bytes_behind_the_value_are_ignored() -> None:
    """They are neither in this value nor in the next."""
    turns = iter(range(9))

    def how(client: socket.socket) -> None:
        client.sendall(whole(b"%d" % next(turns) * 10) + whole(b"evil" * 3) * 3)

    with RudeServer(how) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=PATIENT_S)
        for i in range(3):
            assert read_one(store, make_key(i), 5000) == (Done(10), b"%d" % i * 10)
        store.close()


def test_an_answer_that_no_other_may_follow() -> None:
    body = answer("Content-Length: 9\nContent-Range: bytes 0-8/9\nConnection: Close", b"123456789")
    with RudeServer(lambda client: client.sendall(body)) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=PATIENT_S)
        assert read_one(store, make_key(0), 100) == (Done(9), b"123456789")
        store.close()


def test_bytes_in_chunks_are_taken() -> None:
    fields = "Content-Length: 10\nTransfer-Encoding: chunked\nContent-Range: bytes 0-9/10"
    body = answer(fields, b"a\r\nxxxxxxxxxx\r\n0\r\n\r\n")
    with RudeServer(lambda client: client.sendall(body)) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=PATIENT_S)
        for _ in range(2):
            assert read_one(store, make_key(0), 100) == (Done(10), b"x" * 10)
        store.close()


def test_a_tag_cannot_say_what_is_asked_next() -> None:
    tag = '"a\rX-Forged: 1"'
    body = answer(
        f"Content-Length: {PART_BYTES}\nContent-Range: bytes 0-{PART_BYTES - 1}/{LARGE}",
        b"x" * PART_BYTES,
    )
    forged = body.replace(b'ETag: "1"', b"ETag: " + tag.encode())
    with RudeServer(lambda client: client.sendall(forged)) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=0.3, retries=0)
        with pytest.raises(StoreError):
            read_one(store, make_key(0), LARGE)
        store.close()
    assert not [head for head in rude.heads if b"Forged" in head]


def test_a_fault_keeps_no_buffer(server: ObjectServer, store: Any) -> None:
    for status in ("503 Slow Down", "403 No", "404 Not Found"):
        server.hook = lambda _, status=status: Reply(status)
        for i, length in enumerate((SMALL, LARGE)):
            buffer = bytearray(length)
            with contextlib.suppress(StoreError):
                store.read([(make_key(i), memoryview(buffer))])
            buffer.clear()  # raises BufferError while a view of it is alive


def no_secret(error: BaseException) -> bool:
    """Tells whether the error and its causes have neither the key nor a signature."""
    text = ""
    seen: BaseException | None = error
    while seen is not None:
        text += str(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "very-secret" not in text and "X-Amz" not in text


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("status", ["403 No", "503 Slow Down", "302 Found"])
def test_a_signature_is_in_no_message(
    server: ObjectServer, store: Any, status: str, i: int
) -> None:
    server.hook = lambda _: Reply(status)
    with pytest.raises(StoreError) as caught:
        read_one(store, make_key(i), (SMALL, LARGE)[i])
    assert no_secret(caught.value)


def test_the_longest_head_is_taken() -> None:
    data = answer(f"Content-Length: 9\nContent-Range: bytes 0-8/9\nA: {'b' * 10_000}", b"123456789")
    with RudeServer(lambda client: client.sendall(data)) as rude:
        store = open_store(URL, endpoint=f"http://{HOST}:{rude.port}", timeout_s=PATIENT_S)
        assert read_one(store, make_key(0), 100) == (Done(9), b"123456789")
        store.close()
