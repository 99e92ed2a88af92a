"""The Codec contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvstow.codec.container import Kind
from kvstow.codec.entropy import SEGMENT_BYTES
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError


class Codec(Protocol):
    """Makes one shard's payload smaller, and payload again. Immutable, so any thread may use it.

    The tier owns the buffers: ``encode`` and ``decode`` reserve a bounded scratch of a few segments
    (``SEGMENT_BYTES`` of numbers, or a layer if that is more) besides.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind:
        """What a frame's header carries: id, version, parameters."""
        ...

    @property
    def lossy(self) -> bool:
        """True: what comes back is near, not equal. Such a chunk is flagged, and never written to another tier."""
        ...

    @property
    def error(self) -> str:
        """The error of one number that comes back, as a bound, for people."""
        ...

    def check(self, shape: KVShape) -> None:
        """At start: raise ``UnsupportedError``, saying why, unless the codec serves KV of this shape."""
        ...

    def max_encoded_bytes(self, shape: KVShape) -> int:
        """What ``encode`` writes at most."""
        ...

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        """Write the encoded span to the start of ``out``; returns its length. The payload does not change.

        Preconditions: ``check(shape)`` passed, ``len(payload) == shape.nbytes``, ``out`` has ``max_encoded_bytes``.
        Any bit patterns are allowed: numbers that the method does not suit (NaN, infinities) are kept as they are.
        """
        ...

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        """Fill ``out``, ``shape.nbytes`` long, from a whole encoded span.

        Raises ``FrameError`` for whatever ``encode`` with these parameters and this shape cannot have written, as far
        as lengths and structure show it; ``out`` is then undefined. Bytes that only differ in value decode to other
        numbers: the frame's checksum is what finds those.
        """
        ...


def segments(shape: KVShape) -> Iterator[range]:
    """Runs of layers that are entropy-coded together."""
    step = _segment_layers(shape)
    for first in range(0, shape.layers, step):
        yield range(first, min(first + step, shape.layers))


def count_segments(shape: KVShape) -> int:
    return -(-shape.layers // _segment_layers(shape))


def _segment_layers(shape: KVShape) -> int:
    """Of all segments but the last; even, where it can be, for those who halve them."""
    layers = SEGMENT_BYTES // shape.layer_numbers
    return max(1, layers - layers % 2)


def segment_numbers(shape: KVShape) -> int:
    """Numbers in the longest segment."""
    return len(next(segments(shape))) * shape.layer_numbers


def require_lengths(payload: memoryview, shape: KVShape, out: memoryview, needed: int) -> None:
    """The caller's part of the contract."""
    if len(payload) != shape.nbytes or len(out) < needed:
        raise ValueError(
            f"payload of {len(payload)} bytes, {shape.nbytes} expected; room for {len(out)} of {needed}"
        )


def require_room(shape: KVShape, out: memoryview) -> None:
    if len(out) != shape.nbytes:
        raise FrameError(f"{shape.nbytes} bytes to decode into {len(out)}")
