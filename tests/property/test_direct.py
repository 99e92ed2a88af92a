"""Random operations on direct storage, against a dict: every load is exact or a miss, whatever became of the bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from kvstow.cache import Cache
from kvstow.direct.base import Extent
from kvstow.direct.extents import RETRY_S, Extents
from kvstow.direct.file import FileMedia
from kvstow.direct.geometry import RECORD_BYTES, SUPERBLOCK_BYTES, Geometry
from kvstow.direct.table import Table
from kvstow.errors import KVStowError
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ALIGN, ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.policy.lru import LRU
from kvstow.pool.slots import Lease
from kvstow.testing.manual import ManualClock, ManualExecutor

LENGTH = 5000
LAYOUT = ChunkLayout((GroupLayout(16, 1, (LENGTH,)),))
STEPS = 150
SECTOR = 512


class Machine:
    """One engine over one file in memory. ``lost``: bits have flipped, or a restart found older bytes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        slots = rng.randint(1, 5)
        self.numbers = slots * 2
        self.loads = self.misses = 0
        self.clock = ManualClock()
        self.geometry = Geometry.with_files(LAYOUT, slots)
        self.table_fd = os.memfd_create("table")
        os.ftruncate(self.table_fd, SUPERBLOCK_BYTES + slots * RECORD_BYTES)
        self.disk = bytearray(self.geometry.file_bytes(0))
        self.media = FileMedia(
            -1, 0, 2, self.geometry.extent_bytes[0], io=(self._read, self._write)
        )
        self.namespace = Namespace.from_fields({"made by": "property"})
        self.written: dict[ChunkKey, set[bytes]] = {}
        self.held: list[tuple[Lease, ChunkKey, bytes]] = []
        self.lost = False
        self.unflushed: list[
            tuple[int, bytes]
        ] = []  # pages of extents as they were, for a power cut to bring back
        self.old_table = self._table()
        self._open()

    def _open(self) -> None:
        self.executor = ManualExecutor(self.clock, run_in_wait=True)
        table = Table(self.table_fd, self.geometry.slots, self.executor, self.clock)
        self.extents = Extents(self.geometry, LAYOUT, self.clock, preallocated=True, table=table)
        self.engine = Cache(
            pool=self.extents,
            policy=LRU(),
            tiers=(),
            layout=LAYOUT,
            clock=self.clock,
            metrics=Metrics(),
            sealer=ManualExecutor(self.clock),
        )

    def _read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        views[0][:] = self.disk[offset : offset + len(views[0])]
        return len(views[0])

    def _table(self) -> bytes:
        return os.pread(self.table_fd, self.geometry.slots * RECORD_BYTES, SUPERBLOCK_BYTES)

    def _write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        for at in range(offset, offset + len(views[0]), ALIGN):
            self.unflushed.append((at, bytes(self.disk[at : at + ALIGN])))
        self.disk[offset : offset + len(views[0])] = views[0]
        return len(views[0])

    def _key(self, number: int) -> ChunkKey:
        return ChunkKey.build(self.namespace, 0, number.to_bytes(8, "little"))

    def _fill(self, lease: Lease, key: ChunkKey) -> None:
        data = self.rng.randbytes(LENGTH)  # another computation of the same KV: not the same bytes
        at = self.media.select_area(0)
        self.media.memory[at : at + LENGTH] = data
        self.media.write(0, Extent(*lease.place.spans[0], lease.place.tag))
        self.written.setdefault(key, set()).add(data)

    def _load(self, lease: Lease) -> bytes | None:
        try:
            self.media.read(1, Extent(*lease.place.spans[0], lease.place.tag))
        except KVStowError:
            return None
        at = self.media.select_area(1)
        return bytes(self.media.memory[at : at + LENGTH])

    def store(self, number: int, ends: str) -> None:
        key = self._key(number)
        lease = self.engine.reserve(key, b"", 16)
        if lease is None:
            return
        self._fill(lease, key)
        if ends == "commit":
            self.engine.commit(lease)
        elif ends == "fail":
            self.engine.failed(lease)
        lease.release()
        assert self.engine.index.resident(key) == (ends == "commit")

    def load(self, number: int) -> None:
        key = self._key(number)
        for lease in self.engine.hold("r", [key]):
            data = self._load(lease)
            if data is None:
                assert self.lost, "an untouched extent can't be read"
                self.misses += 1
                self.engine.failed(lease)
                assert not self.engine.index.resident(key)
            else:
                assert data in self.written[key]
                self.loads += 1
            lease.release()

    def hold(self, number: int) -> None:
        key = self._key(number)
        if len(self.held) < 2:
            for lease in self.engine.hold("r", [key]):
                data = self._load(lease)
                if data is None:
                    lease.release()
                else:
                    self.held.append((lease, key, data))

    def let_go(self) -> None:
        if self.held:
            lease, _, data = self.held.pop(0)
            again = self._load(lease)
            assert again == data or (again is None and self.lost), (
                "what a lease pins is nobody else's"
            )
            lease.release()

    def reset(self) -> None:
        self.namespace = self.namespace.derive("reset", b"")
        self.engine.reset()
        assert len(self.engine.index) == 0

    def poll(self) -> None:
        self.engine.poll()
        self.executor.run_all()

    def restart(self, *, flushed: bool) -> None:
        """``flushed`` or killed. Nothing is lost in the first case."""
        resident = set(self.engine.index._resident)
        if flushed:
            self.engine.close(5.0)
        else:
            self.lost = True
        self.held.clear()
        self._open()
        if flushed and not self.lost:
            assert set(self.engine.index._resident) == resident

    def flush(self) -> None:
        """As the drive and the kernel do when they like."""
        self.unflushed.clear()
        self.old_table = self._table()

    def power_cut(self) -> None:
        """Of what was not flushed any pages are there and any are not, in any order: header pages without payloads,
        payloads without header pages; records likewise, by sectors."""
        self.lost = True
        for at, before in reversed(self.unflushed):
            if self.rng.random() < 0.5:
                self.disk[at : at + ALIGN] = before
        for at in range(0, len(self.old_table), SECTOR):
            if self.rng.random() < 0.5:
                os.pwrite(self.table_fd, self.old_table[at : at + SECTOR], SUPERBLOCK_BYTES + at)
        self.flush()
        self.held.clear()
        self._open()

    def harm(self, share: float, *, table: bool) -> None:
        """A bit flips, of an extent or of the table."""
        self.lost = True
        if not table:
            at = self.geometry.offsets[0] + int(
                share * (len(self.disk) - self.geometry.offsets[0] - 1)
            )
            self.disk[at] ^= 1 << self.rng.randrange(8)
            return
        at = SUPERBLOCK_BYTES + int(share * (self.geometry.slots * RECORD_BYTES - 1))
        [byte] = os.pread(self.table_fd, 1, at)
        os.pwrite(self.table_fd, bytes([byte ^ 4]), at)

    def time_passes(self) -> None:
        self.clock.advance(RETRY_S / 2)

    def accounted(self) -> None:
        self.extents.check_integrity()
        assert self.extents.leased == len({lease.slot for lease, _, _ in self.held})

    def run(self) -> None:
        rng = self.rng
        moves = [
            (
                30,
                lambda: self.store(
                    rng.randrange(self.numbers), rng.choice(("commit", "commit", "fail", "abort"))
                ),
            ),
            (30, lambda: self.load(rng.randrange(self.numbers))),
            (5, lambda: self.hold(rng.randrange(self.numbers))),
            (6, self.let_go),
            (1, self.reset),
            (15, self.poll),
            (3, lambda: self.restart(flushed=rng.random() < 0.5)),
            (rng.choice((0, 2)), lambda: self.harm(rng.random(), table=rng.random() < 0.3)),
            (2, self.time_passes),
            (4, self.flush),
            (rng.choice((0, 3)), self.power_cut),
        ]
        weights = [weight for weight, _ in moves]
        for _ in range(STEPS):
            rng.choices(moves, weights)[0][1]()
            self.accounted()
        os.close(self.table_fd)


@pytest.mark.parametrize("batch", range(5))
def test_random_operations(batch: int) -> None:
    loads = misses = 0
    for seed in range(batch * 60, (batch + 1) * 60):
        machine = Machine(random.Random(seed))
        try:
            machine.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loads, misses = loads + machine.loads, misses + machine.misses
    assert loads > 300
    assert misses > 10
