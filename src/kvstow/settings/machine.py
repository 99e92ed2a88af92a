"""What this host has: memory, as the container sees it, and the room in the pool's directory. Linux."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import psutil

Read = Callable[[str], str | None]

POOL_MEMFD_PREFIX: Final = "/memfd:kvstow"
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


class Memory(NamedTuple):
    """Bytes that ``owner`` may use and has left, page cache counted as left."""

    total_bytes: int
    available_bytes: int
    owner: str


class Holder(NamedTuple):
    """A process that holds a pool of kvstow's."""

    pid: int
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What settings are checked against. ``memory`` is the tightest of the machine and its cgroups, None where
    unknown; the ``pool_dir`` facts are None without one."""

    memory: Memory | None
    pool_dir_free_bytes: int | None = None
    pool_dir_problem: str | None = None
    holders: tuple[Holder, ...] = ()


def host_facts(pool_dir: str | None = None) -> HostFacts:
    """Gather the facts of this host, now."""
    free, problem = (None, None) if pool_dir is None else _room(pool_dir)
    return HostFacts(tightest_memory(_read), free, problem, tuple(_holders()))


def available_bytes() -> int:
    """Memory that is left to this process, now; where that is unknown, no limit."""
    memory = tightest_memory(_read)
    return _UNLIMITED if memory is None else memory.available_bytes


def tightest_memory(read: Read) -> Memory | None:
    """The machine's memory or the cgroup's that has least left, by ``read`` (path to content, None: not there)."""
    found = [*_machine_memory(read), *_cgroup_memory(read)]
    if not found:
        return None
    return min(found, key=lambda memory: memory.available_bytes)


def _machine_memory(read: Read) -> Iterator[Memory]:
    fields = _fields((read("/proc/meminfo") or "").replace(":", " "))
    if "MemTotal" in fields and "MemAvailable" in fields:
        yield Memory(fields["MemTotal"] << 10, fields["MemAvailable"] << 10, "this machine")
    if (read("/proc/sys/vm/overcommit_memory") or "").strip() == "2" and "CommitLimit" in fields:
        limit, left = (
            fields["CommitLimit"] << 10,
            (fields["CommitLimit"] - fields["Committed_AS"]) << 10,
        )
        yield Memory(limit, max(0, left), "this machine (vm.overcommit_memory=2)")


def _cgroup_memory(read: Read) -> Iterator[Memory]:
    """Limits of this process's cgroup and its ancestors, v2 and v1.

    In a container the path may be the host's, which isn't mounted: then only the mount's root is there, and it
    is the container's own.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cached = "/sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, usage, cached = (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        where = PurePosixPath(path)
        for group in (where, *where.parents):
            folder = f"{base}{str(group).rstrip('/')}"
            total, used = _number(read(f"{folder}/{limit}")), _number(read(f"{folder}/{usage}"))
            if total is None or used is None or total >= _UNLIMITED:
                continue
            fields = _fields(read(f"{folder}/memory.stat") or "")
            reclaimable = fields.get(f"{cached}inactive_file", 0) + fields.get(
                f"{cached}active_file", 0
            )
            yield Memory(
                total,
                max(0, total - max(0, used - reclaimable)),
                f"the container ({folder}/{limit})",
            )


def _fields(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _room(pool_dir: str) -> tuple[int | None, str | None]:
    if not os.path.isdir(pool_dir):
        return None, "is not a directory"
    if not os.access(pool_dir, os.W_OK | os.X_OK):
        return None, "is not writable"
    stat = os.statvfs(pool_dir)
    # Hugetlbfs without a size does not say.
    return (stat.f_bavail * stat.f_frsize if stat.f_blocks else None, None)


def _holders() -> Iterator[Holder]:
    """Other processes of this user that hold an anonymous pool, one a pool (its ranks map it too)."""
    seen: set[int] = set()
    for pid in psutil.pids():
        if pid == os.getpid():
            continue
        folder = f"/proc/{pid}/fd"
        try:
            for name in os.listdir(folder):
                if not os.readlink(f"{folder}/{name}").startswith(POOL_MEMFD_PREFIX):
                    continue
                stat = os.stat(f"{folder}/{name}")
                if stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield Holder(pid, stat.st_blocks * 512)
        except OSError:
            continue  # another user's, or gone meanwhile
