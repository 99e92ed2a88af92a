"""Opening of the Mooncake tier's store."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvstow.backends.descriptor import OpenContext, OpenedStore
from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.errors import SettingsError
from kvstow.fields.values import format_size

INSTALL: Final = "pip install 'kvstow[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4"


def check(section: MooncakeSettings, frame_bytes: int) -> None:
    """Refuses settings that can't be used. Raises ``SettingsError``."""
    host, _, port = (section.master or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError("mooncake.master: expected host:port, such as master.internal:50051")
    if section.device and section.protocol != "rdma":
        raise SettingsError("mooncake.device is set, and mooncake.protocol isn't rdma")
    if section.buffer_size < frame_bytes:
        raise SettingsError(
            f"mooncake.buffer_size {format_size(section.buffer_size)} is less than a chunk: set it "
            f"to several times {format_size(frame_bytes)}"
        )


def open_store(section: MooncakeSettings, context: OpenContext) -> OpenedStore:
    """Makes the store, whose client connects on the tier's threads when the master can be reached.

    Raises ``SettingsError`` when the settings can't be used, or the client can't be loaded.
    """
    context.set_variables(section.variables())  # the client reads them when it is loaded
    try:
        from kvstow.backends.mooncake.connect import connect
        from kvstow.backends.mooncake.store import MooncakeStore
    except ImportError as error:  # also: a library that the client is linked to is missing
        if "kvstow" in str(error):
            raise
        raise SettingsError(
            f"mooncake.master is set, and its client can't be loaded ({error}): {INSTALL}"
        ) from error
    store = MooncakeStore(section, context.clock, partial(connect, section))
    return OpenedStore(store, f"Mooncake ({section.master})", name_of=section.name_of)
