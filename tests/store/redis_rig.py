"""Stores over real servers, for the tests of the Redis tier."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.connection import HiredisRespSerializer

from kvstow.backends.redis.settings import RedisSettings
from kvstow.backends.redis.store import RedisStore
from kvstow.fields.values import Secret
from kvstow.runtime import SystemClock
from tests.rigs.redis_server import HOST, free_port

PART_BYTES = 1 << 20
TLS_HANDSHAKE = b"\x16"


def open_store(
    url: str, *, clock: Any = None, topology: Any = "single", **options: Any
) -> RedisStore:
    """Opens a store with small parts. Unless a prefix is given it has one of its own, so stores on one server are
    apart."""
    options = {"prefix": f"t{os.urandom(6).hex()}:", "part_bytes": PART_BYTES, **options}
    options["part_size"] = options.pop("part_bytes")
    if "ttl_s" in options:
        options["ttl"] = options.pop("ttl_s")
    for name in ("timeout", "connect_timeout"):
        if f"{name}_s" in options:
            options[f"{name}_ms"] = round(options.pop(f"{name}_s") * 1e3)
    tls = options.pop("tls", None)
    if tls is not None:
        options |= {"tls_ca": tls.ca_file, "tls_cert": tls.cert_file, "tls_key": tls.key_file}
    own = RedisSettings(url=Secret(url), topology=topology, **options)
    return RedisStore(own, clock or SystemClock())


class Tls(NamedTuple):
    """Files of certificates, in PEM format."""

    ca_file: str
    cert_file: str
    key_file: str


def forbid_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails what sends a value by hiredis' packer, which copies it."""
    pack = HiredisRespSerializer.pack

    def pack_small(self: HiredisRespSerializer, *arguments: Any) -> Any:
        assert all(len(word) < PART_BYTES for word in arguments if isinstance(word, bytes))
        return pack(self, *arguments)

    monkeypatch.setattr(HiredisRespSerializer, "pack", pack_small)


def make_certificates(folder: Path, name: str = "own", days: int = 2) -> Tls:
    """Makes an authority, unless the folder has one, and a certificate of 127.0.0.1 for servers and clients."""

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    if not (folder / "ca.pem").exists():
        run(
            *new,
            "-x509",
            "-subj",
            "/CN=authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-days",
            "2",
        )
    run(*new, "-subj", "/CN=127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    run(
        *(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
        ),
        *("-out", f"{name}.pem", "-days", str(days), "-extfile", "names"),
    )
    return Tls(str(folder / "ca.pem"), str(folder / f"{name}.pem"), str(folder / f"{name}.key"))


class TlsFront:
    """Ends TLS in front of a server that may be built without it. Clients must show a certificate. Connections without
    TLS, such as a Sentinel's, pass as they are. ``tls`` counts the others."""

    def __init__(self, tls: Tls, port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.show_certificate(tls)
        self._context.load_verify_locations(tls.ca_file)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._to = port
        self.tls = 0
        self.port = free_port()
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def show_certificate(self, tls: Tls) -> None:
        """Shows this certificate from now on."""
        assert tls.cert_file is not None
        self._context.load_cert_chain(tls.cert_file, tls.key_file)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._inner(client) as inner,
            socket.create_connection((HOST, self._to)) as server,
        ):
            for end in (server, inner):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(server, inner), daemon=True).start()
            _pump(inner, server)

    def _inner(self, client: socket.socket) -> socket.socket:
        if client.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
            return client
        self.tls += 1
        return self._context.wrap_socket(client, server_side=True)

    def close(self) -> None:
        self._listener.close()


class FaultProxy:
    """A proxy in front of a server. ``mode`` may be changed at any time, and holds for what comes from then on.

    Modes: pass, swallow (no answers), refuse (connections), reset (at the first byte of an answer), cut (after 1,000
    bytes of an answer), slow (answers come 64 KiB at a time, with ``SLOW_S`` in between).

    ``round_trips`` counts how often the client sent something after an answer.
    """

    SLOW_S = 0.2

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = free_port()
        self.round_trips = 0
        self._mode = "pass"
        self._open: list[socket.socket] = []
        self._over = threading.Event()
        self._listen()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        before, self._mode = self._mode, mode
        if mode == "refuse":
            self._hang_up()
        elif before == "refuse":
            self._listen()

    def _listen(self) -> None:
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((HOST, self._to))
                self._open += [client, server]
                answered = [True]
                for work in (self._ask, self._answer):
                    threading.Thread(
                        target=work, args=(client, server, answered), daemon=True
                    ).start()

    def _ask(self, client: socket.socket, server: socket.socket, answered: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.round_trips += answered[0]
                answered[0] = False
                if self._mode != "swallow":
                    server.sendall(data)
        _shut(server)

    def _answer(self, client: socket.socket, server: socket.socket, answered: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                answered[0] = True
                if self._mode == "slow":
                    self._over.wait(self.SLOW_S)
                if self._mode in ("reset", "cut"):
                    client.sendall(data[:1000] if self._mode == "cut" else b"")
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
                    break
                if self._mode != "swallow":
                    client.sendall(data)
        _shut(client)

    def _hang_up(self) -> None:
        _shut(self._listener)
        self._listener.close()
        for sock in self._open:
            _shut(sock)
        self._open.clear()

    def close(self) -> None:
        self._over.set()
        self._hang_up()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """Yields a port whose connections are never accepted, because its queue is full."""
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
