"""A tier's codec over whole frames: sealed and raw in, coded out, and back.

A coded frame has the raw one's header but for the codec, its parameters (a byte for the codec's version, then its own)
and the spans, one a shard, each encoded by itself. It says what it is, so a tier reads what another codec wrote, or
the same one with other parameters. It is never longer than the raw frame: what coding does not shorten is written raw.
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
    """Any thread; each that codes keeps one buffer, of the longest frame that ``codec`` may come to.

    ``shapes[g][s]`` is what the payload of shard ``s`` of group ``g`` is. ``known`` gives the codec of a kind.
    The constructor raises ``UnsupportedError``, saying why, where the codec does not suit the KV.
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
        """This thread's, aligned for direct I/O."""
        buffer: memoryview | None = getattr(self._mine, "buffer", None)
        if buffer is None:
            buffer = self._mine.buffer = private_memory(self._buffer_bytes, "codec", at_once=True)
        return buffer

    def encode(self, sealed: memoryview, integrity_key: bytes | None) -> memoryview:
        """The coded frame of a sealed one, good until this thread's next call; ``sealed`` itself where coding does not
        shorten it. Not called where ``codes`` is False."""
        header = frame.parse_header(sealed[:HEADER_BYTES])
        out, payload, lengths = self._buffer(), PayloadChecksum(integrity_key), []
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
        """Whether ``decode`` can read a frame of this codec and parameters."""
        return self._of(header) is not None

    def _of(self, header: FrameHeader) -> Codec | None:
        version, parameters = header.codec_parameters[:1], header.codec_parameters[1:]
        return self._known(Kind(header.codec_id, version[0], parameters)) if version else None

    def decode(self, slot: memoryview, header: FrameHeader) -> None:
        """Turn the checked, coded frame at the start of ``slot`` into its payload, in place. The header page is zeroed.

        Raises ``FrameError`` for what the codec cannot have written; ``slot`` is then undefined.
        """
        codec, group = self._of(header), self._layout.groups[header.key.group]
        if codec is None:
            raise FrameError(
                f"codec {header.codec_id} with parameters {header.codec_parameters.hex()} is not known"
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
