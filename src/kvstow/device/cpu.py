"""The CPU device: pages in ordinary memory, copied on one worker thread so that the engine's own never stalls.

Rows of pages are moved many at a time by ``index_select(out=)`` and ``index_copy_`` on views with 16-byte elements:
measured on shuffled blocks, one thread, against one memcpy of the same bytes, these reach 1.0 at pages of 192 KiB,
0.85 at 32 KiB and 0.55 at 4 KiB (where the memory system is the limit: every page is a new TLB entry), and give up
the interpreter lock once a chunk. A ``memmove`` per page reaches 0.95, 0.7 and 0.25 and takes the lock once a page,
``_foreach_copy_`` 0.8, 0.45 and 0.1, ``index_copy_`` on int8 a tenth.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import gcd
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from kvstow.device.base import KVCache, KVSpec
from kvstow.device.plan import GroupPlan, Move, attach_groups
from kvstow.device.tickets import FENCE_TIMEOUT_S, TicketDevice
from kvstow.errors import CopyError
from kvstow.layout import GroupPages
from kvstow.pool.hostmem import populate
from kvstow.runtime import Clock, Executor, rest

POPULATE_BYTES: Final = 8 << 20  # 4 ms
POPULATE_AT_ONCE_BYTES: Final = 256 << 20  # the first slots, which the first requests fill
POPULATE_SHARE: Final = 0.1  # of one core: the host of a virtual machine may have to find each page
UNITS: Final = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


class Mover(Protocol):
    """Moves rows. ``host`` is ``[len(index), width]``; row ``index[i]`` of ``rows`` is row ``i`` of ``host``."""

    def gather(self, rows: torch.Tensor, index: torch.Tensor, host: torch.Tensor) -> None:
        """Pages to host."""
        ...

    def scatter(self, rows: torch.Tensor, index: torch.Tensor, host: torch.Tensor) -> None:
        """Host to pages."""
        ...


class TorchMover:
    """The fastest primitives measured; see the module's docstring."""

    def gather(self, rows: torch.Tensor, index: torch.Tensor, host: torch.Tensor) -> None:
        torch.index_select(rows, 0, index, out=host)

    def scatter(self, rows: torch.Tensor, index: torch.Tensor, host: torch.Tensor) -> None:
        rows.index_copy_(0, index, host)


@cache
def _set_thread_count() -> Callable[[int], object] | None:
    """OpenMP's own setter, which changes the calling thread only; ``torch.set_num_threads`` leaks into others."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            setter: Callable[[int], object] = ctypes.CDLL(library).omp_set_num_threads
        except (AttributeError, OSError):
            continue
        return setter
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's operators on the calling thread: the other cores are the engine's.

    Without an OpenMP to ask, copies are as right but may use several threads.
    """
    setter, before = _set_thread_count(), torch.get_num_threads()
    if setter is None or before == 1:
        yield
        return
    setter(1)
    try:
        yield
    finally:
        setter(before)


class _Run(NamedTuple):
    """Consecutive layers whose planes are rows of one table, so that a whole chunk of them is one call.

    Block ``b``'s plane ``p`` of layer ``l`` is row ``base[l, 0, p] + b * step`` of ``rows``.
    """

    layers: range
    rows: torch.Tensor
    base: torch.Tensor
    step: int


def _unit_bytes(plan: GroupPlan) -> int:
    """The widest element, at most 16 bytes, that every row, stride and offset of the group is a multiple of."""
    unit = 16
    for page in plan.layers:
        for plane in page.planes:
            unit = gcd(unit, plane.shape[1], plane.stride(0), plane.storage_offset())
    return unit


def _rows_of(plane: torch.Tensor, unit: int) -> torch.Tensor:
    """A plane with elements of ``unit`` bytes."""
    size, stride = (plane.shape[0], plane.shape[1] // unit), (plane.stride(0) // unit, 1)
    return _view(plane, unit, int(plane.storage_offset()), size, stride)


def _view(
    memory: torch.Tensor,
    unit: int,
    offset_bytes: int,
    size: tuple[int, int],
    stride: tuple[int, int],
) -> torch.Tensor:
    view = torch.empty(0, dtype=UNITS[unit])
    return view.set_(memory.untyped_storage(), offset_bytes // unit, size, stride)


def _runs(plan: GroupPlan, unit: int) -> list[_Run]:
    """Cut the group's layers into as few runs as their memory allows. Layers in no run are copied by plane."""
    runs: list[_Run] = []
    first = 0
    while first < len(plan.layers):
        end = first
        while end < len(plan.layers) and _same_table(plan, first, end):
            end += 1
        if end > first:
            runs.append(_table(plan, range(first, end), unit))
        first = max(end, first + 1)
    return runs


def _same_table(plan: GroupPlan, first: int, other: int) -> bool:
    head, planes = plan.layers[first].planes[0], plan.layers[other].planes
    width = head.shape[1]
    return len(planes) == len(plan.layers[first].planes) and all(
        plane.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
        and plane.shape[1] == width
        and plane.stride(0) == head.stride(0)
        and plane.stride(0) % width == 0
        and (plane.storage_offset() - head.storage_offset()) % width == 0
        for plane in planes
    )


def _table(plan: GroupPlan, layers: range, unit: int) -> _Run:
    head = plan.layers[layers[0]].planes[0]
    width = head.shape[1]
    start = int(head.storage_offset()) % width
    count = (head.untyped_storage().nbytes() - start) // width
    rows = _view(head, unit, start, (count, width // unit), (width // unit, 1))
    planes = [plan.layers[i].planes for i in layers]
    base = torch.tensor(
        [[[(plane.storage_offset() - start) // width for plane in of]] for of in planes]
    )
    return _Run(layers, rows, base, head.stride(0) // width)


class _Group:
    """One group's views, ready to be copied."""

    def __init__(self, plan: GroupPlan, mover: Mover) -> None:
        self.unit = _unit_bytes(plan)
        self._plan = plan
        self._mover = mover
        self._runs = _runs(plan, self.unit)
        self._planes = [
            [_rows_of(plane, self.unit) for plane in page.planes] for page in plan.layers
        ]
        tabled = {layer for run in self._runs for layer in run.layers}
        self._untabled = [layer for layer in range(len(plan.layers)) if layer not in tabled]

    def copy(self, pool: torch.Tensor, move: Move, *, load: bool) -> int:
        """Copy one transfer; returns its bytes. Raises ``CopyError``, or what the primitive raises."""
        if move.offset % self.unit:
            raise CopyError(f"a span at byte {move.offset} is not aligned to {self.unit} bytes")
        act = self._mover.scatter if load else self._mover.gather
        ids = torch.tensor(move.ids, dtype=torch.int64)
        whole = len(move.ids) == move.blocks_per_chunk
        for run in self._runs:
            if whole:
                width = run.rows.shape[1]
                index = torch.add(run.base, ids.view(1, -1, 1), alpha=run.step).view(-1)
                at = move.offset + move.blocks_per_chunk * self._plan.prefix_bytes[run.layers[0]]
                act(run.rows, index, _view(pool, self.unit, at, (index.numel(), width), (width, 1)))
            else:
                for layer in run.layers:
                    self._copy_layer(pool, move, layer, ids, act)
        for layer in self._untabled:
            self._copy_layer(pool, move, layer, ids, act)
        return len(move.ids) * self._plan.block_bytes

    def _copy_layer(
        self,
        pool: torch.Tensor,
        move: Move,
        layer: int,
        ids: torch.Tensor,
        act: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> None:
        page_bytes = self._plan.layers[layer].layer.page_bytes
        at = (
            move.offset
            + move.blocks_per_chunk * self._plan.prefix_bytes[layer]
            + move.first * page_bytes
        )
        for rows in self._planes[layer]:
            size, stride = (len(move.ids), rows.shape[1]), (page_bytes // self.unit, 1)
            act(rows, ids, _view(pool, self.unit, at, size, stride))
            at += rows.shape[1] * self.unit


class CpuDevice(TicketDevice):
    """``Device`` over ordinary memory.

    ``copy_out`` is called after the forward returned and ``copy_in`` before anyone reads the blocks, so on a CPU that
    is all the ordering there is; ``fence`` waits. On ``toucher``, closed with the device, the pool is touched for the
    first time; None: by the copies.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        toucher: Executor | None = None,
        mover: Mover | None = None,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        super().__init__(executor, clock, fence_timeout_s)
        self._toucher = toucher
        self._mover = mover or TorchMover()
        self._groups: list[_Group] = []
        self._stop = threading.Event()  # for the toucher

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        self.fence()
        with torch.inference_mode(
            False
        ):  # an inference tensor made here could not be written on another thread
            self._plans = attach_groups(kv_caches, groups, "cpu")
            self._groups = [_Group(plan, self._mover) for plan in self._plans]
        return tuple(plan.pages for plan in self._plans)

    def map_pool(self, pool: memoryview, shard: int) -> None:
        super().map_pool(pool, shard)
        if self._toucher is not None:
            self._toucher.submit(lambda: self._touch(pool), lambda _, error: None)

    def _touch(self, pool: memoryview) -> None:
        """Map the pool's pages, the first at once and the rest at leisure: a first touch costs 6 to 13 copies."""
        for offset in range(0, len(pool), POPULATE_BYTES):
            if self._stop.is_set():
                return
            began_s = self._clock.monotonic()
            populate(pool, offset, min(POPULATE_BYTES, len(pool) - offset))
            if offset >= POPULATE_AT_ONCE_BYTES:
                rest(self._stop, self._clock.monotonic() - began_s, POPULATE_SHARE)

    def _around(self) -> Callable[[], AbstractContextManager[object]]:
        return one_thread

    def _copy(self, pool: torch.Tensor, move: Move, *, load: bool) -> int:
        return self._groups[move.group].copy(pool, move, load=load)

    def close(self) -> None:
        self._stop.set()
        if self._toucher is not None:
            self._toucher.close(self._fence_timeout_s)
        super().close()
        self._groups = []
