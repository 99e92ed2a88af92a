"""``kvstow doctor``: is this host, as it is set up now, one that kvstow works well on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Final

import typer

from kvstow import __version__
from kvstow.cli.doctor import disk, host, rbln, remote, versions
from kvstow.cli.doctor.result import Check, Result, Status, bounded, failed, ok, unknown
from kvstow.errors import SettingsError
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, check_disk, host_facts, load, variable

EXIT_FAILED: Final = 1
QUICK_S: Final = 10.0
DISK_S: Final = 20.0
REMOTE_S: Final = 20.0
RDS_S: Final = 2 * rbln.COMMAND_S + 5.0
SETTINGS: Final = "settings"
PIPED_COLUMNS: Final = 160
COLOURS: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.UNKNOWN: "magenta"}

Planned = tuple[str, float, Check]  # name, the seconds it may take, what to do


def doctor(
    file: Annotated[
        str | None, typer.Option(help="A YAML file, instead of the one that KVSTOW_CONFIG_FILE names.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check versions, memory, disks, servers and RBLN's storage against the settings, and say what to fix.

    Writes and reads a small file in each of disk.paths. Exit code 1: something failed.
    """
    settings, results = _settings(file)
    for name, limit_s, check in _plan(settings):
        results += bounded(name, check, limit_s)
    works = not any(result.status is Status.FAILED for result in results)
    if as_json:
        rows = [{**result._asdict(), "status": str(result.status)} for result in results]
        print(json.dumps({"kvstow": __version__, "ok": works, "results": rows}, indent=2))
    else:
        _show(results)
    if not works:
        raise typer.Exit(EXIT_FAILED)


def _settings(file: str | None) -> tuple[Settings | None, list[Result]]:
    """The settings; None where they are wrong, and the result says why."""
    fix = "see `kvstow config`"
    try:
        effective = load(file=file)
    except SettingsError as error:
        return None, [failed(SETTINGS, str(error), fix)]
    given = [row for row in effective.describe() if row.source != "default"]
    shown = ", ".join(f"{row.key}={row.shown}" for row in given) or "all are defaults"
    try:
        check_disk(effective.settings, 0)
    except SettingsError as error:
        return effective.settings, [failed(SETTINGS, str(error), fix)]
    return effective.settings, [ok(SETTINGS, shown)]


def _plan(settings: Settings | None) -> Iterator[Planned]:
    found = versions.installed()
    on_rbln = any(name in found for name in versions.RBLN)
    yield "versions", QUICK_S, partial(versions.check_versions, found)
    if settings is None:
        yield "the rest", QUICK_S, lambda: [unknown("the rest", "could not check without settings", "mend them first")]
    else:
        yield from _host(settings, on_rbln)
        yield from _tiers(settings)
    wanted = settings is not None and _direct_engine(settings) == "rds"
    if on_rbln or wanted:
        yield "RDS", RDS_S, partial(rbln.check_rds, wanted=wanted)


def _host(settings: Settings, on_rbln: bool) -> Iterator[Planned]:
    from kvstow.build import asked_for

    pool_dir, size = settings.memory.pool_dir, settings.memory.size
    registers = [name for name, on in (("mooncake", "mooncake" in asked_for(settings)), ("RDS", on_rbln)) if on]
    seed = variable(host.SEED)
    yield host.SEED, QUICK_S, partial(host.check_hash_seed, seed, list(asked_for(settings)), rbln=on_rbln)
    yield "memory", QUICK_S, lambda: host.check_memory(settings, host_facts(pool_dir))
    yield "pools", QUICK_S, lambda: host.check_pools(host_facts().holders, host.is_orphan)
    yield host.SHM, QUICK_S, lambda: host.check_shm(pool_dir, host.shm_bytes())
    yield "locked memory", QUICK_S, lambda: host.check_memlock(host.memlock_bytes(), size, registers)
    yield "NUMA", QUICK_S, lambda: host.check_numa(host.numa_nodes())
    yield "huge pages", QUICK_S, lambda: host.check_huge_pages(pool_dir, size)


def _tiers(settings: Settings) -> Iterator[Planned]:
    clock, disks = SystemClock(), settings.disk.paths or ()
    for path in disks:
        part = (settings.disk.size or 0) // len(disks)
        yield f"disk {path}", DISK_S, partial(disk.check_path, path, part, settings.disk.min_free, clock)
    if settings.redis.url is not None:
        yield "redis", REMOTE_S, partial(_redis, settings)


def _redis(settings: Settings) -> list[Result]:
    from kvstow.build import redis_options

    try:
        options = redis_options(settings)
    except SettingsError as error:
        return [failed("redis", str(error), "see `kvstow config`")]
    return list(remote.check_redis(options, SystemClock()))


def _direct_engine(settings: Settings) -> str | None:
    engine = getattr(getattr(settings, "direct", None), "engine", None)
    return None if engine is None else str(engine)


def _show(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for result in results:
        colour = COLOURS[result.status]
        fix = f"\n→ {escape(result.fix)}" if result.fix else ""
        table.add_row(f"[{colour}]{result.status}[/{colour}]", escape(result.check), f"{escape(result.found)}{fix}")
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    console.print(table)
    count = {status: sum(result.status is status for result in results) for status in Status}
    console.print(", ".join(f"{number} {status}" for status, number in count.items() if number))
