"""One of the processes that the crash test kills: reads and writes as fast as it can until then.

``python -m tests.crash.disk_writer PATH SIZE SEED``. It says ``ready`` once its store is open, ``wrong ...`` if a read
is neither exact nor a miss.
"""

from __future__ import annotations

import mmap
import random
import sys

from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey, Namespace
from kvstow.policy.lru import LRU
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.store.base import Done
from kvstow.store.disk import DiskOptions, DiskStore

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
    return isinstance(outcome, Done) and (outcome.length != CHUNK or bytes(buffer[:CHUNK]) != value_of(i))


def main(path: str, size_bytes: int, seed: int) -> None:
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
            elif choice < 0.97:
                store.delete([key_of(i)])
            else:
                store.quarantine([key_of(i)])
        except StoreUnavailable as error:
            print(f"wrong: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
