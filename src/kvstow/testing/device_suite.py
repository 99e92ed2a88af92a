"""The Device contract as tests. A device's own tests subclass it and create the device::

class TestMyDevice(DeviceSuite):
    torch_device = "mine"

    def make_device(self, fail_at: int | None = None) -> Device:
        return MyDevice(...)
"""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from kvstow.device.base import Device, Finished, KVSpec, Transfer
from kvstow.errors import UnsupportedError
from kvstow.layout import ALIGN, GroupPages, Place, Span
from kvstow.testing.guarded_pool import Host, everything
from kvstow.testing.kv_layouts import LAYOUTS, Built, Shape, block_bytes, fill

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)


class DeviceSuite:
    """Subclass it and implement ``make_device``. Tests neither sleep nor read a clock."""

    torch_device: ClassVar[str] = "cpu"

    def make_device(self, fail_at: int | None = None) -> Device:
        """Returns a fresh device.

        With ``fail_at`` the primitive that moves bytes raises RuntimeError at its ``fail_at``-th
        call (0 is the first) and at all later ones, if possible after it has moved some of the
        bytes.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the accelerator is idle."""

    def on_compute(self, run: Callable[[], None]) -> None:
        """Run ``run``, which writes pages, where the engine's kernels run."""
        run()

    def temporary_bytes(self) -> int:
        """Bytes of temporary memory that the device holds now.

        Here: this process's resident memory.
        """
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    # --- helpers ----------------------------------------------------------------------------------

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make_device()
        yield device
        device.close()

    def wait(self, device: Device, *tickets: int) -> dict[int, Finished]:
        """Returns the ends of these tickets, and checks that each ends once and no other does."""
        device.fence(tickets)
        self.synchronize()
        ended: dict[int, Finished] = {}
        for _ in range(1000):
            for finished in device.finished():
                assert finished.ticket not in ended, "a ticket ended twice"
                ended[finished.ticket] = finished
            if len(ended) >= len(tickets):
                break
        assert set(ended) == set(tickets)
        return ended

    def good(self, device: Device, *tickets: int) -> None:
        for finished in self.wait(device, *tickets).values():
            assert finished.failed == ()
            assert finished.error is None
            assert finished.moved_bytes > 0
            assert finished.seconds >= 0

    def build(self, layout: str, **shape: object) -> Built:
        built = LAYOUTS[layout](replace(Shape(device=self.torch_device), **shape))  # type: ignore[arg-type]
        fill(built, seed=7)
        return built

    def attach(
        self, device: Device, built: Built, blocks_per_chunk: int = 1, slots: int = 4
    ) -> tuple[GroupPages, Host]:
        [pages] = device.attach(built.caches, [built.specs])
        host = Host(pages.block_bytes * blocks_per_chunk, slots)
        device.map_pool(host.memory, 0)
        return pages, host

    def round_trip(
        self, device: Device, built: Built, blocks_per_chunk: int, seed: int = 1
    ) -> GroupPages:
        """Copies chunks out of blocks, overwrites all pages, and copies into other blocks."""
        chunks = 2
        pages, host = self.attach(device, built, blocks_per_chunk, chunks)
        rng = random.Random(seed)
        blocks = next(iter(built.specs.values())).num_blocks
        source = rng.sample(range(blocks), chunks * blocks_per_chunk)
        target = rng.sample(range(blocks), chunks * blocks_per_chunk)
        parts = [slice(i * blocks_per_chunk, (i + 1) * blocks_per_chunk) for i in range(chunks)]
        before = everything(built)
        device.copy_out(1, [Transfer(host.place(i), source[part]) for i, part in enumerate(parts)])
        self.good(device, 1)
        assert everything(built) == before, "a store changed pages"
        assert host.untouched([(i, 0) for i in range(chunks)])
        stored = bytes(host.memory)

        fill(built, seed=8)
        expected = everything(built)
        for name in built.specs:
            for come_from, go_to in zip(source, target, strict=True):
                expected[name, go_to] = before[name, come_from]
        device.copy_in(2, [Transfer(host.place(i), target[part]) for i, part in enumerate(parts)])
        self.good(device, 2)
        assert everything(built) == expected
        assert bytes(host.memory) == stored, "a load changed its place"
        return pages

    # --- layouts ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("blocks_per_chunk", [1, 3])
    def test_a4_round_trip_is_bit_equal_in_every_known_layout(
        self, device: Device, layout: str, blocks_per_chunk: int
    ) -> None:
        self.round_trip(device, self.build(layout), blocks_per_chunk)

    def test_a4_unknown_layout_is_refused_by_name(self, device: Device) -> None:
        spec = KVSpec(12, 16, 2, 16, 4, 16 * 2 * 2 * 16 * 4)
        cache = torch.zeros(12, 2, 16, 2, 8, 2, device=self.torch_device)
        with pytest.raises(
            UnsupportedError, match=r"layers\.7\.attn.*\(12, 2, 16, 2, 8, 2\).*packed_heads"
        ):
            device.attach({"layers.7.attn": cache}, [{"layers.7.attn": spec}])

    @pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256, 512, 1024])
    @pytest.mark.parametrize("layout", ["kv_first", "blocks_first", "packed_lbhnc", "mla"])
    def test_block_sizes(self, device: Device, layout: str, tokens: int) -> None:
        self.round_trip(device, self.build(layout, tokens=tokens, blocks=5, heads=1, layers=2), 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", ["kv_first", "packed_lbnhc", "mla"])
    def test_dtypes(self, device: Device, layout: str, dtype: torch.dtype) -> None:
        self.round_trip(device, self.build(layout, dtype=dtype), 2)

    @pytest.mark.parametrize("layout", ["packed_lbhnc", "packed_lbnhc", "packed_lhbnc"])
    def test_kernel_blocks_smaller_than_the_engines(self, device: Device, layout: str) -> None:
        self.round_trip(device, self.build(layout, tokens=64, kernel_blocks=4), 2)

    def test_odd_sizes_are_copied_exactly(self, device: Device) -> None:
        self.round_trip(device, self.build("mla", size=33, tokens=3, dtype=torch.uint8), 3)

    def test_o5_layers_of_different_sizes_in_one_group(self, device: Device) -> None:
        small, large = self.build("mla", size=132, dtype=torch.uint8), self.build("mla", size=576)
        caches = {"indexer": small.caches["layers.0.attn"], "attn": large.caches["layers.0.attn"]}
        specs = {"indexer": small.specs["layers.0.attn"], "attn": large.specs["layers.0.attn"]}
        mixed = Built(
            caches,
            specs,
            lambda name, b: (small if name == "indexer" else large).block("layers.0.attn", b),
        )
        fill(mixed, seed=3)
        pages = self.round_trip(device, mixed, 3)
        assert [layer.page_bytes for layer in pages.layers] == [132 * 16, 576 * 4 * 16]

    def test_payload_is_layers_then_blocks_then_planes(self, device: Device) -> None:
        built = self.build("kv_first", layers=3)
        pages, host = self.attach(device, built, blocks_per_chunk=2)
        device.copy_out(1, [Transfer(host.place(0), [9, 4])])
        self.good(device, 1)
        expected = b"".join(
            block_bytes(built, layer.name, block) for layer in pages.layers for block in (9, 4)
        )
        assert host.payload(0) == expected

    # --- parts, groups, shards --------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["kv_first", "packed_lbhnc", "packed_bhlnc"])
    def test_part_of_a_chunk(self, device: Device, layout: str) -> None:
        built = self.build(layout)
        _, host = self.attach(device, built, blocks_per_chunk=4)
        before = everything(built)
        device.copy_out(
            1, [Transfer(host.place(0), [3, 8]), Transfer(host.place(0), [5, 1], first_block=2)]
        )
        device.copy_out(2, [Transfer(host.place(1), [3, 8, 5, 1])])
        self.good(device, 1, 2)
        assert host.payload(0) == host.payload(1)
        device.copy_in(3, [Transfer(host.place(0), [11, 0], first_block=1)])
        self.good(device, 3)
        expected = before | {(name, 11): before[name, 8] for name in built.specs}
        expected |= {(name, 0): before[name, 5] for name in built.specs}
        assert everything(built) == expected

    def test_several_groups_over_the_same_memory(self, device: Device) -> None:
        """Layers of different groups alias: each copy touches its own group's layers only."""
        built = self.build("packed_lbhnc", layers=4)
        names = list(built.specs)
        groups = [{name: built.specs[name] for name in part} for part in (names[:3], names[3:])]
        first, second = device.attach(built.caches, groups)
        assert (len(first.layers), len(second.layers)) == (3, 1)
        host = Host(first.block_bytes, 4)
        device.map_pool(host.memory, 0)
        small = Place("pool", (Span(host.place(1).spans[0].offset, second.block_bytes),))
        before = everything(built)
        device.copy_out(1, [Transfer(host.place(0), [2]), Transfer(small, [5], group=1)])
        device.copy_in(2, [Transfer(small, [6], group=1), Transfer(host.place(0), [7])])
        self.good(device, 1, 2)
        expected = (
            before
            | {(name, 7): before[name, 2] for name in names[:3]}
            | {(names[3], 6): before[names[3], 5]}
        )
        assert everything(built) == expected

    def test_a_rank_uses_its_own_span(self, device: Device) -> None:
        built = self.build("blocks_first")
        [pages] = device.attach(built.caches, [built.specs])
        host = Host(pages.block_bytes, slots=2, shards=3)
        device.map_pool(host.memory, 1)
        device.copy_out(1, [Transfer(host.place(0), [3])])
        self.good(device, 1)
        assert host.untouched([(0, 1)])
        assert host.payload(0, 1) == b"".join(block_bytes(built, name, 3) for name in built.specs)

    # --- order and ends ---------------------------------------------------------------------------

    def test_many_tickets_end_each_once(self, device: Device) -> None:
        built = self.build("packed_lbhnc", blocks=32)
        _, host = self.attach(device, built, slots=16)
        tickets = random.Random(5).sample(range(10_000), 16)
        for slot, ticket in enumerate(tickets):
            device.copy_out(ticket, [Transfer(host.place(slot), [31 - slot])])
        self.good(device, *tickets)
        assert device.finished() == []
        for slot in range(16):
            assert host.payload(slot) == b"".join(
                block_bytes(built, name, 31 - slot) for name in built.specs
            )

    def test_fence_ignores_unknown_and_ended_tickets(self, device: Device) -> None:
        _, host = self.attach(device, self.build("mla"))
        device.fence([])
        device.fence([99])
        device.copy_out(1, [Transfer(host.place(0), [0])])
        self.good(device, 1)
        device.fence([1, 2, 3])

    def test_after_a_fence_pages_may_be_overwritten(self, device: Device) -> None:
        built = self.build("packed_lbhnc")
        _, host = self.attach(device, built)
        before = everything(built)
        device.copy_out(1, [Transfer(host.place(0), [4])])
        device.fence([1])
        self.on_compute(lambda: fill(built, seed=99))
        self.good(device, 1)
        assert host.payload(0) == b"".join(before[name, 4] for name in built.specs)

    def test_block_ids_are_taken_at_the_call(self, device: Device) -> None:
        built = self.build("packed_lbhnc")
        _, host = self.attach(device, built)
        ids = [4]
        device.copy_out(1, [Transfer(host.place(0), ids)])
        ids[0] = 5
        ids.append(6)
        self.good(device, 1)
        assert host.payload(0) == b"".join(block_bytes(built, name, 4) for name in built.specs)

    def test_empty_ticket_ends(self, device: Device) -> None:
        self.attach(device, self.build("mla"))
        device.copy_out(1, [])
        device.copy_in(2, [])
        ended = self.wait(device, 1, 2)
        assert all(
            finished.failed == () and finished.moved_bytes == 0 for finished in ended.values()
        )

    # --- failures ---------------------------------------------------------------------------------

    def test_a8_bad_transfers_fail_alone(self, device: Device) -> None:
        built = self.build("packed_lbhnc")
        pages, host = self.attach(device, built, blocks_per_chunk=2)
        span = host.place(1).spans[0]
        end = len(host.memory)
        bad = [
            Transfer(host.place(1), [3, 12]),  # no such block
            Transfer(host.place(1), [3, -1]),
            Transfer(host.place(1), [3, 4, 5]),  # more than the chunk has
            Transfer(host.place(1), [3], first_block=2),
            Transfer(host.place(1), [3], first_block=-1),
            Transfer(
                Place("pool", (Span(end - pages.block_bytes + ALIGN, pages.block_bytes),)), [3]
            ),
            Transfer(Place("pool", (Span(-ALIGN, pages.block_bytes),)), [3]),
            Transfer(Place("pool", (Span(span.offset, span.length - 16),)), [3]),
            Transfer(Place("pool", (Span(span.offset, 0),)), [3]),
            Transfer(Place("pool", ()), [3]),
            Transfer(Place("direct", (span,)), [3, 4]),
            Transfer(host.place(1), [3, 4], group=1),
        ]
        before, memory = everything(built), bytes(host.memory)
        for ticket, start in ((1, device.copy_out), (2, device.copy_in)):
            start(ticket, [Transfer(host.place(0), [6, 7]), *bad, Transfer(host.place(2), [8, 9])])
            finished = self.wait(device, ticket)[ticket]
            assert finished.failed == tuple(range(1, len(bad) + 1))
            assert finished.error
            assert finished.moved_bytes == 4 * pages.block_bytes
            if ticket == 1:
                assert host.untouched([(0, 0), (2, 0)])
                memory = bytes(host.memory)
        assert everything(built) == before
        assert bytes(host.memory) == memory

    def test_a8_a_block_loaded_twice_fails(self, device: Device) -> None:
        _, host = self.attach(device, self.build("mla"), blocks_per_chunk=2)
        device.copy_in(1, [Transfer(host.place(0), [3, 3])])
        assert self.wait(device, 1)[1].failed == (0,)

    def test_a8_without_a_pool_copies_fail(self, device: Device) -> None:
        built = self.build("mla")
        [pages] = device.attach(built.caches, [built.specs])
        device.copy_out(1, [Transfer(Place("pool", (Span(0, pages.block_bytes),)), [0])])
        assert self.wait(device, 1)[1].failed == (0,)

    @pytest.mark.parametrize("load", [False, True])
    def test_a8_failing_copies_are_reported_and_not_counted(self, load: bool) -> None:
        device = self.make_device(fail_at=1)
        built = self.build("packed_lbhnc")
        _, host = self.attach(device, built)
        start = device.copy_in if load else device.copy_out
        start(1, [Transfer(host.place(0), [1])])
        start(2, [Transfer(host.place(1), [2])])
        start(3, [Transfer(host.place(2), [3])])
        ended = self.wait(device, 1, 2, 3)
        assert ended[1].failed == ()
        for ticket in (2, 3):
            assert ended[ticket].failed == (0,)
            assert ended[ticket].error
            assert ended[ticket].moved_bytes == 0
        device.close()

    # --- life -------------------------------------------------------------------------------------

    def test_o6_attach_again_uses_the_new_memory_only(self, device: Device) -> None:
        old = self.build("packed_lbhnc")
        self.round_trip(device, old, 2)
        before = everything(old)
        new = self.build("blocks_first", blocks=20)
        self.round_trip(device, new, 2, seed=2)
        assert everything(old) == before

    @pytest.mark.parametrize("cache", ["meta", "states", "none", "dict"])
    def test_o7_what_is_not_a_kv_cache_is_refused_by_name(self, device: Device, cache: str) -> None:
        spec = _spec_of(self.build("mla"))
        meta = torch.zeros(12, 16, 16, device="meta")
        given = {"meta": meta, "states": [torch.zeros(4)] * 3, "none": None, "dict": {}}
        with pytest.raises(UnsupportedError, match=r"layers\.0"):
            device.attach({"layers.0": given[cache]}, [{"layers.0": spec}])  # type: ignore[dict-item]

    def test_o7_missing_layer_and_empty_group_are_refused_by_name(self, device: Device) -> None:
        built = self.build("mla")
        with pytest.raises(UnsupportedError, match=r"layers\.9"):
            device.attach(built.caches, [{"layers.9": _spec_of(built)}])
        with pytest.raises(UnsupportedError, match="group 1"):
            device.attach(built.caches, [built.specs, {}])

    def test_works_inside_inference_mode(self, device: Device) -> None:
        with torch.inference_mode():
            built = self.build("packed_lbhnc")
            self.round_trip(device, built, 2)

    def test_g10_random_lengths_need_no_growing_memory(self, device: Device) -> None:
        built = self.build("packed_lbhnc", blocks=64)
        _, host = self.attach(device, built, blocks_per_chunk=32)
        rng = random.Random(0)

        def load(ticket: int) -> None:
            length = rng.randint(1, 32)
            device.copy_in(
                ticket, [Transfer(host.place(ticket % 4), rng.sample(range(64), length))]
            )
            self.good(device, ticket)

        for ticket in range(100):
            load(ticket)
        before = self.temporary_bytes()
        peak = before
        for ticket in range(100, 600):
            load(ticket)
            peak = max(peak, self.temporary_bytes())
        assert peak - before < 2 << 20

    def test_close_is_idempotent_and_releases_the_pool(self) -> None:
        device = self.make_device()
        _, host = self.attach(device, self.build("mla"))
        place, memory, host.memory = host.place(0), host.memory, memoryview(b"")
        device.copy_out(1, [Transfer(place, [0])])
        device.close()
        device.close()
        assert [finished.ticket for finished in device.finished()] == [1]
        left = weakref.ref(memory)
        del memory
        gc.collect()
        assert left() is None, "the device still holds the pool"


def _spec_of(built: Built) -> KVSpec:
    return next(iter(built.specs.values()))
