"""Checks of RBLN direct storage: its service, its library, its devices.

The library is imported in a process of its own, because it may crash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstow.backends.result import MAX_FOUND, Result, failed, ok, unknown, warning

UNIT: Final = "rebellions-rds-binding.service"
SYSTEMD: Final = "/run/systemd/system"
COMMAND_S: Final = 20.0  # the vendor's library may look for devices
PROBE: Final = (
    "from rebel import rds; "
    "print('rds', bool(rds.is_available()), int(rds.query_available_device_count()))"
)


class CommandResult(NamedTuple):
    """The outcome of a command.

    ``code`` is its exit status, negative for a signal, or None if it did not end within
    ``COMMAND_S``.
    """

    code: int | None
    out: str
    err: str


def run_command(command: Sequence[str]) -> CommandResult:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return CommandResult(None, "", "")
    return CommandResult(done.returncode, done.stdout, done.stderr)


def has_systemd() -> bool:
    """Whether systemd runs here."""
    return os.path.isdir(SYSTEMD) and shutil.which("systemctl") is not None


def check_rds(
    *,
    wanted: bool,
    systemd: bool | None = None,
    ask: Callable[[Sequence[str]], CommandResult] = run_command,
) -> Iterator[Result]:
    """Check service, library and devices.

    ``wanted`` says that settings ask for direct storage on RDS: problems are failures then, else
    warnings. ``systemd`` is None to find out whether it runs here. ``ask`` runs a command.
    """
    problem = failed if wanted else warning
    if has_systemd() if systemd is None else systemd:
        state = ask(["systemctl", "is-active", UNIT])
        if state.code == 0:
            yield ok("RDS service", f"{UNIT} is active")
        else:
            found = (
                state.out.strip() or "unknown"
                if state.code is not None
                else "no answer from systemctl"
            )
            yield problem(
                "RDS service", f"{UNIT}: {found}"[:MAX_FOUND], f"journalctl -u {UNIT} -b --no-pager"
            )
    else:
        yield unknown(
            "RDS service", "no systemd here (a container?)", f"on the host: systemctl status {UNIT}"
        )
    answer = ask([sys.executable, "-c", PROBE])
    words = answer.out.split()
    if answer.code is None:
        yield problem(
            "RDS", f"rebel.rds gave no answer within {COMMAND_S:g} s", "see the driver's log"
        )
    elif answer.code != 0 or words[-3:-2] != ["rds"]:
        last = (answer.err.strip().splitlines() or [f"exit code {answer.code}"])[-1]
        yield problem(
            "RDS", f"rebel.rds can't be asked: {last}"[:MAX_FOUND], "install rebel-compiler anew"
        )
    elif words[-2:-1] != ["True"] or words[-1] == "0":
        found = f"available: {words[-2]}, devices: {words[-1]}"
        yield problem(
            "RDS", found, f"systemctl status {UNIT}; without it direct storage goes through files"
        )
    else:
        yield ok("RDS", f"available, devices: {words[-1]}")
