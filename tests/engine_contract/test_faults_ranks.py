"""Fault catalogue A10, A12, F1, F2, F4, H3: ranks, groups, shared blocks, what goes between a lookup and its load."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvstow.errors import UnsupportedError
from kvstow.testing.faults import Fault
from kvstow.vllm.groups import block_geometry
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape, kv_cache_config, vllm_config


def forget_memory(sim: Sim) -> None:
    """Everything leaves the pool and the engine's own cache; the lower tier keeps it."""
    sim.stack.cache.index.reset()
    sim.engine.pool.forget_cached()


@pytest.mark.parametrize("tp", [2, 4])
def test_a12_each_rank_reads_back_its_own_bytes(tp: int) -> None:
    """Every rank's pages differ, and each checks every byte that it would attend to."""
    sim = Sim(Shape(tp=tp, lower_tier=True))
    tokens = prompt(100)
    request = sim.serve("cold", tokens)
    pages = [worker.pages.tensors["layer.0"].clone() for worker in sim.stack.workers]
    assert not any(torch.equal(pages[0], other) for other in pages[1:])
    assert sim.stack.store is not None
    assert sim.stack.store.calls["write"] == 6, (
        "a chunk is one object, whatever the number of ranks"
    )
    forget_memory(sim)
    sim.serve("warm", tokens, 4)
    assert sim.engine.loaded_tokens == 96
    assert sim.held(request) == 6
    sim.close()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("lost", [0, 3, 5])
def test_a10_ranks_restore_one_and_the_same_prefix(tp: int, lost: int) -> None:
    """A chunk goes between the lookup and the read: every rank restores what comes before it, none more."""
    sim = Sim(Shape(tp=tp, lower_tier=True))
    tokens = prompt(100)
    request = sim.serve("cold", tokens)
    store = sim.stack.store
    assert store is not None
    gone = sim.stack.keys(request)[lost]
    forget_memory(sim)
    store.faults = [Fault("read", delay=lambda: store.delete([gone]), calls=range(1))]
    sim.serve("warm", tokens, 4)
    assert sim.engine.loaded_tokens == 16 * lost
    forget_memory(sim)
    sim.serve("again", tokens, 4)
    assert sim.engine.loaded_tokens == 16 * lost + 96, "computed once, and stored again"
    sim.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_f1_who_shares_the_blocks_of_a_failed_load_waits_until_they_are_computed(tp: int) -> None:
    sim = Sim(Shape(tp=tp), fails=lambda load, transfers: range(len(transfers)) if load else [])
    tokens = prompt(100)
    sim.serve("cold", tokens)
    sim.engine.pool.forget_cached()
    sim.add("owner", tokens, 6)
    sim.step()
    assert sim.loads() == 1
    sim.add("sharer", tokens, 6)
    sim.step()
    sim.settle()  # the workers check every byte that either attends to
    assert sim.requests["owner"].output_token_ids == sim.requests["sharer"].output_token_ids
    sim.close()


def test_f2_several_groups_are_refused_by_name_and_never_reach_the_recovery() -> None:
    shape = Shape()
    spec = FullAttentionSpec(
        block_size=shape.block, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    one = kv_cache_config(shape)
    two = replace(one, kv_cache_groups=[*one.kv_cache_groups, KVCacheGroupSpec(["layer.9"], spec)])
    with pytest.raises(
        UnsupportedError, match=r"2 KV cache groups.*--disable-hybrid-kv-cache-manager"
    ):
        block_geometry(vllm_config(shape), two)
    assert block_geometry(vllm_config(shape), one).block_tokens == shape.block


def test_h3_ranks_that_end_their_copies_at_other_times_wait_for_nobody() -> None:
    """Each rank says what it has done; the scheduler counts. Nothing is there until all have."""
    sim = Sim(Shape(tp=4, prefix_caching=False))
    request = sim.add("r", prompt(100))
    sim.step()
    sim.step()
    for rank, executor in enumerate(reversed(sim.stack.copies)):
        executor.run_all()
        for _ in range(20):  # the other ranks are polled on and on
            sim.step()
        assert sim.stack.cache.lookup(sim.stack.keys(request)).chunks == (6 if rank == 3 else 0)
    sim.settle()
    sim.close()
