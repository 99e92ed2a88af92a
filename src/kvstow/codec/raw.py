"""The codec that does nothing."""

from __future__ import annotations

from typing import Final

from kvstow.codec.base import require_lengths, require_room
from kvstow.codec.container import Kind
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError


class Raw:
    """A span is its payload, without a header of its own. Frames of codec 0 hold such spans."""

    name: Final = "raw"
    kind: Final = Kind(0, 0)
    lossy: Final = False

    def check(self, shape: KVShape) -> None:
        """Accept everything."""

    def max_encoded_bytes(self, shape: KVShape) -> int:
        return shape.nbytes

    def encode(self, payload: memoryview, shape: KVShape, out: memoryview) -> int:
        require_lengths(payload, shape, out, shape.nbytes)
        out[: shape.nbytes] = payload
        return shape.nbytes

    def decode(self, encoded: memoryview, shape: KVShape, out: memoryview) -> None:
        require_room(shape, out)
        if len(encoded) != shape.nbytes:
            raise FrameError(f"{len(encoded)} bytes, {shape.nbytes} expected")
        out[:] = encoded
