"""What transfers need of a lower tier. ``kvstow.tier.Tier`` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstow.index import Got
from kvstow.key import ChunkKey
from kvstow.pool import Lease


class Call(Protocol):
    """Work handed to a tier."""

    def cancel(self) -> bool:
        """True if it had not begun: it never touches its buffers, and its ``then`` never runs."""
        ...


class Lower(Protocol):
    """A lower tier as its owner's thread sees it. No method waits; a ``then`` runs in the tier's ``poll``."""

    @property
    def name(self) -> str: ...

    @property
    def usable(self) -> bool:
        """False: it fails or hangs; ask it nothing."""
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

    def read(self, items: Sequence[tuple[ChunkKey, Lease]], then: Callable[[list[Got]], None]) -> Call | None:
        """Fill leased slots; ``then`` hears which hold their payload, checked, and whether exactly. None: not
        started."""
        ...

    def write(self, key: ChunkKey, lease: Lease, then: Callable[[bool], None]) -> Call | None:
        """Write a sealed slot, never a lossy one; ``then`` hears whether the tier has the key. None: refused, and
        counted."""
        ...
