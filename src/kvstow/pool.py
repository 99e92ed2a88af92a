"""The host pool: slots of shared memory, and the leases that pin them.

Everything here belongs to the owner's thread, the engine's, *release of a lease included*: a worker thread hands its
lease back through the executor's ``then``. Only ``HostPool.prefault`` and the bytes behind a lease's views are for
other threads. Nothing outside this module may assume that slots are contiguous or of equal size: a lease gives spans.

A slot's life::

    free --reserve--> RESERVED --commit--> COMMITTED --free_slot, no lease--> free
                         |                     `-------free_slot, leased----> DOOMED --last release--> free
                         `--released uncommitted--> free
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Final

from kvstow.hostmem import HostMemory, PoolError, PoolRef, map_memory, populate
from kvstow.layout import ChunkLayout, Place, align_up

__all__ = ["HostPool", "Lease", "PoolError", "PoolRef", "SlotState", "map_pool", "populate"]

PIECE_BYTES: Final = 64 << 20  # one prefault: 13 ms of an executor's thread

map_pool = map_memory


class SlotState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    DOOMED = "doomed"  # nobody can find it any more; free once no lease pins it


class Lease:
    """A pin on one slot: while it is held the slot's bytes are nobody else's.

    The lease that ``reserve`` gave writes the slot: ``commit`` makes it a chunk, ``release`` before that gives the
    slot back, and tells ``on_abort``. ``release`` is idempotent. A context manager, whose end releases.
    """

    __slots__ = ("_pool", "_released", "group", "on_abort", "slot")

    def __init__(self, pool: HostPool, slot: int, group: int) -> None:
        self._pool = pool
        self._released = False
        self.slot = slot
        self.group = group
        self.on_abort: Callable[[Lease], object] | None = None

    @property
    def released(self) -> bool:
        return self._released

    @property
    def place(self) -> Place:
        """Where the payload goes, for a worker."""
        return self._pool._place(self._held(), self.group)

    def view(self) -> memoryview:
        """The whole frame in this process: header page, then the padded spans."""
        return self._pool._frame(self._held(), self.group)

    def spans(self) -> list[memoryview]:
        """The payload in this process, a view a shard, without padding."""
        memory = self._pool.memory
        return [memory[span.offset : span.offset + span.length] for span in self.place.spans]

    def commit(self) -> None:
        """The bytes are all there: the slot holds a chunk now, and this lease is an ordinary pin."""
        self._pool._commit(self._held())

    def release(self) -> None:
        if not self._released:
            self._released = True
            aborted = self._pool._unpin(self.slot)
            if aborted and self.on_abort is not None:
                self.on_abort(self)

    def _held(self) -> int:
        if self._released:
            raise AssertionError(f"lease on slot {self.slot} used after its release")
        return self.slot

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class HostPool:
    """A fixed number of slots, each large enough for any group's frame, in memory that workers can map.

    A double free, or any other use of a slot in a state that does not allow it, raises ``AssertionError``.
    """

    def __init__(self, layout: ChunkLayout, memory: HostMemory, slots: int, slot_bytes: int) -> None:
        self._layout = layout
        self._memory = memory
        self.memory = memory.view
        self.ref = memory.ref
        self.closed = memory.closed  # an event, for threads that work on the memory
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._state = [SlotState.FREE] * slots
        self._pins = [0] * slots
        self._group = [0] * slots
        self._free = list(reversed(range(slots)))  # a stack: the slot used last is the warmest
        self._leased = 0

    @classmethod
    def create(cls, layout: ChunkLayout, capacity_bytes: int, *, name: str, pool_dir: str | None = None) -> HostPool:
        """A pool of at most ``capacity_bytes``, on a memfd or, with ``pool_dir``, in a file there.

        The caller has compared ``capacity_bytes`` with the memory that is free. Raises ``PoolError``.
        """
        slot_bytes = align_up(layout.max_frame_bytes)
        slots = capacity_bytes // slot_bytes
        if slots < 1:
            raise PoolError(
                f"memory.size={capacity_bytes:,} bytes is less than one chunk of {slot_bytes:,} bytes "
                f"({layout.chunk_tokens} tokens): set memory.size to several chunks, or chunk_size lower"
            )
        size = slots * slot_bytes
        memory = HostMemory.in_directory(size, name, pool_dir) if pool_dir else HostMemory.anonymous(size, name)
        return cls(layout, memory, slots, slot_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes reserved: whole slots within the budget."""
        return self.slots * self.slot_bytes

    @property
    def free(self) -> int:
        """Slots that ``reserve`` can give now."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """Slots that at least one lease pins."""
        return self._leased

    @property
    def pieces(self) -> int:
        """How many ``prefault`` calls take the whole pool from the system."""
        return -(-self.capacity_bytes // PIECE_BYTES)

    def prefault(self, piece: int, available_bytes: Callable[[], int] | None = None) -> None:
        """Reserve piece ``piece`` of the memory for real; any thread. The first pieces serve the first slots.

        Raises ``PoolError`` where ``available_bytes()`` is less than the piece: the system would not refuse it, the
        OOM killer would end some process instead.
        """
        if self.ref.path is not None:
            return  # a file's space is reserved at its creation
        offset = piece * PIECE_BYTES
        length = min(PIECE_BYTES, self.capacity_bytes - offset)
        if available_bytes is not None and (available := available_bytes()) < length:
            raise PoolError(
                f"memory.size: {available:,} bytes of memory are left after {offset:,} of the pool's "
                f"{self.capacity_bytes:,}: set memory.size lower, or free memory (an earlier engine may still run)"
            )
        self._memory.reserve(offset, length)

    def unname(self) -> None:
        """Every worker has mapped the pool: nobody needs its file's name any more."""
        self._memory.unname()

    def reserve(self, group: int = 0) -> Lease | None:
        """A free slot to fill with a chunk of ``group``. ``None``: there is none; evict and ask again."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot] = SlotState.RESERVED
        self._group[slot] = group
        return self._pin(slot)

    def lease(self, slot: int) -> Lease:
        """One more pin on a chunk."""
        self._expect(slot, SlotState.COMMITTED)
        return self._pin(slot)

    def evictable(self, slot: int) -> bool:
        """Whether ``free_slot`` would free the slot at once."""
        return self._state[slot] is SlotState.COMMITTED and not self._pins[slot]

    def free_slot(self, slot: int) -> None:
        """Drop a chunk: nobody can lease it any more, and its memory is free once no lease pins it."""
        self._expect(slot, SlotState.COMMITTED)
        self._state[slot] = SlotState.DOOMED
        if not self._pins[slot]:
            self._give_back(slot)

    def check_integrity(self) -> None:
        """Assert that every slot is accounted for exactly once."""
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        free = {slot for slot, state in enumerate(self._state) if state is SlotState.FREE}
        assert free == set(self._free), f"free list and states differ in {sorted(free ^ set(self._free))}"
        assert all(pins >= 0 for pins in self._pins), "more releases than leases"
        assert self._leased == sum(pins > 0 for pins in self._pins), "count of leased slots is off"
        for slot, (state, pins) in enumerate(zip(self._state, self._pins, strict=True)):
            assert state is not SlotState.FREE or not pins, f"slot {slot} is free and leased"
            assert pins or state in (SlotState.FREE, SlotState.COMMITTED), f"slot {slot} is {state.value}, unleased"

    def close(self) -> None:
        """Give the memory back. Leases still held keep their bytes, in this process, until they go. Idempotent."""
        self._memory.close()

    def _pin(self, slot: int) -> Lease:
        self._leased += not self._pins[slot]
        self._pins[slot] += 1
        return Lease(self, slot, self._group[slot])

    def _unpin(self, slot: int) -> bool:
        """Take one pin off. True: it was a reservation, and ends uncommitted."""
        if self._pins[slot] < 1:
            raise AssertionError(f"slot {slot} released more often than leased")
        self._pins[slot] -= 1
        if self._pins[slot]:
            return False
        self._leased -= 1
        aborted = self._state[slot] is SlotState.RESERVED
        if aborted or self._state[slot] is SlotState.DOOMED:
            self._give_back(slot)
        return aborted

    def _commit(self, slot: int) -> None:
        self._expect(slot, SlotState.RESERVED)
        self._state[slot] = SlotState.COMMITTED

    def _give_back(self, slot: int) -> None:
        if self._state[slot] is SlotState.FREE:
            raise AssertionError(f"slot {slot} freed twice")
        self._state[slot] = SlotState.FREE
        self._free.append(slot)

    def _expect(self, slot: int, state: SlotState) -> None:
        if self._state[slot] is not state:
            raise AssertionError(f"slot {slot} is {self._state[slot].value}, not {state.value}")

    def _place(self, slot: int, group: int) -> Place:
        return Place("pool", self._layout.groups[group].spans(slot * self.slot_bytes))

    def _frame(self, slot: int, group: int) -> memoryview:
        start = slot * self.slot_bytes
        return self.memory[start : start + self._layout.groups[group].frame_bytes]
