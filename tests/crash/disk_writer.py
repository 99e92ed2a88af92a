"""One of the processes that the crash test kills: reads and writes as fast as it can until then.

``python -m tests.crash.disk_writer PATH SIZE SEED [beset | operator]``. It says ``ready`` once its store is open,
``wrong ...`` if a read is neither exact nor a miss, or a call fails, unless it is ``beset`` by somebody who damages the
directory. An ``operator`` counts, verifies, clears up and clears instead.
"""

from __future__ import annotations

import mmap
import random
import sys

from kvstow.backends.base import Done
from kvstow.backends.disk import DiskOptions, DiskStore
from kvstow.cli.data_directory import DataDirectory
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey, Namespace
from kvstow.pool.policy.lru import LRU
from kvstow.runtime import SystemClock, ThreadExecutor

CHUNK = 32 << 10
KEYS = 600
NAMESPACES = [Namespace.from_fields({"model": name}) for name in ("one", "two")]


def key_of(i: int) -> ChunkKey:
    return ChunkKey.build(NAMESPACES[i % 2], 0, i.to_bytes(32, "little"))


def value_of(i: int) -> bytes:
    return random.Random(i).randbytes(16) * (CHUNK // 16)


def open_store(path: str, size_bytes: int) -> DiskStore:
    return DiskStore([path], DiskOptions(size_bytes), order=LRU, clock=SystemClock())


def wrong(store: DiskStore, i: int, buffer: memoryview) -> bool:
    """Whether a read gives anything but the exact value or a miss."""
    [outcome] = store.read([(key_of(i), buffer)])
    return isinstance(outcome, Done) and (
        outcome.length != CHUNK or bytes(buffer[:CHUNK]) != value_of(i)
    )


def operate(path: str, seed: int) -> None:
    rng = random.Random(seed)
    print("ready", flush=True)
    while True:
        try:
            directory = DataDirectory(path)
            directory.usage()
            directory.remove(lambda _, used_s: rng.random() < 0.2)
            directory.tidy(empty=True)
            directory.close()
        except (StoreUnavailable, StoreRefused):  # the ledger is gone
            continue


def main(path: str, size_bytes: int, seed: int, *, beset: bool) -> None:
    rng = random.Random(seed)
    store = open_store(path, size_bytes)
    store.start(ThreadExecutor("background"))
    buffers = memoryview(mmap.mmap(-1, 2 * CHUNK))
    print("ready", flush=True)
    while True:
        i = rng.randrange(KEYS)
        choice = rng.random()
        try:
            if choice < 0.55:
                buffers[:CHUNK] = value_of(i)
                at = rng.choice((4096, 100))
                store.write([(key_of(i), [buffers[:at], buffers[at:CHUNK]])])
            elif choice < 0.9:
                if wrong(store, i, buffers[CHUNK:]):
                    print(f"wrong {i}", flush=True)
            elif choice < 0.96:
                store.delete([key_of(i)])
            elif choice < 0.97:
                store.scan()
            else:
                store.set_aside([key_of(i)])
        except StoreUnavailable as error:
            if not beset:
                print(f"wrong: {error}", flush=True)


if __name__ == "__main__":
    if sys.argv[4:] == ["operator"]:
        operate(sys.argv[1], int(sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), beset=sys.argv[4:] == ["beset"])
