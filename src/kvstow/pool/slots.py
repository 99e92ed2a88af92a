"""Slots and the leases that pin them: what the engine gives out, whatever kind of place is behind a slot.

Everything here belongs to the owner's thread, the engine's, *release of a lease included*: a worker thread hands its
lease back through the executor's ``then``. Nothing may assume that slots are contiguous or of equal size: a lease
gives spans.

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
    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    DOOMED = "doomed"  # nobody can find it any more; free once no lease pins it


class Lease:
    """A pin on one slot: while it is held the slot's bytes are nobody else's.

    The lease that ``reserve`` gave writes the slot: ``commit`` makes it a chunk, ``release`` before that gives the
    slot back, and tells ``on_abort``. ``release`` is idempotent. A context manager, whose end releases. ``key``: the
    chunk, as the index says.
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
        """Where the payload goes, for a worker."""
        self._held()
        return self._slots._place(self)

    def view(self) -> memoryview:
        """The whole frame in this process: header page, then the padded spans. The host pool's only."""
        return self._slots._frame(self._held(), self.group)

    def spans(self) -> list[memoryview]:
        """The payload in this process, a view a shard, without padding. The host pool's only."""
        return self._slots._payload(self._held(), self.group)

    def commit(self) -> None:
        """The bytes are all there: the slot holds a chunk now, and this lease is an ordinary pin."""
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
    """A fixed number of slots, each for a chunk. A kind of place is a subclass.

    A double free, or any other use of a slot in a state that does not allow it, raises ``AssertionError``.
    """

    tier: ClassVar[str]  # this kind's name among the tiers
    gauges: ClassVar[str]  # what the names of its gauges begin with

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
        """Bytes reserved: whole slots within the budget."""
        return self.slots * self.slot_bytes

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def leased(self) -> int:
        """Slots that at least one lease pins."""
        return self._leased

    def found(self) -> Sequence[tuple[ChunkKey, int]]:
        """Chunks of an earlier engine, with their slots, in the order in which they were stored. Asked once."""
        return ()

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

    def spoil(self, slot: int) -> None:
        """A worker failed to fill or to read the slot."""

    def check_integrity(self) -> None:
        """Assert that every slot is accounted for exactly once."""
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
        """The owner's thread passes by, once a step."""

    def busy(self) -> bool:
        """Whether an idle vLLM must keep stepping for what ``poll`` does."""
        return False

    def close(self, timeout_s: float = 0.0) -> None:
        """Give everything back, waiting at most ``timeout_s``. Idempotent."""

    def _place(self, lease: Lease) -> Place:
        raise NotImplementedError

    def _frame(self, slot: int, group: int) -> memoryview:
        raise AssertionError("the bytes of this kind of place are not in this process")

    def _payload(self, slot: int, group: int) -> list[memoryview]:
        raise AssertionError("the bytes of this kind of place are not in this process")

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
