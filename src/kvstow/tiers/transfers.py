"""The work of a tier's threads: read, check and decode frames; encode and write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvstow import frame
from kvstow.backends.base import REJECTED, Done, MaintainedStore, Missing, Outcome
from kvstow.errors import FrameError, StoreError
from kvstow.key import ChunkKey
from kvstow.layout import ChunkLayout
from kvstow.pool.index import ReadOutcome
from kvstow.runtime import Clock

if TYPE_CHECKING:
    from kvstow.codec.frames import FrameCoder


class Unusable(Enum):
    """Why a value that the store has is a miss."""

    CORRUPT = "corrupt"
    CODEC = "codec"  # whole, of a codec that is not known here
    LOSSY = "lossy"  # whole, of a lossy codec, in a tier that is to keep exact copies


class ReadResult(NamedTuple):
    """How the read of one chunk ended.

    ``unusable`` is None unless a value was there and is a miss all the same. ``length`` is the
    number of bytes that came from the store, ``decode_s`` the seconds that decoding took.
    """

    outcome: ReadOutcome
    unusable: Unusable | None = None
    length: int = 0
    decode_s: float = 0.0


class WriteResult(NamedTuple):
    """How the write of one chunk ended.

    ``held``: the store has the key now. ``encode_s`` is the seconds that encoding took, 0 where the
    frame was written as it was.
    """

    outcome: Outcome
    held: bool
    encode_s: float = 0.0


class FrameTransfers:
    """Moves frames between slots and a store. Thread-safe.

    ``coder`` None: frames are raw.
    """

    def __init__(
        self,
        store: MaintainedStore,
        layout: ChunkLayout,
        clock: Clock,
        *,
        coder: FrameCoder | None,
        integrity_key: bytes | None,
    ) -> None:
        self._store = store
        self._layout = layout
        self._clock = clock
        self.coder = coder
        self.integrity_key = integrity_key

    def read(self, views: Sequence[tuple[ChunkKey, memoryview]]) -> list[ReadResult]:
        """Fill each slot with the payload of its key, checked.

        A corrupt value is set aside, one that is whole and of no use here is deleted: either can be
        written anew. Raises what the store raises.
        """
        outcomes = self._store.read(views)
        results = [
            self._check(key, view, outcome)
            for (key, view), outcome in zip(views, outcomes, strict=True)
        ]
        keys = [key for key, _ in views]
        corrupt = [
            key
            for key, result in zip(keys, results, strict=True)
            if result.unusable is Unusable.CORRUPT
        ]
        useless = [
            key
            for key, result in zip(keys, results, strict=True)
            if result.unusable in (Unusable.CODEC, Unusable.LOSSY)
        ]
        # Each is a miss either way: removing is for those who ask later.
        if corrupt:
            with suppress(StoreError):
                self._store.set_aside(corrupt)
        if useless:
            with suppress(StoreError):
                self._store.delete(useless)
        return results

    def _check(self, key: ChunkKey, view: memoryview, outcome: Outcome) -> ReadResult:
        """Check and decode what was read into ``view``."""
        if isinstance(outcome, Missing):
            return ReadResult(ReadOutcome.MISS)
        if not isinstance(outcome, Done):  # longer than a frame of this key can be
            return ReadResult(ReadOutcome.MISS, Unusable.CORRUPT)
        length = outcome.length
        coder = self.coder
        decode_s = 0.0
        try:
            header = frame.check(
                view,
                length,
                key,
                self._layout.groups[key.group],
                integrity_key=self.integrity_key,
                coded=True,
            )
            if header.lossy and (coder is None or not coder.lossy):
                return ReadResult(ReadOutcome.MISS, Unusable.LOSSY, length)
            if header.codec_id != frame.RAW:
                if coder is None or not coder.knows(header):
                    return ReadResult(ReadOutcome.MISS, Unusable.CODEC, length)
                began_s = self._clock.monotonic()
                coder.decode(view, header)
                decode_s = self._clock.monotonic() - began_s
        except FrameError:
            return ReadResult(ReadOutcome.MISS, Unusable.CORRUPT, length)
        return ReadResult(
            ReadOutcome.LOSSY if header.lossy else ReadOutcome.EXACT, None, length, decode_s
        )

    def write(self, key: ChunkKey, view: memoryview) -> WriteResult:
        """Write a sealed frame, encoded if the tier has a codec. Raises what the store raises.

        A rejected key is there already, or has no room, or is not admitted yet. It must be offered
        again in the last two cases, so the store is asked. A tier with a lossy codec is offered
        again what it has, so it is asked before anything is encoded.
        """
        encode_s = 0.0
        if self.coder is not None and self.coder.codes:
            if self.coder.lossy and self._store.contains([key])[0]:
                return WriteResult(REJECTED, held=True)
            began_s = self._clock.monotonic()
            view = self.coder.encode(view, self.integrity_key)
            encode_s = self._clock.monotonic() - began_s
        [outcome] = self._store.write([(key, [view])])
        held = isinstance(outcome, Done) or self._store.contains([key])[0]
        return WriteResult(outcome, held, encode_s)
