"""The Policy contract: which key goes next. Pure: keys and sizes only, no I/O, no clock, no randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvstow.key import ChunkKey

Evictable = Callable[[ChunkKey], bool]

#: Leased keys that one search passes before it gives up. What is leased was touched just before, so a search that
#: meets this many has found a pool that is pinned nearly whole; at 0.25 µs a key (lru) it then cost 0.3 ms.
MAX_LEASED_SKIPS: Final = 1024


class Policy(Protocol):
    """Orders the keys that a tier holds by how much they are worth keeping.

    One owner thread. The owner calls ``insert`` when a key becomes resident, ``remove`` when it goes for any reason
    of its own, and ``victim`` when it needs room; the policy never drops a key otherwise, so its keys are at any time
    exactly those that the owner inserted and that neither call has returned or removed.
    """

    def insert(self, key: ChunkKey, size: int = 1) -> None:
        """Hold ``key``, which takes ``size`` units (slots or bytes, the same for all). Precondition: not held."""
        ...

    def touch(self, key: ChunkKey) -> None:
        """``key`` was used. Ignored where it is not held."""
        ...

    def touch_many(self, keys: Iterable[ChunkKey]) -> None:
        """``touch`` each in order. Of a prompt pass the tail first: its head then is the last to go.

        Costs at most 0.15 ms for 1,000 held keys.
        """
        ...

    def remove(self, key: ChunkKey) -> None:
        """Forget ``key`` altogether, as if it had never been held. Ignored where it is not held."""
        ...

    def victim(self, evictable: Evictable) -> ChunkKey | None:
        """Choose the key to evict, forget it, and return it; the owner must now evict it.

        ``evictable(key)`` is false for a key that is leased: it stays, and counts as just used, so that the next
        search does not meet it first again. That makes a search O(1) amortised. ``None``: nothing to evict, or
        ``MAX_LEASED_SKIPS`` leased keys passed in this call; a later call goes on where this one ended.
        """
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...
