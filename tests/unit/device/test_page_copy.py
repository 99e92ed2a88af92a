"""The ways to copy pages, against a copy by slices, at every alignment; and the choice among them."""

from __future__ import annotations

import numpy as np
import pytest

from kvstow.device import page_copy
from kvstow.device.page_copy import PageCopies, PageCopy, choose, copy_page_by_page, kernels
from kvstow.runtime import SystemClock
from kvstow.testing.manual import ManualClock

BLOCKS = 7
SHIFTS = (0, 1, 32, 64)
WIDTHS = (1, 63, 64, 65, 128, 4096 + 64, 4096 + 8)


def ways() -> dict[str, PageCopy]:
    compiled = kernels()
    assert compiled is not None
    return {
        "page by page": copy_page_by_page,
        "plain": compiled.plain,
        "streaming": compiled.streaming,
    }


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("load", [False, True])
def test_two_planes_of_a_page_are_copied_to_their_places(way: str, width: int, load: bool) -> None:
    rng = np.random.default_rng(width)
    copy = ways()[way]
    for shift in SHIFTS:
        gap = 24
        stride = width + gap
        memory = rng.integers(0, 256, 2 * BLOCKS * stride + 128, dtype=np.uint8)
        slot = rng.integers(0, 256, 3 * 2 * width + 256, dtype=np.uint8)
        first, second = shift, shift + BLOCKS * stride
        page = 2 * width
        planes = np.array(
            [
                [memory.ctypes.data + first, stride, width, page, 0, 0],
                [memory.ctypes.data + second, stride, width, page, 0, width],
            ],
            dtype=np.int64,
        )
        ids = np.array([5, 2], dtype=np.int64)
        want_memory, want_slot = memory.copy(), slot.copy()
        for i, block in enumerate(ids):
            for start, within in ((first, 0), (second, width)):
                at = shift + page * (1 + i) + within
                there = slice(start + block * stride, start + block * stride + width)
                if load:
                    want_memory[there] = slot[at : at + width]
                else:
                    want_slot[at : at + width] = memory[there]
        copy(planes, ids, slot.ctypes.data + shift, 3, 1, load)
        assert np.array_equal(memory, want_memory)
        assert np.array_equal(slot, want_slot)


@pytest.mark.parametrize("page_bytes", [100, 4096, 64 << 20])
def test_the_choice_returns_a_copy_for_each_direction(page_bytes: int) -> None:
    compiled = kernels()
    assert compiled is not None
    assert set(choose(page_bytes, SystemClock())) <= {compiled.plain, compiled.streaming}


def test_the_faster_way_is_chosen_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    def way(load_s: float, store_s: float) -> PageCopy:
        return lambda *arguments: clock.advance(load_s if arguments[-1] else store_s)

    plain, streaming = way(2.0, 1.0), way(1.0, 2.0)
    monkeypatch.setattr(page_copy, "kernels", lambda: page_copy._Kernels(plain, streaming))
    assert choose(4096, clock) == PageCopies(load=streaming, store=plain)


def test_without_numba_pages_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copy, "numba", None)
    monkeypatch.setattr(page_copy, "kernels", page_copy.kernels.__wrapped__)
    assert choose(4096, SystemClock()) == PageCopies(copy_page_by_page, copy_page_by_page)
