"""Settings that are valid but probably not intended: too small, or of a tier that is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvstow.backends.disk.settings import DiskSettings
from kvstow.backends.registry import BACKENDS
from kvstow.backends.result import Result, warning
from kvstow.layout import MIN_CHUNKS
from kvstow.settings import Row, Settings, format_size

MIN_CHUNK_BYTES: Final = 1_000_000  # chunks of common models are larger
MIN_TIER_BYTES: Final = MIN_CHUNKS * MIN_CHUNK_BYTES
SWITCHES: Final = (*(backend.switch_key for backend in BACKENDS), "direct.engine")
REFUSED_AT_START: Final = "direct.path"  # without its switch; `kvstow config` reports it already


def check_sizes(settings: Settings) -> Iterator[Result]:
    """Warn of sizes in which no model's minimum of chunks fits, probably for want of a unit."""
    if settings.direct.engine is None:
        yield from _size("memory.size", settings.memory.size, "")
    disk = settings.section(DiskSettings)
    paths = disk.paths or ()
    if paths and disk.size is not None:
        per_path = " a path" if len(paths) > 1 else ""
        yield from _size("disk.size", disk.size // len(paths), per_path)


def _size(setting: str, size_bytes: int, per_path: str) -> Iterator[Result]:
    if size_bytes >= MIN_TIER_BYTES:
        return
    found = (
        f"{setting} is {format_size(size_bytes)}{per_path}, probably less than the {MIN_CHUNKS} "
        "chunks without which vLLM does not start"
    )
    yield warning("sizes", found, f"give {setting} its unit, as in 20GB")


def check_unused(rows: Sequence[Row]) -> Iterator[Result]:
    """Warn of settings of a tier that is not switched on. ``rows`` holds every setting."""
    for switch in (row.key for row in rows if row.key in SWITCHES and not row.value):
        section = switch.partition(".")[0]
        names = [
            row.key for row in rows if row.key.startswith(f"{section}.") and row.source != "default"
        ]
        if not names or REFUSED_AT_START in names:
            continue
        verb = "has" if len(names) == 1 else "have"
        pronoun = "it" if len(names) == 1 else "them"
        found = (
            f"{' and '.join(names)} {verb} no effect unless kv_connector_extra_config sets "
            f"{switch}: here it is not"
        )
        yield warning("unused", found, f"set {switch}, or leave {pronoun} unset")
