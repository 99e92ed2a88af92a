"""A store against its client alone, on the same frames, slots, threads and server.

The sides alternate.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from rich.table import Table

from kvstow import frame
from kvstow.backends.base import Done, Store
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import HEADER_BYTES, GroupLayout
from kvstow.runtime import ThreadExecutor

SIZES_MIB: Final = (1, 4, 32)
# four chunks a thread of the largest, so that the checks of some overlap with others
ROUND_BYTES: Final = 512 << 20
DEPTH: Final = 4
FIRST_ROUNDS_DROPPED: Final = 1  # connections made, memory taken from the system
NAMESPACE: Final = Namespace.from_fields({"made by": "bench"})
WAYS: Final = ("get", "put")

Work = Callable[[int, memoryview], None]  # chunk, slot


class Client(Protocol):
    def put(self, chunk: int, slot: memoryview) -> None: ...

    def get(self, chunk: int, slot: memoryview) -> None: ...

    def delete(self, chunk: int) -> None: ...


class Tier:
    """What a tier does on its threads: the store's call, and the check of what came."""

    def __init__(self, store: Store, group: GroupLayout) -> None:
        self._store = store
        self._group = group

    @staticmethod
    def key(chunk: int) -> ChunkKey:
        return ChunkKey.build(NAMESPACE, 0, chunk.to_bytes(32, "little"))

    def put(self, chunk: int, slot: memoryview) -> None:
        assert self._store.write([(self.key(chunk), [slot])]) == [Done(len(slot))]

    def get(self, chunk: int, slot: memoryview) -> None:
        key = self.key(chunk)
        [outcome] = self._store.read([(key, slot)])
        assert isinstance(outcome, Done)
        frame.check(slot, outcome.length, key, self._group)

    def delete(self, chunk: int) -> None:
        self._store.delete([self.key(chunk)])


def compare(client: Client, store: Store, rounds: int) -> dict[str, Any]:
    """Returns ``get_over_client`` and ``put_over_client``, each the least of all sizes.

    ``mib_<n>`` has the figures of one size.
    """
    sizes = {f"mib_{mib}": _measure(client, store, mib, rounds) for mib in SIZES_MIB}
    least = {
        f"{way}_over_client": min(size[f"{way}_over_client"] for size in sizes.values())
        for way in WAYS
    }
    return {**least, **sizes, "depth": DEPTH, "rounds": rounds}


def _measure(client: Client, store: Store, mib: int, rounds: int) -> dict[str, float]:
    """GB/s of both sides and ways for frames of ``mib`` MiB, and the tier's shares of the client's."""
    group, slots = frames(mib)
    tier = Tier(store, group)
    chunks = ROUND_BYTES // group.frame_bytes
    sides: dict[str, Client] = {"client": client, "tier": tier}
    took: dict[str, list[float]] = {f"{who}_{way}": [] for who in sides for way in WAYS}
    executor = ThreadExecutor("bench", threads=DEPTH)
    for round_ in range(rounds + FIRST_ROUNDS_DROPPED):
        order = ("client", "tier") if round_ % 2 else ("tier", "client")
        for way in ("put", "get"):
            for who in order:
                took[f"{who}_{way}"].append(
                    timed(executor, [getattr(sides[who], way)] * DEPTH, slots, chunks)
                )
                _each(chunks, sides[who].delete)
            if way == "put":  # each side wrote into an emptied store; frames of their own are read
                for who in order:
                    for chunk in range(chunks):
                        frame.seal(slots[0], tier.key(chunk), group, 32, b"", 0.0)
                        sides[who].put(chunk, slots[0])
    executor.close(5.0)
    result = {
        f"{name}_gb_s": chunks
        * group.frame_bytes
        / 1e9
        / statistics.median(times[FIRST_ROUNDS_DROPPED:])
        for name, times in took.items()
    }
    return result | {
        f"{way}_over_client": result[f"tier_{way}_gb_s"] / result[f"client_{way}_gb_s"]
        for way in WAYS
    }


def _each(chunks: int, work: Callable[[int], None]) -> None:
    for chunk in range(chunks):
        work(chunk)


def frames(mib: int) -> tuple[GroupLayout, list[memoryview]]:
    """The layout of frames of ``mib`` MiB, and a slot of noise for each thread."""
    group = GroupLayout(32, 1, ((mib << 20) - HEADER_BYTES,))
    memory = memoryview(mmap.mmap(-1, DEPTH * group.frame_bytes))
    slots = [memory[i * group.frame_bytes :][: group.frame_bytes] for i in range(DEPTH)]
    for slot in slots:
        slot[:] = os.urandom(4096) * (group.frame_bytes // 4096)
    return group, slots


def timed(
    executor: ThreadExecutor, works: Sequence[Work], slots: Sequence[memoryview], chunks: int
) -> float:
    """Seconds until every chunk was taken, each thread with a work and a slot of its own."""
    left = iter(range(chunks))
    faults: list[BaseException] = []

    def take(thread: int) -> None:
        for chunk in left:  # one step of an iterator over a range is atomic
            works[thread](chunk, slots[thread])

    def ended(_: None, error: BaseException | None) -> None:
        if error is not None:
            faults.append(error)

    began = time.perf_counter()
    for thread in range(DEPTH):
        executor.submit(partial(take, thread), ended)
    while executor.outstanding:
        executor.wait(60.0)
        executor.poll()
    took = time.perf_counter() - began
    if faults:
        raise faults[0]
    return took


def table(result: dict[str, Any], part: str, title: str) -> Table:
    """The result of ``part`` for people."""
    found = result[part]
    if "skipped" in found:
        view = Table(title=f"{title}: skipped", title_justify="left")
        view.add_column(found["skipped"])
        return view
    view = Table(title=f"{title}, {found['depth']} chunks at a time, GB/s", title_justify="left")
    for column in (
        "chunk",
        "get client",
        "tier",
        "tier/client",
        "put client",
        "tier",
        "tier/client",
    ):
        view.add_column(column, justify="right")
    for mib in SIZES_MIB:
        size = found[f"mib_{mib}"]
        cells = [
            size[n]
            for way in WAYS
            for n in (f"client_{way}_gb_s", f"tier_{way}_gb_s", f"{way}_over_client")
        ]
        view.add_row(f"{mib} MiB", *(f"{cell:.2f}" for cell in cells))
    return view
