"""What a process with kvstow in it does while nobody asks: nothing listens, no thread wakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BUILD = """
import os, sys, time
from pathlib import Path
from kvstow import build
from tests.rigs.tiers import open_tier
from kvstow.cli.main import main
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import parse
from tests.unit.rig import LAYOUT, TOKENS, fill, key, keys

def sockets():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    return [link for link in links if link.startswith("socket:")]

extra = {"memory.size": "1MB", "disk.paths": sys.argv[1], "disk.size": "50MB", "disk.min_free": 0}
settings = parse(None, {}, extra).settings
clock, metrics = SystemClock(), Metrics()
disk = open_tier(settings, LAYOUT, clock=clock, metrics=metrics)
pool, engine = build.build_cache(settings, LAYOUT, name="quiet", key=None, clock=clock, metrics=metrics, tiers=[disk])
for i in range(5):
    lease = engine.reserve(key(i), b"", TOKENS)
    fill(lease, key(i))
    engine.commit(lease)
    lease.release()
assert engine.drain(30.0)
assert disk.holds(key(4))
"""


def child(code: str, *arguments: str) -> str:
    path = [str(ROOT), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{BUILD}{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_l2_l3_no_socket_is_opened_so_nobody_can_reach_one(tmp_path: Path) -> None:
    """An engine over a disk tier, and the command line beside it. There is no route to clear or run anything."""
    show = """
assert not sockets()
sys.argv = ["kvstow", "disk", "ls", "--path", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code
print("sockets", sockets())
"""
    assert child(show, str(tmp_path / "d")) == "sockets []"
    probe = "import socket; kept = socket.socket(); print(len(sockets()))"
    assert child(probe, str(tmp_path / "e")) == "1", "this test would not see a socket"


def test_m5_m6_threads_that_wait_never_wake(tmp_path: Path) -> None:
    """They wait for work, they don't look for it: an idle tier takes nothing from the scheduler's thread."""
    count = """
def switches():
    total = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if task.name != str(os.getpid()):
            status = (task / "status").read_text()
            total[task.name] = name, int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return total
time.sleep(0.2)
before = switches()
time.sleep(0.5)
woken = sorted(name for task, (name, count) in switches().items() if count - before[task][1] > 2)
assert len(before) >= 3
print("woken", woken)
"""
    assert child(count, str(tmp_path / "d")) == "woken []"
