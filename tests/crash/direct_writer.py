"""The process that the crash test kills: an engine over direct storage that stores and loads as fast as it can.

``python -m tests.crash.direct_writer PATH SEED``. It says ``ready N`` once it has opened its files with N chunks in
them, ``wrong ...`` if a read is neither exact nor a miss.
"""

from __future__ import annotations

import random
import sys

from kvstow import build
from kvstow.cache import Cache
from kvstow.direct.base import Extent
from kvstow.direct.extents import Extents
from kvstow.direct.file import FileMedia
from kvstow.errors import KVStowError
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.slots import Lease
from kvstow.runtime import SystemClock
from kvstow.settings import DirectSettings, Settings

CHUNK = 24_000
KEYS = 400
SLOTS = 100
LAYOUT = ChunkLayout((GroupLayout(16, 2, (CHUNK // 2, CHUNK // 2)),))
NAMESPACE = Namespace.from_fields({"made by": "direct crash test"})


def key_of(i: int) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, i.to_bytes(32, "little"))


def value_of(i: int, shard: int) -> bytes:
    return random.Random(i * 2 + shard).randbytes(16) * (CHUNK // 16)


class Node:
    """The scheduler's and both workers' part in one process."""

    def __init__(self, path: str) -> None:
        settings = Settings(
            direct=DirectSettings(engine="file", path=(path,), size=64 << 20, max_chunks=SLOTS)
        )
        self.extents: Extents
        self.engine: Cache
        self.extents, ref, self.engine = build.build_direct(
            settings,
            LAYOUT,
            ranks=2,
            engine=0,
            not_persistent=None,
            clock=SystemClock(),
            metrics=Metrics(),
        )
        self.media: list[FileMedia] = [build.file_media(ref, shard) for shard in (0, 1)]

    def store(self, i: int) -> None:
        lease = self.engine.reserve(key_of(i), b"", 32)
        if lease is None:
            return
        for shard, media in enumerate(self.media):
            at = media.select_area(0)
            media.memory[at : at + CHUNK] = value_of(i, shard)
            media.write(0, self._extent(lease, shard))
        self.engine.commit(lease)
        lease.release()

    def load(self, i: int) -> bool | None:
        """None: a miss; else whether every byte is right."""
        leases = self.engine.hold("r", [key_of(i)])
        if not leases:
            return None
        [lease] = leases
        try:
            for shard, media in enumerate(self.media):
                media.read(1, self._extent(lease, shard))
                at = media.select_area(1)
                if bytes(media.memory[at : at + CHUNK]) != value_of(i, shard):
                    return False
        except KVStowError:
            self.engine.failed(lease)
            return None
        finally:
            lease.release()
        return True

    @staticmethod
    def _extent(lease: Lease, shard: int) -> Extent:
        place = lease.place
        return Extent(*place.spans[shard], place.tag)


def main(path: str, seed: int) -> None:
    rng = random.Random(seed)
    node = Node(path)
    print("ready", len(node.engine.index), flush=True)
    while True:
        i = rng.randrange(KEYS)
        if rng.random() < 0.7:
            node.store(i)
        elif node.load(i) is False:
            print("wrong", i, flush=True)
        node.engine.poll()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
