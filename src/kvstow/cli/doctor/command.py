"""``kvstow doctor``: checks whether kvstow works well on this host with these settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Final

import typer

from kvstow import __version__
from kvstow.backends.disk.checks import DISK_S, check_path
from kvstow.backends.result import Check, PlannedCheck, Result, Status, failed, ok, unknown, warning
from kvstow.cli.conflicts import conflicts
from kvstow.cli.doctor import host, rbln, versions
from kvstow.cli.doctor import settings as setting_checks
from kvstow.cli.doctor.result import CORRECT, bounded
from kvstow.cli.output import FileOption, JsonOption, print_table
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
PLUGINS_S: Final = 60.0
RDS_S: Final = 2 * rbln.COMMAND_S + 5.0
SETTINGS: Final = "settings"
COLOURS: Final = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "red",
    Status.UNKNOWN: "magenta",
}


def doctor(
    file: FileOption = None,
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
    as_json: JsonOption = False,
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
    yield PlannedCheck("versions", QUICK_S, partial(versions.check_versions, found))
    if settings is None:
        rest = [unknown("the rest", "could not check without settings", CORRECT)]
        yield PlannedCheck("the rest", QUICK_S, lambda: rest)
    else:
        yield from _host(settings, on_rbln)
        yield from _tiers(settings)
    wanted = settings is not None and settings.direct.engine == "rds"
    if on_rbln or wanted:
        yield PlannedCheck("RDS", RDS_S, partial(rbln.check_rds, wanted=wanted))


def _host(settings: Settings, on_rbln: bool) -> Iterator[PlannedCheck]:
    from kvstow import build

    pool_dir, size = settings.memory.pool_dir, settings.memory.size
    configured = build.configured_backends(settings)
    disks = any(each.name == "disk" for each in configured)
    pinning = [
        backend.title for _, backend, section, _ in configured if backend.pins_memory(section)
    ]
    if on_rbln:
        pinning.append("RDS")
    seed = variable(host.SEED)

    def quick(name: str, run: Check) -> PlannedCheck:
        return PlannedCheck(name, QUICK_S, run)

    yield quick(
        host.SEED, lambda: host.check_hash_seed(seed, list(build.asked_for(settings)), rbln=on_rbln)
    )
    if settings.direct.engine is None:
        yield quick("memory", lambda: host.check_memory(settings, host_facts(pool_dir)))
        yield quick("memory.pool_dir", lambda: host.check_pool_dir(pool_dir))
        yield quick("huge pages", lambda: host.check_huge_pages(pool_dir, size, disks=disks))
    yield quick(
        "pools",
        lambda: host.check_pools(host_facts().holders, host.is_orphan, unseen=host.has_unseen()),
    )
    yield quick("locked memory", lambda: host.check_memlock(host.memlock_bytes(), size, pinning))


def _tiers(settings: Settings) -> Iterator[PlannedCheck]:
    from kvstow import build

    clock, seed = SystemClock(), variable(host.SEED)
    for _, backend, section, _ in build.configured_backends(settings):
        yield from backend.checks(section, clock, seed)
    direct = settings.direct
    paths = direct.path or () if direct.engine in ("auto", "file") else ()
    for path in paths:
        part = (direct.size or 0) // len(paths)
        run = partial(check_path, path, part, 0, clock, "direct.size")
        yield PlannedCheck(f"disk {path}", DISK_S, run)
    if settings.plugins.stores:
        yield PlannedCheck("plug-ins", PLUGINS_S, partial(_plugins, settings))


def _plugins(settings: Settings) -> Iterator[Result]:
    """Opens nothing: imports each plug-in, and runs the checks that it brings."""
    from kvstow import build

    clock, seed = SystemClock(), variable(host.SEED)
    try:
        plugins = build.resolve_plugins(settings)
    except SettingsError as error:
        yield failed("plug-ins", str(error), CORRECT)
        return
    for name, backend, section, _ in plugins:
        yield ok("plug-ins", f"{name} can be imported")
        for check in backend.checks(section, clock, seed):
            yield from bounded(check.name, check.run, check.limit_s)


def _show(results: Sequence[Result]) -> None:
    from rich.markup import escape

    rows = []
    for result in results:
        colour = COLOURS[result.status]
        check, found, fix = (
            escape(printable(text)) for text in (result.check, result.found, result.fix)
        )
        status = f"[{colour}]{result.status}[/{colour}]"
        rows.append((status, check, f"{found}\n→ {fix}" if fix else found))
    print_table(("", "check", "found"), rows, markup=True)
    count = {status: sum(result.status is status for result in results) for status in Status}
    print(", ".join(_counted(number, status) for status, number in count.items() if number))


def _counted(number: int, status: Status) -> str:
    return f"{number} {status}{'s' if status is Status.WARNING and number > 1 else ''}"
