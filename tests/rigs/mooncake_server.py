"""Runs a real Mooncake on loopback, for tests and benchmarks: a master and a lender of memory.

It needs the package mooncake-transfer-engine-non-cuda, and libraries that pip does not install: see
``missing``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from kvstow.backends.mooncake.settings import P2P, MooncakeSettings
from kvstow.settings.variables import set_defaults
from tests.rigs.redis_server import free_port, until

HOST: Final = "127.0.0.1"
LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def missing() -> str | None:
    """Returns why Mooncake can't run here, and what to install; None if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake's client isn't installed: pip install 'kvstow[mooncake]'"
    packages = [package for name, package in LIBRARIES.items() if not _loads(name)]
    return (
        f"Mooncake's client needs libraries: apt-get install {' '.join(packages)}"
        if packages
        else None
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def quiet() -> None:
    """Sets the variables that kvstow's own tier sets before it loads the client."""
    set_defaults(MooncakeSettings().variables())


class MooncakeServer:
    """A master, and a process that lends memory to it.

    Args:
        folder: Where the logs go.
        lend_bytes: How much memory is lent.
        metadata: Whether the master also serves metadata over HTTP.
    """

    def __init__(
        self, folder: Path, lend_bytes: int = 256 << 20, *, metadata: bool = False
    ) -> None:
        if (why := missing()) is not None:
            raise FileNotFoundError(why)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lend_bytes = lend_bytes
        self.port = free_port()
        self._metadata_port = free_port() if metadata else None
        self._master: subprocess.Popen[bytes] | None = None
        self._lender: subprocess.Popen[bytes] | None = None

    @property
    def master(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def metadata(self) -> str:
        return f"http://{HOST}:{self._metadata_port}/metadata" if self._metadata_port else P2P

    def start(self) -> MooncakeServer:
        self.start_master()
        lend = [HOST, self.metadata, self._lend_bytes, 16 << 20, "tcp", "", self.master]
        with (self._folder / "lender.log").open("ab") as log:
            self._lender = subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.mooncake_server", json.dumps(lend)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._lender.stdout is not None
        if self._lender.stdout.readline().strip() != b"lent":
            raise OSError(f"no memory was lent: see {self._folder}/lender.log")
        return self

    def start_master(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        program = Path(spec.origin).parent / "mooncake_master"
        command = [
            str(program),
            f"--rpc_port={self.port}",
            f"--rpc_address={HOST}",
            f"--metrics_host={HOST}",
            f"--metrics_port={free_port()}",
            f"--http_metadata_server_host={HOST}",
        ]
        if self._metadata_port:
            command += [
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_port={self._metadata_port}",
            ]
        with (self._folder / "master.log").open("ab") as log:
            self._master = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self._up, f"mooncake_master, log in {self._folder}/master.log")

    def _up(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0):
            return True

    def pause(self) -> None:
        """Stops all threads of the master."""
        _stop(self._master)

    def resume(self) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def pause_lender(self) -> None:
        _stop(self._lender)

    def resume_lender(self) -> None:
        assert self._lender is not None
        self._lender.send_signal(signal.SIGCONT)

    def kill_master(self) -> None:
        process = self._master
        self._master = None
        _end(process)

    def kill_lender(self) -> None:
        process = self._lender
        self._lender = None
        _end(process)

    def kill(self) -> None:
        self.kill_lender()
        self.kill_master()


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def lend(arguments: str) -> None:
    """Lends memory until standard input ends, that is until the parent process has ended."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if client.setup(*json.loads(arguments)):
        sys.exit(1)
    sys.stdout.write("lent\n")
    sys.stdout.flush()
    threading.Thread(target=_until_eof, daemon=True).start()
    threading.Event().wait()


def _until_eof() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    quiet()
    lend(sys.argv[1])
