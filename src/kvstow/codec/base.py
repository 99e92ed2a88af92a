"""The Codec contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvstow.codec.container import Kind
from kvstow.codec.entropy import SEGMENT_BYTES
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError


class Codec(Protocol):
    """Encodes one shard's payload into fewer bytes, and decodes it. Immutable, so threads may share
    it.

    The tier owns the buffers. ``encode`` and ``decode`` allocate scratch memory of a few segments
    at most (``SEGMENT_BYTES`` of numbers each, or a layer if that is more).
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind:
        """The codec's id, version and parameters, as a frame's header has them."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether decoded numbers are near, not equal.

        Such chunks are flagged, and stay in their tier.
        """
        ...

    def check(self, shape: KVShape) -> None:
        """Raise ``UnsupportedError``, with the reason, unless the codec suits KV of this shape."""
        ...

    def max_encoded_bytes(self, shape: KVShape) -> int:
        """The most bytes that ``encode`` writes."""
        ...

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        """Write the encoded span to the start of ``out``. Returns its length. The payload does not
        change.

        Preconditions: ``check(shape)`` passed, ``len(payload) == shape.nbytes``, and ``out`` has
        ``max_encoded_bytes``. All bit patterns are allowed; NaN and infinities come back as they
        were.
        """
        ...

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        """Fill ``out``, ``shape.nbytes`` long, from a whole encoded span.

        Raises ``FrameError`` if lengths or structure show that ``encode`` with these parameters and
        this shape did not write it; ``out`` is then undefined. Bytes that differ only in value
        decode to other numbers: the frame's checksum finds those.
        """
        ...


def segments(shape: KVShape) -> Iterator[range]:
    """Yields the runs of layers that are entropy-coded together."""
    step = _segment_layers(shape)
    for first in range(0, shape.layers, step):
        yield range(first, min(first + step, shape.layers))


def count_segments(shape: KVShape) -> int:
    """The number of segments."""
    return -(-shape.layers // _segment_layers(shape))


def _segment_layers(shape: KVShape) -> int:
    """Layers of each segment but the last.

    Even where possible, because ``lossless`` halves them.
    """
    layers = SEGMENT_BYTES // shape.layer_numbers
    return max(1, layers - layers % 2)


def segment_numbers(shape: KVShape) -> int:
    """The numbers of the longest segment."""
    return len(next(segments(shape))) * shape.layer_numbers


def require_lengths(payload: memoryview, shape: KVShape, out: memoryview, needed: int) -> None:
    """Raise ``ValueError`` unless the caller of ``encode`` keeps to its contract."""
    if len(payload) != shape.nbytes or len(out) < needed:
        raise ValueError(
            f"payload of {len(payload)} bytes, {shape.nbytes} expected; "
            f"room for {len(out)} of {needed}"
        )


def require_room(shape: KVShape, out: memoryview) -> None:
    """Raise ``FrameError`` unless ``out`` has the length of a payload."""
    if len(out) != shape.nbytes:
        raise FrameError(f"{shape.nbytes} bytes to decode into {len(out)}")
