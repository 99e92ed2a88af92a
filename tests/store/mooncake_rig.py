"""Opens stores over a real Mooncake."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.runtime import SystemClock
from tests.rigs.mooncake_server import missing, quiet


def need_mooncake() -> None:
    """Skips the module if the client can't be loaded, and says what to install."""
    why = missing()
    if why is not None:
        pytest.skip(why, allow_module_level=True)
    quiet()


def open_store(master: str, *, clock: Any = None, **options: Any) -> Any:
    """Opens a store as a new engine would, with a prefix of its own unless ``options`` has one."""
    from kvstow.backends.mooncake.connect import connect
    from kvstow.backends.mooncake.store import MooncakeStore

    options = {"prefix": f"t{os.urandom(6).hex()}/", "buffer_size": 32 << 20, **options}
    own = MooncakeSettings(master=master, **options)
    return MooncakeStore(own, clock or SystemClock(), lambda: connect(own))
