"""Checks of ``kvstow doctor`` for the Mooncake tier."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from functools import partial
from typing import Final

from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.backends.result import PlannedCheck, Result, failed, ok
from kvstow.errors import SettingsError
from kvstow.runtime import Clock

LIMIT_S: Final = 20.0
CONNECT_S: Final = 5.0


def checks(
    section: MooncakeSettings, _clock: Clock, _hash_seed: str | None
) -> Iterator[PlannedCheck]:
    yield PlannedCheck("mooncake", LIMIT_S, partial(check_mooncake, section.master or ""))


def check_mooncake(master: str) -> Iterator[Result]:
    """Whether the client is installed, and the master's port is open. The client itself is not started: it would lend
    memory, and a library that it lacks may end the process."""
    if importlib.util.find_spec("mooncake") is None:
        found = "mooncake.master is set, and its client isn't installed"
        yield failed("mooncake", found, "pip install 'kvstow[mooncake]'")
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError("mooncake.master: expected host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        yield failed(
            "mooncake", f"{master}: {error}", "see that it runs, and that this host may connect"
        )
    else:
        yield ok("mooncake", f"{master} accepts connections")
