"""``kvstow doctor``: checks whether kvstow works well on this host with these settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Final

import typer

from kvstow import __version__
from kvstow.cli.conflicts import conflicts
from kvstow.cli.doctor import disk, host, rbln, remote, stored, versions
from kvstow.cli.doctor import settings as setting_checks
from kvstow.cli.doctor.result import (
    CORRECT,
    Check,
    Result,
    Status,
    bounded,
    failed,
    ok,
    unknown,
    warning,
)
from kvstow.cli.output import PIPED_COLUMNS
from kvstow.errors import SettingsError
from kvstow.runtime import SystemClock
from kvstow.settings import (
    Effective,
    Settings,
    host_facts,
    lmcache_variables,
    load,
    load_lmcache,
    variable,
)
from kvstow.text import printable

EXIT_FAILED: Final = 1
QUICK_S: Final = 10.0
DISK_S: Final = 20.0
REMOTE_S: Final = 20.0
RDS_S: Final = 2 * rbln.COMMAND_S + 5.0
SETTINGS: Final = "settings"
COLOURS: Final = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "red",
    Status.UNKNOWN: "magenta",
}

PlannedCheck = tuple[str, float, Check]  # its name, the seconds that it may take, the check


def doctor(
    file: Annotated[
        str | None,
        typer.Option(help="A YAML file, instead of the one that KVSTOW_CONFIG_FILE names."),
    ] = None,
    lmcache: Annotated[
        bool,
        typer.Option(
            "--lmcache",
            help="With the LMCACHE_* variables, as the LMCache-style connectors take them.",
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --lmcache: tensor times pipeline parallel size, which multiplies sizes.",
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check versions, memory, disks, servers and RBLN's storage against the settings, and say what
    to fix.

    Writes and reads a small file in each of disk.paths. Exit code 1: something failed.
    """
    from rich.console import Console
    from rich.markup import escape

    if lmcache and file is not None:
        raise typer.BadParameter(
            "--file is kvstow's own; LMCache's is named by LMCACHE_CONFIG_FILE"
        )
    effective, results = _settings(
        lambda: load_lmcache(None, workers=workers) if lmcache else load(file=file)
    )
    if not lmcache:
        if effective is not None:
            results += setting_checks.check_sizes(effective.settings)
            results += setting_checks.check_unused(effective.describe())
        results += _ignored_lmcache()
    settings = effective.settings if effective else None
    with Console(stderr=True).status("") as shown:  # on a terminal: a check may take its time
        for name, limit_s, check in _plan(settings):
            shown.update(f"checking {escape(printable(name))}, at most {limit_s:g} s")
            results += bounded(name, check, limit_s)
    works = not any(result.status is Status.FAILED for result in results)
    if as_json:
        rows = [{**result._asdict(), "status": str(result.status)} for result in results]
        print(json.dumps({"kvstow": __version__, "ok": works, "results": rows}, indent=2))
    else:
        _show(results)
    if not works:
        raise typer.Exit(EXIT_FAILED)


def _settings(read: Callable[[], Effective]) -> tuple[Effective | None, list[Result]]:
    """Returns the settings, or None if they are wrong, and results that say why."""
    try:
        effective = read()
    except SettingsError as error:
        return None, [failed(SETTINGS, str(error), CORRECT)]
    changed = [row for row in effective.describe() if row.source != "default"]
    shown = ", ".join(f"{row.key}={row.shown}" for row in changed) or "all are defaults"
    wrong = [failed(SETTINGS, str(error), CORRECT) for error in conflicts(effective)]
    notes = [
        warning(SETTINGS, note.text, "see docs/how-to/from-lmcache.md")
        for note in effective.notes
        if note.warns
    ]
    return effective, [*(wrong or [ok(SETTINGS, shown)]), *notes]


def _ignored_lmcache() -> list[Result]:
    """A warning if this shell has LMCache's variables, which kvstow's own connector ignores."""
    names = lmcache_variables()
    if not names:
        return []
    shown = names[0] if len(names) == 1 else f"{names[0]} and others"
    found = f"{shown} not looked at: only LMCache-style connectors read LMCACHE_*"
    return [warning("LMCache", found, "kvstow doctor --lmcache, if vLLM is given one of those")]


def _plan(settings: Settings | None) -> Iterator[PlannedCheck]:
    found = versions.installed()
    on_rbln = any(name in found for name in versions.RBLN)
    yield "versions", QUICK_S, partial(versions.check_versions, found)
    if settings is None:
        yield (
            "the rest",
            QUICK_S,
            lambda: [unknown("the rest", "could not check without settings", CORRECT)],
        )
    else:
        yield from _host(settings, on_rbln)
        yield from _disks(settings)
        yield from _remote(settings)
    wanted = settings is not None and settings.direct.engine == "rds"
    if on_rbln or wanted:
        yield "RDS", RDS_S, partial(rbln.check_rds, wanted=wanted)


def _host(settings: Settings, on_rbln: bool) -> Iterator[PlannedCheck]:
    from kvstow.build import asked_for

    pool_dir, size, mooncake = settings.memory.pool_dir, settings.memory.size, settings.mooncake
    locks = {
        "Mooncake": mooncake.protocol == "rdma" and mooncake.master is not None,
        "RDS": on_rbln,
    }
    registers = [name for name, on in locks.items() if on]
    seed = variable(host.SEED)
    yield (
        host.SEED,
        QUICK_S,
        lambda: host.check_hash_seed(seed, list(asked_for(settings)), rbln=on_rbln),
    )
    if settings.direct.engine is None:
        yield "memory", QUICK_S, lambda: host.check_memory(settings, host_facts(pool_dir))
        yield "memory.pool_dir", QUICK_S, lambda: host.check_pool_dir(pool_dir)
        disks = settings.disk.paths is not None
        yield "huge pages", QUICK_S, lambda: host.check_huge_pages(pool_dir, size, disks=disks)
    yield (
        "pools",
        QUICK_S,
        lambda: host.check_pools(host_facts().holders, host.is_orphan, unseen=host.has_unseen()),
    )
    yield (
        "locked memory",
        QUICK_S,
        lambda: host.check_memlock(host.memlock_bytes(), size, registers),
    )


def _disks(settings: Settings) -> Iterator[PlannedCheck]:
    direct, seed = settings.direct, variable(host.SEED)
    for path in settings.disk.paths or ():
        yield f"chunks in {path}", QUICK_S, partial(stored.check_stored, path, seed)
    used = [(settings.disk.paths, settings.disk.size, settings.disk.min_free, "disk.size")]
    used += (
        [(direct.path, direct.size, 0, "direct.size")] if direct.engine in ("auto", "file") else []
    )
    for paths, size, min_free, setting in used:
        for path in paths or ():
            part = (size or 0) // len(paths or ())
            yield (
                f"disk {path}",
                DISK_S,
                partial(disk.check_path, path, part, min_free, SystemClock(), setting),
            )


def _remote(settings: Settings) -> Iterator[PlannedCheck]:
    from kvstow import build

    clock, objects = SystemClock(), settings.objects.url
    if settings.redis.url is not None:
        yield "redis", REMOTE_S, lambda: remote.check_redis(build.redis_options(settings), clock)
    if objects is not None:
        yield (
            "objects",
            REMOTE_S,
            lambda: remote.check_objects(objects, build.objects_options(settings), clock),
        )
    if settings.mooncake.master is not None:
        yield "mooncake", REMOTE_S, partial(remote.check_mooncake, settings.mooncake.master)


def _show(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for result in results:
        colour = COLOURS[result.status]
        check, found, fix = (
            escape(printable(text)) for text in (result.check, result.found, result.fix)
        )
        table.add_row(
            f"[{colour}]{result.status}[/{colour}]", check, f"{found}\n→ {fix}" if fix else found
        )
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    console.print(table)
    count = {status: sum(result.status is status for result in results) for status in Status}
    console.print(", ".join(_counted(number, status) for status, number in count.items() if number))


def _counted(number: int, status: Status) -> str:
    return f"{number} {status}{'s' if status is Status.WARNING and number > 1 else ''}"
