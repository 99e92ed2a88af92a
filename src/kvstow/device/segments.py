"""Transfers as byte ranges, device addresses beside pool offsets, for devices that copy ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvstow.device.plan import GroupPlan, Move, plane_table


class Segments(NamedTuple):
    """Byte ranges: ``sizes[i]`` bytes at address ``device[i]`` and at pool offset ``host[i]``.

    All three are int64 tensors on the CPU.
    """

    device: torch.Tensor
    host: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence[Segments]) -> Segments:
        if not parts:
            empty = torch.empty(0, dtype=torch.int64)
            return cls(empty, empty, empty)
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def host_end(self) -> int:
        """One past the last pool offset; 0 without ranges."""
        return int((self.host + self.sizes).max()) if len(self.sizes) else 0


class GroupAddresses:
    """Turns the transfers of one group into byte ranges."""

    def __init__(self, plan: GroupPlan) -> None:
        self._base, self._stride, self._width, self._page, self._prefix, self._within = (
            plane_table(plan).T.contiguous().unsqueeze(2)
        )

    def segments(self, move: Move, piece_bytes: int) -> Segments:
        """Returns the ranges of ``move``, neighbours joined.

        No range crosses a multiple of ``piece_bytes`` of the pool.
        """
        ids = torch.tensor(move.ids, dtype=torch.int64)
        order = torch.arange(move.first, move.first + len(move.ids))
        device = (self._base + self._stride * ids).flatten()
        host = (
            self._prefix * move.blocks_per_chunk + self._page * order + (self._within + move.offset)
        )
        return _cut(
            _joined(device, host.flatten(), self._width.expand(-1, len(ids)).flatten()), piece_bytes
        )


def _joined(device: torch.Tensor, host: torch.Tensor, sizes: torch.Tensor) -> Segments:
    if len(sizes) < 2:
        return Segments(device, host, sizes)
    ends_d, ends_h = device + sizes, host + sizes
    starts = torch.ones(len(sizes), dtype=torch.bool)
    starts[1:] = (ends_d[:-1] != device[1:]) | (ends_h[:-1] != host[1:])
    first = starts.nonzero().flatten()
    last = torch.cat((first[1:], torch.tensor([len(sizes)]))) - 1
    return Segments(device[first], host[first], ends_h[last] - host[first])


def _cut(segments: Segments, piece_bytes: int) -> Segments:
    """Splits ranges at piece boundaries: one copy must not span two pinned ranges."""
    if not len(segments.sizes) or bool(
        (segments.host // piece_bytes == (segments.host + segments.sizes - 1) // piece_bytes).all()
    ):
        return segments
    rows: list[tuple[int, int, int]] = []
    for device, host, size in zip(*(column.tolist() for column in segments), strict=True):
        end = host + size
        at = host
        while at < end:
            stop = min(end, (at // piece_bytes + 1) * piece_bytes)
            rows.append((device + at - host, at, stop - at))
            at = stop
    return Segments(*torch.tensor(rows, dtype=torch.int64).T.contiguous())


class Arena:
    """Turns device addresses back into tensors, by the storages behind a device's planes."""

    def __init__(self, plans: Sequence[GroupPlan]) -> None:
        memory = {}
        for plan in plans:
            for layer in plan.layers:
                for plane in layer.planes:
                    storage = plane.untyped_storage()
                    memory[storage.data_ptr()] = torch.empty(
                        0, dtype=torch.uint8, device=plane.device
                    ).set_(storage)
        self._starts = sorted(memory)
        self._flat = [memory[start] for start in self._starts]

    def at(self, address: int, size: int) -> torch.Tensor:
        """Returns ``size`` bytes at ``address`` as a uint8 tensor."""
        i = bisect_right(self._starts, address) - 1
        begin = address - self._starts[i]
        return self._flat[i][begin : begin + size]
