"""What transfers need of a lower tier. ``kvstow.tiers.Tier`` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstow.key import ChunkKey
from kvstow.pool.index import Got
from kvstow.pool.pool import Lease


class Call(Protocol):
    """Work handed to a tier."""

    @property
    def ended_s(self) -> float | None:
        """When its store call ended, which its owner may notice much later. None: it has not."""
        ...

    def cancel(self) -> bool:
        """True if it had not begun: it never touches its buffers, and its ``then`` never runs."""
        ...


class Lower(Protocol):
    """A lower tier as its owner's thread sees it. No method waits; a ``then`` runs in the tier's ``poll``."""

    @property
    def name(self) -> str: ...

    @property
    def usable(self) -> bool:
        """Whether it may be looked up and read. False while it fails or hangs."""
        ...

    @property
    def writable(self) -> bool:
        """Whether it may be written, too. False while its writes fail."""
        ...

    def probe(self, keys: Sequence[ChunkKey], then: Callable[[list[bool]], None]) -> Call | None:
        """Ask which keys it holds, in one round trip. None: not asked."""
        ...

    def room(self, group: int) -> int:
        """How many more chunks of a group may be read now."""
        ...

    def batch(self, group: int) -> int:
        """How many chunks of a group make one read."""
        ...

    def read(
        self, items: Sequence[tuple[ChunkKey, Lease]], then: Callable[[list[Got]], None]
    ) -> Call | None:
        """Fill leased slots; ``then`` hears which hold their payload, checked, and whether exactly. None: not
        started."""
        ...

    def write(self, key: ChunkKey, lease: Lease, then: Callable[[bool], None]) -> Call | None:
        """Write a sealed slot, never a lossy one; ``then`` hears whether the tier has the key. None: refused, and
        counted."""
        ...


class Estimate(Protocol):
    """What is known of the seconds that a read takes."""

    fixed_s: float
    each_s: float

    def seconds(self, amount: float) -> float: ...

    def observe(self, amount: float, seconds: float) -> None: ...


class Average(Protocol):
    """What is known of the seconds that a question takes."""

    known: bool
    seconds: float

    def observe(self, seconds: float) -> None: ...


class Costs(Protocol):
    """What fetches need of what the engine has learned. ``kvstow.fetch.estimates.Costs`` is it; None: not known yet."""

    @property
    def reads(self) -> Sequence[Estimate]: ...

    @property
    def probes(self) -> Sequence[Average]: ...

    @property
    def prefill_s(self) -> float | None: ...

    @property
    def learned(self) -> bool: ...

    def compute_s(self, chunks: int) -> float | None: ...

    def load_s(self, tier: int, size: int) -> float | None: ...

    def worth(self, tier: int, size: int, gained: int) -> bool: ...

    def plan(
        self, ready_s: Sequence[float | None], *, had: int = 0, going_on: bool = False
    ) -> int: ...

    def pays_from(self, tier: int, size: int, queued: int) -> int | None: ...

    def patience_s(self, first_s: float | None, compute_s: float | None) -> float: ...
