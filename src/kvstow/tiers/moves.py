"""What a tier does on its worker threads: read, check and decode; encode and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from kvstow import frame
from kvstow.backends.base import REJECTED, Done, Missing, Outcome, Store
from kvstow.errors import FrameError, StoreError
from kvstow.frame import FrameHeader
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.pool.index import Got
from kvstow.runtime import Clock

CORRUPT: Final = "corrupt"
CODEC: Final = "codec"  # whole, of a codec that is not known here
LOSSY: Final = "lossy"  # whole, of a lossy codec, in a tier that was told to keep exact copies


class Coder(Protocol):
    """A tier's codec, over whole frames. Used on any worker thread; ``kvstow.codec.frames`` has the one there is."""

    @property
    def codes(self) -> bool:
        """False: ``encode`` is never called; what others coded is read."""
        ...

    @property
    def lossy(self) -> bool: ...

    def encode(self, sealed: memoryview, integrity_key: bytes | None) -> memoryview:
        """The coded frame of a sealed one, good until this thread's next call; ``sealed`` itself if that is no
        longer."""
        ...

    def knows(self, header: FrameHeader) -> bool:
        """Whether ``decode`` can read a frame of this codec and parameters."""
        ...

    def decode(self, slot: memoryview, header: FrameHeader) -> None:
        """Make the coded frame at the start of ``slot``, checked, its payload, in place; the header page is zeroed.

        Raises ``FrameError`` for what the codec cannot have written; ``slot`` is then undefined.
        """
        ...


class Came(NamedTuple):
    """What one read came to. ``why`` it is a miss, where something was there; ``length``: bytes that were moved."""

    got: Got
    why: str = ""
    length: int = 0
    decode_s: float = 0.0


class Wrote(NamedTuple):
    """What one write came to, and whether the store has the key now. ``encode_s`` 0: it was written as it was."""

    outcome: Outcome
    held: bool
    encode_s: float = 0.0


class Moves:
    """``coder`` and ``integrity_key`` are set before the first call, and not changed."""

    def __init__(
        self,
        store: Store,
        layout: ChunkLayout,
        clock: Clock,
        set_aside: Callable[[Sequence[ChunkKey]], None],
    ) -> None:
        self._store = store
        self._layout = layout
        self._clock = clock
        self._set_aside = set_aside
        self.coder: Coder | None = None
        self.integrity_key: bytes | None = None

    def read(self, views: Sequence[tuple[ChunkKey, memoryview]]) -> list[Came]:
        """Fill each slot with the payload of its key, checked. What is corrupt is set aside, what is whole and of no
        use here is deleted: either can be written anew."""
        came = [
            self._take(key, view, outcome)
            for (key, view), outcome in zip(views, self._store.read(views), strict=True)
        ]
        for remove, reasons in (
            (self._set_aside, (CORRUPT,)),
            (self._store.delete, (CODEC, LOSSY)),
        ):
            keys = [key for (key, _), one in zip(views, came, strict=True) if one.why in reasons]
            if keys:
                with suppress(
                    StoreError
                ):  # it is a miss either way; removing is for those who come later
                    remove(keys)
        return came

    def _take(self, key: ChunkKey, view: memoryview, outcome: Outcome) -> Came:
        if isinstance(outcome, Missing):
            return Came(Got.MISS)
        if not isinstance(outcome, Done):  # longer than a frame of this key can be
            return Came(Got.MISS, CORRUPT)
        length, coder, began_s = outcome.length, self.coder, 0.0
        try:
            group = self._layout.groups[key.group]
            header = frame.check(
                view,
                length,
                key,
                group,
                integrity_key=self.integrity_key,
                coded=True,
                checksum=outcome.checksum,
            )
            if header.lossy and (coder is None or not coder.lossy):
                return Came(Got.MISS, LOSSY, length)
            if header.codec_id != frame.RAW:
                if coder is None or not coder.knows(header):
                    return Came(Got.MISS, CODEC, length)
                began_s = self._clock.monotonic()
                coder.decode(view, header)
        except FrameError:
            return Came(Got.MISS, CORRUPT, length)
        decode_s = self._clock.monotonic() - began_s if began_s else 0.0
        return Came(Got.LOSSY if header.lossy else Got.EXACT, "", length, decode_s)

    def write(self, key: ChunkKey, view: memoryview) -> Wrote:
        """A rejected key is there already, or has no room, or is not admitted yet: then it must be offered again, so
        the store is asked. One with a lossy codec is offered again what it has, and asked before anything is coded.
        """
        encode_s = 0.0
        if self.coder is not None and self.coder.codes:
            if self.coder.lossy and self._store.contains([key])[0]:
                return Wrote(REJECTED, held=True)
            began_s = self._clock.monotonic()
            view = self.coder.encode(view, self.integrity_key)
            encode_s = self._clock.monotonic() - began_s
        [outcome] = self._store.write([(key, [view])])
        return Wrote(outcome, isinstance(outcome, Done) or self._store.contains([key])[0], encode_s)
