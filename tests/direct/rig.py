"""Direct storage from end to end in one process: the engine's side, and ranks with CPU pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from kvstow import build
from kvstow.device.base import Device, Finished, Transfer
from kvstow.device.cpu import CpuDevice
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.pool.slots import Lease
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.settings import DirectSettings, Settings
from kvstow.testing.kv_layouts import LAYOUTS, Built, Shape, block_bytes, fill
from kvstow.vllm.direct import DirectDevice, open_direct

NAMESPACE = Namespace.from_fields({"made by": "direct rig"})
BLOCKS_PER_CHUNK = 2
BLOCKS = 64


def key(number: int) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, number.to_bytes(32, "little"))


class Rank:
    """One worker's device, with pages of its own."""

    torch_device: ClassVar[str] = "cpu"

    def __init__(self, shard: int, shape: Shape) -> None:
        self.built = self.build(shape)
        fill(self.built, shard)
        self.inner = self.make_device()
        [self.pages] = self.inner.attach(self.built.caches, [self.built.specs])
        self.shard = shard
        self.device: DirectDevice | None = None
        self._ticket = 0

    def build(self, shape: Shape) -> Built:
        return LAYOUTS["packed_lbhnc"](shape)

    def make_device(self) -> Device:
        return CpuDevice(ThreadExecutor("copy"), SystemClock())

    def copy(self, work: Sequence[tuple[Lease, Sequence[int]]], *, load: bool) -> Finished:
        """Start a job and wait for its end."""
        assert self.device is not None
        self._ticket += 1
        transfers = [Transfer(lease.place, list(blocks)) for lease, blocks in work]
        (self.device.copy_in if load else self.device.copy_out)(self._ticket, transfers)
        return self.wait(self._ticket)

    def wait(self, ticket: int) -> Finished:
        assert self.device is not None
        for _ in range(200_000):
            for end in self.device.finished():
                assert end.ticket == ticket
                return end
            self.device._pipeline._executor.wait(0.001)
        raise AssertionError("the transfer does not end")

    def bytes_of(self, blocks: Sequence[int]) -> bytes:
        return b"".join(
            block_bytes(self.built, name, block) for block in blocks for name in self.built.specs
        )


class Rig:
    """``ranks`` distinct shards, over files in ``folder`` where there is one."""

    make_rank: ClassVar[type[Rank]] = Rank

    def __init__(
        self,
        folder: Path | str | None,
        ranks: int = 2,
        *,
        size: int | None = 4 << 20,
        **direct: object,
    ) -> None:
        self.ranks = [self.make_rank(shard, Shape(blocks=BLOCKS)) for shard in range(ranks)]
        block_bytes_ = tuple(rank.pages.block_bytes for rank in self.ranks)
        self.layout = ChunkLayout((GroupLayout(16, BLOCKS_PER_CHUNK, block_bytes_),))
        paths = {} if folder is None else {"path": (str(folder),)}
        options = {"engine": "file", "size": size, **paths, **direct}
        self.settings = Settings(direct=DirectSettings(**options))  # type: ignore[arg-type]
        self.metrics = Metrics()
        self.extents, self.ref, self.engine = build.build_direct(
            self.settings,
            self.layout,
            ranks=ranks,
            engine=0,
            not_persistent=None,
            clock=SystemClock(),
            metrics=self.metrics,
            lock_timeout_s=0.5,
        )
        for rank in self.ranks:
            rank.device = open_direct(
                rank.inner, self.ref, rank.shard, torch.device(rank.torch_device)
            )

    def store(self, chunks: dict[int, Sequence[int]]) -> list[Finished]:
        """Chunk number to the blocks that hold it on every rank. Commits what every rank has stored."""
        leases: dict[int, Lease] = {}
        for number in chunks:
            lease = self.engine.reserve(key(number), b"", self.layout.chunk_tokens)
            assert lease is not None, f"no slot for {number}"
            leases[number] = lease
        ends = [
            rank.copy([(leases[n], blocks) for n, blocks in chunks.items()], load=False)
            for rank in self.ranks
        ]
        failed = {index for end in ends for index in end.failed}
        for index, lease in enumerate(leases.values()):
            if index in failed:
                self.engine.failed(lease)
            else:
                self.engine.commit(lease)
            lease.release()
        return ends

    def load(self, chunks: dict[int, Sequence[int]]) -> list[Finished]:
        """Chunk number to the blocks to fill. What a rank can't read is dropped."""
        leases = self.engine.hold("r", [key(number) for number in chunks])
        work = list(zip(leases, chunks.values(), strict=False))
        ends = [rank.copy(work, load=True) for rank in self.ranks] if work else []
        failed = {index for end in ends for index in end.failed}
        for index, lease in enumerate(leases):
            if index in failed:
                self.engine.failed(lease)
            lease.release()
        return ends

    def found(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.engine.index.resident(key(number))]

    def settle(self) -> None:
        """Until the table is on its way to the disk no more."""
        while self.engine.busy():
            self.engine.poll()
            table = self.extents._table
            if table is not None:
                table._executor.wait(0.01)

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.device is not None
            rank.device.close()
        self.engine.close(5.0)


def shuffled(count: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` chunks' worth of distinct blocks, in random order."""
    blocks = list(range(BLOCKS))
    random.Random(seed).shuffle(blocks)
    return [tuple(blocks[i * BLOCKS_PER_CHUNK : (i + 1) * BLOCKS_PER_CHUNK]) for i in range(count)]
