"""The Device contract (worker process)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvstow.layout import GroupPages, Place

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""The KV of one layer as an engine registers it: one tensor, or the pair (K, V)."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The engine's description of one layer's pages. The device checks the tensor against it.

    ``page_bytes`` is one block of one layer on this rank, K and V together (or the latent, for
    MLA).
    """

    num_blocks: int
    block_tokens: int
    num_kv_heads: int
    head_size: int  # elements; for MLA the latent width
    element_bytes: int
    page_bytes: int
    mla: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of blocks ``first_block .. first_block + len(block_ids)`` of one chunk (indices inside
    the chunk).

    ``block_ids[i]`` is the device block that holds chunk block ``first_block + i``.
    """

    place: Place
    block_ids: Sequence[int]
    first_block: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a ticket.

    ``failed`` lists the indices of its transfers that did not happen, whole or in part; ``error``
    is the first of their errors.
    """

    ticket: int
    failed: tuple[int, ...]
    error: str | None
    moved_bytes: int
    seconds: float


class Device(Protocol):
    """Moves whole blocks between the engine's pages and places.

    The device orders its copies explicitly against compute: ``copy_out`` after the kernels that
    fill the pages, ``copy_in`` before their first reader and after the last reader of the old
    content. Calls come from one thread, the worker's. No method but ``fence`` and ``close`` waits
    for a copy.
    """

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        """Takes the engine's KV tensors. ``groups`` has for each group its layers, name to spec, in
        payload order.

        Returns the recognised pages of each group. Raises ``UnsupportedError``, naming layer,
        shape, strides and the known layouts, when a layout is not positively recognised. May be
        called again with other tensors after all copies have ended.
        """
        ...

    def map_pool(self, pool: memoryview, shard: int) -> None:
        """Takes the mapping of the whole host pool, and the index of this rank's span in each pool
        place.
        """
        ...

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        """Starts copying pages to places.

        Never raises for a failed copy: ``finished`` reports it.
        """
        ...

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        """Starts copying places to pages.

        Never raises for a failed copy: ``finished`` reports it.
        """
        ...

    def finished(self) -> list[Finished]:
        """Returns the tickets that ended since the last call, each exactly once."""
        ...

    def fence(self, tickets: Sequence[int]) -> None:
        """Returns once later work on the device can neither disturb these tickets nor be disturbed
        by them.

        On a device with streams this makes compute wait for the copies; on a CPU it waits for them.
        Unknown and ended tickets are ignored.
        """
        ...

    def close(self) -> None:
        """Waits for copies in flight (bounded) and releases resources. Idempotent."""
        ...
