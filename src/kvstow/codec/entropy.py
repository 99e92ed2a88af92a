"""Order-0 entropy coding of bytes, as zstd frames of Huffman-coded literals ("zstd-huf").

KV has no matches worth finding, so zstd's search is made to skip ahead: strategy fast, a table of
64 entries, and the largest step (``target_length``). A step makes zstd store literals as they are,
which its literal compression mode, experimental parameter 5, overrides. Exponents of bfloat16 KV,
one core: 0.9 GB/s where a plain search reached 0.3 to 0.5, and not a byte longer. Should zstd drop
the parameter, the plain search is used; the format is zstd's either way.

Frames of 128 KiB and more decode fastest: a decoder costs 9 us to make, and each block of 128 KiB
has its own table. A segment is as long as suits numpy, too, each of whose steps costs a microsecond
before it begins, or several where caches are shared with others: lossless decoding was 5 % faster
with segments of 1.5 Mi numbers than of half as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
from backports import zstd
from backports.zstd import CompressionParameter, DecompressionParameter

from kvstow.codec.shape import Array
from kvstow.errors import FrameError

SEGMENT_BYTES: Final = 1536 << 10  # of numbers a frame, at most, or one layer's if that is more
MAX_WINDOW_LOG: Final = 17

_LITERAL_COMPRESSION_MODE: Final = 1002  # ZSTD_c_literalCompressionMode; 1: always
_PLAIN: Final[Mapping[int, int]] = {
    CompressionParameter.strategy: zstd.Strategy.fast,
    CompressionParameter.min_match: 7,
    CompressionParameter.hash_log: 6,
    CompressionParameter.chain_log: 6,
    CompressionParameter.window_log: MAX_WINDOW_LOG,
    CompressionParameter.target_length: 0,
    CompressionParameter.checksum_flag: 0,
}
_HUFFMAN: Final = {
    **_PLAIN,
    CompressionParameter.target_length: 128 << 10,
    _LITERAL_COMPRESSION_MODE: 1,
}
_DECODER: Final[Mapping[int, int]] = {DecompressionParameter.window_log_max: MAX_WINDOW_LOG + 1}
_SAMPLE: Final = 2048
_WORTH_BITS: Final = 7.4  # of 8 a byte: with more, the bytes are stored as they are


@cache
def _options() -> Mapping[int, int]:
    try:
        zstd.ZstdCompressor(options=_HUFFMAN)
    except (ValueError, zstd.ZstdError):
        return _PLAIN
    return _HUFFMAN


class Packer:
    """A compressor that one thread may use repeatedly."""

    def __init__(self) -> None:
        self._zstd = zstd.ZstdCompressor(options=_options())

    def pack(self, symbols: Array) -> bytes | None:
        """Returns contiguous ``symbols`` (bytes) as one frame, or None if that would not be
        shorter.
        """
        data = symbols.reshape(-1).data
        self._zstd.set_pledged_input_size(len(data))
        frame = self._zstd.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
        return frame if len(frame) < len(data) else None


def unpack(data: memoryview, length: int) -> Array:
    """Returns ``length`` symbols from a frame of ``pack``, or from ``data`` itself if it is as
    long.

    Allocates ``length`` bytes and one window at most, whatever ``data`` says. Raises
    ``FrameError``.
    """
    if len(data) == length:
        return np.frombuffer(data, np.uint8)
    decoder = zstd.ZstdDecompressor(options=_DECODER)
    try:
        symbols = decoder.decompress(data, max_length=length)
    except zstd.ZstdError as error:
        raise FrameError(f"entropy-coded bytes: {error}") from error
    if len(symbols) != length or not decoder.eof or decoder.unused_data:
        raise FrameError(f"entropy-coded bytes: {len(symbols)} of {length} symbols, or more")
    return np.frombuffer(symbols, np.uint8)


def worth_packing(symbols: Array) -> bool:
    """Whether coding the bytes pays, by the entropy of a sample."""
    sample = symbols[:: max(1, len(symbols) // _SAMPLE)]
    counts = np.bincount(sample, minlength=256)
    share = counts[counts > 0] / len(sample)
    return float(-(share * np.log2(share)).sum()) < _WORTH_BITS
