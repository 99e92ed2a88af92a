"""The disk tier, from settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstow.backends.disk import DiskOptions, DiskStore, frame_check
from kvstow.build.policies import POLICIES
from kvstow.errors import SettingsError, StoreUnavailable, UnsupportedError
from kvstow.layout import ChunkLayout
from kvstow.metrics import Metrics
from kvstow.runtime import Clock, ThreadExecutor
from kvstow.settings import Settings
from kvstow.tiers import Tier


def build_disk(
    settings: Settings,
    layout: ChunkLayout,
    *,
    clock: Clock,
    metrics: Metrics,
    describe: Callable[[bytes], Mapping[str, object]],
    key: bytes | None,
    device: int = 0,
    namespace: bytes | None = None,
    root: tuple[str, str] | None = None,
) -> Tier | None:
    """The disk tier; None: not set. ``describe`` says for people what a namespace is; ``device``: which of this
    host's engines it is; ``key``: the integrity key; ``namespace``: its own; ``root``: where its block hashes begin,
    behind a digest of all else.

    Raises ``SettingsError`` when a directory can't be used, ``UnsupportedError`` where the engines that share it, or
    used it before, begin elsewhere.
    """
    paths, size = settings.disk.paths, settings.disk.size
    if not paths or size is None:
        return None
    options = DiskOptions(
        size_bytes=size,
        min_free_bytes=settings.disk.min_free,
        volume=device if settings.disk.spread == "device" else None,
        admission=settings.disk.admission,
        scrub_bytes_s=settings.disk.scrub_rate,
        threads=settings.disk.threads,
    )
    order, check = POLICIES[settings.disk.policy], frame_check(key)
    try:
        store = DiskStore(paths, options, order=order, clock=clock, describe=describe, check=check)
    except (OSError, UnsupportedError, StoreUnavailable) as error:
        raise SettingsError(f"disk.paths {','.join(paths)} can't be used: {error}") from error
    if root is not None and namespace is not None:
        try:
            store.introduce(namespace, root[1])
        except UnsupportedError as error:
            store.close()
            raise UnsupportedError(f"tier disk: {error}") from None
    store.start(ThreadExecutor("disk-background", threads=len(paths)))
    executor = ThreadExecutor("disk", threads=settings.disk.threads)
    return Tier(
        *("disk", store, executor),
        layout=layout,
        clock=clock,
        metrics=metrics,
        set_aside=store.quarantine,
        take_corrupt=store.take_corrupt,
        paths_down=store.paths_down,
        stuck=store.stuck,
        take_maintenance_failures=store.take_maintenance_failures,
    )
