"""Checks of the host: hash seed, memory, limits, huge pages, pools of servers that were killed."""

from __future__ import annotations

import glob
import os
import re
import resource
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import psutil

from kvstow.backends.disk.filesystem import filesystem_of
from kvstow.backends.result import Result, failed, ok, unknown, warning
from kvstow.errors import SettingsError
from kvstow.pool.hostmem import HostMemory, PoolError
from kvstow.settings import Settings, check_host, format_size
from kvstow.settings.machine import Holder, HostFacts

SEED: Final = "PYTHONHASHSEED"
HUGE: Final = "hugetlbfs"
TMPFS: Final = "tmpfs"
POOL_DIR: Final = (
    "give a tmpfs or hugetlbfs that vLLM's user may write to, or leave memory.pool_dir unset"
)
INIT: Final = 1
UNLIMITED: Final = (resource.RLIM_INFINITY, -1)
_SHARED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_TRIAL_BYTES: Final = 4 << 20
_HUGE_POOLS: Final = "/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages"


def check_hash_seed(seed: str | None, tiers: Collection[str], *, rbln: bool) -> Iterator[Result]:
    """Check that vLLM derives the same block hashes in every process.

    ``seed`` is the value of PYTHONHASHSEED, None if it is not set. ``tiers`` are those that keep KV
    after vLLM's process has ended.
    """
    if seed is not None and seed != "random":
        yield ok(SEED, seed)
    elif rbln:
        fix = f"export {SEED}=0, the same for every instance"
        yield failed(
            SEED, "not set to a fixed value: vLLM for RBLN may hash from a random root", fix
        )
    elif tiers and seed is not None:
        yield warning(
            SEED,
            "random is no fixed value",
            f"unset {SEED}, or with xxhash export {SEED}=0 everywhere",
        )
    elif tiers:
        yield ok(
            SEED,
            "not set: fine with vLLM's default, --prefix-caching-hash-algo sha256; xxhash needs a "
            "fixed one",
        )
    else:
        yield ok(SEED, "not set, and no tier outlives vLLM's process")


def check_memory(settings: Settings, facts: HostFacts) -> Iterator[Result]:
    """Check that the pool can be created and fits the memory that is left."""
    if facts.pool_dir_problem is not None:
        found = f"memory.pool_dir {settings.memory.pool_dir} {facts.pool_dir_problem}"
        yield failed("memory", found, POOL_DIR)
        return
    try:
        check_host(settings, facts)
    except SettingsError as error:
        found, _, fix = str(error).partition(". ")
        yield failed("memory", found, fix or "set memory.size to less")
        return
    memory, size = facts.memory, format_size(settings.memory.size)
    if memory is None:
        yield ok("memory", f"memory.size is {size}; how much is left is not known on this system")
    else:
        left, total = format_size(memory.available_bytes), format_size(memory.total_bytes)
        yield ok("memory", f"memory.size {size} fits: {memory.owner} has {left} left of {total}")


def check_pool_dir(pool_dir: str | None) -> Iterator[Result]:
    """Warn of a pool directory on a disk."""
    mount = filesystem_of(pool_dir) if pool_dir is not None and os.path.isdir(pool_dir) else None
    if mount is not None and mount.kind not in (TMPFS, HUGE):
        found = (
            f"memory.pool_dir {pool_dir} is on {mount.kind} ({mount.source}): the kernel writes "
            "the pool to it"
        )
        yield warning("memory.pool_dir", found, POOL_DIR)


def check_memlock(
    limit_bytes: int, size_bytes: int, registered_by: Sequence[str]
) -> Iterator[Result]:
    """Check the limit of locked memory. ``registered_by`` names the parts that lock memory."""
    enough = limit_bytes in UNLIMITED or limit_bytes >= size_bytes
    shown = "unlimited" if limit_bytes in UNLIMITED else format_size(limit_bytes)
    if enough or not registered_by:
        needed = "" if registered_by else "; nothing that is set needs more"
        yield ok("locked memory", f"{shown} (ulimit -l){needed}")
        return
    names = " and ".join(registered_by)
    found = f"{shown} (ulimit -l), and {names} locks up to {format_size(size_bytes)}"
    yield warning("locked memory", found, "ulimit -l unlimited; in a container --ulimit memlock=-1")


def memlock_bytes() -> int:
    """This process's limit of locked memory."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def check_huge_pages(pool_dir: str | None, size_bytes: int, *, disks: bool) -> Iterator[Result]:
    """Check that the pool is in huge pages. On filesystems other than tmpfs and hugetlbfs it yields
    nothing.

    ``disks`` says whether a disk tier is set: its direct I/O is faster with huge pages.
    """
    mount = filesystem_of(pool_dir) if pool_dir is not None and os.path.isdir(pool_dir) else None
    if mount is not None and mount.kind == HUGE:
        yield _reserved_pages(mount.at, size_bytes)
    elif pool_dir is None or (mount is not None and mount.kind == TMPFS):
        yield transparent_pages(makes_huge_pages(pool_dir), disks=disks)


def _reserved_pages(mount: str, size_bytes: int) -> Result:
    page = os.statvfs(mount).f_bsize
    needed, shown = -(-size_bytes // page), format_size(page)
    free = int(Path(_HUGE_POOLS.format(page >> 10)).read_text())
    if free < needed:
        found = f"{free} of {shown} are free, memory.size {format_size(size_bytes)} needs {needed}"
        return failed(
            "huge pages", found, f"sysctl vm.nr_hugepages={needed}, or leave memory.pool_dir unset"
        )
    return ok("huge pages", f"{free} of {shown} are free, {needed} are needed")


def transparent_pages(available: bool, *, disks: bool) -> Result:
    """The result for transparent huge pages, which the kernel makes unasked if ``available``."""
    if available:
        return ok("huge pages", "the kernel makes them")
    if not disks:
        return ok("huge pages", "the kernel makes none; without a disk tier that matters little")
    found = f"Linux {os.uname().release} makes none: direct I/O may take twice as long"
    return warning(
        "huge pages",
        found,
        f"Linux 6.1 or later, {_SHARED} not at deny; with Linux 5.14 to 6.0 at advise",
    )


def makes_huge_pages(pool_dir: str | None = None) -> bool:
    """Whether the kernel backs the pool's kind of memory with huge pages. It tries 4 MiB."""
    try:
        if pool_dir is None:
            trial = HostMemory.anonymous(_TRIAL_BYTES, "doctor")
        else:
            trial = HostMemory.in_directory(_TRIAL_BYTES, "doctor", pool_dir)
        with closing(trial) as memory:
            memory.reserve(0, _TRIAL_BYTES)
            _, _, mapping = Path("/proc/self/smaps").read_text().partition(f" {memory.ref.inode} ")
            found = re.search(r"^ShmemPmdMapped: +(\d+)", mapping, re.MULTILINE)
            return found is not None and int(found[1]) > 0
    except (OSError, PoolError):
        return False


def check_pools(
    holders: Sequence[Holder], orphan: Callable[[int], bool], *, unseen: bool = False
) -> Iterator[Result]:
    """Report the pools of other processes, and warn of those whose server was killed.

    ``orphan`` says whether the process of a pid lost its parent. ``unseen`` says that there are
    processes whose files this user may not read.
    """
    for holder in holders:
        found = f"process {holder.pid} holds one of {format_size(holder.pool_bytes)}"
        if orphan(holder.pid):
            yield warning(
                "pools", f"{found}, and the server that started it is gone", f"kill {holder.pid}"
            )
        else:
            yield ok("pools", found)
    if unseen:
        found = "whether other users' processes hold any: they can't be looked at"
        yield unknown("pools", found, "run this as root to see all")
    elif not holders:
        yield ok("pools", "none of other processes")


def has_unseen(proc: str = "/proc") -> bool:
    """Whether there are processes, other than the kernel's threads, whose files this user may not
    read.
    """
    return any(
        not os.access(f"{folder}/fd", os.R_OK | os.X_OK) and _has_command(folder)
        for folder in glob.iglob(f"{proc}/[0-9]*")
    )


def _has_command(folder: str) -> bool:
    """False for a thread of the kernel, and for a process that has ended meanwhile."""
    try:
        return bool(Path(folder, "cmdline").read_bytes())
    except OSError:
        return False


def is_orphan(pid: int) -> bool:
    """Whether a process's parent has ended. In a container the server itself may be process 1."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return parent is None or (parent.pid == INIT and parent.name() != process.name())
    except psutil.Error:
        return False
