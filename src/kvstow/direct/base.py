"""The contract of direct storage's media: payloads between staging areas and extents."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Extent(NamedTuple):
    """One shard's part of one slot.

    ``offset`` is the byte offset of its header page, ``length`` the bytes of its payload. ``tag``
    names the chunk and its filling (``kvstow.direct.page.tag_of``).
    """

    offset: int
    length: int
    tag: bytes


class Staging(Protocol):
    """Staging areas that a device can copy to and from."""

    def select_area(self, area: int) -> int:
        """Makes ``area`` part of the device's pool from the next copy on.

        Returns its payload's offset there.
        """
        ...


class Media(Protocol):
    """Moves whole payloads between staging areas, numbered from 0, and extents.

    ``write`` and ``read`` block. They run on an executor's threads, several at a time, each with an
    area that no other call touches. They raise ``OSError``, ``FrameError`` or ``CopyError``; the
    content of the area is undefined then.
    """

    @property
    def name(self) -> str:
        """The media's name in log lines."""
        ...

    @property
    def areas(self) -> int:
        """Number of staging areas."""
        ...

    def write(self, area: int, extent: Extent) -> None:
        """Writes the area's payload behind a header page with ``extent.tag``."""
        ...

    def read(self, area: int, extent: Extent) -> None:
        """Fills the area with the payload.

        Raises ``FrameError`` unless the extent holds ``extent.tag``, as whole as this media can
        check.
        """
        ...

    def probe(self, area: int, extent: Extent) -> None:
        """Reads like ``read``, and asks NVMe even for an extent that was never written."""
        ...

    def scrub(self, area: int) -> None:
        """Checks one payload that ``read`` does not check, through the area, and drops it if it is
        damaged.

        Does nothing where there is none.
        """
        ...

    def close(self) -> None:
        """Releases resources. Precondition: nothing is in flight. Idempotent."""
        ...
