"""A small, fast, fake object store over HTTP on loopback, for benchmarks and for tests of faults.

It serves the requests that kvstow sends to S3, GCS (XML) and Azure Blob: GET with one range and
If-Match, HEAD, PUT, DELETE, and each store's way of a PUT that only creates. It checks no signature
and takes any bucket's name. moto, which the tests run too, is closer to S3 and moves a tenth of the
bytes a second.

``python -m tests.rigs.object_server`` serves in a process of its own and prints its port.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

HOST: Final = "127.0.0.1"
RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")
BATCHED: Final = re.compile(rb"DELETE (\S+) HTTP/1.1")
CREATE_ONLY: Final = (("if-none-match", "*"), ("x-goog-if-generation-match", "0"))
MAX_HEAD_BYTES: Final = 64 << 10


class Request(NamedTuple):
    method: str
    path: str  # without the query
    headers: Mapping[str, str]  # names in lower case


class Reply(NamedTuple):
    status: str
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = {}
    cut_at: int | None = None  # bytes of the body after which the connection is reset


class ObjectServer:
    """The server.

    Attributes:
        objects: The value of each path.
        requests: All requests so far.
        hook: Is called with each request. It may hold the request, or return the reply; None: the
            server replies.
        port: The port that it listens on.
    """

    def __init__(self, port: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.hook: Callable[[Request], Reply | None] = lambda _: None
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._listener = socket.create_server((HOST, port), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._clients: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> ObjectServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def stop(self) -> None:
        """Resets all connections. The server can't be started again."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in list(self._clients):
            _reset(client)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._clients.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            rest = b""
            while True:
                head, rest = _head(client, rest)
                lines = head.decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])
                }
                length = int(headers.get("content-length", 0))
                body = bytearray(length)
                body[: len(rest)] = rest[:length]
                view = memoryview(body)
                at = min(len(rest), length)
                rest = rest[length:]
                while at < length:
                    got = client.recv_into(view[at:])
                    if not got:
                        return
                    at += got
                request = Request(method, target.partition("?")[0], headers)
                self.requests.append(request)
                reply = self.hook(request) or self._answer(request, body)
                self._send(client, request, reply)
        self._clients.discard(client)
        client.close()

    def _answer(self, request: Request, body: bytearray) -> Reply:
        with self._lock:
            value = self.objects.get(request.path)
            if request.method == "PUT":
                if value is not None and any(
                    request.headers.get(name) == how for name, how in CREATE_ONLY
                ):
                    return Reply(
                        "412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>"
                    )
                self._versions[request.path] = self._versions.get(request.path, 0) + 1
                self.objects[request.path] = bytes(body)
                return Reply(
                    "201 Created" if "x-ms-blob-type" in request.headers else "200 OK",
                    b"",
                    self._headers(request),
                )
            if request.method == "DELETE":
                self.objects.pop(request.path, None)
                return Reply(
                    "202 Accepted" if "x-ms-version" in request.headers else "204 No Content"
                )
            if request.method == "POST":
                return self._delete_batch(body)
            if value is None:
                return Reply("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
            return self._read(request, value)

    def _delete_batch(self, body: bytearray) -> Reply:
        """Answers Azure's batch of deletes, in which each request is a part of the body."""
        answers = []
        for i, path in enumerate(BATCHED.findall(body)):
            gone = self.objects.pop(path.decode(), None) is None
            status = b"404 The specified blob does not exist." if gone else b"202 Accepted"
            head = b"--answers\r\nContent-Type: application/http\r\nContent-ID: %d\r\n\r\n" % i
            answers.append(head + b"HTTP/1.1 %s\r\n\r\n\r\n" % status)
        answers.append(b"--answers--\r\n")
        return Reply(
            "202 Accepted", b"".join(answers), {"Content-Type": "multipart/mixed; boundary=answers"}
        )

    def _read(self, request: Request, value: bytes) -> Reply:
        headers = self._headers(request)
        if request.headers.get("if-match", headers["ETag"]) != headers["ETag"]:
            return Reply("412 Precondition Failed")
        asked = RANGE.fullmatch(
            request.headers.get("range") or request.headers.get("x-ms-range", "")
        )
        if asked is None:
            return Reply("200 OK", value, headers)
        start, end = int(asked[1]), min(int(asked[2] or len(value)) + 1, len(value))
        if start >= len(value):
            return Reply("416 Range Not Satisfiable")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(value)}"
        return Reply("206 Partial Content", memoryview(value)[start:end], headers)

    def _headers(self, request: Request) -> dict[str, str]:
        version = self._versions.get(request.path, 0)
        when = "Mon, 02 Nov 2026 00:00:00 GMT"
        return {"ETag": f'"{version}"', "Last-Modified": when, "x-goog-generation": str(version)}

    @staticmethod
    def _send(client: socket.socket, request: Request, reply: Reply) -> None:
        lines = [f"HTTP/1.1 {reply.status}", f"Content-Length: {len(reply.body)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        if request.method != "HEAD":
            client.sendall(memoryview(reply.body)[: reply.cut_at])
        if reply.cut_at is not None:
            _reset(client)
            raise ConnectionResetError


def _head(client: socket.socket, data: bytes) -> tuple[bytes, bytes]:
    """Returns the next request's head, and the bytes that came after it."""
    while b"\r\n\r\n" not in data:
        got = client.recv(MAX_HEAD_BYTES)
        data += got
        if not got or len(data) > 2 * MAX_HEAD_BYTES:
            raise ConnectionResetError
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _reset(client: socket.socket) -> None:
    """Closes the connection so that the other side sees an error, not an end."""
    with contextlib.suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.shutdown(socket.SHUT_RDWR)
        client.close()


def main() -> None:
    server = ObjectServer().start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
