"""The host pool: slots of shared memory that workers map. ``kvstow.pool.slots`` has a slot's life.

Other threads than the owner's may call ``HostPool.prefault`` and use the bytes of a lease's views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from kvstow.layout import ChunkLayout, Place, align_up
from kvstow.pool.hostmem import HostMemory, PoolError, PoolRef, map_memory, populate
from kvstow.pool.slots import Lease, Slots, SlotState

__all__ = ["HostPool", "Lease", "PoolError", "PoolRef", "SlotState", "map_pool", "populate"]

# One prefault takes 5 to 15 ms, and 150 ms where a virtual machine's host must find the memory.
PIECE_BYTES: Final = 64 << 20

map_pool = map_memory


class HostPool(Slots):
    """A fixed number of slots, each large enough for any group's frame, in memory that workers can map."""

    tier: ClassVar[str] = "memory"
    gauges: ClassVar[str] = "pool"

    def __init__(
        self, layout: ChunkLayout, memory: HostMemory, slots: int, slot_bytes: int
    ) -> None:
        super().__init__(slots, slot_bytes)
        self._layout = layout
        self._memory = memory
        self.memory = memory.view
        self.ref = memory.ref
        self.closed = memory.closed  # an event, for threads that work on the memory

    @classmethod
    def create(
        cls, layout: ChunkLayout, capacity_bytes: int, *, name: str, pool_dir: str | None = None
    ) -> HostPool:
        """Creates a pool of at most ``capacity_bytes`` on a memfd, or in a file in ``pool_dir``.

        The caller has compared ``capacity_bytes`` with the free memory. Raises ``PoolError``.
        """
        slot_bytes = align_up(layout.max_frame_bytes)
        slots = capacity_bytes // slot_bytes
        if slots < 1:
            raise PoolError(
                f"memory.size={capacity_bytes:,} bytes is less than one chunk of {slot_bytes:,} bytes "
                f"({layout.chunk_tokens} tokens): set memory.size to several chunks, or chunk_size "
                "lower"
            )
        size = slots * slot_bytes
        memory = (
            HostMemory.in_directory(size, name, pool_dir)
            if pool_dir
            else HostMemory.anonymous(size, name)
        )
        return cls(layout, memory, slots, slot_bytes)

    @property
    def pieces(self) -> int:
        """Number of ``prefault`` calls for the whole pool."""
        return -(-self.capacity_bytes // PIECE_BYTES)

    def prefault(self, piece: int, available_bytes: Callable[[], int] | None = None) -> None:
        """Takes piece ``piece`` of the memory from the system. Any thread may call it.

        The first pieces serve the first slots. Raises ``PoolError`` where ``available_bytes()`` is less
        than the piece: the system would grant it and let the OOM killer end some process. The space
        of a file is reserved when the file is created.
        """
        offset = piece * PIECE_BYTES
        length = min(PIECE_BYTES, self.capacity_bytes - offset)
        if available_bytes is not None and self.ref.path is None:
            available = available_bytes()
            if available < length:
                raise PoolError(
                    f"memory.size: {available:,} bytes of memory are left after {offset:,} of the "
                    f"pool's {self.capacity_bytes:,}: set memory.size lower, or free memory (an "
                    "earlier engine may still run)"
                )
        self._memory.reserve(offset, length)

    def unname(self) -> None:
        """Removes the name of the pool's file. Precondition: every worker has mapped the pool."""
        self._memory.unname()

    def close(self, timeout_s: float = 0.0) -> None:
        """Releases the memory. Leases still held keep their bytes in this process. Idempotent."""
        self._memory.close()

    def _place(self, lease: Lease) -> Place:
        return Place("pool", self._layout.groups[lease.group].spans(lease.slot * self.slot_bytes))

    def _frame(self, slot: int, group: int) -> memoryview:
        start = slot * self.slot_bytes
        return self.memory[start : start + self._layout.groups[group].frame_bytes]

    def _payload(self, slot: int, group: int) -> list[memoryview]:
        spans = self._layout.groups[group].spans(slot * self.slot_bytes)
        return [self.memory[span.offset : span.offset + span.length] for span in spans]
