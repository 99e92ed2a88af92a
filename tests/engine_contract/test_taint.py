"""A lossy lower tier in front of an exact one: what was computed on lossy KV is never taken for exact.

Pages are simulated. A lossy codec's mark is a bit that a real one's error stands for: a forward
pass that attends to a marked position leaves marks on what it writes. The tokens stay right, so
that nothing but the mark tells.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from kvstow import frame
from kvstow.testing.manual import ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier
from kvstow.vllm.requests import NEVER
from tests.engine_contract.scenario import Traffic, random_failures, random_shape
from tests.engine_contract.seeds import seeds
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import Shape
from tests.engine_contract.vllm_scheduler import Driver
from tests.rigs.sim_pages import WORDS_PER_TOKEN, Pages, _words_of

REQUESTS = 22


def marked(words: Any) -> Any:
    """Which positions bear the mark; ``words`` is [positions, 2]."""
    return words[:, 1] == (~words[:, 0] ^ numpy.uint64(1))


def words_in(payload: Any) -> Any:
    return numpy.frombuffer(payload, numpy.uint64).reshape(-1, WORDS_PER_TOKEN)


class MarkedPages(Pages):
    """Marks spread from what is attended to, to what is written, within a step too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._written: list[tuple[Sequence[int], int, int]] = []

    def write(self, blocks: Sequence[int], start: int, states: Any) -> None:
        super().write(blocks, start, states)
        self._written.append((list(blocks), start, start + len(states)))

    def marks(self, blocks: Sequence[int], count: int) -> Any:
        return marked(self._words[0][self._rows(blocks, 0, count)])

    def _spread(self) -> None:
        changed = True
        while changed:
            changed = False
            for blocks, start, end in self._written:
                rows = self._rows(blocks, start, end)
                if self.marks(blocks, end).any() and not marked(self._words[0][rows]).all():
                    for words in self._words:
                        words[rows, 1] = ~words[rows, 0] ^ numpy.uint64(1)
                    changed = True
        self._written.clear()

    def wrong(self, blocks: Sequence[int], states: Any) -> int | None:
        self._spread()
        rows = self._rows(blocks, 0, len(states))
        for words, factor in zip(self._words, self._factor, strict=True):
            right = _words_of(states, factor)
            unmarked = numpy.where(
                marked(words[rows]), words[rows, 1] ^ numpy.uint64(1), words[rows, 1]
            )
            equal = (words[rows, 0] == right[:, 0]) & (unmarked == right[:, 1])
            if not equal.all():
                return int(equal.argmin())
        return None


class MarkCoder:
    """A lossy codec whose frames are not smaller."""

    codes = lossy = True

    def encode(self, sealed: memoryview, integrity_key: bytes | None) -> memoryview:
        copy = memoryview(bytearray(sealed))
        header, payload = frame.parse_header(copy[:4096]), frame.PayloadChecksum()
        for span in header.spans:
            part = copy[span.offset : span.offset + span.length]
            words = words_in(part)
            words[:, 1] = ~words[:, 0] ^ numpy.uint64(1)
            payload.update(part)
        frame.write_header(copy, header._replace(lossy=True), payload, None)
        return copy

    def knows(self, header: Any) -> bool:
        return False

    def decode(self, slot: memoryview, header: Any) -> None:
        raise AssertionError("its frames are raw")


class World:
    """A driver whose first lower tier is lossy and whose second is exact, if there is a second."""

    def __init__(
        self, shape: Shape, seed: int = 0, *, exact_tier: bool = True, **options: Any
    ) -> None:
        self.stores = [MemoryStore() for _ in range(1 + exact_tier)]
        self.driver = Driver(shape, seed, make_tiers=self._tiers, pages_of=MarkedPages, **options)
        self.lossy_loads = self.tainted = 0

    def _tiers(self, background: list[ManualExecutor], **needs: Any) -> list[Tier]:
        tiers = []
        for store, coder in zip(self.stores, (MarkCoder(), None), strict=False):
            executor = ManualExecutor(needs["clock"], run_in_wait=True)
            background.append(executor)
            tiers.append(Tier(f"t{len(tiers)}", store, executor, coder=coder, **needs))
        return tiers

    def check(self) -> None:
        """What passes for exact has no mark, in any place.

        And no request is thought tainted that is not.
        """
        stack = self.driver.stack
        index, pool = stack.cache.index, stack.pool
        for key, slot in index._resident.items():
            with pool.lease(slot) as lease:
                marks = [marked(words_in(span)) for span in lease.spans()]
            if index.lossy(key):
                self.lossy_loads += 1
                assert all(one.all() for one in marks)
            else:
                assert not any(one.any() for one in marks), (
                    "the pool has a tainted chunk that passes for exact"
                )
        for store in self.stores[1:]:
            for data in store._values.values():
                header = frame.parse_header(data[:4096])
                spans = [data[span.offset : span.offset + span.length] for span in header.spans]
                assert not header.lossy
                assert not any(marked(words_in(span)).any() for span in spans), (
                    "an exact tier has a tainted chunk"
                )
        pages, chunk = stack.workers[0].pages, stack.shape.chunk
        for request in self.driver.scheduler.running:
            tracked = stack.side._tracked[request.request_id]
            if tracked.blocks and tracked.exact_chunks != NEVER:
                self.tainted += 1
                first = tracked.exact_chunks * chunk // stack.shape.block
                until = first + stack.shape.blocks_per_chunk
                blocks = tracked.blocks[first:until]
                assert pages.marks(blocks, len(blocks) * stack.shape.block).any(), (
                    "an exact request counts as tainted"
                )


def run_seed(seed: int, **fixed: Any) -> World:
    rng = random.Random(seed)
    fixed = {"pool_slots": rng.choice((3, 6, 12)), "num_blocks": rng.randint(12, 40), **fixed}
    shape = random_shape(rng, lower_tier=False, **fixed)
    chance = rng.choice((0.0, 0.0, 0.1))
    world = World(
        shape,
        seed,
        exact_tier=rng.random() < 0.6,
        fails=random_failures(rng, chance),
        fetch_deadline_s=rng.choice((0.05, 1.0)),
    )
    driver = world.driver
    traffic = Traffic(rng, shape, min(220, (shape.num_blocks - 2) * shape.block - 32))
    pace, speed, added = rng.choice((0.1, 0.4, 1.0)), rng.choice((0.3, 0.8, 1.0)), 0
    while added < REQUESTS or driver.unfinished:
        if added < REQUESTS and rng.random() < pace and len(driver.unfinished) < 8:
            finished = [
                [*driver.requests[r].prompt_token_ids, *driver.outputs[r]] for r in driver.outputs
            ]
            driver.add(
                f"r{added}", traffic.prompt(finished), rng.randint(1, 24), **traffic.options()
            )
            added += 1
        if driver.unfinished and rng.random() < 0.01:
            driver.abort(rng.choice(driver.unfinished))
        driver.stack.work(speed)
        driver.step()
        world.check()
        assert driver.steps < 6000, f"no end in sight: {driver.unfinished}"
    driver.settle(speed)
    world.check()
    return world


@pytest.mark.parametrize("seed", seeds(40))
def test_nothing_tainted_passes_for_exact(seed: int) -> None:
    run_seed(seed).driver.close()


def test_lossy_chunks_are_loaded_and_taint() -> None:
    """The random tests would pass if nothing lossy were ever loaded: this one does not."""
    worlds = [run_seed(seed, prefix_caching=True, pool_slots=6) for seed in range(24)]
    assert sum(world.lossy_loads for world in worlds) > 50
    assert sum(world.tainted for world in worlds) > 15
    for world in worlds:
        world.driver.close()


# --- in order -------------------------------------------------------------------------------------


def serve(world: World, req_id: str, tokens: list[int], **options: Any) -> None:
    world.driver.add(req_id, tokens, **options)
    world.driver.run(req_id)
    world.driver.settle()
    world.check()


def forget_the_pool(world: World) -> None:
    """Everything is evicted; the lower tiers keep what they have."""
    world.driver.stack.cache.index.reset()


def drop_the_engines_own(world: World) -> None:
    assert world.driver.scheduler.reset_prefix_cache(
        reset_running_requests=False, reset_connector=False
    )


@pytest.mark.contract
def test_a_chunk_computed_anew_on_an_exact_prefix_replaces_the_lossy_one() -> None:
    world = World(Shape(num_blocks=64, pool_slots=64), exact_tier=False)
    tokens = prompt(100)
    serve(world, "first", tokens)
    index, keys = (
        world.driver.stack.cache.index,
        world.driver.stack.keys(world.driver.requests["first"])[:6],
    )
    forget_the_pool(world)
    drop_the_engines_own(world)
    serve(world, "second", tokens)
    assert [index.lossy(key) for key in keys] == [True] * 6, "restored from the lossy tier"
    serve(world, "third", [*tokens[:96], *prompt(40, 1)])
    assert sum(index.resident(key) for key in keys) == 6
    assert len(index) == 6, "its tail was computed on lossy KV of the engine's own cache"
    drop_the_engines_own(world)
    serve(world, "fourth", tokens, skip_load=True)
    assert [index.lossy(key) for key in keys] == [False] * 6, "exact copies took their place"
    serve(world, "fifth", [*tokens[:96], *prompt(40, 1)])
    assert len(index) == 8, "computed on an exact prefix"
    world.driver.close()


@pytest.mark.contract
def test_a_prefix_hit_that_ends_inside_a_tainted_chunk_taints() -> None:
    """The next request's chunk has another key than the one whose first block it shares."""
    world = World(Shape(num_blocks=64, pool_slots=64, blocks_per_chunk=4), exact_tier=True)
    tokens = prompt(128)
    serve(world, "first", [*tokens, 1])
    forget_the_pool(world)
    world.stores[1]._values.clear()
    drop_the_engines_own(world)
    serve(world, "second", [*tokens, 1])
    assert world.lossy_loads
    before = len(world.stores[1]._values)
    serve(world, "third", [*tokens[:32], *prompt(96, 1), 1])
    assert len(world.stores[1]._values) == before, "its first chunk is half lossy"
    world.driver.close()


@pytest.mark.contract
def test_blocks_computed_on_a_lossy_prefix_taint_when_that_prefix_has_become_exact() -> None:
    world = World(Shape(num_blocks=64, pool_slots=64, batched_tokens=32), exact_tier=False)
    tokens = prompt(97)
    serve(world, "first", tokens[:33])
    forget_the_pool(world)
    drop_the_engines_own(world)
    serve(world, "second", tokens)
    assert world.lossy_loads
    manager = world.driver.scheduler.kv_cache_manager
    computed, _ = manager.get_computed_blocks(world.driver.requests["second"])[:2]
    manager.block_pool.evict_blocks({block.block_id for block in computed.blocks[0][:2]})
    forget_the_pool(world)
    world.stores[0]._values.clear()
    serve(world, "third", tokens[:33])
    index = world.driver.stack.cache.index
    assert len(index) == 2
    serve(world, "fourth", [*tokens[:96], *prompt(40, 1)])
    assert len(index) == 2, (
        "the engine's own cache gave it blocks 2 to 5, which were computed on lossy KV"
    )
    world.driver.close()


def test_with_exact_tiers_there_is_nothing_to_keep() -> None:
    world = World(Shape(lower_tier=True), exact_tier=False)
    assert world.driver.stack.side._taint is not None
    assert Driver(Shape(lower_tier=True)).stack.side._taint is None
    world.driver.close()
