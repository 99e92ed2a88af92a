"""A vLLM OpenAI server as a subprocess that leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import psutil

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 600.0  # the first start compiles kernels, on machines that may be busy
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.25
TAIL_LINES: Final = 12

EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
PREFIX: Final = re.compile(r"^(\(.*?pid=\d+\) ?)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\] ?)?")

OWN: Final = (
    "KVSTOW_",
    "LMCACHE_",
    "VLLM_",
)  # variables that say how vLLM and kvstow run: none of the caller's
LOCAL: Final = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # a proxy can't reach this host's loopback

KVSTOW: Final[Mapping[str, Any]] = {"kv_connector": "KVStowConnector", "kv_role": "kv_both"}


class ServerError(Exception):
    """The server did not start, or ended; the message says why as far as its log tells, and where that is."""


def all_cores() -> str:
    """Cores this process may use, as vLLM's CPU build takes them. On every side of a comparison: see README."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a vLLM process here: every core, a small KV cache, no network."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(OWN)},
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": all_cores(),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


class Server:
    """``with Server(model, log=...) as server:`` starts it and waits until it answers; leaving stops all its processes.

    ``connector`` is vLLM's ``--kv-transfer-config`` (None: no connector). ``progress`` is called now and then while
    it starts, with the last line of its log.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        connector: Mapping[str, Any] | None = KVSTOW,
        prefix_caching: bool = False,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model = model
        self.log = log
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._progress = progress
        self._environment = engine_environment(environment)
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *(
                "--model",
                str(model),
                "--served-model-name",
                model.name,
                "--host",
                HOST,
                "--port",
                str(self.port),
            ),
            *("--dtype", "float32", caching, *arguments),
        ]
        if connector is not None:
            self._command += ["--kv-transfer-config", json.dumps(dict(connector))]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write(f"$ {' '.join(self._command)}\n\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def metric(self, name: str) -> float:
        """Sum over labels of one metric on ``/metrics``; 0 when it is not there."""
        return sum_of(self.get("/metrics"), name)

    def get(self, path: str) -> str:
        with LOCAL.open(self.url + path, timeout=30) as response:
            text: str = response.read().decode()
            return text

    def post(self, path: str) -> None:
        LOCAL.open(urllib.request.Request(self.url + path, method="POST"), timeout=30).close()

    def stop(self) -> None:
        """End every process of the server: ask, wait, then kill. Idempotent, not cut short by a second Ctrl-C."""
        process, self._process = self._process, None
        if process is None:
            return
        with uninterrupted():
            family = processes_of(process.pid)
            process.terminate()
            _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
            for member in {*alive, *processes_of(process.pid)}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(
                    f"vLLM ended with exit code {process.returncode} while starting.\n{self.diagnosis()}"
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.get("/health")
                return
            self._progress(last_line(self.log))
            time.sleep(POLL_S)
        raise ServerError(
            f"vLLM did not answer within {START_TIMEOUT_S:.0f} s.\n{self.diagnosis()}"
        )

    def diagnosis(self) -> str:
        """What the log says went wrong: the exceptions if there are any, else its end; and its path."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in map(message, lines) if EXCEPTION.match(line)]
        said = list(dict.fromkeys(errors)) or lines
        return "\n".join([*(f"  {line}" for line in said[-TAIL_LINES:]), f"Log: {self.log}"])


def processes_of(pid: int) -> set[psutil.Process]:
    """``pid``, its descendants, and whatever else is in the session that it leads (orphans of a killed parent)."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        found |= {leader, *leader.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == pid:
                found.add(process)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def last_line(path: Path) -> str:
    """The last line that says something."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return message(lines[-1]) if lines else ""


def message(line: str) -> str:
    """A log line without vLLM's prefix of process, level, date and file."""
    return PREFIX.sub("", line).strip()


def sum_of(exposition: str, name: str) -> float:
    """Sum over labels of metric ``name`` in Prometheus' text format."""
    total = 0.0
    for line in exposition.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            total += float(line.rpartition(" ")[2])
    return total


class uninterrupted:  # noqa: N801  (used as a statement)
    """SIGINT and SIGTERM wait while the block runs. Only in the main thread; elsewhere it changes nothing."""

    _signals: Final = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> None:
        self._old: dict[signal.Signals, Any] = {}
        self._late: list[int] = []
        with contextlib.suppress(ValueError):
            for number in self._signals:
                self._old[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._late.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        for late in self._late[:1]:
            signal.raise_signal(late)
