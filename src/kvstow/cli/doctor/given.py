"""Settings that are allowed and hardly meant: too small for a chunk, or of a tier that is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvstow.cli.doctor.result import Result, warning
from kvstow.settings import MIN_CHUNKS, Row, Settings, format_size

LEAST_BYTES: Final = MIN_CHUNKS * 1_000_000  # chunks are hardly ever smaller than 1 MB
REFUSED: Final = "direct.path"  # without its switch; the others are passed over
SWITCHES: Final = ("disk.paths", "redis.url", "objects.url", "mooncake.master", "direct.engine")


def check(settings: Settings, rows: Sequence[Row]) -> Iterator[Result]:
    """``rows``: every setting."""
    yield from check_sizes(settings)
    yield from check_unused(rows)


def check_sizes(settings: Settings) -> Iterator[Result]:
    memory, disk = settings.memory, settings.disk
    sizes = {"memory.size": memory.size if settings.direct.engine is None else None}
    sizes["disk.size"] = disk.size if disk.paths else None
    for setting, size in sizes.items():
        if size is not None and size < LEAST_BYTES:
            found = f"{setting} is {format_size(size)}, probably less than the {MIN_CHUNKS} chunks without which vLLM"
            yield warning(
                "sizes", f"{found} does not start", f"give {setting} its unit, as in 20GB"
            )


def check_unused(rows: Sequence[Row]) -> Iterator[Result]:
    for off in (row.key for row in rows if row.key in SWITCHES and not row.value):
        tier = off.partition(".")[0]
        names = [
            row.key for row in rows if row.key.startswith(f"{tier}.") and row.source != "default"
        ]
        if names and REFUSED not in names:
            has, them = ("has", "it") if len(names) == 1 else ("have", "them")
            found = f"{' and '.join(names)} {has} no effect unless kv_connector_extra_config sets {off}: here it is not"
            yield warning("unused", found, f"set {off}, or leave {them} unset")
