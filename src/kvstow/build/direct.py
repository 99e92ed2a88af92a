"""Direct storage, from settings: its extents and engine in the scheduler's process, its media in a worker's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvstow.build.cache import fetch_deadline_s
from kvstow.build.tiers import asked_for
from kvstow.cache import Cache
from kvstow.direct.extents import Extents
from kvstow.direct.file import FileMedia
from kvstow.direct.geometry import DirectRef, Geometry, extent_bytes, slots_in
from kvstow.direct.rds import load as load_rds
from kvstow.direct.table import Table
from kvstow.direct.volume import LOCK_TIMEOUT_S, device_bytes, open_extents, open_volume, paths_for
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import MIN_CHUNKS, ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.policy import POLICIES
from kvstow.runtime import Clock, ThreadExecutor
from kvstow.settings import Settings, format_size
from kvstow.settings.sections.direct import FILE_STAGING_BYTES, RDS_STAGING_BYTES
from kvstow.settings.sections.memory import MemorySettings

logger = logging.getLogger("kvstow")

# What is kept in mind where nothing else limits it; NVMe is full long before.
MAX_RDS_CHUNKS: Final = 1 << 16
# Some 100 bytes of memory each, and a second a million to find them at the start.
MAX_FILE_CHUNKS: Final = 1 << 22
DEFAULT_AREAS: Final = 4
LEAST_AREAS: Final = 2  # one is copied while the other is written


def check_direct(settings: Settings) -> None:
    """Raise ``SettingsError`` for what can't go with direct storage."""
    direct = settings.direct
    if direct.engine is None:
        if direct.path is not None:
            raise SettingsError(
                "direct.path is set and direct.engine isn't: set direct.engine to auto, rds or file"
            )
        return
    for tier, setting in asked_for(settings).items():
        if tier != "direct":
            raise SettingsError(
                f"direct.engine and {setting} are set: direct storage has no tiers below it. Unset one"
            )
    if settings.memory.size not in (0, MemorySettings().size):
        raise SettingsError(
            "direct.engine and memory.size are set: direct storage takes the place of host memory. Unset one"
        )
    if settings.integrity_key_file is not None:
        raise SettingsError(
            "direct.engine and integrity_key_file are set: extents carry checksums, not keyed ones. Unset one"
        )


def choose(settings: Settings, load: Callable[[], object] = load_rds) -> str:
    """``rds`` or ``file``. Raises ``SettingsError`` where what is asked for isn't there."""
    direct = settings.direct
    why = "direct.engine is file"
    if direct.engine != "file":
        try:
            load()
            return "rds"
        except UnsupportedError as error:
            why = str(error)
            if direct.engine == "rds":
                raise SettingsError(
                    f"direct.engine is rds, and RDS can't be used: {error}"
                ) from error
    if direct.path is None:
        raise SettingsError(
            f"direct.engine is {direct.engine}, so direct storage needs files ({why}): set direct.path to a directory "
            "on local NVMe, and direct.size"
        )
    logger.info("Direct storage runs on files, not on RDS: %s", why)
    return "file"


def build_direct(
    settings: Settings,
    layout: ChunkLayout,
    *,
    ranks: int,
    engine: int,
    not_persistent: str | None,
    clock: Clock,
    metrics: Metrics,
    load: Callable[[], object] = load_rds,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> tuple[Extents, DirectRef, Cache]:
    """The extents, what workers need to reach them, and the engine that owns them. Blocks: for the start.

    ``ranks``: workers; ``engine``: which of the host's data parallel engines this is; ``not_persistent``: why this KV
    must not outlive the process, or None. Raises ``SettingsError``; ``UnsupportedError`` where it must not and would.
    """
    check_direct(settings)
    chosen, direct = choose(settings, load), settings.direct
    if chosen == "file" and not_persistent is not None:
        raise UnsupportedError(
            f"direct.path is set, but this KV can't be kept in files: {not_persistent}"
        )
    area = max(extent_bytes(layout))
    default = max(
        RDS_STAGING_BYTES if chosen == "rds" else FILE_STAGING_BYTES, DEFAULT_AREAS * area
    )
    staging = default if direct.staging_size is None else direct.staging_size // ranks
    if staging < LEAST_AREAS * area:
        raise SettingsError(
            f"direct.staging_size: {format_size(staging)} a rank hold fewer than {LEAST_AREAS} chunks of "
            f"{format_size(area)}: set it to at least {format_size(LEAST_AREAS * area * ranks)}"
        )
    geometry, paths = _geometry(settings, layout, chosen, engine)
    about = (staging, direct.threads if chosen == "file" else 1, direct.failure_policy)
    if chosen == "rds":
        ref = DirectRef(chosen, geometry, *about)
        extents = Extents(geometry, layout, clock, preallocated=False)
    else:
        volume = open_volume(paths, geometry, consent=direct.format, lock_timeout_s=lock_timeout_s)
        ref = DirectRef(chosen, geometry, *about, volume.paths, volume.set_id)
        table = Table(volume.fds[0], geometry.slots, ThreadExecutor("direct-table"), clock)
        extents = Extents(geometry, layout, clock, preallocated=True, table=table, fds=volume.fds)
    found = extents.slots - extents.free
    logger.info(
        "Direct storage: engine %s, %d chunks of %.2f MB, %d found%s",
        *(
            chosen,
            extents.slots,
            extents.slot_bytes / 1e6,
            found,
            f", in {', '.join(paths)}" if paths else "",
        ),
    )
    metrics.gauge("direct_engine", 1, engine=chosen)
    return extents, ref, _engine(settings, extents, layout, clock, metrics)


def _engine(
    settings: Settings, extents: Extents, layout: ChunkLayout, clock: Clock, metrics: Metrics
) -> Cache:
    return Cache(
        pool=extents,
        policy=POLICIES[settings.direct.policy](),
        tiers=(),
        layout=layout,
        clock=clock,
        metrics=metrics,
        sealer=ThreadExecutor("seal"),
        fetch_deadline_s=fetch_deadline_s(settings),
    )


def _geometry(
    settings: Settings, layout: ChunkLayout, chosen: str, engine: int
) -> tuple[Geometry, tuple[str, ...]]:
    """How many slots, and in which files."""
    direct = settings.direct
    sizes = extent_bytes(layout)
    most = direct.max_chunks or (MAX_RDS_CHUNKS if chosen == "rds" else MAX_FILE_CHUNKS)
    if chosen == "rds":
        slots = min(most, direct.size // sum(sizes)) if direct.size is not None else most
        return Geometry.without_files(layout, _enough(slots, layout)), ()
    assert direct.path is not None
    paths = paths_for(direct.path, len(sizes), engine)
    if direct.size is not None:
        slots = slots_in(sizes, direct.size)
    else:
        devices = [there for path in paths if (there := device_bytes(path)) is not None]
        if len(devices) < len(paths):
            raise SettingsError(
                "direct.path is set and direct.size is not: say how much they may hold, such as 500GB"
            )
        slots = min(slots_in([size], there) for size, there in zip(sizes, devices, strict=True))
    return Geometry.with_files(layout, _enough(min(most, slots), layout)), paths


def _enough(slots: int, layout: ChunkLayout) -> int:
    if slots < MIN_CHUNKS:
        least = (sum(extent_bytes(layout)) + 4096) * (MIN_CHUNKS + 1)
        raise SettingsError(
            f"direct.size and direct.max_chunks give {slots} chunks of {layout.chunk_tokens} tokens, {MIN_CHUNKS} are "
            f"the least: set direct.size to at least {format_size(least)}, direct.max_chunks to at least {MIN_CHUNKS}"
        )
    return slots


def file_media(ref: DirectRef, shard: int) -> FileMedia:
    """A rank's. Raises ``UnsupportedError`` where its file isn't the one that the engine opened."""
    fd = open_extents(ref.paths[shard], ref.set_id, ref.geometry, shard)
    return FileMedia(fd, shard, ref.areas(shard), ref.geometry.extent_bytes[shard])
