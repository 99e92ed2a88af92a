"""Slots, and the leases that pin them, for any kind of place.

Everything here runs on the owner's thread, *also the release of a lease*: a worker thread hands its
lease back through the executor's ``then``. A lease gives spans; slots need not be contiguous or of
equal size.

A slot's life::

    free --reserve--> RESERVED --commit--> COMMITTED --free_slot, no lease--> free
                         |                     `-------free_slot, leased----> DOOMED --last release--> free
                         `--released uncommitted--> free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import TracebackType
from typing import ClassVar

from kvstow.key import ChunkKey
from kvstow.layout import Place


class SlotState(Enum):
    """The state of a slot."""

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    DOOMED = "doomed"  # unfindable; free once no lease pins it


class Lease:
    """A pin on one slot. While it is held the slot is neither evicted nor reused.

    The holder of the lease from ``reserve`` writes the slot. ``commit`` makes it a chunk; ``release``
    before that frees the slot and calls ``on_abort``. ``release`` is idempotent. A lease is a context
    manager whose exit releases it. ``key`` is the slot's chunk, set by the index.
    """

    __slots__ = ("_released", "_slots", "group", "key", "on_abort", "slot")

    def __init__(self, slots: Slots, slot: int, group: int) -> None:
        self._slots = slots
        self._released = False
        self.slot = slot
        self.group = group
        self.key: ChunkKey | None = None
        self.on_abort: Callable[[Lease], object] | None = None

    @property
    def released(self) -> bool:
        return self._released

    @property
    def place(self) -> Place:
        """The payload's place, for a worker."""
        self._held()
        return self._slots._place(self)

    def view(self) -> memoryview:
        """Returns the whole frame: header page, then padded spans. Only for the host pool."""
        return self._slots._frame(self._held(), self.group)

    def spans(self) -> list[memoryview]:
        """Returns the payload, one view for each shard, without padding. Only for the host pool."""
        return self._slots._payload(self._held(), self.group)

    def commit(self) -> None:
        """Makes the filled slot a chunk. The lease is an ordinary pin afterwards."""
        self._held()
        self._slots._commit(self)

    def release(self) -> None:
        if not self._released:
            self._released = True
            aborted = self._slots._unpin(self.slot)
            if aborted and self.on_abort is not None:
                self.on_abort(self)

    def _held(self) -> int:
        if self._released:
            raise AssertionError(f"lease on slot {self.slot} used after its release")
        return self.slot

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Slots:
    """A fixed number of slots, each for one chunk. Each kind of place is a subclass.

    A double free, or any other use of a slot in a state that does not allow it, raises ``AssertionError``.
    """

    tier: ClassVar[str]  # name of the tier
    gauges: ClassVar[str]  # prefix of the gauges' names

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._state = [SlotState.FREE] * slots
        self._pins = [0] * slots
        self._group = [0] * slots
        self._free = list(reversed(range(slots)))  # a stack: the slot used last is the warmest
        self._leased = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def free(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """Number of slots that at least one lease pins."""
        return self._leased

    def found(self) -> Sequence[tuple[ChunkKey, int]]:
        """Returns the chunks of an earlier engine with their slots, in the order of storing. Called once."""
        return ()

    def reserve(self, group: int = 0) -> Lease | None:
        """Reserves a free slot for a chunk of ``group``. None: no slot is free; evict and call again."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot] = SlotState.RESERVED
        self._group[slot] = group
        return self._pin(slot)

    def lease(self, slot: int) -> Lease:
        """Pins a chunk once more."""
        self._expect(slot, SlotState.COMMITTED)
        return self._pin(slot)

    def evictable(self, slot: int) -> bool:
        """Whether ``free_slot`` would free the slot at once."""
        return self._state[slot] is SlotState.COMMITTED and not self._pins[slot]

    def free_slot(self, slot: int) -> None:
        """Drops a chunk. It can't be leased any more; its slot is free once no lease pins it."""
        self._expect(slot, SlotState.COMMITTED)
        self._state[slot] = SlotState.DOOMED
        if not self._pins[slot]:
            self._give_back(slot)

    def mark_failed(self, slot: int) -> None:
        """Notes that a worker could not fill or read the slot."""

    def check_integrity(self) -> None:
        """Asserts that every slot is in exactly one state, and that free and leased counts are right."""
        assert len(self._free) == len(set(self._free)), "a slot is free twice"
        free = {slot for slot, state in enumerate(self._state) if state is SlotState.FREE}
        assert free == set(self._free), (
            f"free list and states differ in {sorted(free ^ set(self._free))}"
        )
        assert all(pins >= 0 for pins in self._pins), "more releases than leases"
        assert self._leased == sum(pins > 0 for pins in self._pins), "count of leased slots is off"
        for slot, (state, pins) in enumerate(zip(self._state, self._pins, strict=True)):
            assert state is not SlotState.FREE or not pins, f"slot {slot} is free and leased"
            assert pins or state in (SlotState.FREE, SlotState.COMMITTED), (
                f"slot {slot} is {state.value}, unleased"
            )

    def poll(self) -> None:
        """Does periodic work. The owner's thread calls it once a step."""

    def busy(self) -> bool:
        """Whether an idle vLLM must keep stepping for the work of ``poll``."""
        return False

    def close(self, timeout_s: float = 0.0) -> None:
        """Releases everything, waiting at most ``timeout_s``. Idempotent."""

    def _place(self, lease: Lease) -> Place:
        raise NotImplementedError

    def _frame(self, slot: int, group: int) -> memoryview:
        raise AssertionError("the bytes of this kind of place are not in this process")

    def _payload(self, slot: int, group: int) -> list[memoryview]:
        raise AssertionError("the bytes of this kind of place are not in this process")

    def _pin(self, slot: int) -> Lease:
        if not self._pins[slot]:
            self._leased += 1
        self._pins[slot] += 1
        return Lease(self, slot, self._group[slot])

    def _unpin(self, slot: int) -> bool:
        """Removes one pin. True: it was the last one of a reservation that was not committed."""
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

    def _commit(self, lease: Lease) -> None:
        self._expect(lease.slot, SlotState.RESERVED)
        self._state[lease.slot] = SlotState.COMMITTED

    def _give_back(self, slot: int) -> None:
        if self._state[slot] is SlotState.FREE:
            raise AssertionError(f"slot {slot} freed twice")
        self._state[slot] = SlotState.FREE
        self._free.append(slot)

    def _expect(self, slot: int, state: SlotState) -> None:
        if self._state[slot] is not state:
            raise AssertionError(f"slot {slot} is {self._state[slot].value}, not {state.value}")
