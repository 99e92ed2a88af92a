"""The Store contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from kvstow.key import ChunkKey

Buffer = memoryview  # writable or read-only, contiguous, format "B"


@dataclass(frozen=True, slots=True)
class Done:
    """The whole operation happened; ``length`` bytes were read or written."""

    length: int


class Missing:
    """No value under this key. Expected, not a fault."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


class Rejected:
    """The store chose not to: already there, admission, no room. Expected, not a fault."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REJECTED"


MISSING: Final = Missing()
REJECTED: Final = Rejected()

Outcome = Done | Missing | Rejected


class Store(Protocol):
    """A flat map from ``ChunkKey`` to frame bytes. Blocking, batched, thread-safe.

    It parses, checks, retries and logs nothing; wrappers (retry, limit, breaker) are stores themselves.
    Outcomes come in the order of the arguments. A fault is raised: ``StoreUnavailable`` (transient) or
    ``StoreRefused`` (permanent). Then the caller treats every item of the batch as not done.
    """

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Tells for each key whether the store holds a whole value. A later read may still miss."""
        ...

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        """Fills each writable buffer from its start with the value's bytes.

        ``Done(n)``: ``n`` bytes came, the value's own length even where the buffer is longer. A value longer
        than its buffer is ``REJECTED``. After ``MISSING``, ``REJECTED`` or an exception a buffer's content is
        undefined. The store keeps no reference to a buffer after return.
        """
        ...

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        """Stores each value, the concatenation of its parts, all or nothing.

        The first published value of a key wins: where one is already there, ``REJECTED``. No reader ever sees
        part of a value. Parts are read only during the call.
        """
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Removes the values. Keys that are not there are ignored."""
        ...

    def close(self) -> None:
        """Releases resources. Idempotent; no other method is called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Events that a store noticed by itself.

    Attributes:
        corrupt: Corrupt values that the store has set aside since the last report.
        maintenance_failures: Runs of background work that ended by an unforeseen error since the last report.
        paths_down: Directories or servers of the store that are out of use now. None: the store has no such parts.
        hung_calls: Calls that hang now in parts which the store works without.
    """

    corrupt: int = 0
    maintenance_failures: int = 0
    paths_down: int | None = None
    hung_calls: int = 0


@runtime_checkable
class MaintainedStore(Store, Protocol):
    """A store that looks after its values by itself. Optional: a tier does without it."""

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """Remove corrupt values so that each key can be written again. It may keep them for inspection."""
        ...

    def report(self) -> StoreReport:
        """Return what the store noticed since the last call.

        Never blocks: the owner's thread calls it on every step.
        """
        ...
