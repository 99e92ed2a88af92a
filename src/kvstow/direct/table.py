"""The table of direct storage: which chunk each slot holds, kept across restarts.

It has one record for each slot and lies in the first file, behind the superblock.

A record is: generation (u64), key length (u16), key (98 bytes), zeros, XXH3-64 of the 120 bytes
before. An empty slot's record is all zero.

Records are written through the page cache on a thread of their own. A killed process loses the
records of its last step, each of them whole. After a power cut a record may be stale or torn. A
stale one is caught by its extent's header page, which must have the same key and generation, and a
torn one by its own checksum. So no flush is needed, and the order against the extents' writes does
not matter.
"""

from __future__ import annotations

import logging
import os
import struct
from typing import Final

from xxhash import xxh3_64_digest

from kvstow.direct.geometry import RECORD_BYTES, SUPERBLOCK_BYTES
from kvstow.direct.page import MAX_KEY_BYTES
from kvstow.key import NAMESPACE_BYTES, ChunkKey
from kvstow.runtime import Clock, Executor

logger = logging.getLogger("kvstow")

# An idle engine is kept stepping at most this long for a write that hangs.
WORK_DEADLINE_S: Final = 30.0
MAX_GENERATION: Final = 1 << 63  # of the 64 bits of a record and of a header page
_BODY: Final = struct.Struct("<QH98s12x")
_EMPTY: Final = bytes(RECORD_BYTES)
_LEAST_KEY_BYTES: Final = NAMESPACE_BYTES + 3


def record(key: ChunkKey, generation: int) -> bytes:
    """Packs one record."""
    body = _BODY.pack(generation, len(key), key)
    return body + xxh3_64_digest(body)


def entries(data: bytes, slots: int) -> list[tuple[int, int, ChunkKey]]:
    """Returns ``(generation, slot, key)`` of every intact record, in order of generation.

    Of several records of a key the latest counts. A record whose generation no filling can have
    reached is ignored, since later generations count on from the highest.
    """
    latest: dict[ChunkKey, tuple[int, int]] = {}
    for slot in range(min(slots, len(data) // RECORD_BYTES)):
        one = data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        if one == _EMPTY or xxh3_64_digest(one[: _BODY.size]) != one[_BODY.size :]:
            continue
        generation, length, key = _BODY.unpack_from(one)
        if _LEAST_KEY_BYTES <= length <= MAX_KEY_BYTES and generation < MAX_GENERATION:
            chunk = ChunkKey(key[:length])
            latest[chunk] = max((generation, slot), latest.get(chunk, (-1, -1)))
    return sorted((generation, slot, key) for key, (generation, slot) in latest.items())


class Table:
    """Keeps the table up to date. Owner's thread only.

    Writes to ``fd``, which the caller owns, run on ``executor``, which this object closes.
    """

    def __init__(self, fd: int, slots: int, executor: Executor, clock: Clock) -> None:
        self._fd = fd
        self._slots = slots
        self._executor = executor
        self._clock = clock
        self._dirty: dict[int, bytes] = {}
        self._since_s = clock.monotonic()
        self._failed = False

    def read(self) -> list[tuple[int, int, ChunkKey]]:
        """Returns the entries that an earlier engine left; none where the table can't be read.

        Blocks.
        """
        try:
            return entries(
                os.pread(self._fd, self._slots * RECORD_BYTES, SUPERBLOCK_BYTES), self._slots
            )
        except OSError as error:
            logger.error("Direct storage: its table can't be read, so nothing is found: %s", error)
            return []

    def put(self, slot: int, key: ChunkKey, generation: int) -> None:
        """Records what the slot holds, with the next write."""
        self._dirty[slot] = record(key, generation)

    def clear(self, slot: int) -> None:
        """Records that the slot is empty, with the next write."""
        self._dirty[slot] = _EMPTY

    def poll(self) -> None:
        self._executor.poll()
        if self._dirty and not self._executor.outstanding:
            batch, self._dirty = self._dirty, {}
            self._since_s = self._clock.monotonic()
            self._executor.submit(lambda: self._write(batch), self._written)

    def busy(self) -> bool:
        """Whether writes are pending and have made progress within ``WORK_DEADLINE_S``."""
        if self._executor.outstanding:
            return self._clock.monotonic() - self._since_s < WORK_DEADLINE_S
        return bool(self._dirty)

    def close(self, timeout_s: float) -> bool:
        """Writes pending records, for at most ``timeout_s``.

        False: a write hangs and may still touch ``fd``.
        """
        deadline_s = self._clock.monotonic() + timeout_s
        while self._dirty or self._executor.outstanding:
            self.poll()
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0 or (self._executor.outstanding and not self._executor.wait(left_s)):
                break
        self._executor.close(max(0.0, deadline_s - self._clock.monotonic()))
        self._executor.poll()
        return not self._executor.outstanding

    def _write(self, batch: dict[int, bytes]) -> None:
        for slot in sorted(batch):
            done = os.pwrite(self._fd, batch[slot], SUPERBLOCK_BYTES + slot * RECORD_BYTES)
            if done != RECORD_BYTES:
                raise OSError(f"{done} of {RECORD_BYTES} bytes written")

    def _written(self, _: None, error: BaseException | None) -> None:
        if error is not None and not self._failed:
            logger.error(
                "Direct storage: its table can't be written, so the next start will find less: %s",
                error,
            )
        self._failed = error is not None
