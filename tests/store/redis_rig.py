"""Stores over real servers, for the tests of the Redis tier."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstow.runtime import SystemClock
from kvstow.store.redis.options import RedisOptions, Tls, parse_address
from kvstow.store.redis.store import RedisStore
from kvstow.testing.redis_server import HOST, free_port

PART_BYTES = 1 << 20


def open_store(url: str, *, clock: Any = None, topology: Any = "single", **options: Any) -> RedisStore:
    """A prefix of its own, so that stores on one server are apart, unless one is given; small parts."""
    options = {"prefix": f"t{os.urandom(6).hex()}:", "part_bytes": PART_BYTES, **options}
    return RedisStore(RedisOptions(parse_address(url, topology), topology, **options), clock or SystemClock())


def make_certificates(folder: Path) -> Tls:
    """An authority, and a certificate of 127.0.0.1 that serves as the server's and as the client's."""
    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run(*new, "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    run(*new, "-subj", "/CN=127.0.0.1", "-keyout", "own.key", "-out", "own.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    run(
        *("x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "own.pem", "-days", "2", "-extfile", "names"),
    )
    return Tls(str(folder / "ca.pem"), str(folder / "own.pem"), str(folder / "own.key"))


class TlsFront:
    """Ends TLS in front of a server that may be built without it; clients must show a certificate."""

    def __init__(self, tls: Tls, port: int) -> None:
        assert tls.cert_file is not None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(tls.cert_file, tls.key_file)
        self._context.load_verify_locations(tls.ca_file)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._to = port
        self.port = free_port()
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(client, server_side=True) as inner,
            socket.create_connection((HOST, self._to)) as server,
        ):
            for end in (server, inner):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(server, inner), daemon=True).start()
            _pump(inner, server)

    def close(self) -> None:
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port whose connections are never taken: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex((HOST, port))
        yield port
