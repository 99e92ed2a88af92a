"""The server wrapper: it waits, says what went wrong, and leaves no process behind. Stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest

from demo.client import Client
from demo.server import Server, ServerError, engine_environment, last_line, message, sum_of

GIVE_UP_S = 20

# Serves /health and starts a child as EngineCore is one; the child ignores SIGTERM.
GOOD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b'a_total{x="1"} 2.0\\na_total{x="2"} 3.0\\na_total_created 9.0\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BAD = "raise ValueError('Unsupported connector type: Nothing')"


def server(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("demo.server.STOP_TIMEOUT_S", 0.5)
    stand_in = Server(Path("model"), log=tmp_path / "server.log")
    stand_in._command = [sys.executable, "-c", program, str(stand_in.port)]
    return stand_in


def session(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def assert_gone(pid: int) -> None:
    """Whoever was killed is, once the kernel has come to it."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while left := session(pid):
        assert time.monotonic() < give_up_s, left
        time.sleep(0.05)


def test_stop_ends_children_that_ignore_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path, GOOD, monkeypatch) as running:
        pid = running.pid
        assert len(session(pid)) == 2
        assert running.metric("a_total") == 5.0
    assert_gone(pid)


def test_stop_ends_orphans_of_a_killed_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path, GOOD, monkeypatch) as running:
        pid = running.pid
        os.kill(pid, signal.SIGKILL)
    assert_gone(pid)


def test_the_callers_proxy_and_settings_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("KVSTOW_MEMORY_SIZE", "LMCACHE_CHUNK_SIZE", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "nonsense")
    with server(tmp_path, GOOD, monkeypatch) as running:
        assert running.metric("a_total") == 5.0
        with pytest.raises(openai.APIStatusError):  # the stand-in's answer: it was reached
            Client(running.url, "model").complete("hello")
    assert "nonsense" not in engine_environment().values()


def test_a_server_that_ends_while_starting_is_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError) as caught, server(tmp_path, BAD, monkeypatch):
        pass
    assert "ValueError: Unsupported connector type: Nothing" in str(caught.value)
    assert str(tmp_path / "server.log") in str(caught.value)


def test_interrupt_while_starting_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import signal, sys, demo.server as s
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
s.STOP_TIMEOUT_S = 0.5
server = s.Server(Path("model"), log=Path({str(tmp_path / "log")!r}))
server._command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
try:
    with server:
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    give_up_s = time.monotonic() + GIVE_UP_S
    while not (tmp_path / "log").exists() or "here\n" not in (tmp_path / "log").read_text():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(GIVE_UP_S) == 130
    assert not any(child.is_running() for child in children)


def test_log_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("(Worker pid=3) INFO 11-30 03:20:09 [cpu.py:317] Loading [x] weights\n\n")
    assert last_line(log) == "Loading [x] weights"
    assert message("plain words") == "plain words"


def test_sum_of_takes_whole_names_only() -> None:
    text = "# HELP hits_total help\nhits_total 2\nhits_total_other 5\nmy_hits_total 7\n"
    assert sum_of(text, "hits_total") == 2.0
    assert sum_of(text, "none") == 0.0
