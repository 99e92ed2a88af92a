"""A Device wrapper that watches every copy, and fails some on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvstow.device.base import Device, Finished, KVSpec, Transfer
from kvstow.layout import GroupPages, Place

Fails = Callable[[bool, Sequence[Transfer]], Iterable[int]]
"""Returns, from ``load`` and a ticket's transfers, the indices that fail."""


@dataclass(slots=True)
class _Flight:
    load: bool
    blocks: frozenset[int]
    places: frozenset[Place]
    kept: list[int]  # indices that were passed on
    failed: tuple[int, ...]


class WatchedDevice:
    """Asserts that no forward pass and no other copy touches the blocks of a copy of ``inner``.

    ``fails`` picks transfers that end as failures. A failed load leaves garbage in its pages,
    written by ``scribble``; a failed store leaves its place as it was.
    """

    def __init__(
        self,
        inner: Device,
        *,
        fails: Fails | None = None,
        scribble: Callable[[Sequence[int]], None],
    ) -> None:
        self.inner = inner
        self.fails = fails
        self.loads = 0
        self.stores = 0
        self._scribble = scribble
        self._flights: dict[int, _Flight] = {}
        self._ended: list[Finished] = []

    # --- checks of a simulated forward pass -------------------------------------------------------

    def before_read(self, blocks: Iterable[int]) -> None:
        """Asserts, before a forward pass reads these pages, that no load is filling them."""
        for ticket, flight in self._flights.items():
            busy = flight.blocks.intersection(blocks) if flight.load else ()
            assert not busy, (
                f"the forward reads blocks {sorted(busy)} while load {ticket} fills them"
            )

    def before_write(self, blocks: Iterable[int]) -> None:
        """Asserts, before a forward pass writes these pages, that no copy uses them."""
        for ticket, flight in self._flights.items():
            busy = flight.blocks.intersection(blocks)
            assert not busy, (
                f"the forward writes blocks {sorted(busy)} while copy {ticket} uses them"
            )

    def in_flight_blocks(self) -> set[int]:
        """Returns the pages that copies still use."""
        return {block for flight in self._flights.values() for block in flight.blocks}

    @property
    def in_flight(self) -> int:
        """The number of copies whose end was not taken yet."""
        return len(self._flights)

    # --- Device -----------------------------------------------------------------------------------

    def attach(
        self, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        return self.inner.attach(kv_caches, groups)

    def map_pool(self, pool: memoryview, shard: int) -> None:
        self.inner.map_pool(pool, shard)

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self.stores += 1
        self.inner.copy_out(ticket, self._start(ticket, transfers, load=False))

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        self.loads += 1
        self.inner.copy_in(ticket, self._start(ticket, transfers, load=True))

    def _start(self, ticket: int, transfers: Sequence[Transfer], *, load: bool) -> list[Transfer]:
        assert ticket not in self._flights, f"ticket {ticket} is used twice"
        blocks = frozenset(block for transfer in transfers for block in transfer.block_ids)
        assert 0 not in blocks, "block 0 is the engine's null block"
        assert len(blocks) == sum(len(t.block_ids) for t in transfers) or not load, (
            "a block is loaded twice"
        )
        places = frozenset(transfer.place for transfer in transfers)
        for other, flight in self._flights.items():
            if load or flight.load:
                busy = blocks & flight.blocks
                assert not busy, f"copy {ticket} uses blocks {sorted(busy)} while copy {other} does"
            if not (load and flight.load):
                assert not places & flight.places, (
                    f"copy {ticket} uses a place while copy {other} does"
                )
        failed = tuple(sorted(set(self.fails(load, transfers)))) if self.fails is not None else ()
        kept = [index for index in range(len(transfers)) if index not in failed]
        if load:
            for index in failed:
                self._scribble(transfers[index].block_ids)
        self._flights[ticket] = _Flight(load, blocks, places, kept, failed)
        return [transfers[index] for index in kept]

    def finished(self) -> list[Finished]:
        self._take()
        ended, self._ended = self._ended, []
        return ended

    def _take(self) -> None:
        for end in self.inner.finished():
            flight = self._flights.pop(end.ticket)
            failed = tuple(sorted({*flight.failed, *(flight.kept[index] for index in end.failed)}))
            error = end.error or ("a failure by request" if flight.failed else None)
            self._ended.append(Finished(end.ticket, failed, error, end.moved_bytes, end.seconds))

    def fence(self, tickets: Sequence[int]) -> None:
        self.inner.fence(tickets)
        self._take()
        left = [ticket for ticket in tickets if ticket in self._flights]
        assert not left, f"copies {left} were fenced and have not ended"

    def close(self) -> None:
        self.inner.close()
