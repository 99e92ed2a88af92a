"""Opens object stores over real servers, and a connection between them that breaks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.runtime import SystemClock
from tests.rigs.redis_server import free_port, until

HOST = "127.0.0.1"
BUCKET = "kvstow-test"
PART_BYTES = 1 << 20
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "very-secret",
    "AWS_REGION": "us-east-1",
}


def open_store(url: str, *, clock: Any = None, warn: Any = None, **options: Any) -> Any:
    """Opens a store with small parts and short limits, unless ``options`` has others."""
    from kvstow.backends.objects.store import ObjectsStore

    options = {
        "part_size": PART_BYTES,
        "timeout_s": 0.5,
        "connect_timeout_s": 0.3,
        "retries": 1,
        **options,
    }
    for name in ("timeout", "connect_timeout"):
        options[f"{name}_ms"] = round(options.pop(f"{name}_s") * 1e3)
    return ObjectsStore(
        ObjectsSettings(url=url, **options),
        clock or SystemClock(),
        warn=warn or (lambda _: None),
    )


def need_obstore() -> None:
    """Skips the module if the client isn't installed."""
    pytest.importorskip("obstore", reason="obstore isn't installed: pip install 'kvstow[objects]'")


class Moto:
    """moto's S3 in a process of its own. After a restart it is empty."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("moto") is None:
            pytest.skip("moto isn't installed: pip install -r requirements/dev.txt")
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        with (self._folder / "moto.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._up, f"moto, log in {self._folder}")
        self.ask("PUT", f"/{BUCKET}")

    def _up(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0):
            return True

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Sends one request past the store. Returns status and body."""
        import http.client

        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        authorization = (
            "AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/20260101/us-east-1/s3/aws4_request, "
            "Signature=0"
        )
        connection.request(method, path, body, {"Authorization": authorization})
        answer = connection.getresponse()
        with contextlib.closing(connection):
            return answer.status, answer.read()

    def names(self) -> list[str]:
        import re

        return re.findall(
            r"<Key>([^<]*)</Key>", self.ask("GET", f"/{BUCKET}?list-type=2")[1].decode()
        )

    def kill(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()


class Wire:
    """Forwards connections to ``port``, and breaks them as told.

    Attributes:
        cut_at: Bytes from the server after which a connection breaks; None: never.
        politely: Whether it then ends without a reset.
        hold: Whether connections are accepted and never served.
    """

    def __init__(self, port: int) -> None:
        self.cut_at: int | None = None
        self.politely = False
        self.hold = False
        self._to = port
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def drop(self) -> None:
        """Breaks every connection, so that changed attributes hold for all later bytes."""
        ends = self._ends
        self._ends = []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                if not self.hold:
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection((HOST, self._to)) as server,
        ):
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            left = self.cut_at
            while data := server.recv(65536 if left is None else max(1, min(65536, left))):
                client.sendall(data)
                left = None if left is None else left - len(data)
                if left is not None and left <= 0:
                    if not self.politely:
                        client.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
                        )
                    return

    def close(self) -> None:
        self._listener.close()
        self.drop()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the process S3 credentials, and no other variable of AWS."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
