"""Opening of the disk tier's store."""

from __future__ import annotations

from kvstow.backends.descriptor import OpenContext, OpenedStore
from kvstow.backends.disk.settings import DiskSettings
from kvstow.errors import SettingsError, StoreUnavailable, UnsupportedError
from kvstow.fields.values import format_size, round_up_to_mb
from kvstow.layout import MIN_CHUNKS
from kvstow.runtime import ThreadExecutor


def check(section: DiskSettings, frame_bytes: int) -> None:
    """Refuses a disk tier without a size, and one too small for ``MIN_CHUNKS`` chunks in each
    directory."""
    paths = section.paths or ()
    if section.size is None:
        raise SettingsError(
            "disk.paths is set and disk.size is not: say how much they may hold, such as 500GB"
        )
    least = MIN_CHUNKS * frame_bytes * len(paths)
    if section.size < least:
        raise SettingsError(
            f"disk.size {format_size(section.size)} over {len(paths)} paths is less than "
            f"{MIN_CHUNKS} chunks of {format_size(frame_bytes)} in each. Set disk.size to at least "
            f"{round_up_to_mb(least)}"
        )


def open_store(section: DiskSettings, context: OpenContext) -> OpenedStore:
    """Opens the directories, and starts their background work.

    Raises ``SettingsError`` if a directory can't be used.
    """
    from kvstow.backends.disk.check import frame_check
    from kvstow.backends.disk.store import DiskOptions, DiskStore
    from kvstow.pool.policy import POLICIES

    paths = section.paths or ()
    options = DiskOptions(
        size_bytes=section.size or 0,
        min_free_bytes=section.min_free,
        volume=context.engine_index if section.spread == "device" else None,
        admission=section.admission,
        scrub_bytes_s=section.scrub_rate,
        threads=section.threads,
    )
    try:
        store = DiskStore(
            paths,
            options,
            order=POLICIES[section.policy],
            clock=context.clock,
            describe=context.describe,
            check=frame_check(context.integrity_key),
        )
    except (OSError, UnsupportedError, StoreUnavailable) as error:
        raise SettingsError(f"disk.paths {','.join(paths)} can't be used: {error}") from error
    if context.root is not None and context.namespace is not None:
        try:
            store.register_namespace(context.namespace, context.root.word)
        except UnsupportedError as error:
            store.close()
            raise UnsupportedError(f"tier disk: {error}") from None
    store.start(ThreadExecutor("disk-background", threads=len(paths)))
    return OpenedStore(store, f"Disk {','.join(paths)}", checks_root=True)
