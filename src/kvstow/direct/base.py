"""The engines' contract: between a staging area and an extent."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Extent(NamedTuple):
    """One shard's part of one slot. ``offset``: of its header page, in bytes; ``length``: of its payload; ``tag``:
    which filling it is (``kvstow.direct.page``)."""

    offset: int
    length: int
    tag: bytes


class Staging(Protocol):
    """Where a device finds the staging areas."""

    def select_area(self, area: int) -> int:
        """From the next copy on the device's pool is what has this area; its payload begins at the returned byte."""
        ...


class Media(Protocol):
    """Moves whole payloads between staging areas, numbered from 0, and extents.

    ``write`` and ``read`` block, on threads of an executor, several at a time with different areas; while one runs the
    area is its own. Raise ``OSError``, ``FrameError`` or ``CopyError``; whatever the area holds then is not to be used.
    """

    @property
    def name(self) -> str:
        """What log lines call it."""
        ...

    @property
    def areas(self) -> int: ...

    def write(self, area: int, extent: Extent) -> None:
        """Write the area's payload, behind a header page that says ``extent.tag``."""
        ...

    def read(self, area: int, extent: Extent) -> None:
        """Fill the area with the payload, if it is that of ``extent.tag`` and whole, as far as this engine can tell."""
        ...

    def probe(self, area: int, extent: Extent) -> None:
        """``read``, but NVMe itself is asked, even for an extent that was never written."""
        ...

    def scrub(self, area: int) -> None:
        """Check a payload that no read checks, by way of the area; there may be none. What is wrong is lost."""
        ...

    def close(self) -> None:
        """Nothing is in flight. Idempotent."""
        ...
