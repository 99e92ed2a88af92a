"""Encoding and decoding of whole frames.

A coded frame has the raw frame's header, except for the codec, its parameters (a byte for the
codec's version, then its own) and the spans: one a shard, each encoded by itself. The header names
the codec, so a tier reads frames of other codecs and parameters. A coded frame is never longer than
the raw one: if coding does not shorten it, it is written raw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstow import frame
from kvstow.codec.base import Codec
from kvstow.codec.container import Kind
from kvstow.codec.shape import KVShape
from kvstow.errors import FrameError, UnsupportedError
from kvstow.frame import RAW, FrameHeader, PayloadChecksum
from kvstow.layout import ALIGN, HEADER_BYTES, ChunkLayout, align_up
from kvstow.pool.hostmem import private_memory

_ZEROS: Final = bytes(ALIGN)


class FrameCoder:
    """Encodes frames with one codec and decodes those of every known one. Threads may share it.

    ``shapes[g][s]`` is the shape of the payload of shard ``s`` of group ``g``. ``known`` returns
    the codec of a kind, or None. The constructor raises ``UnsupportedError``, with the reason, if
    the codec does not suit the KV. Each thread that codes keeps one buffer, of the longest frame
    that ``codec`` may write.
    """

    def __init__(
        self,
        codec: Codec,
        layout: ChunkLayout,
        shapes: Sequence[Sequence[KVShape]],
        known: Callable[[Kind], Codec | None],
    ) -> None:
        for group, of_shards in zip(layout.groups, shapes, strict=True):
            for length, shape in zip(group.payload_lengths, of_shards, strict=True):
                if shape.nbytes != length:
                    raise ValueError(f"{shape} for a payload of {length} bytes")
                codec.check(shape)
        self.lossy: Final = codec.lossy
        self.codes: Final = codec.kind.codec_id != RAW
        self._codec = codec
        self._layout = layout
        self._shapes = shapes
        self._known = known
        longest = (
            HEADER_BYTES + sum(align_up(codec.max_encoded_bytes(s)) for s in of_shards)
            for of_shards in shapes
        )
        self._buffer_bytes = max(layout.max_frame_bytes, *longest)
        self._mine = threading.local()

    def _buffer(self) -> memoryview:
        """This thread's buffer, aligned for direct I/O."""
        buffer: memoryview | None = getattr(self._mine, "buffer", None)
        if buffer is None:
            buffer = self._mine.buffer = private_memory(self._buffer_bytes, "codec", at_once=True)
        return buffer

    def encode(self, sealed: memoryview, integrity_key: bytes | None) -> memoryview:
        """Returns the coded frame of a sealed one, or ``sealed`` itself if coding does not shorten
        it.

        The result is valid until this thread's next call. Not called if ``codes`` is False.
        """
        header = frame.parse_header(sealed[:HEADER_BYTES])
        out = self._buffer()
        payload = PayloadChecksum(integrity_key)
        lengths = []
        at = HEADER_BYTES
        for span, shape in zip(header.spans, self._shapes[header.key.group], strict=True):
            room = out[at : at + self._codec.max_encoded_bytes(shape)]
            length = self._codec.encode(
                sealed[span.offset : span.offset + span.length], shape, room
            )
            payload.update(room[:length])
            end = at + align_up(length)
            out[at + length : end] = _ZEROS[: end - at - length]
            lengths.append(length)
            at = end
        if at >= len(sealed):
            return sealed
        kind = self._codec.kind
        coded = header._replace(
            spans=frame.frame_spans(tuple(lengths)),
            lossy=self._codec.lossy,
            codec_id=kind.codec_id,
            codec_parameters=bytes([kind.version]) + kind.parameters,
        )
        frame.write_header(out, coded, payload, integrity_key)
        return out[:at]

    def knows(self, header: FrameHeader) -> bool:
        """Whether ``decode`` reads frames of this header's codec and parameters."""
        return self._codec_of(header) is not None

    def _codec_of(self, header: FrameHeader) -> Codec | None:
        if not header.codec_parameters:
            return None
        version = header.codec_parameters[0]
        return self._known(Kind(header.codec_id, version, header.codec_parameters[1:]))

    def decode(self, slot: memoryview, header: FrameHeader) -> None:
        """Replace the checked, coded frame at the start of ``slot`` by its payload, and zero the
        header page.

        Raises ``FrameError`` if the codec did not write it; ``slot`` is then undefined.
        """
        codec = self._codec_of(header)
        group = self._layout.groups[header.key.group]
        if codec is None:
            raise FrameError(
                f"codec {header.codec_id} with parameters {header.codec_parameters.hex()} "
                "is not known"
            )
        if codec.lossy and not header.lossy:
            raise FrameError(f"codec {codec.name} is lossy, and the frame says that it is exact")
        try:
            for shape in self._shapes[header.key.group]:
                codec.check(shape)
        except UnsupportedError as error:
            raise FrameError(f"a frame that codec {codec.name} can't have made: {error}") from error
        coded = self._buffer()[: header.frame_length]
        coded[:] = slot[: header.frame_length]
        for span, shape, place in zip(
            header.spans, self._shapes[header.key.group], group.spans(), strict=True
        ):
            encoded = coded[span.offset : span.offset + span.length]
            codec.decode(encoded, shape, slot[place.offset : place.offset + place.length])
        slot[:HEADER_BYTES] = _ZEROS
