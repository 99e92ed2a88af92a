"""The Device contract (worker process)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvstow.layout import GroupPages, Place

KVCache: TypeAlias = (
    torch.Tensor | Sequence[torch.Tensor]
)  # what an engine registers for a layer; a pair is (K, V)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What the engine says of one layer's pages; the device checks the tensor against it.

    ``page_bytes`` is one block of one layer on this rank, K and V together (or the latent, for MLA).
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
    """Copy blocks ``first_block .. first_block + len(block_ids)`` of one chunk (indices inside the chunk).

    ``block_ids[i]`` is the device block that holds chunk block ``first_block + i``.
    """

    place: Place
    block_ids: Sequence[int]
    first_block: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A ticket's end. ``failed`` lists the indices of its transfers that did not happen, whole or in part."""

    ticket: int
    failed: tuple[int, ...]
    error: str | None
    moved_bytes: int
    seconds: float


class Device(Protocol):
    """Moves whole blocks between the engine's pages and places.

    The device orders its copies explicitly against compute: ``copy_out`` after the kernels that fill the
    pages, ``copy_in`` before their first reader and after the last reader of the old content. Calls come from
    one thread, the worker's. No method but ``fence`` and ``close`` waits for a copy.
    """

    def attach(
        self, kv_caches: Mapping[str, KVCache], groups: Sequence[Mapping[str, KVSpec]]
    ) -> tuple[GroupPages, ...]:
        """Take the engine's KV tensors: per group its layers (name to spec) in payload order.

        Returns what was recognised. Raises ``UnsupportedError``, naming layer, shape, strides and the known
        layouts, when a layout is not positively recognised. May be called again with other tensors after all
        copies have ended.
        """
        ...

    def map_pool(self, pool: memoryview, shard: int) -> None:
        """Take the host pool's whole mapping and the index of this rank's span in each pool place."""
        ...

    def copy_out(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        """Start copying pages to places. Never raises for a failed copy: ``finished`` says so."""
        ...

    def copy_in(self, ticket: int, transfers: Sequence[Transfer]) -> None:
        """Start copying places to pages. Never raises for a failed copy: ``finished`` says so."""
        ...

    def finished(self) -> list[Finished]:
        """Tickets that ended since the last call, each exactly once."""
        ...

    def fence(self, tickets: Sequence[int]) -> None:
        """Return when nothing that runs on the device afterwards can disturb, or be disturbed by, these tickets.

        On a device with streams this makes compute wait for the copies; on a CPU it waits for them. Unknown
        and ended tickets are ignored.
        """
        ...

    def close(self) -> None:
        """Wait for copies in flight (bounded), release resources. Idempotent."""
        ...
