"""The Mooncake tier, from settings."""

from __future__ import annotations

from functools import partial

from kvstow.backends.mooncake import MooncakeOptions
from kvstow.build.greet import greet
from kvstow.errors import SettingsError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, ThreadExecutor
from kvstow.settings import Settings, format_size
from kvstow.settings.variables import set_defaults
from kvstow.tiers import Tier

INSTALL = "pip install 'kvstow[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4"


def build_mooncake(
    settings: Settings,
    layout: ChunkLayout,
    *,
    clock: Clock,
    metrics: Metrics,
    root: tuple[str, str] | None = None,
) -> Tier | None:
    """The Mooncake tier; None: not set. Its client connects on the tier's threads, whenever the master can be reached.

    ``root``: as for ``greet``. Raises ``SettingsError`` when the settings can't be used, or the client can't be loaded,
    ``UnsupportedError`` where the engines that share the store begin elsewhere.
    """
    if settings.mooncake.master is None:
        return None
    options = mooncake_options(settings, layout)
    set_defaults(options.variables())  # read when the client is loaded
    try:
        from kvstow.backends.mooncake.connect import connect
        from kvstow.backends.mooncake.store import MooncakeStore
    except ImportError as error:  # also: a library that the client is linked to is missing
        if "kvstow" in str(error):
            raise
        raise SettingsError(
            f"mooncake.master is set, and its client can't be loaded ({error}): {INSTALL}"
        ) from error
    store = MooncakeStore(options, clock, partial(connect, options))
    executor = ThreadExecutor("mooncake", threads=settings.mooncake.threads)
    greet("mooncake", f"Mooncake ({options.master})", store, executor, root, options.name_of)
    return Tier("mooncake", store, executor, layout=layout, clock=clock, metrics=metrics)


def mooncake_options(settings: Settings, layout: ChunkLayout) -> MooncakeOptions:
    """What a Mooncake store is given. Raises ``SettingsError``."""
    own = settings.mooncake
    host, _, port = (own.master or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError("mooncake.master: expected host:port, such as master.internal:50051")
    if own.buffer_size < layout.max_frame_bytes:
        size, least = format_size(own.buffer_size), format_size(layout.max_frame_bytes)
        raise SettingsError(
            f"mooncake.buffer_size {size} is less than a chunk: set it to several times {least}"
        )
    if own.device and own.protocol != "rdma":
        raise SettingsError("mooncake.device is set, and mooncake.protocol isn't rdma")
    return MooncakeOptions(
        own.master or "",
        metadata=own.metadata,
        protocol=own.protocol,
        device=own.device or "",
        local_hostname=own.local_hostname,
        segment_bytes=own.segment_size,
        buffer_bytes=own.buffer_size,
        prefix=own.prefix,
        replicas=own.replicas,
        timeout_s=own.timeout_ms / 1e3,
        connect_timeout_s=own.connect_timeout_ms / 1e3,
    )
