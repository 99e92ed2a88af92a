"""Copies pages between a CPU device's planes and a slot, by address, one native call for a chunk.

A page is copied in one of two ways:

- *plain*: the C library's ``memcpy``. The processor reads the target's cache lines before it
  overwrites them.
- *streaming*: non-temporal stores, which skip that read, behind a prefetch of the source.

Which one is faster depends on the processor, the direction and the page size, so ``choose`` times
both. As shares of one large ``memcpy``, one thread, shuffled pages of 192, 32, 8 and 4 KiB: an
Intel Xeon (Sapphire Rapids class) reaches plain 0.59, 0.58, 0.52, 0.48 and streaming 0.91, 0.78,
0.80, 0.81 from the slot to the pages. The C library streams by itself only in calls of more than
its ``x86_non_temporal_threshold``, 190 MB there.

The native code is compiled at start by numba, which vLLM's CPU build requires (0.3 s). Without
numba each page is one ``memmove``.
"""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow.runtime import Clock

try:
    import numba
    from llvmlite import ir
    from numba.extending import intrinsic
except ImportError:
    numba = None

Int64s: TypeAlias = npt.NDArray[np.int64]

PageCopy: TypeAlias = Callable[[Int64s, Int64s, int, int, int, bool], None]
"""``(planes, block_ids, place, blocks_per_chunk, first_block, load)``.

``planes`` is ``kvstow.device.plan.plane_table``; ``place`` is the address of the chunk's first
payload byte. ``load`` copies from the place to the pages, else from the pages to the place. The
caller has checked that every range is inside memory that stays mapped.
"""

SAMPLE_BYTES: Final = 8 << 20  # 1 to 2 ms to copy
SAMPLE_ROUNDS: Final = 3
LINE_BYTES: Final = 64
PREFETCH_BYTES: Final = 1024  # ahead of the line being copied


class PageCopies(NamedTuple):
    """The copy for each direction: ``load`` fills pages, ``store`` fills a slot."""

    load: PageCopy
    store: PageCopy


def copy_page_by_page(
    planes: Int64s,
    block_ids: Int64s,
    place: int,
    blocks_per_chunk: int,
    first_block: int,
    load: bool,
) -> None:
    """Copies each page with a call of its own. It takes the interpreter lock once a page."""
    ids = block_ids.tolist()
    for base, stride, width, page_bytes, prefix_bytes, within in planes.tolist():
        host = place + prefix_bytes * blocks_per_chunk + page_bytes * first_block + within
        for block_id in ids:
            page = base + stride * block_id
            target, source = (page, host) if load else (host, page)
            ctypes.memmove(target, source, width)
            host += page_bytes


class _Kernels(NamedTuple):
    plain: PageCopy
    streaming: PageCopy


@cache
def kernels() -> _Kernels | None:
    """Compiles the native copies. None: numba is not installed.

    They release the interpreter lock for the whole call.
    """
    if numba is None:
        return None
    copy_line, copy_plain, full_fence = _intrinsics()

    def copy(planes, block_ids, place, blocks_per_chunk, first_block, load, streaming):  # type: ignore[no-untyped-def]
        for plane in range(planes.shape[0]):
            width = planes[plane, 2]
            page_bytes = planes[plane, 3]
            host = place + planes[plane, 4] * blocks_per_chunk
            host += page_bytes * first_block + planes[plane, 5]
            for i in range(block_ids.shape[0]):
                page = planes[plane, 0] + planes[plane, 1] * block_ids[i]
                target = page if load else host
                source = host if load else page
                if streaming and (target | source | width) % LINE_BYTES == 0:
                    for offset in range(0, width, LINE_BYTES):
                        copy_line(target + offset, source + offset)
                else:
                    copy_plain(target, source, width)
                host += page_bytes
        full_fence()

    signature = "void(int64[:, ::1], int64[::1], int64, int64, int64, boolean, boolean)"
    compiled = numba.njit(signature, nogil=True)(copy)

    def plain(*arguments: Any) -> None:
        compiled(*arguments, False)

    def streaming(*arguments: Any) -> None:
        compiled(*arguments, True)

    return _Kernels(plain, streaming)


def _intrinsics() -> tuple[Any, Any, Any]:
    """Operations that Python has no words for: a streamed line, ``memcpy``, a fence.

    Non-temporal stores are weakly ordered; the fence makes them visible before the call returns.
    """
    void = ir.VoidType()
    byte_pointer = ir.IntType(8).as_pointer()
    int32 = ir.IntType(32)
    int64 = ir.IntType(64)
    half_line = ir.VectorType(int64, 4)
    half_line_bytes = LINE_BYTES // 2
    types = numba.types

    def copy_line(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            target, source = arguments
            prefetch_type = ir.FunctionType(void, [byte_pointer, int32, int32, int32])
            prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte_pointer], prefetch_type
            )
            ahead = builder.add(source, ir.Constant(int64, PREFETCH_BYTES))
            for_reading, all_levels, data = (ir.Constant(int32, n) for n in (0, 3, 1))
            pointer = builder.inttoptr(ahead, byte_pointer)
            builder.call(prefetch, [pointer, for_reading, all_levels, data])
            non_temporal = builder.module.add_metadata([ir.Constant(int32, 1)])
            for offset in (0, half_line_bytes):
                move = ir.Constant(int64, offset)
                read = builder.inttoptr(builder.add(source, move), half_line.as_pointer())
                write = builder.inttoptr(builder.add(target, move), half_line.as_pointer())
                value = builder.load(read, align=half_line_bytes)
                store = builder.store(value, write, align=half_line_bytes)
                store.set_metadata("nontemporal", non_temporal)

        return types.void(types.int64, types.int64), generate

    def copy_plain(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            target, source, size = arguments
            memcpy = builder.module.declare_intrinsic(
                "llvm.memcpy", [byte_pointer, byte_pointer, int64]
            )
            to_pointer = builder.inttoptr(target, byte_pointer)
            from_pointer = builder.inttoptr(source, byte_pointer)
            not_volatile = ir.Constant(ir.IntType(1), 0)
            builder.call(memcpy, [to_pointer, from_pointer, size, not_volatile])

        return types.void(types.int64, types.int64, types.int64), generate

    def full_fence(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            builder.fence("seq_cst")

        return types.void(), generate

    return intrinsic(copy_line), intrinsic(copy_plain), intrinsic(full_fence)


def choose(page_bytes: int, clock: Clock) -> PageCopies:
    """Times the ways to copy pages of ``page_bytes`` and returns the faster one for each direction.

    Every copy moves bytes that no earlier copy has touched, as those of a slot are after a while.
    Takes some 0.1 s, and 24 times ``SAMPLE_BYTES`` of memory meanwhile.
    """
    compiled = kernels()
    if compiled is None:
        return PageCopies(copy_page_by_page, copy_page_by_page)
    count = max(1, SAMPLE_BYTES // page_bytes)
    samples = 2 * len(compiled) * SAMPLE_ROUNDS
    sample_bytes = count * page_bytes
    # Written once: pages of memory that never were share one physical page of zeros.
    pages = np.ones(samples * sample_bytes + LINE_BYTES, dtype=np.uint8)
    slots = np.ones(samples * sample_bytes + LINE_BYTES, dtype=np.uint8)
    first_page, first_slot = _aligned(pages), _aligned(slots)
    block_ids = np.array(random.Random(0).sample(range(count), count), dtype=np.int64)
    offsets = iter(range(0, samples * sample_bytes, sample_bytes))

    def seconds(copy: PageCopy, load: bool) -> float:
        offset = next(offsets)
        plane = [first_page + offset, page_bytes, page_bytes, page_bytes, 0, 0]
        planes = np.array([plane], dtype=np.int64)
        began_s = clock.monotonic()
        copy(planes, block_ids, first_slot + offset, count, 0, load)
        return clock.monotonic() - began_s

    def fastest(load: bool) -> PageCopy:
        rounds = [[seconds(copy, load) for copy in compiled] for _ in range(SAMPLE_ROUNDS)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return compiled[medians.index(min(medians))]

    return PageCopies(load=fastest(True), store=fastest(False))


def _aligned(memory: npt.NDArray[np.uint8]) -> int:
    """Address of the first byte of ``memory`` at a multiple of ``LINE_BYTES``."""
    return -(-int(memory.ctypes.data) // LINE_BYTES) * LINE_BYTES
