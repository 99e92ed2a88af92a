"""Disk stores for tests, and small real filesystems where the test may mount them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstow.backends.base import Done
from kvstow.backends.disk import DiskOptions, DiskStore
from kvstow.backends.disk.names import chunk_path
from kvstow.key import ChunkKey
from kvstow.pool.policy.lru import LRU
from kvstow.runtime import Clock, SystemClock
from kvstow.testing.store_suite import read_one, value_of, write_one

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 64 * KIB


def disk(
    *paths: Path, size_bytes: int = 64 * MIB, clock: Clock | None = None, **options: Any
) -> DiskStore:
    extra = {name: options.pop(name) for name in ("check", "describe") if name in options}
    settings = DiskOptions(size_bytes, **options)
    return DiskStore(
        [str(p) for p in paths], settings, order=LRU, clock=clock or SystemClock(), **extra
    )


def file_of(path: Path, key: ChunkKey) -> Path:
    return path / chunk_path(bytes(key.namespace), key.digest())


def put(store: DiskStore, key: ChunkKey, seed: int, size: int = CHUNK) -> bool:
    return write_one(store, key, value_of(seed, size)) == Done(size)


def holds(store: DiskStore, key: ChunkKey, seed: int, size: int = CHUNK) -> bool:
    """True: read back exactly. False: a miss. Anything else fails."""
    outcome, got = read_one(store, key, size)
    if not isinstance(outcome, Done):
        return False
    assert outcome == Done(size)
    assert got == value_of(seed, size), "neither exact nor a miss"
    return True


def on_disk(path: Path) -> int:
    """What the directory takes, as the filesystem says: files and directories, whatever their names."""
    total = 0
    for directory, _, files in os.walk(path):
        for entry in [directory, *(os.path.join(directory, name) for name in files)]:
            try:
                result = os.lstat(entry)
            except FileNotFoundError:
                continue
            total += max(result.st_blocks * 512, result.st_size if not os.path.isdir(entry) else 0)
    return total - os.lstat(path).st_blocks * 512


def temporaries(path: Path) -> list[str]:
    return os.listdir(path / "tmp")


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """``mount ARGUMENTS PATH``, undone at the end; skips the test where it may not mount."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *arguments, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(path)], check=True)


def tmpfs(path: Path, size: str) -> Any:
    return mounted(path, "-t", "tmpfs", "-o", f"size={size},mode=0700", "kvstow-test")


@contextmanager
def ext4(tmp_path: Path, size_bytes: int) -> Iterator[Path]:
    """A real ext4 in a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no mkfs.ext4 here")
    with mounted(tmp_path / "ext4", "-o", "loop", str(image)) as path:
        yield path


def keys_held(store: DiskStore, keys: Sequence[ChunkKey]) -> list[int]:
    return [i for i, held in enumerate(store.contains(keys)) if held]


def no_error(_: bytes, error: OSError) -> None:
    """What a scrub is told to do with files that give an error, in tests where none does."""
    raise error
